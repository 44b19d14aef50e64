"""From one bufferised kernel to functions a driver can call over ranges of blocks.

A kernel is a sequence of phases: an `scf.forall`, whose blocks any threads may run in any order, or
what lies between two of them, which one thread runs. All threads finish a phase before the next.
Temporary memory is laid out here: what outlives a phase in the workspace, which threads share, the
rest in the scratch of the thread or, if small, on its stack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from yolomlir.bindings import arith, ir, linalg, memref, scf
from yolomlir.diagnostics import InternalError
from yolomlir.dialects import yolo

ALIGNMENT = 64
_STACK_BYTES = 16 * 1024
"""Buffers up to this lie on the stack, where LLVM sees that nothing else points at them."""
_WORKSPACE, _SCRATCH, _BEGIN, _END = -4, -3, -2, -1
"""Where the kernel's last arguments are."""
_ADDRESSES = (
    "arith.constant", "memref.subview", "memref.expand_shape", "memref.collapse_shape",
    "memref.cast", "memref.reinterpret_cast", "memref.alloc", "memref.view",
    "builtin.unrealized_conversion_cast", "llvm.mlir.zero", "llvm.insertvalue", "func.return",
    "ub.poison", "arith.index_cast",
)  # fmt: skip
"""Ops without effects, which every phase keeps."""


@dataclass(frozen=True)
class Phase:
    """A function `name` and the number of its blocks."""

    name: str
    blocks: int


@dataclass(frozen=True)
class Phases:
    """The phases of a kernel in order, and the temporary bytes they need."""

    phases: tuple[Phase, ...]
    workspace_bytes: int
    scratch_bytes: int


def outline(module: ir.Module, prefix: str) -> Phases:
    """Replace `@kernel` by one function a phase, `{prefix}_0`, `{prefix}_1`, …"""
    kernel = _kernel(module)
    workspace = _place_shared(kernel)
    addresses = _addresses(kernel)
    effects = _split(kernel, addresses)
    phases, scratch = [], 0
    for index, members in enumerate(effects):
        with ir.InsertionPoint(kernel):
            function = kernel.clone().operation
        name = f"{prefix}_{index}"
        function.attributes["sym_name"] = ir.StringAttr.get(name)
        kept = [op for i, op in enumerate(_body(function)) if i in members or i in addresses]
        blocks = 1
        for op in reversed(_body(function)):
            if op not in kept:
                op.erase()
        for op in _body(function):
            if op.name == "scf.forall":
                blocks = _to_range(function, op)
        scratch = max(scratch, _place_private(function))
        phases.append(Phase(name, blocks))
    kernel.erase()
    return Phases(tuple(phases), workspace, scratch)


def _kernel(module: ir.Module) -> ir.Operation:
    for view in module.body.operations:
        if ir.StringAttr(view.operation.attributes["sym_name"]).value == "kernel":
            return view.operation
    raise InternalError("the module has no @kernel")


def _body(function: ir.Operation) -> list[ir.Operation]:
    return [view.operation for view in function.regions[0].blocks[0].operations]


def _addresses(kernel: ir.Operation) -> set[int]:
    """Indices of the ops that every phase keeps: without effects, and of such ops' results alone.

    What is computed from a loaded value (of a loop that had one iteration, and so is none) belongs
    to the phase that loads it.
    """
    kept: set[int] = set()
    computed: set[ir.Value] = set()
    for index, op in enumerate(_body(kernel)):
        address = op.name in _ADDRESSES or op.name.startswith("affine.")
        if address and computed.isdisjoint(op.operands):
            kept.add(index)
        else:
            computed.update(op.results)
    return kept


def _split(kernel: ir.Operation, addresses: set[int]) -> list[set[int]]:
    """Indices of the ops with effects, a set a phase."""
    phases: list[set[int]] = []
    serial = False
    for index, op in enumerate(_body(kernel)):
        if index in addresses:
            continue
        if op.name == "scf.forall" or not serial:
            phases.append(set())
        phases[-1].add(index)
        serial = op.name != "scf.forall"
    return phases


def _to_range(function: ir.Operation, forall: ir.Operation) -> int:
    """Make a forall a loop over the blocks [begin, end); returns how many blocks there are."""
    bounds = [
        _bounds(forall, key) for key in ("staticLowerBound", "staticUpperBound", "staticStep")
    ]
    if len(forall.operands) or any(bounds[0]) or any(s != 1 for s in bounds[2]):
        raise InternalError(f"a forall from {bounds[0]} by {bounds[2]}; expected 0 and 1")
    counts = bounds[1]
    arguments = function.regions[0].blocks[0].arguments
    index, source = ir.IndexType.get(), forall.regions[0].blocks[0]
    with ir.InsertionPoint(forall), forall.location:
        begin = arith.index_cast(index, arguments[_argument(arguments, _BEGIN)])
        end = arith.index_cast(index, arguments[_argument(arguments, _END)])
        loop = scf.ForOp(begin, end, arith.constant(index, 1))
    with ir.InsertionPoint(loop.body), forall.location:
        places: list[ir.Value] = []
        rest = loop.induction_variable
        for count in reversed(counts):
            size = arith.constant(index, count)
            places.insert(0, arith.remui(rest, size))
            rest = arith.divui(rest, size)
        terminator = scf.YieldOp([]).operation
    for argument, place in zip(source.arguments, places, strict=True):
        argument.replace_all_uses_with(place)
    for view in list(source.operations)[:-1]:
        view.operation.move_before(terminator)
    forall.erase()
    return math.prod(counts)


