"""`vector`: loads and stores, building, taking apart, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.arith_ops import elementwise
from yolomlir.simulator.cast_ops import reinterpret
from yolomlir.simulator.decode import Scope, Step, operation, reference_in
from yolomlir.simulator.elements import (
    Array,
    Value,
    element_of,
    is_uniform,
    lanes_first,
    scalar_of,
    vector_shape,
)
from yolomlir.simulator.math_ops import fused_multiply_add
from yolomlir.simulator.memory import check_indices, load, store
from yolomlir.simulator.memref_ops import alignment_of
from yolomlir.simulator.references import DYNAMIC

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes


def _shape(type_: Any, scope: Scope) -> tuple[int, ...]:
    shape = vector_shape(type_)
    if shape is None:
        raise InternalError(f"{type_} is not a vector", where=scope.site.text())
    return shape


def _numbers(attribute: Any) -> list[int]:
    return list(ir.DenseI64ArrayAttr(attribute))


def _integers(attribute: Any) -> list[int]:
    return [ir.IntegerAttr(a).value for a in ir.ArrayAttr(attribute)]


# ---- memory -------------------------------------------------------------------------------------


@operation("vector.load")
def _load(op: Any, scope: Scope) -> Step:
    memory, *indices = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    shape = _shape(op.results[0].type, scope)
    element = element_of(op.results[0].type)
    count = int(np.prod(shape))
    align, site = alignment_of(op, element), scope.site
    scope.note_access(count * element.size_bytes)
    if count > 1 and align < count * element.size_bytes:
        scope.program.split_vectors.append(site)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        check_indices(lanes, reference, where, count, site)
        loaded = load(lanes, reference, reference.at(where), count, align, site)
        lanes.registers[result] = np.reshape(loaded, (-1, *shape))

    return step


@operation("vector.store")
def _store(op: Any, scope: Scope) -> Step:
    value, memory, *indices = scope.uses(list(op.operands))
    shape = _shape(op.operands[0].type, scope)
    element = element_of(op.operands[0].type)
    count = int(np.prod(shape))
    align, site = alignment_of(op, element), scope.site
    scope.note_access(count * element.size_bytes)
    if count > 1 and align < count * element.size_bytes:
        scope.program.split_vectors.append(site)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        check_indices(lanes, reference, where, count, site)
        rows = lanes.registers[value].reshape(-1, count)
        store(lanes, reference, reference.at(where), rows, count, align, site)

    return step


def _masked_elements(lanes: Lanes, mask: Array, count: int, action: Callable[[int], None]) -> None:
    """`action(k)` on the lanes whose mask has element k set."""
    outer = lanes.mask
    for k in range(count):
        wanted = lanes.broadcast(mask[:, k])
        wanted = wanted if outer is None else wanted & outer
        if wanted.any():
            lanes.set_mask(wanted)
            action(k)
    lanes.set_mask(outer)


@operation("vector.maskedload", "vector.transfer_read")
def _masked_load(op: Any, scope: Scope) -> Step:
    transfer = op.name == "vector.transfer_read"
    shape = _shape(op.results[0].type, scope)
    element = element_of(op.results[0].type)
    memory, indices, mask, fill = _masked_operands(op, scope, transfer=transfer)
    result = scope.define(op.results[0])
    scope.note_access(element.size_bytes)
    count, site = shape[0], scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        wanted = _wanted(lanes, reference, where, mask, count)
        padding = lanes.registers[fill]
        filler = padding if np.ndim(padding) > 1 else np.reshape(padding, (-1, 1))
        out = np.array(np.broadcast_to(filler, (lanes.count, count)))

        def element_at(k: int) -> None:
            at = [*where[:-1], where[-1] + k]
            check_indices(lanes, reference, at, 1, site)
            loaded = load(lanes, reference, reference.at(at), 0, element.size_bytes, site)
            active = slice(None) if lanes.mask is None else lanes.mask
            out[active, k] = lanes.active(loaded)

        _masked_elements(lanes, wanted, count, element_at)
        lanes.registers[result] = out

    return step


@operation("vector.maskedstore", "vector.transfer_write")
def _masked_store(op: Any, scope: Scope) -> Step:
    transfer = op.name == "vector.transfer_write"
    memory, indices, mask, value = _masked_operands(op, scope, transfer=transfer)
    source = op.operands[0] if transfer else op.operands[len(op.operands) - 1]
    element = element_of(source.type)
    count, site = _shape(source.type, scope)[0], scope.site
    scope.note_access(element.size_bytes)

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        where = [lanes.registers[i] for i in indices]
        wanted = _wanted(lanes, reference, where, mask, count)
        rows = lanes.registers[value]

        def element_at(k: int) -> None:
            at = [*where[:-1], where[-1] + k]
            check_indices(lanes, reference, at, 1, site)
            column = scalar_of(rows[:, k])
            store(lanes, reference, reference.at(at), column, 0, element.size_bytes, site)

        _masked_elements(lanes, wanted, count, element_at)

    return step


def _masked_operands(
    op: Any, scope: Scope, *, transfer: bool
) -> tuple[int, list[int], int | None, int]:
    """(memref, indices, mask, padding or value) of a masked or transfer access of a 1-D vector."""
    slots = scope.uses(list(op.operands))
    vector = op.results[0].type if len(op.results) else None
    if not transfer:
        return slots[0], slots[1:-2], slots[-2], slots[-1]
    map_ = str(op.attributes["permutation_map"])
    inputs, output = map_.removeprefix("affine_map<").rstrip(">").split(" -> ")
    if len(op.results) and len(_shape(vector, scope)) != 1:
        raise InternalError("only transfers of 1-D vectors are simulated", where=scope.site.text())
    if inputs.strip("()").split(", ")[-1] != output.strip("()"):
        raise InternalError("only minor identity maps are simulated", where=scope.site.text())
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    if len(op.results):
        memory, indices = slots[0], slots[1 : 1 + counts[1]]
        mask = slots[-1] if counts[3] else None
        return memory, indices, mask, slots[1 + counts[1]]
    memory, indices = slots[1], slots[2 : 2 + counts[2]]
    return memory, indices, slots[-1] if counts[3] else None, slots[0]


def _wanted(
    lanes: Lanes, reference: Any, where: Sequence[Value], mask: int | None, count: int
) -> Array:
    """Which elements an access takes: those of its mask, and within the last dimension."""
    if mask is not None:
        return np.asarray(np.broadcast_to(lanes.registers[mask], (lanes.count, count)))
    size = reference.sizes[-1]
    if size is None:
        return np.ones((lanes.count, count), np.bool_)
    last = lanes.broadcast(where[-1])
    return np.asarray(last[:, None] + np.arange(count) < size)


# ---- parts --------------------------------------------------------------------------------------


def _positions(
    op: Any, scope: Scope, dynamic: Sequence[Any]
) -> Callable[[Lanes], tuple[Value, ...]]:
    left = iter(scope.uses(dynamic))
    entries = [
        (next(left), True) if p == DYNAMIC else (p, False)
        for p in _numbers(op.attributes["static_position"])
    ]
    return lambda lanes: tuple(lanes.registers[e] if slot else e for e, slot in entries)


def _joined(rows: Any, positions: tuple[Value, ...]) -> tuple[Any, ...]:
    """An index of the lane axis and then of the vector's axes."""
    return (rows, *positions)


