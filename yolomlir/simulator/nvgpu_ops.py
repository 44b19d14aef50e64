"""`nvgpu`: asynchronous copies, `ldmatrix`, `mma.sync`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Scope, Step, operation, reference_in
from yolomlir.simulator.elements import Array, Value, element_of, truncate_tf32
from yolomlir.simulator.fragments import multiply
from yolomlir.simulator.ldmatrix import load_matrices
from yolomlir.simulator.memory import (
    Reference,
    check_indices,
    checked_addresses,
    note_global_read,
)

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

COPY_SIZES = (4, 8, 16)


def copy_asynchronously(
    lanes: Lanes,
    target: Reference,
    target_address: Value,
    source: Reference,
    source_address: Value,
    size: int,
    source_bytes: Value,
    site: Site,
) -> None:
    """Issue `cp.async` of `size` bytes a lane, of which `source_bytes` are read, zeros behind."""
    if target.space != "shared" or source.space != "global":
        raise site.fault("out-of-bounds", f"copies from {source.space} to {target.space} memory")
    target_address = np.array(lanes.broadcast(target_address))
    where = checked_addresses(lanes, target, target_address, size, size, site)
    numbers = np.flatnonzero(lanes.mask) if lanes.mask is not None else np.arange(lanes.count)
    data = np.zeros((len(numbers), size), np.uint8)
    _read_source(lanes, source, source_address, size, source_bytes, numbers, data, site)
    machine = lanes.machine
    threads, warps = lanes.active_threads()
    granules = machine.shadow.granules(where, size)
    machine.shadow.write(granules, threads, warps, site, asynchronous=True)
    lanes.count_banks(site, where, size)
    lanes.copies.issue(numbers, where, data)


def _read_source(
    lanes: Lanes,
    source: Reference,
    address: Value,
    size: int,
    source_bytes: Value,
    numbers: Array,
    data: Array,
    site: Site,
) -> None:
    """Fill `data` (active lanes, size) with the bytes that are read; lanes of 0 read nothing."""
    outer = lanes.mask
    amounts = lanes.broadcast(source_bytes)[numbers]
    if amounts.min() < 0 or amounts.max() > size:
        raise site.fault("out-of-bounds", f"reads {int(amounts.max())} bytes for a copy of {size}")
    every = lanes.broadcast(address)
    for amount in set(amounts.tolist()) - {0}:
        rows = amounts == amount
        if not rows.all():
            mask = np.zeros(lanes.count, np.bool_)
            mask[numbers[rows]] = True
            lanes.mask = mask
        where = checked_addresses(lanes, source, every, amount, size, site)
        note_global_read(lanes, where, amount, site)
        memory = lanes.machine.global_memory.data
        data[rows, :amount] = memory[where[:, None] + np.arange(amount)]
        lanes.mask = outer


@operation("nvgpu.device_async_copy")
def _copy(op: Any, scope: Scope) -> Step:
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    slots = scope.uses(list(op.operands))
    ends = [0, *np.cumsum(counts)]
    target, target_indices, source, source_indices, amount = (slots[a:b] for a, b in pairwise(ends))
    scope.define(op.results[0])
    element = element_of(op.operands[0].type)
    elements = ir.IntegerAttr(op.attributes["dstElements"]).value
    size = elements * element.size_bytes
    site = scope.site
    bypass = "bypassL1" in op.attributes
    if size not in COPY_SIZES or (bypass and size != 16):
        raise site.fault("misaligned", f"cp.async copies 4, 8 or 16 bytes, not {size}")
    scope.note_access(size)

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        to, origin = reference_in(lanes, target[0]), reference_in(lanes, source[0])
        to_index = [registers[i] for i in target_indices]
        from_index = [registers[i] for i in source_indices]
        check_indices(lanes, to, to_index, elements, site)
        read = registers[amount[0]] * np.int64(element.size_bytes) if amount else np.int64(size)
        copy_asynchronously(
            lanes, to, to.at(to_index), origin, origin.at(from_index), size, read, site
        )

    return step


@operation("nvgpu.device_async_create_group", "nvvm.cp.async.commit.group")
def _commit(op: Any, scope: Scope) -> Step:
    scope.defines(list(op.results))
    return lambda lanes: lanes.copies.commit(lanes.mask)


@operation("nvgpu.device_async_wait", "nvvm.cp.async.wait.group")
def _wait(op: Any, scope: Scope) -> Step:
    name = "n" if op.name.startswith("nvvm") else "numGroups"
    newest = ir.IntegerAttr(op.attributes[name]).value if name in op.attributes else 0
    return lambda lanes: lanes.copies.wait(lanes, newest)


@operation("nvgpu.ldmatrix")
def _ldmatrix(op: Any, scope: Scope) -> Step:
    memory, *indices = scope.uses(list(op.operands))
    count = ir.IntegerAttr(op.attributes["numTiles"]).value
    transpose = ir.BoolAttr(op.attributes["transpose"]).value
    element = element_of(op.results[0].type)
    packed = 4 // element.size_bytes
    result = scope.define(op.results[0])
    site = scope.site
    if transpose and element.size_bytes != 2:
        raise InternalError("ldmatrix transposes 16-bit elements only", where=site.text())

    def step(lanes: Lanes) -> None:
        reference = reference_in(lanes, memory)
        address = reference.at([lanes.registers[i] for i in indices])
        words = load_matrices(lanes, reference, address, count, site, transpose=transpose)
        values = element.from_memory(np.ascontiguousarray(words).view(element.memory))
        lanes.registers[result] = values.reshape(lanes.count, count, packed)

    return step


@operation("nvgpu.mma.sync")
def _mma(op: Any, scope: Scope) -> Step:
    a, b, c = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    kind = element_of(op.operands[0].type).name
    shape = [ir.IntegerAttr(s).value for s in ir.ArrayAttr(op.attributes["mmaShape"])]
    tf32 = kind == "f32"
    site = scope.site
    if shape[:2] != [16, 8] or (tf32 and "tf32Enabled" not in op.attributes):
        raise InternalError(
            f"mma of shape {shape} of {kind} is not simulated (f32 needs tf32Enabled)",
            where=site.text(),
        )

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(site)
        left, right, base = (_full(lanes, lanes.registers[s]) for s in (a, b, c))
        if tf32:
            left, right = truncate_tf32(left), truncate_tf32(right)
        product = multiply(left, right, base.reshape(lanes.count, 4))
        lanes.registers[result] = product.reshape(lanes.count, 2, 2)

    return step


def _full(lanes: Lanes, value: Array) -> Array:
    return np.ascontiguousarray(np.broadcast_to(value, (lanes.count, *value.shape[1:])))


@operation("nvgpu.rcp")
def _reciprocal(op: Any, scope: Scope) -> Step:
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = np.float32(1) / lanes.registers[source]

    return step
