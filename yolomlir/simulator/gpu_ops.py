"""`gpu`: identifiers, barriers, shuffles, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Control, Execution, Scope, Step, operation
from yolomlir.simulator.elements import Array, Value, element_of
from yolomlir.simulator.lanes import WARP
from yolomlir.simulator.warp import SHUFFLES, combine_in_warps, shuffle

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

AXES = {"x": 0, "y": 1, "z": 2}


def thread_id(lanes: Lanes, axis: int) -> Array:
    """Each lane's threadIdx along an axis; 0 behind the block's end."""
    x, y, _ = lanes.machine.block
    flat = lanes.thread_ids
    return (flat % x, flat // x % y, flat // (x * y))[axis]


def cluster_position(lanes: Lanes, axis: int) -> int:
    """The block's place in its cluster along an axis."""
    return lanes.block_id[axis] % lanes.machine.cluster[axis]


IDENTIFIERS: dict[str, Callable[[Any, int], Value]] = {
    "thread_id": thread_id,
    "block_id": lambda lanes, axis: lanes.block_id[axis],
    "block_dim": lambda lanes, axis: lanes.machine.block[axis],
    "grid_dim": lambda lanes, axis: lanes.machine.grid[axis],
    "global_id": lambda lanes, axis: (
        lanes.block_id[axis] * lanes.machine.block[axis] + thread_id(lanes, axis)
    ),
    "cluster_id": lambda lanes, axis: lanes.block_id[axis] // lanes.machine.cluster[axis],
    "cluster_dim": lambda lanes, axis: lanes.machine.grid[axis] // lanes.machine.cluster[axis],
    "cluster_dim_blocks": lambda lanes, axis: lanes.machine.cluster[axis],
    "cluster_block_id": cluster_position,
}


@operation(*(f"gpu.{name}" for name in IDENTIFIERS))
def _identifier(op: Any, scope: Scope) -> Step:
    function = IDENTIFIERS[op.name.removeprefix("gpu.")]
    axis = AXES[str(op.attributes["dimension"]).removeprefix("#gpu<dim ").rstrip(">")]
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        value = function(lanes, axis)
        lanes.registers[result] = value if isinstance(value, np.ndarray) else np.int64(value)

    return step


_WARP_IDENTIFIERS: dict[str, Callable[[Any], Value]] = {
    "gpu.lane_id": lambda lanes: lanes.thread_ids % WARP,
    "gpu.subgroup_id": lambda lanes: lanes.thread_ids // WARP,
    "gpu.num_subgroups": lambda lanes: np.int64(lanes.machine.padded_threads // WARP),
    "gpu.subgroup_size": lambda lanes: np.int64(WARP),
}


@operation(*_WARP_IDENTIFIERS)
def _warp_identifier(op: Any, scope: Scope) -> Step:
    function = _WARP_IDENTIFIERS[op.name]
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        lanes.registers[result] = function(lanes)

    return step


# ---- barriers -----------------------------------------------------------------------------------


def block_barrier(lanes: Lanes, site: Site, number: int = 0) -> Execution:
    """All threads of the block meet; the same op for all of them."""
    if not lanes.converged():
        active = lanes.active_count()
        raise site.fault(
            "divergence",
            f"a block barrier is reached by {active} of {int(lanes.exists.sum())} threads: it is "
            "under divergent control flow",
        )
    machine = lanes.machine
    key = ("block", lanes.rank, number)
    before = machine.barrier(key, machine.block_threads).site
    if before is not None and before is not site:
        raise site.fault(
            "barrier",
            f"warp {lanes.warp_slice.start} waits here while others wait at {before.location} "
            f"({before.text()}): the barrier is under divergent control flow",
        )
    machine.arrive(lanes, key, machine.block_threads, site)
    yield from machine.wait(lanes, key, site)


@operation("gpu.barrier", "nvvm.barrier0")
def _barrier(op: Any, scope: Scope) -> Control:
    del op
    site = scope.site
    return Control(lambda lanes: block_barrier(lanes, site))


# ---- across lanes -------------------------------------------------------------------------------


@operation("gpu.shuffle")
def _shuffle(op: Any, scope: Scope) -> Step:
    mode = str(op.attributes["mode"]).removeprefix("#gpu<shuffle_mode ").rstrip(">")
    source, offset, width = scope.uses(list(op.operands))
    result, valid = scope.defines(list(op.results))
    site = scope.site
    pick = SHUFFLES[mode]

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        segment = registers[width]
        registers[result], registers[valid] = shuffle(
            lanes, registers[source], registers[offset], segment, pick, site
        )

    return step


_REDUCE: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add,
    "mul": np.multiply,
    "minui": np.minimum,
    "minsi": np.minimum,
    "minnumf": np.fmin,
    "maxui": np.maximum,
    "maxsi": np.maximum,
    "maxnumf": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "minimumf": np.minimum,
    "maximumf": np.maximum,
}


def _reducer(op: Any, scope: Scope) -> Callable[[Value, Value], Value]:
    if "op" not in op.attributes:
        raise InternalError("a reduction by a region is not simulated", where=scope.site.text())
    name = str(op.attributes["op"]).removeprefix("#gpu<all_reduce_op ").rstrip(">")
    element = element_of(op.results[0].type)
    function = _REDUCE[name]
    if name in ("minui", "maxui"):
        kind = element.unsigned
        return lambda a, b: function(a.view(kind), b.view(kind)).view(element.register)
    return element.rounded(function)


@operation("gpu.subgroup_reduce")
def _subgroup_reduce(op: Any, scope: Scope) -> Step:
    """A butterfly within clusters of lanes: neighbours first, as the lowering to shuffles does."""
    combine = _reducer(op, scope)
    size, stride = WARP, 1
    if "cluster_size" in op.attributes:
        size = ir.IntegerAttr(op.attributes["cluster_size"]).value
        stride = ir.IntegerAttr(op.attributes["cluster_stride"]).value
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(site)
        value = lanes.registers[source]
        lanes.registers[result] = combine_in_warps(lanes, value, combine, size, stride)

    return step


@operation("gpu.all_reduce")
def _all_reduce(op: Any, scope: Scope) -> Control:
    """A reduction over the block: within warps, then over warps in order; two barriers."""
    combine = _reducer(op, scope)
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])
    site = scope.site

    def run(lanes: Lanes) -> Execution:
        partial = combine_in_warps(lanes, lanes.registers[source], combine, WARP, 1)
        board = lanes.machine.board.setdefault((site.index, lanes.rank), {})
        first = int(lanes.thread_ids[0]) // WARP
        board.update({first + i: v for i, v in enumerate(partial[::WARP])})
        yield from block_barrier(lanes, site)
        total = board[0]
        for warp in range(1, len(board)):
            total = combine(total, board[warp])
        yield from block_barrier(lanes, site, 1)
        lanes.registers[result] = total

    return Control(run)


@operation("gpu.printf")
def _printf(op: Any, scope: Scope) -> None:
    del op, scope