@operation("vector.extract")
def _extract(op: Any, scope: Scope) -> Step:
    source = scope.use(op.operands[0])
    positions = _positions(op, scope, list(op.operands)[1:])
    result = scope.define(op.results[0])
    scalar = vector_shape(op.results[0].type) is None
    if len(op.operands) == 1:
        index = _joined(slice(None), tuple(_numbers(op.attributes["static_position"])))

        def static(lanes: Lanes) -> None:
            part = lanes.registers[source][index]
            lanes.registers[result] = scalar_of(part) if scalar else part

        return static

    def step(lanes: Lanes) -> None:
        array = lanes.registers[source]
        where = positions(lanes)
        rows: Any = slice(None)
        if not all(is_uniform(p) for p in where):
            array = np.broadcast_to(array, (lanes.count, *array.shape[1:]))
            rows = np.arange(lanes.count)
        part = array[_joined(rows, where)]
        lanes.registers[result] = scalar_of(part) if scalar else part

    return step


@operation("vector.insert")
def _insert(op: Any, scope: Scope) -> Step:
    value, target = scope.uses(list(op.operands)[:2])
    positions = _positions(op, scope, list(op.operands)[2:])
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        base, inserted = lanes.registers[target], lanes.registers[value]
        where = positions(lanes)
        uniform = all(is_uniform(p) for p in where) and len(base) == 1
        if not uniform or not (is_uniform(inserted) or len(inserted) == 1):
            base = np.broadcast_to(base, (lanes.count, *base.shape[1:]))
        base = np.array(base)
        rows = slice(None) if all(is_uniform(p) for p in where) else np.arange(lanes.count)
        base[_joined(rows, where)] = inserted
        lanes.registers[result] = base

    return step


