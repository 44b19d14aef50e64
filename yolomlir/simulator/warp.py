"""Data exchange between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from yolomlir.simulator.elements import Array, Value
from yolomlir.simulator.lanes import WARP

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

Pick = Callable[[Array, Value, Value], tuple[Array, Array]]
"""(lane, offset, width) to (source lane, whether it is within the segment)."""


def _xor(lane: Array, offset: Value, width: Value) -> tuple[Array, Array]:
    source = lane ^ offset
    return source, source < (lane // width + 1) * width


def _up(lane: Array, offset: Value, width: Value) -> tuple[Array, Array]:
    source = lane - offset
    return source, source >= lane // width * width


def _down(lane: Array, offset: Value, width: Value) -> tuple[Array, Array]:
    source = lane + offset
    return source, source < (lane // width + 1) * width


def _index(lane: Array, offset: Value, width: Value) -> tuple[Array, Array]:
    return lane // width * width + offset % width, (offset >= 0) & (offset < width)


SHUFFLES: dict[str, Pick] = {"xor": _xor, "up": _up, "down": _down, "idx": _index}


def shuffle(
    lanes: Lanes, value: Value, offset: Value, width: Value, pick: Pick, site: Site
) -> tuple[Array, Array]:
    """`shfl.sync`: (the source lane's value or, outside the segment, one's own; validity)."""
    lane = lanes.thread_ids % WARP
    source, valid = pick(lane, np.asarray(offset, np.int64), np.asarray(width, np.int64))
    source = np.where(valid, source, lane)
    values = lanes.broadcast(value).reshape(-1, WARP)
    index = lanes.broadcast(source).reshape(-1, WARP)
    if lanes.mask is not None:
        _check_sources(lanes, index, site)
    taken = np.take_along_axis(values, index, 1).reshape(-1)
    return taken, lanes.broadcast(valid)


def _check_sources(lanes: Lanes, index: Array, site: Site) -> None:
    mask = lanes.broadcast(lanes.mask).reshape(-1, WARP)
    missing = mask & ~np.take_along_axis(mask, index, 1)
    if not missing.any():
        return
    warp, lane = np.argwhere(missing)[0]
    raise site.fault(
        "divergence",
        f"lane {lane} of warp {lanes.warp_slice.start + warp} reads lane {index[warp, lane]}, "
        "which is not active",
    )


def combine_in_warps(
    lanes: Lanes, value: Value, combine: Callable[[Value, Value], Value], size: int, stride: int
) -> Array:
    """A butterfly reduction over groups of `size` lanes, `stride` apart; all lanes get it."""
    total = np.array(lanes.broadcast(value))
    lane = np.arange(lanes.count)
    step = stride
    while step < size * stride:
        total = combine(total, total[lane ^ step])
        step *= 2
    return total


def ballot(lanes: Lanes, predicate: Value) -> Array:
    """A bit a lane of the warp whose predicate holds (inactive lanes: 0), as uint32 a lane."""
    votes = lanes.broadcast(predicate)
    votes = votes if lanes.mask is None else votes & lanes.mask
    weights = np.left_shift(np.uint64(1), np.arange(WARP, dtype=np.uint64))
    words = (votes.reshape(-1, WARP) * weights).sum(1).astype(np.uint32)
    return np.repeat(words, WARP)
