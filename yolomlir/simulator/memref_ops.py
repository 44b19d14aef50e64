"""`memref`: loads, stores, views, atomics, globals and per-lane buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.atomics import ATOMIC_KINDS, atomic_update
from yolomlir.simulator.decode import Scope, Step, operation, reference_in
from yolomlir.simulator.elements import Element, Value, element_of, is_uniform
from yolomlir.simulator.memory import GLOBAL_BASE, Reference, check_indices, load, store
from yolomlir.simulator.references import (
    DYNAMIC,
    DYNAMIC_STRIDE,
    is_shared,
    local_reference,
    shared_reference,
)

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

Sizes = tuple[Value, ...]


def alignment_of(op: Any, element: Element) -> int:
    """What the op promises of its address: its `alignment`, else that of one element."""
    if "alignment" in op.attributes:
        return max(element.size_bytes, int(ir.IntegerAttr(op.attributes["alignment"]).value))
    return element.size_bytes


@operation("memref.load")
def _load(op: Any, scope: Scope) -> Step:
    memory, *indices = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    element = element_of(op.results[0].type)
    scope.note_access(element.size_bytes)
    align, site = alignment_of(op, element), scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        check_indices(lanes, reference, where, 1, site)
        address = reference.at(where)
        lanes.registers[result] = load(lanes, reference, address, 0, align, site)

    return step


@operation("memref.store")
def _store(op: Any, scope: Scope) -> Step:
    value, memory, *indices = scope.uses(list(op.operands))
    element = element_of(op.operands[0].type)
    scope.note_access(element.size_bytes)
    align, site = alignment_of(op, element), scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        check_indices(lanes, reference, where, 1, site)
        address = reference.at(where)
        store(lanes, reference, address, lanes.registers[value], 0, align, site)

    return step


@operation("memref.atomic_rmw")
def _atomic(op: Any, scope: Scope) -> Step:
    value, memory, *indices = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    element = element_of(op.results[0].type)
    scope.note_access(element.size_bytes)
    kind = ATOMIC_KINDS[ir.IntegerAttr(op.attributes["kind"]).value]
    site = scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        check_indices(lanes, reference, where, 1, site)
        lanes.registers[result] = atomic_update(
            lanes, reference, reference.at(where), lanes.registers[value], kind, site
        )

    return step


# ---- buffers ------------------------------------------------------------------------------------


def _static_layout(type_: Any) -> tuple[Element, int, Sizes, Sizes]:
    memref_type = ir.MemRefType(type_)
    element = element_of(memref_type)
    shape = list(memref_type.shape)
    strides, _ = memref_type.get_strides_and_offset()
    size = int(np.prod(shape)) * element.size_bytes
    return element, size, tuple(map(np.int64, shape)), tuple(map(np.int64, strides))


@operation("memref.get_global")
def _get_global(op: Any, scope: Scope) -> Step:
    name = ir.FlatSymbolRefAttr(op.attributes["name"]).value
    result = scope.define(op.results[0])
    element, size, sizes, strides = _static_layout(op.results[0].type)
    program = scope.program
    shared = is_shared(ir.MemRefType(op.results[0].type))
    offset, extent = program.shared_globals.get(name, (0, size))

    def step(lanes: Lanes) -> None:
        if not shared:
            segment = program.constants[name]
            start, end = np.int64(segment.start), np.int64(segment.end)
            value = Reference("global", start, start, end, element, sizes, strides)
        elif size:
            value = shared_reference(lanes, offset, extent, element, sizes, strides)
        else:
            value = _dynamic_shared(lanes, element)
        lanes.registers[result] = value

    return step


def _dynamic_shared(lanes: Lanes, element: Element) -> Reference:
    """All of the dynamic shared memory: a zero-length global stands for it."""
    machine = lanes.machine
    start = machine.program.static_shared_bytes
    size = machine.shared_bytes - start
    return shared_reference(lanes, start, size, element, (None,), (np.int64(1),))


@operation("gpu.dynamic_shared_memory")
def _dynamic(op: Any, scope: Scope) -> Step:
    result = scope.define(op.results[0])
    element = element_of(op.results[0].type)

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = _dynamic_shared(lanes, element)

    return step


@operation("memref.alloca")
def _alloca(op: Any, scope: Scope) -> Step:
    element, size, sizes, strides = _static_layout(op.results[0].type)
    if size < 0 or len(op.operands):
        raise InternalError("a buffer of dynamic size per thread", where=scope.site.text())
    result = scope.define(op.results[0])
    place = scope.program.local_bytes
    scope.program.local_bytes += -(-size // 16) * 16

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = local_reference(lanes, place, size, element, sizes, strides)

    return step


@operation("memref.alloca_scope.return", "memref.dealloc", "memref.assume_alignment")
def _ignored(op: Any, scope: Scope) -> Step | None:
    if not len(op.results):
        return None
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = lanes.registers[source]

    return step


# ---- views --------------------------------------------------------------------------------------


def _mixed(static: Sequence[int], dynamic: list[int], mark: int) -> Callable[[Lanes], list[Value]]:
    """Static numbers with the dynamic ones filled in from registers."""
    left = iter(dynamic)
    entries = [(next(left), True) if s == mark else (np.int64(s), False) for s in static]

    def values(lanes: Lanes) -> list[Value]:
        return [lanes.registers[e] if is_slot else e for e, is_slot in entries]

    return values


def _mixed_operands(op: Any, scope: Scope) -> tuple[Callable[[Lanes], list[Value]], ...]:
    """(offsets, sizes, strides) of a subview or reinterpret_cast."""
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    slots = scope.uses(list(op.operands))
    ends = np.cumsum(counts)
    groups = [slots[ends[i] : ends[i + 1]] for i in range(3)]
    names = ("static_offsets", "static_sizes", "static_strides")
    return tuple(
        _mixed(list(ir.DenseI64ArrayAttr(op.attributes[n])), g, DYNAMIC)
        for n, g in zip(names, groups, strict=True)
    )


def _narrowed(reference: Reference, address: Value, sizes: Sizes, strides: Sizes) -> Reference:
    """A part of a buffer: bounds cut to it where its extent is known."""
    low, high = reference.low, reference.high
    if all(s is not None for s in sizes) and all(np.all(s >= 0) for s in strides):
        span: Value = np.int64(1)
        for size, stride in zip(sizes, strides, strict=True):
            span = span + (size - 1) * stride
        low = np.maximum(low, address)
        high = np.minimum(high, address + span * reference.element.size_bytes)
    return replace(
        reference, address=address, low=low, high=high, sizes=tuple(sizes), strides=tuple(strides)
    )


@operation("memref.reinterpret_cast")
def _reinterpret_cast(op: Any, scope: Scope) -> Step:
    source = scope.use(op.operands[0])
    offsets, sizes, strides = _mixed_operands(op, scope)
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        address = reference.address + offsets(lanes)[0] * reference.element.size_bytes
        lanes.registers[result] = _narrowed(
            reference, address, tuple(sizes(lanes)), tuple(strides(lanes))
        )

    return step


@operation("memref.subview")
def _subview(op: Any, scope: Scope) -> Step:
    source = scope.use(op.operands[0])
    offsets, sizes, strides = _mixed_operands(op, scope)
    result = scope.define(op.results[0])
    kept = list(ir.MemRefType(op.results[0].type).shape)
    full = list(ir.DenseI64ArrayAttr(op.attributes["static_sizes"]))
    dropped = _dropped_dimensions(full, kept)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        address = reference.at(offsets(lanes))
        steps = [a * b for a, b in zip(strides(lanes), reference.strides, strict=True)]
        extents = sizes(lanes)
        part = _narrowed(reference, address, tuple(extents), tuple(steps))
        keep = [i for i in range(len(full)) if i not in dropped]
        lanes.registers[result] = replace(
            part, sizes=tuple(extents[i] for i in keep), strides=tuple(steps[i] for i in keep)
        )

    return step


def _dropped_dimensions(full: list[int], kept: list[int]) -> set[int]:
    """Unit dimensions that a rank-reducing subview leaves out."""
    dropped: set[int] = set()
    position = 0
    for axis, size in enumerate(full):
        if position < len(kept) and kept[position] == size:
            position += 1
        elif size == 1:
            dropped.add(axis)
        else:
            position += 1
    return dropped


@operation("memref.view")
def _view(op: Any, scope: Scope) -> Step:
    source, shift, *dynamic = scope.uses(list(op.operands))
    type_ = ir.MemRefType(op.results[0].type)
    element = element_of(type_)
    sizes = _mixed(list(type_.shape), dynamic, DYNAMIC)
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        extents = sizes(lanes)
        steps: list[Value] = [np.int64(1)]
        for size in reversed(extents[1:]):
            steps.insert(0, steps[0] * size)
        typed = replace(reference, element=element)
        lanes.registers[result] = _narrowed(
            typed, reference.address + lanes.registers[shift], tuple(extents), tuple(steps)
        )

    return step


@operation("memref.cast", "memref.memory_space_cast")
def _cast(op: Any, scope: Scope) -> Step:
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])
    shape = list(ir.MemRefType(op.results[0].type).shape)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        sizes = tuple(
            old if new == DYNAMIC or old is None else np.int64(new)
            for new, old in zip(shape, reference.sizes, strict=True)
        )
        lanes.registers[result] = replace(reference, sizes=sizes)

    return step


@operation("memref.collapse_shape", "memref.expand_shape")
def _reshaped(op: Any, scope: Scope) -> Step:
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])
    type_ = ir.MemRefType(op.results[0].type)
    strides, _ = type_.get_strides_and_offset()
    if DYNAMIC in list(type_.shape) or DYNAMIC_STRIDE in strides:
        raise InternalError("a reshape of dynamic shape", where=scope.site.text())
    sizes = tuple(np.int64(s) for s in type_.shape)
    steps = tuple(np.int64(s) for s in strides)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        lanes.registers[result] = replace(reference, sizes=sizes, strides=steps)

    return step


@operation("memref.dim")
def _dim(op: Any, scope: Scope) -> Step:
    source, axis = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        sizes = reference_in(lanes, source).sizes
        number = lanes.registers[axis]
        if not is_uniform(number) or sizes[int(number)] is None:
            raise site.fault("out-of-bounds", "the size of a bare pointer is not known")
        lanes.registers[result] = sizes[int(number)]

    return step


@operation("memref.extract_aligned_pointer_as_index")
def _pointer(op: Any, scope: Scope) -> Step:
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, source)
        base = GLOBAL_BASE if reference.space == "global" else 0
        if reference.space == "local":
            raise InternalError("a pointer to a thread's own memory is not simulated")
        lanes.registers[result] = reference.address + np.int64(base)

    return step