@operation("vector.from_elements")
def _from_elements(op: Any, scope: Scope) -> Step:
    slots = scope.uses(list(op.operands))
    shape = _shape(op.results[0].type, scope)
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        values = lanes_first([lanes.registers[s] for s in slots], lanes.count)
        lanes.registers[result] = values.reshape(-1, *shape)

    return step


@operation("vector.to_elements")
def _to_elements(op: Any, scope: Scope) -> Step:
    source = scope.use(op.operands[0])
    results = scope.defines(list(op.results))

    def step(lanes: Lanes) -> None:
        array = lanes.registers[source]
        flat = array.reshape(len(array), -1)
        for i, slot in enumerate(results):
            lanes.registers[slot] = scalar_of(flat[:, i])

    return step


@operation("vector.broadcast")
def _broadcast(op: Any, scope: Scope) -> Step:
    shape = _shape(op.results[0].type, scope)

    def function(value: Value) -> Array:
        array = np.asarray(value)
        lanes = array.shape[0] if array.ndim else 1
        inner = array.shape[1:]
        aligned = array.reshape(lanes, *(1,) * (len(shape) - len(inner)), *inner)
        return np.broadcast_to(aligned, (lanes, *shape))

    return elementwise(op, scope, function)


@operation("vector.shape_cast")
def _shape_cast(op: Any, scope: Scope) -> Step:
    shape = _shape(op.results[0].type, scope)
    return elementwise(op, scope, lambda v: v.reshape(len(v), *shape))


@operation("vector.bitcast")
def _bitcast(op: Any, scope: Scope) -> Step:
    source, target = element_of(op.operands[0].type), element_of(op.results[0].type)
    return elementwise(op, scope, lambda v: reinterpret(v, source, target))


def _common_lanes(*arrays: Array) -> list[Array]:
    lanes = max(len(a) for a in arrays)
    return [np.broadcast_to(a, (lanes, *a.shape[1:])) for a in arrays]


@operation("vector.shuffle")
def _shuffle(op: Any, scope: Scope) -> Step:
    order = _numbers(op.attributes["mask"])

    def function(a: Array, b: Array) -> Array:
        return np.concatenate(_common_lanes(a, b), 1)[:, order]

    return elementwise(op, scope, function)


@operation("vector.interleave")
def _interleave(op: Any, scope: Scope) -> Step:
    def function(a: Array, b: Array) -> Array:
        first, second = _common_lanes(a, b)
        return np.stack([first, second], -1).reshape(*first.shape[:-1], -1)

    return elementwise(op, scope, function)


