"""Grouping ops of `@main` into private functions, one dispatch a group; several passes use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from yolomlir.dialects import yolo

from yolomlir.bindings import func, ir
from yolomlir.diagnostics import UserError

FAMILY = "yolo.family"
ENTRY = "main"


def functions(module: ir.Module) -> dict[str, ir.Operation]:
    """Every function of a module by its name, in order."""
    found = {}
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func":
            found[yolo.string(op, "sym_name")] = op
    return found


def entry_block(module: ir.Module) -> ir.Block:
    """The body of `@main`: one block, of tensors. Raises UserError where there is none such."""
    main = functions(module).get(ENTRY)
    if main is None or not len(main.regions[0].blocks):
        raise UserError(f"the module has no function @{ENTRY} with a body")
    if len(main.regions[0].blocks) > 1:
        raise UserError(f"@{ENTRY} has control flow; a network is one block")
    block = main.regions[0].blocks[0]
    for index, argument in enumerate(block.arguments):
        if not isinstance(argument.type, ir.RankedTensorType):
            raise UserError(f"argument {index} of @{ENTRY} is {argument.type}; expected a tensor")
    return block


def require_grouped(block: ir.Block, views: Sequence[str]) -> None:
    """Raise UserError for an op that is neither a dispatch, a weight nor one of these views."""
    allowed = ("yolo.weight", "func.return", *views)
    for op in operations(block):
        if op.name not in allowed and not yolo.is_dispatch(op):
            raise UserError(
                f"'{op.name}' is in no dispatch",
                where=yolo.layer_of(op.location),
                hint="run yolo-conv-epilogue-fusion and yolo-form-dispatches first",
            )


def operations(block: ir.Block) -> list[ir.Operation]:
    """The operations of a block, as a list that stays while they are rewritten."""
    return [view.operation for view in block.operations]


def dispatches(module: ir.Module) -> list[ir.Operation]:
    """The kernel launches of `@main`, in order."""
    return [op for op in operations(entry_block(module)) if yolo.is_dispatch(op)]


def users(value: ir.Value) -> list[ir.Operation]:
    """The op of every use of a value: an op that uses it twice is there twice."""
    return [use.owner.operation for use in value.uses]


def only_user(value: ir.Value, name: str) -> ir.Operation | None:
    """The op that is the only use of `value`, when it is named `name`."""
    found = users(value)
    return found[0] if len(found) == 1 and found[0].name == name else None


def producer(value: ir.Value, name: str | None = None) -> ir.Operation | None:
    """The op that defines a value; None for a block argument or an op of another name."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    op: ir.Operation = owner.operation
    return op if name is None or op.name == name else None


def precision_of(module: ir.Module) -> str:
    """The module's `yolo.precision`; TF32 where it states none, as for a GPU."""
    named = "yolo.precision" in module.operation.attributes
    return yolo.string(module.operation, "yolo.precision") if named else "tf32"


def is_weight(value: ir.Value) -> bool:
    """Whether a value comes straight from the weight store."""
    return producer(value, "yolo.weight") is not None


def family_of(call: ir.Operation, table: dict[str, ir.Operation]) -> str:
    """The family of the function that a dispatch calls; "" where it has none."""
    function = table[yolo.callee(call)]
    return yolo.string(function, FAMILY) if FAMILY in function.attributes else ""


def convolution(body: ir.Block) -> ir.Operation:
    """The first convolution of a function's body. Raises UserError where there is none."""
    for op in operations(body):
        if op.name == "yolo.conv2d":
            return op
    owner = body.owner.operation
    name, family = yolo.string(owner, "sym_name"), yolo.string(owner, FAMILY)
    raise UserError(f"@{name} is of the family '{family}' and has no yolo.conv2d")


def weight_index(body: ir.Block) -> int:
    """The operand of a convolution's dispatch that is its weight; those before it are sources.

    Raises UserError where the weight is no operand.
    """
    weight = convolution(body).operands[1]
    for index, argument in enumerate(body.arguments):
        if argument == weight:
            return index
    name = yolo.string(body.owner.operation, "sym_name")
    raise UserError(f"the weight of @{name}'s convolution is none of its arguments")


Builder = Callable[[Sequence[ir.Value]], ir.Value | Sequence[ir.Value]]
"""Builds a function's body at the insertion point from its arguments; gives its results."""


