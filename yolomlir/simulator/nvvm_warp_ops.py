"""`nvvm`: exchange of values between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import Array, Value
from yolomlir.simulator.lanes import WARP
from yolomlir.simulator.nvvm_ops import check_members, keyword
from yolomlir.simulator.warp import ballot, combine_in_warps, shuffle

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes


def _source_lane(kind: str, lane: Array, offset: Value, clamp: Value) -> tuple[Array, Array]:
    """PTX ISA, shfl.sync: the source lane and its predicate."""
    b, c, mask = offset & 31, clamp & 31, (clamp >> 8) & 31
    limit = (lane & mask) | (c & ~mask)
    if kind == "up":
        source = lane - b
        return source, source >= limit
    if kind == "down":
        source = lane + b
    elif kind == "bfly":
        source = lane ^ b
    else:
        source = (lane & mask) | (b & ~mask)
    return source, source <= limit


@operation("nvvm.shfl.sync")
def _shuffle(op: Any, scope: Scope) -> Step:
    kind = keyword(op.attributes["kind"])
    member, value, offset, clamp = scope.uses(list(op.operands))
    both = "return_value_and_is_valid" in op.attributes
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        check_members(lanes, registers[member], site)
        taken, valid = shuffle(
            lanes,
            registers[value],
            registers[offset],
            registers[clamp],
            lambda lane, b, c: _source_lane(kind, lane, b, c),
            site,
        )
        registers[result] = (taken, valid) if both else taken

    return step


_REDUX: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "umin": lambda a, b: np.minimum(a.view(np.uint32), b.view(np.uint32)).view(np.int32),
    "umax": lambda a, b: np.maximum(a.view(np.uint32), b.view(np.uint32)).view(np.int32),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "fmin": np.fmin,
    "fmax": np.fmax,
}


@operation("nvvm.redux.sync")
def _redux(op: Any, scope: Scope) -> Step:
    combine = _REDUX[keyword(op.attributes["kind"])]
    if any(str(op.attributes[f]) == "true" for f in ("abs", "nan") if f in op.attributes):
        raise InternalError("redux with abs or nan is not simulated", where=scope.site.text())
    value, _ = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        lanes.whole_warps(site)
        lanes.registers[result] = combine_in_warps(lanes, lanes.registers[value], combine, WARP, 1)

    return step


@operation("nvvm.vote.sync")
def _vote(op: Any, scope: Scope) -> Step:
    kind = keyword(op.attributes["kind"])
    member, predicate = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        check_members(lanes, registers[member], site)
        votes = ballot(lanes, registers[predicate])
        everyone = ballot(lanes, np.bool_(True))
        registers[result] = {
            "any": votes != 0,
            "all": votes == everyone,
            "ballot": votes.view(np.int32),
            "uni": (votes == 0) | (votes == everyone),
        }[kind]

    return step


@operation("nvvm.match.sync")
def _match(op: Any, scope: Scope) -> Step:
    kind = keyword(op.attributes["kind"])
    member, value = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        check_members(lanes, lanes.registers[member], site)
        values = lanes.broadcast(lanes.registers[value]).reshape(-1, WARP)
        equal = values[:, :, None] == values[:, None, :]
        if lanes.mask is not None:
            equal = equal & lanes.mask.reshape(-1, 1, WARP)
        weights = np.left_shift(np.uint64(1), np.arange(WARP, dtype=np.uint64))
        words = (equal * weights).sum(2).astype(np.uint32).reshape(-1)
        if kind == "any":
            lanes.registers[result] = words.view(np.int32)
            return
        every = words == ballot(lanes, np.bool_(True))
        lanes.registers[result] = (np.where(every, words, np.uint32(0)).view(np.int32), every)

    return step


@operation("nvvm.elect.sync")
def _elect(op: Any, scope: Scope) -> Step:
    """The first active lane of each warp is elected."""
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        active = lanes.exists if lanes.mask is None else lanes.mask
        first = np.argmax(active.reshape(-1, WARP), 1)
        lanes.registers[result] = np.repeat(first, WARP) == lanes.thread_ids % WARP

    return step
