"""Which tiles of a chain are worth considering, and which of them without measurements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from yolomlir.codegen.gpu.chain_model import estimate_us
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, objection, plan
from yolomlir.diagnostics import UnsupportedError
from yolomlir.target import Target

_RECTANGLES = ((16, 4), (32, 4), (32, 2), (64, 8), (64, 4), (128, 8), (128, 4), (256, 16), (256, 8))
"""block_m and rows worth considering."""
_RINGS = ((8, 2), (8, 4), (16, 2), (16, 4), (16, 12), (32, 3))
"""step_kib and slots worth considering where the input comes as a window."""


def tile_space(shape: ChainShape, target: Target, precision: str) -> Iterator[ChainTile]:
    """Every candidate worth considering, all legal, in a fixed order."""
    for block_m in (16, 32, 64, 128, 256) if not shape.inner else ():
        for cluster_n in (1, 2, 4, 8):
            for warps in (4, 8, 16):
                for step_kib in (8, 16, 32):
                    for slots in (2, 3, 4, 6, 8, 12):
                        tile = ChainTile(block_m, cluster_n, warps, step_kib, slots)
                        if objection(tile, shape, target, precision) is None:
                            yield tile
    if shape.first.taps > 1:
        yield from window_space(shape, target, precision)


def window_space(shape: ChainShape, target: Target, precision: str) -> Iterator[ChainTile]:
    """The candidates of a window: its size leaves fewer choices than loading by steps."""
    for (block_m, rows), cluster_n, warps in product(_RECTANGLES, (1, 2, 4), (4, 8, 16)):
        for step_kib, slots in _RINGS:
            tile = ChainTile(block_m, cluster_n, warps, step_kib, slots, rows)
            if objection(tile, shape, target, precision) is None:
                yield tile


# ---- a choice with no measurements --------------------------------------------------------------


def likely_tiles(
    shape: ChainShape, target: Target, precision: str, count: int = 160
) -> list[ChainTile]:
    """The tiles of the least estimates, the best first; at most a few of one size and cluster.

    Of tiles that make the same kernel, as steps of 16 and 32 KiB do where no stage has a step of
    more than 16, the first.
    """
    tiles = list(tile_space(shape, target, precision))
    tiles.sort(key=lambda t: estimate_us(t, shape, target, precision))
    turns: dict[tuple[int, ...], int] = {}
    order: list[tuple[int, int]] = []
    seen = set()
    for rank, tile in enumerate(tiles):
        size = (tile.block_m, tile.cluster_n, tile.warps, tile.rows)
        work = plan(tile, shape)
        kernel = (size, work.ring, work.stages)
        if kernel in seen:
            continue
        seen.add(kernel)
        turns[size] = turns.get(size, 0) + 1
        order.append((turns[size] // 4, rank))
    return [tiles[rank] for _, rank in sorted(order)[:count]]


@lru_cache(maxsize=1024)
def default_tile(shape: ChainShape, target: Target, precision: str) -> ChainTile:
    """The legal tile of the least estimate, the first among equals.

    Raises UnsupportedError where no tile is legal.
    """
    tiles = tile_space(shape, target, precision)
    best = min(tiles, key=lambda t: estimate_us(t, shape, target, precision), default=None)
    if best is None:
        raise UnsupportedError(
            f"no chain tile fits {shape} on {target.name}",
            hint="optimisation level 2 makes no chains",
        )
    return best


__all__ = ["default_tile", "likely_tiles", "tile_space", "window_space"]
