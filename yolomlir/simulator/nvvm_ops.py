"""`nvvm`: what PTX instructions do: special registers, tensor cores, copies, synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.arith_ops import elementwise
from yolomlir.simulator.decode import Control, Execution, Scope, Step, operation
from yolomlir.simulator.elements import (
    ELEMENTS,
    Array,
    Value,
    is_uniform,
    lanes_first,
    round_tf32,
    truncate_tf32,
)
from yolomlir.simulator.fragments import multiply
from yolomlir.simulator.gpu_ops import IDENTIFIERS, block_barrier
from yolomlir.simulator.lanes import WARP
from yolomlir.simulator.ldmatrix import load_matrices
from yolomlir.simulator.llvm_ops import flush_subnormals
from yolomlir.simulator.nvgpu_ops import copy_asynchronously
from yolomlir.simulator.pointers import address_space, reference_at

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

_BYTE = ELEMENTS["i8"]


def keyword(attribute: Any) -> str:
    """`bfly` of `#nvvm<shfl_kind bfly>`, `tf32` of `#nvvm.mma_type<tf32>`."""
    return str(attribute).rstrip(">").replace("<", " ").split()[-1]


def _require(condition: bool, scope: Scope, message: str) -> None:
    if not condition:
        raise InternalError(message, where=scope.site.text())


# ---- special registers --------------------------------------------------------------------------

_REGISTERS = {
    "tid": "thread_id",
    "ntid": "block_dim",
    "ctaid": "block_id",
    "nctaid": "grid_dim",
    "clusterid": "cluster_id",
    "nclusterid": "cluster_dim",
    "cluster.ctaid": "cluster_block_id",
    "cluster.nctaid": "cluster_dim_blocks",
}
_PREFIX = "nvvm.read.ptx.sreg."


@operation(*(f"{_PREFIX}{name}.{axis}" for name in _REGISTERS for axis in "xyz"))
def _vector_register(op: Any, scope: Scope) -> Step:
    name, _, axis = op.name.removeprefix(_PREFIX).rpartition(".")
    function, number = IDENTIFIERS[_REGISTERS[name]], "xyz".index(axis)
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = np.asarray(function(lanes, number)).astype(np.int32)[()]

    return step


_SCALARS: dict[str, Callable[[Any], Value]] = {
    "laneid": lambda lanes: lanes.thread_ids % WARP,
    "warpid": lambda lanes: lanes.thread_ids // WARP,
    "warpsize": lambda lanes: WARP,
    "cluster.ctarank": lambda lanes: lanes.rank,
    "cluster.nctarank": lambda lanes: lanes.machine.cluster_blocks,
}


@operation(*(f"{_PREFIX}{name}" for name in _SCALARS))
def _scalar_register(op: Any, scope: Scope) -> Step:
    function = _SCALARS[op.name.removeprefix(_PREFIX)]
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = np.asarray(function(lanes)).astype(np.int32)[()]

    return step


# ---- tensor cores -------------------------------------------------------------------------------


def _packed(values: list[Value], kind: str, lanes: Lanes) -> Array:
    """The registers of A or B as elements: (lanes, registers, elements a register)."""
    if kind == "f16":
        return np.stack([np.broadcast_to(v, (lanes.count, 2)) for v in values], 1)
    words = np.empty((lanes.count, len(values)), np.int32)
    for i, value in enumerate(values):
        words[:, i] = value
    if kind == "tf32":
        return np.asarray(truncate_tf32(words.view(np.float32))[:, :, None])
    narrow = words.view({"bf16": np.uint16, "s8": np.int8, "u8": np.uint8}[kind])
    parts = narrow.reshape(lanes.count, len(values), -1)
    return ELEMENTS["bf16"].from_memory(parts) if kind == "bf16" else parts


_MMA_KINDS = ("tf32", "f16", "bf16", "s8", "u8")


@operation("nvvm.mma.sync")
def _mma(op: Any, scope: Scope) -> Step:
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    ends = np.cumsum([0, *counts])
    slots = scope.uses(list(op.operands))
    a, b, c = (slots[i:j] for i, j in pairwise(ends))
    kind = "f16"
    if "multiplicandAPtxType" in op.attributes:
        kind = keyword(op.attributes["multiplicandAPtxType"])
    shape = str(op.attributes["shape"])
    supported = kind in _MMA_KINDS and "m = 16, n = 8" in shape
    _require(supported, scope, f"mma of {shape} of {kind} is not simulated")
    halves = len(c) == 2
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(site)
        registers = lanes.registers
        left = _packed([registers[s] for s in a], kind, lanes)
        right = _packed([registers[s] for s in b], kind, lanes)
        if halves:
            base = np.stack([np.broadcast_to(registers[s], (lanes.count, 2)) for s in c], 1)
        else:
            base = lanes_first([registers[s] for s in c], lanes.count)
            base = np.broadcast_to(base, (lanes.count, 4))
        product = multiply(left, right, base.reshape(lanes.count, 4))
        if halves:
            registers[result] = (product[:, :2], product[:, 2:])
        else:
            registers[result] = tuple(product.T)

    return step


@operation("nvvm.ldmatrix")
def _ldmatrix(op: Any, scope: Scope) -> Step:
    pointer, result = scope.use(op.operands[0]), scope.define(op.results[0])
    space = address_space(op.operands[0].type)
    count = ir.IntegerAttr(op.attributes["num"]).value
    transpose = keyword(op.attributes["layout"]) == "col"
    site = scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_at(lanes, lanes.registers[pointer], space, _BYTE)
        words = load_matrices(lanes, reference, reference.address, count, site, transpose=transpose)
        columns = tuple(words.view(np.int32).T)
        lanes.registers[result] = columns if count > 1 else columns[0]

    return step


@operation("nvvm.convert.float.to.tf32")
def _to_tf32(op: Any, scope: Scope) -> Step:
    mode = keyword(op.attributes["rnd"]) if "rnd" in op.attributes else "rna"
    relu = "relu" in op.attributes and str(op.attributes["relu"]) == "true"
    _require(mode == "rna" and not relu, scope, f"cvt.{mode}.tf32 is not simulated")
    return elementwise(op, scope, lambda v: round_tf32(v).view(np.int32))


@operation("nvvm.rcp.approx.ftz.f")
def _reciprocal(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, lambda v: flush_subnormals(np.float32(1) / flush_subnormals(v)))


# ---- asynchronous copies ------------------------------------------------------------------------


@operation("nvvm.cp.async.shared.global")
def _copy(op: Any, scope: Scope) -> Step:
    target, source, *amount = scope.uses(list(op.operands))
    to_space, from_space = (address_space(op.operands[i].type) for i in (0, 1))
    size = ir.IntegerAttr(op.attributes["size"]).value
    scope.note_access(size)
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        to = reference_at(lanes, registers[target], to_space, _BYTE)
        origin = reference_at(lanes, registers[source], from_space, _BYTE)
        read = registers[amount[0]].astype(np.int64) if amount else np.int64(size)
        copy_asynchronously(lanes, to, to.address, origin, origin.address, size, read, site)

    return step


@operation("nvvm.griddepcontrol")
def _grid_dependency(op: Any, scope: Scope) -> Step:
    waits = "wait" in str(op.attributes["kind"])

    def step(lanes: Lanes) -> None:
        if not waits or lanes.unwaited is None:
            return
        if lanes.mask is None:
            lanes.unwaited = None
            return
        lanes.unwaited[lanes.mask] = False
        if not lanes.unwaited[lanes.exists].any():
            lanes.unwaited = None

    return step


# ---- synchronisation ----------------------------------------------------------------------------


def _named(op: Any, scope: Scope) -> tuple[int | None, int | None]:
    """(barrier id, thread count) slots of `nvvm.barrier`."""
    has_id, has_threads, has_predicate = ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"])
    _require(not has_predicate, scope, "a barrier with a reduction is not simulated")
    slots = scope.uses(list(op.operands))
    scope.program.needs_warps |= bool(has_id or has_threads)
    return slots[0] if has_id else None, slots[-1] if has_threads else None


def _single(lanes: Lanes, slot: int | None, default: int, scope_site: Any) -> int:
    if slot is None:
        return default
    value = lanes.active(lanes.registers[slot])
    if not is_uniform(value) and (value != value[0]).any():
        raise scope_site.fault("divergence", "a warp's lanes name different barriers")
    return int(np.ravel(value)[0])


@operation("nvvm.barrier")
def _named_barrier(op: Any, scope: Scope) -> Control:
    identifier, threads = _named(op, scope)
    site = scope.site

    def run(lanes: Lanes) -> Execution:
        number = _single(lanes, identifier, 0, site)
        if threads is None:
            yield from block_barrier(lanes, site, number)
            return
        lanes.whole_warps(site, full=False)
        key = ("block", lanes.rank, number)
        count = _single(lanes, threads, 0, site)
        lanes.machine.arrive(lanes, key, count, site)
        yield from lanes.machine.wait(lanes, key, site)

    return Control(run)


@operation("nvvm.barrier.arrive")
def _arrive(op: Any, scope: Scope) -> Step:
    slots = scope.uses(list(op.operands))
    identifier, threads = (slots[0] if len(slots) > 1 else None), slots[-1]
    scope.program.needs_warps = True
    site = scope.site

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(site, full=False)
        number = _single(lanes, identifier, 0, site)
        count = _single(lanes, threads, 0, site)
        lanes.machine.arrive(lanes, ("block", lanes.rank, number), count, site)

    return step


@operation("nvvm.cluster.arrive", "nvvm.cluster.arrive.relaxed")
def _cluster_arrive(op: Any, scope: Scope) -> Step:
    relaxed = op.name.endswith(".relaxed")
    site = scope.site

    def step(lanes: Lanes) -> None:
        if not lanes.converged():
            raise site.fault("divergence", "a cluster barrier under divergent control flow")
        machine = lanes.machine
        threads = machine.block_threads * machine.cluster_blocks
        machine.arrive(lanes, ("cluster",), threads, site, relaxed=relaxed)

    return step


@operation("nvvm.cluster.wait")
def _cluster_wait(op: Any, scope: Scope) -> Control:
    del op
    site = scope.site
    return Control(lambda lanes: lanes.machine.wait(lanes, ("cluster",), site))


@operation("nvvm.bar.warp.sync")
def _warp_sync(op: Any, scope: Scope) -> Step:
    member = scope.use(op.operands[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        check_members(lanes, lanes.registers[member], site)
        _, warps = lanes.active_threads()
        lanes.machine.clocks.synchronise_warps(np.unique(warps))

    return step


def check_members(lanes: Lanes, member: Value, site: Any) -> None:
    """Every lane that a member mask names is active (or the warp waits for ever)."""
    if lanes.mask is None:
        return
    bits = lanes.broadcast(member).astype(np.int64)
    named = (bits >> (lanes.thread_ids % WARP)) & 1 == 1
    active = np.repeat(lanes.mask.reshape(-1, WARP).any(1), WARP)
    missing = named & active & lanes.exists & ~lanes.mask
    if missing.any():
        lane = int(np.argmax(missing))
        raise site.fault(
            "divergence",
            f"lane {lane % WARP} of warp {int(lanes.warps[lane])} is named by the member mask "
            "and is not active",
        )


@operation(
    "nvvm.fence.sc.cluster",
    "nvvm.fence.proxy",
    "nvvm.memory.barrier",
    "nvvm.prefetch",
    "nvvm.setmaxregister",
    "nvvm.nanosleep",
)
def _nothing(op: Any, scope: Scope) -> None:
    """Memory is sequentially consistent here; what fences order is checked by the clocks."""
    del op, scope


@operation("nvvm.mapa")
def _mapa(op: Any, scope: Scope) -> Step:
    pointer, rank = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        machine = lanes.machine
        number = np.asarray(lanes.registers[rank], np.int64)[()]
        active = lanes.active(number)
        if np.any(active < 0) or np.any(active >= machine.cluster_blocks):
            raise site.fault(
                "out-of-bounds", f"block {np.max(active)} of a cluster of {machine.cluster_blocks}"
            )
        offset = lanes.registers[pointer] % machine.shared_stride
        lanes.registers[result] = number * machine.shared_stride + offset

    return step
