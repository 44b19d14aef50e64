"""The elementwise tail of a dispatch: the region of its `linalg.generic`, inlined on registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu.builder import f32
from yolomlir.codegen.gpu.linalg_match import argument_number, constant_float, defining, made_by
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo

_HINT = "docs/architecture.md, section 4, lists the forms that kernels are made from"


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does to each accumulator before it stores it.

    generic: the elementwise `linalg.generic`; None where the root op's result is returned.
    inputs: an entry a block argument of its region: the number of the function's argument, or -1
    for the accumulator. channel, element: the arguments with one value a channel (bias) and one an
    output element (residual), in order.
    """

    generic: ir.Operation | None
    inputs: tuple[int, ...] = ()
    channel: tuple[int, ...] = ()
    element: tuple[int, ...] = ()
    round_result: bool = False

    def apply(self, accumulator: ir.Value, operands: Mapping[int, ir.Value]) -> ir.Value:
        """The value to store; `operands` has a scalar for every argument in channel and element."""
        result = accumulator
        if self.generic is not None:
            block = self.generic.regions[0].blocks[0]
            scope: dict[ir.Value, ir.Value] = {}
            for argument, number in zip(block.arguments, self.inputs, strict=False):
                scope[argument] = accumulator if number < 0 else operands[number]
            result = _inline(block, scope)
        if self.round_result:
            return instructions.from_bits(instructions.round_to_tf32(result))
        return result


def match_epilogue(function: ir.Operation, accumulator: ir.Value) -> Epilogue:
    """The epilogue between a root op's result (N x H x W x C) and what the function returns.

    Raises UnsupportedError where that is not one elementwise generic of the accumulator, of
    per-channel vectors and of tensors of the accumulator's shape that are function arguments.
    """
    returned = function.regions[0].blocks[0].operations[-1].operation.operands[0]
    rounded = "yolo.round_result" in function.attributes
    if returned == accumulator:
        return Epilogue(None, round_result=rounded)
    generic = made_by(returned, "linalg.generic")
    if generic is None or len(generic.results) != 1:
        raise _unsupported(function, "does not return one elementwise linalg.generic")
    return match_epilogue_generic(generic, accumulator, argument_number, rounded=rounded)


def match_epilogue_generic(
    generic: ir.Operation,
    accumulator: ir.Value,
    number_of: Callable[[ir.Value], int | None],
    *,
    rounded: bool = False,
) -> Epilogue:
    """The epilogue that a generic is of a root op's result (N x H x W x C).

    number_of: the number by which `Epilogue.apply` gets an operand; None for one that it cannot
    have. Raises UnsupportedError as `match_epilogue` does.
    """
    maps = list(ir.ArrayAttr(generic.attributes["indexing_maps"]))
    rank = ir.RankedTensorType(accumulator.type).rank
    identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(rank))
    last = ir.AffineMapAttr.get(ir.AffineMap.get(rank, 0, [ir.AffineDimExpr.get(rank - 1)]))
    if maps[-1] != identity or len(maps) != len(generic.operands):
        raise _unsupported(generic, "permutes or reduces the result in its epilogue")
    inputs: list[int] = []
    channel: list[int] = []
    element: list[int] = []
    for value, map_ in zip(list(generic.operands)[:-1], maps[:-1], strict=True):
        number = number_of(value)
        if value == accumulator and map_ == identity:
            inputs.append(-1)
        elif number is not None and map_ in (identity, last):
            inputs.append(number)
            kind = element if map_ == identity else channel
            kind.extend([number] if number not in kind else [])
        else:
            raise _unsupported(generic, f"reads an epilogue operand through {map_}")
    if -1 not in inputs:
        raise _unsupported(generic, "does not use the accumulator in its epilogue")
    return Epilogue(generic, tuple(inputs), tuple(channel), tuple(element), rounded)


def _unsupported(op: ir.Operation, message: str) -> UnsupportedError:
    return UnsupportedError(f"the dispatch {message}", where=yolo.layer_of(op.location), hint=_HINT)


def _inline(block: ir.Block, scope: dict[ir.Value, ir.Value]) -> ir.Value:
    """Emit a region's ops for one element; what its terminator yields."""
    for view in block.operations:
        op = view.operation
        if op.name == "linalg.yield":
            return _resolve(op.operands[0], scope)
        operands = [_resolve(value, scope) for value in op.operands]
        scope[op.results[0]] = _emit(op, operands)
    raise UnsupportedError("the epilogue's region has no terminator", hint=_HINT)


def _resolve(value: ir.Value, scope: dict[ir.Value, ir.Value]) -> ir.Value:
    if value not in scope:
        constant = made_by(value, "arith.constant")
        if constant is None:
            raise UnsupportedError("the epilogue captures a value that is no constant", hint=_HINT)
        scope[value] = _clone(constant, [])
    return scope[value]


def _emit(op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    if op.name == "math.exp":
        if _feeds_only_sigmoids(op):
            return instructions.exp2(arith.mulf(operands[0], f32(instructions.LOG2_E)))
        return instructions.exp(operands[0])
    if op.name == "arith.divf" and _sigmoid_exponential(op.operands[1]) is not None:
        return arith.mulf(operands[0], instructions.reciprocal(operands[1]))
    if op.name in _MATH:
        return _MATH[op.name](*operands)
    if not op.name.startswith("arith."):
        raise _unsupported(op, f"uses '{op.name}' in its epilogue, which kernels cannot compute")
    return _clone(op, operands)


_MATH: dict[str, Callable[..., ir.Value]] = {
    "math.exp2": instructions.exp2,
    "math.tanh": instructions.tanh,
    "math.sqrt": instructions.sqrt,
    "math.rsqrt": instructions.rsqrt,
    "math.absf": instructions.absolute,
    "math.fma": instructions.fma,
}


def _clone(op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    clone = op.clone(ir.InsertionPoint.current)
    for i, operand in enumerate(operands):
        clone.operation.operands[i] = operand
    return clone.operation.results[0]


def _sigmoid_exponential(divisor: ir.Value) -> ir.Operation | None:
    """The `math.exp` of a divisor `1 + exp(y)`, which lies in [1, inf], where rcp.approx is exact
    to an ulp; None for another divisor."""
    add = made_by(divisor, "arith.addf")
    if add is None:
        return None
    for one, other in (tuple(add.operands), tuple(add.operands)[::-1]):
        exponential = made_by(other, "math.exp")
        if constant_float(one) == 1.0 and exponential is not None:
            return exponential
    return None


def _feeds_only_sigmoids(exponential: ir.Operation) -> bool:
    """Whether an exponential is only used in `1 / (1 + exp)`, which damps its relative error."""
    for use in exponential.results[0].uses:
        add = use.owner.operation
        if add.name != "arith.addf" or _sigmoid_exponential(add.results[0]) is None:
            return False
        for outer in add.results[0].uses:
            divide = outer.owner.operation
            if divide.name != "arith.divf" or defining(divide.operands[1]) != add:
                return False
    return True