@operation("vector.transpose")
def _transpose(op: Any, scope: Scope) -> Step:
    order = [0, *(p + 1 for p in _numbers(op.attributes["permutation"]))]
    return elementwise(op, scope, lambda v: v.transpose(order))


def _slices(offsets: list[int], sizes: list[int], strides: list[int]) -> tuple[slice, ...]:
    parts = zip(offsets, sizes, strides, strict=True)
    return (slice(None), *(slice(o, o + (n - 1) * s + 1, s) for o, n, s in parts))


@operation("vector.extract_strided_slice")
def _extract_strided(op: Any, scope: Scope) -> Step:
    names = ("offsets", "sizes", "strides")
    index = _slices(*(_integers(op.attributes[n]) for n in names))
    return elementwise(op, scope, lambda v: v[index])


@operation("vector.insert_strided_slice")
def _insert_strided(op: Any, scope: Scope) -> Step:
    offsets = _integers(op.attributes["offsets"])
    inner = _shape(op.operands[0].type, scope)
    padding = len(offsets) - len(inner)
    sizes = [1] * padding + list(inner)
    index = _slices(offsets, sizes, [1] * len(offsets))

    def function(value: Array, target: Array) -> Array:
        part, base = _common_lanes(value, target)
        out = np.array(base)
        out[index] = part.reshape(len(part), *sizes)
        return out

    return elementwise(op, scope, function)


# ---- arithmetic ---------------------------------------------------------------------------------


@operation("vector.fma")
def _fma(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, element_of(op.results[0].type).rounded(fused_multiply_add))


_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add,
    "mul": np.multiply,
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "minimumf": np.minimum,
    "maximumf": np.maximum,
    "minnumf": np.fmin,
    "maxnumf": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@operation("vector.reduction")
def _reduction(op: Any, scope: Scope) -> Step:
    """From the first element to the last, starting with the accumulator where there is one."""
    kind = str(op.attributes["kind"]).removeprefix("#vector.kind<").rstrip(">")
    if kind not in _COMBINE:
        raise InternalError(f"the reduction '{kind}' is not simulated", where=scope.site.text())
    combine = element_of(op.results[0].type).rounded(_COMBINE[kind])
    slots = scope.uses(list(op.operands))
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        array = lanes.registers[slots[0]]
        columns = [scalar_of(array[:, i]) for i in range(array.shape[1])]
        if len(slots) > 1:
            columns.insert(0, lanes.registers[slots[1]])
        total = columns[0]
        for column in columns[1:]:
            total = combine(total, column)
        lanes.registers[result] = total

    return step


@operation("vector.constant_mask")
def _constant_mask(op: Any, scope: Scope) -> None:
    shape = _shape(op.results[0].type, scope)
    mask = np.zeros((1, *shape), np.bool_)
    mask[_slices([0] * len(shape), _numbers(op.attributes["mask_dim_sizes"]), [1] * len(shape))] = 1
    scope.constant(op.results[0], mask)


@operation("vector.create_mask")
def _create_mask(op: Any, scope: Scope) -> Step:
    shape = _shape(op.results[0].type, scope)
    slots = scope.uses(list(op.operands))
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        mask: Array = np.ones((1, *shape), np.bool_)
        for axis, slot in enumerate(slots):
            limit = np.reshape(lanes.registers[slot], (-1, *(1,) * len(shape)))
            along = np.arange(shape[axis]).reshape(
                1, *(shape[a] if a == axis else 1 for a in range(len(shape)))
            )
            mask = mask & (along < limit)
        lanes.registers[result] = mask

    return step


@operation("vector.step")
def _step(op: Any, scope: Scope) -> None:
    numbers = np.arange(_shape(op.results[0].type, scope)[0], dtype=np.int64)[None]
    scope.constant(op.results[0], numbers)