def _argument(arguments: ir.BlockArgumentList, place: int) -> int:
    return len(arguments) + place


def _bounds(op: ir.Operation, name: str) -> list[int]:
    return [int(v) for v in ir.DenseI64ArrayAttr(op.attributes[name])]


# ---- temporary memory ---------------------------------------------------------------------------


def _bytes(type_: ir.MemRefType) -> int:
    element = str(type_.element_type)
    sizes = {"f32": 4, "i32": 4, "i8": 1, "i1": 1, "index": 8, "i64": 8}
    if element not in sizes or not type_.has_static_shape:
        raise InternalError(f"a temporary of type {type_}")
    return int(math.prod(type_.shape)) * sizes[element]


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _place(op: ir.Operation, base: ir.Value, offset: int) -> None:
    """Replace an allocation by a place in `base`, a memref of bytes."""
    type_ = op.results[0].type
    with ir.InsertionPoint(op), op.location:
        at = arith.constant(ir.IndexType.get(), offset)
        view = memref.view(type_, base, at, [])
    op.results[0].replace_all_uses_with(view)
    op.erase()


def _bytes_memref(function: ir.Operation, place: int) -> ir.Value:
    """An argument, a bare pointer, as a memref of bytes."""
    block = function.regions[0].blocks[0]
    pointer = block.arguments[_argument(block.arguments, place)]
    struct = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"
    with ir.InsertionPoint.at_block_begin(block), function.location:
        value = ir.Operation.create("llvm.mlir.zero", results=[ir.Type.parse(struct)]).results[0]
        for position in (0, 1):
            value = ir.Operation.create(
                "llvm.insertvalue",
                results=[value.type],
                operands=[value, pointer],
                attributes={"position": ir.DenseI64ArrayAttr.get([position])},
            ).results[0]
        cast = ir.Operation.create(
            "builtin.unrealized_conversion_cast",
            results=[ir.Type.parse("memref<?xi8>")],
            operands=[value],
        )
    return cast.results[0]


def _place_shared(kernel: ir.Operation) -> int:
    """Put every allocation outside of a forall into the workspace; returns its bytes."""
    allocations = [op for op in _body(kernel) if op.name == "memref.alloc"]
    if not allocations:
        return 0
    base, offset = _bytes_memref(kernel, _WORKSPACE), 0
    for op in allocations:
        size = _bytes(ir.MemRefType(op.results[0].type))
        _place(op, base, offset)
        offset += _aligned(size)
    return offset


def _place_private(function: ir.Operation) -> int:
    """Put every allocation of a block on the stack or into the scratch; returns its bytes."""
    offset, base = 0, None
    entry = function.regions[0].blocks[0]
    for op in list(yolo.ops_in(function, "memref.alloc")):
        type_ = ir.MemRefType(op.results[0].type)
        size = _bytes(type_)
        if size <= _STACK_BYTES:
            with ir.InsertionPoint.at_block_begin(entry), op.location:
                local = memref.alloca(type_, [], [], alignment=ALIGNMENT)
            op.results[0].replace_all_uses_with(local)
            op.erase()
            continue
        base = base or _bytes_memref(function, _SCRATCH)
        _place(op, base, offset)
        offset += _aligned(size)
    return offset


def forward_loop_memory(module: ir.Module) -> None:
    """Loops that carry a buffer unchanged use it directly; copies of a buffer to itself go away.

    What upstream's canonicalisation would do, which would also take 2-D vectors apart.
    """
    for view in module.body.operations:
        _forward(view.operation)
    for op in list(yolo.ops_in(module, "memref.copy")):
        if op.operands[0] == op.operands[1]:
            op.erase()


def _forward(root: ir.Operation) -> None:
    """Inner loops first: their result is their initial buffer, then the outer one's argument."""
    for region in root.regions:
        for block in region:
            for view in list(block.operations):
                _forward(view.operation)
                if view.operation.name == "scf.for":
                    _forward_loop(view.operation)


def _forward_loop(loop: ir.Operation) -> None:
    body = loop.regions[0].blocks[0]
    yielded = list(body.operations)[-1].operation.operands
    for index, result in enumerate(loop.results):
        argument, initial = body.arguments[index + 1], loop.operands[index + 3]
        if isinstance(result.type, ir.MemRefType) and yielded[index] == argument:
            argument.replace_all_uses_with(initial)
            result.replace_all_uses_with(initial)


def copies_to_loops(module: ir.Module) -> None:
    """`memref.copy` as `linalg.copy`, which becomes loops instead of a call into MLIR's library."""
    for op in list(yolo.ops_in(module, "memref.copy")):
        with ir.InsertionPoint(op), op.location:
            linalg.copy(op.operands[0], outs=[op.operands[1]])
        op.erase()


__all__ = ["ALIGNMENT", "Phase", "Phases", "copies_to_loops", "forward_loop_memory", "outline"]