class Outliner:
    """Makes dispatches of one module; equal functions are made once and shared.

    Two functions are equal when their bodies, operand types and family are, whatever layer each was
    made for. `Outliner(module)` knows the functions that earlier passes made.
    """

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._taken = set(functions(module))
        self._by_key: dict[object, str] = {}
        for name, op in functions(module).items():
            if name != ENTRY and len(op.regions[0].blocks):
                self._by_key.setdefault(_key(op), name)

    def outline(
        self,
        ops: Sequence[ir.Operation],
        operands: Sequence[ir.Value],
        family: str,
        name: str,
        *,
        residual: ir.Value | None = None,
        loc: ir.Location | None = None,
    ) -> ir.Operation:
        """Replace `ops`, of which only the last one's result is used outside, by one dispatch.

        `operands` are the values that `ops` take from outside, in the function's order; `ops` are
        in program order. `residual`, what the last op alone takes, is the function's last operand,
        a second one where it is among `operands` too. The call stands where the last op stood; its
        location is `loc`, or the first op's.
        """
        inputs = list(operands) if residual is None else [*operands, residual]

        def body(arguments: Sequence[ir.Value]) -> ir.Value:
            mapping = dict(zip(inputs[: len(operands)], arguments, strict=False))
            if residual is None:
                return clone_ops(ops, mapping)
            clone_ops(ops[:-1], mapping)
            mapping[residual] = arguments[-1]
            return clone_ops(ops[-1:], mapping)

        last = ops[-1]
        call = self.call(body, inputs, family, name, loc=loc or ops[0].location, before=last)
        last.results[0].replace_all_uses_with(call.results[0])
        for op in reversed(ops):
            op.erase()
        return call

    def call(
        self,
        body: Builder,
        operands: Sequence[ir.Value],
        family: str,
        name: str,
        *,
        loc: ir.Location,
        before: ir.Operation,
    ) -> ir.Operation:
        """A dispatch of the function whose body `body` builds, before the op `before`."""
        function = self._function(body, [v.type for v in operands], family, name, loc)
        results = list(
            ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).results
        )
        with ir.InsertionPoint(before):
            return yolo.dispatch(yolo.string(function, "sym_name"), operands, results, loc=loc)

    def _function(
        self, body: Builder, types: Sequence[ir.Type], family: str, name: str, loc: ir.Location
    ) -> ir.Operation:
        with ir.InsertionPoint(self._module.body):
            made = func.FuncOp(name, (list(types), []), visibility="private", loc=loc)
        block = ir.Block.create_at_start(made.operation.regions[0], list(types), [loc] * len(types))
        with ir.InsertionPoint(block):
            given = body(list(block.arguments))
            results = [given] if isinstance(given, ir.Value) else list(given)
            func.ReturnOp(results, loc=loc)
        signature = ir.FunctionType.get(list(types), [v.type for v in results])
        made.operation.attributes["function_type"] = ir.TypeAttr.get(signature)
        made.operation.attributes[FAMILY] = ir.StringAttr.get(family)
        key = _key(made.operation)
        if key in self._by_key:
            made.operation.erase()
            return functions(self._module)[self._by_key[key]]
        unique = _unique(name, self._taken)
        made.operation.attributes["sym_name"] = ir.StringAttr.get(unique)
        self._taken.add(unique)
        self._by_key[key] = unique
        return made.operation


def clone_ops(ops: Iterable[ir.Operation], mapping: dict[ir.Value, ir.Value]) -> ir.Value:
    """Copy ops to the insertion point with operands replaced by `mapping`, which gains the results.

    Returns the last op's result.
    """
    result = None
    for op in ops:
        copy = op.clone().operation
        for index, operand in enumerate(op.operands):
            copy.operands[index] = mapping[operand]
        mapping.update(zip(op.results, copy.results, strict=True))
        result = copy.results[0]
    if result is None:
        raise ValueError("no op to copy")
    return result


def erase_unused_functions(module: ir.Module) -> int:
    """Erase the private functions that nothing calls, but for `@main`; how many they were."""
    calls = [op for op in yolo.ops_in(module, "func.call") if op.name == "func.call"]
    kept = {yolo.callee(call) for call in calls} | {ENTRY}
    unused = [op for name, op in functions(module).items() if name not in kept and _is_private(op)]
    for op in unused:
        op.erase()
    return len(unused)


def _is_private(function: ir.Operation) -> bool:
    attributes = function.attributes
    return "sym_visibility" in attributes and yolo.string(function, "sym_visibility") == "private"


def _unique(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    number = 1
    while f"{name}_v{number}" in taken:
        number += 1
    return f"{name}_v{number}"


def _key(function: ir.Operation) -> object:
    """What makes two functions equal: family, argument types and body, locations left out."""
    block = function.regions[0].blocks[0]
    numbers: dict[ir.Value, int] = {}
    for argument in block.arguments:
        numbers[argument] = len(numbers)
    parts: list[object] = [str(a.type) for a in block.arguments]
    kept = ("sym_name", "function_type", "sym_visibility")
    parts.append(tuple(text for text in _attributes(function) if text[0] not in kept))
    for op in operations(block):
        parts.append((op.name, tuple(numbers[v] for v in op.operands), tuple(_attributes(op))))
        for result in op.results:
            numbers[result] = len(numbers)
            parts.append(str(result.type))
    return tuple(parts)


def _attributes(op: ir.Operation) -> Iterator[tuple[str, str]]:
    """Every attribute as text, tiles included: functions that differ in one are two kernels."""
    for item in op.attributes:
        name = item if isinstance(item, str) else item.name
        yield name, str(op.attributes[name])
