"""The two kinds of tiles that a `conv2d` dispatch can have, told apart here and nowhere else.

A `ConvTile` gathers a row of K for every output pixel (`conv2d_kernel.py`). A window tile is a
`ChainTile` whose `rows` are not 0: the function is generated as a chain of one stage, whose blocks
load the pixels under a rectangle of outputs once and read all taps there (`chain_window.py`). It
moves fewer bytes and takes less shared memory where the kernel is larger than 1x1 and channels are
few.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from yolomlir.bindings import ir
from yolomlir.codegen.gpu import chain_space, chain_tile, conv2d_tile
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.codegen.gpu.tile import TILE, carveout_objection, tile_or, to_attribute
from yolomlir.target import Target

Conv2dTile = ConvTile | ChainTile
"""A tile of the family, of either kind."""

_WINDOW_OPTION = "rows"
_MAX_RUNS = 4
"""Runs of four channels of a thread in a window's epilogue. With more, whose residuals and sums are
on their way beside the addresses of all copies, some kernels spill."""

_MAX_EXACT_ROWS = 32
"""Pixels of a warp at fp32: no step waits, so the split operands of many are on their way at once.
"""


def kind_named(options: Collection[str]) -> type[ConvTile] | type[ChainTile]:
    """The kind of a tile by the names of its options: only a window's has `rows`."""
    return ChainTile if _WINDOW_OPTION in options else ConvTile


def stated_tile(function: ir.Operation) -> Conv2dTile | None:
    """The tile of a function's `yolo.tile`; None where it has none.

    Raises UserError for options that are unknown or missing.
    """
    if TILE not in function.attributes:
        return None
    attribute = function.attributes[TILE]
    if kind_named({named.name for named in ir.DictAttr(attribute)}) is ConvTile:
        return ConvTile.from_attribute(attribute)
    return tile_or(function, ChainTile, lambda: ChainTile(0, 0, 0))  # the attribute is there


def attribute_of(tile: Conv2dTile) -> ir.Attribute:
    """The `yolo.tile` dictionary of a tile, in the current context."""
    return tile.to_attribute() if isinstance(tile, ConvTile) else to_attribute(tile)


def objection(tile: Conv2dTile, shape: ConvShape, target: Target, precision: str) -> str | None:
    """Why no kernel can be made of this tile; None where it can."""
    if isinstance(tile, ConvTile):
        reason = conv2d_tile.objection(tile, shape, target, precision)
        return carveout_objection(tile) if reason is None else reason
    if not tile.rows:
        return "rows = 0 is no window"
    if shape.source_vector == 0:
        return "a window is copied, not converted as an image is"
    reason = chain_tile.objection(tile, as_chain(shape), target, precision)
    if reason is not None:
        return reason
    rows = tile.block_m // chain_tile.plan(tile, as_chain(shape)).stages[0].warps_m
    if precision == "fp32" and rows > _MAX_EXACT_ROWS:
        return f"{rows} pixels a warp; at most {_MAX_EXACT_ROWS} where operands are split"
    outputs = tile.block_m * chain_tile.part_of(shape.out_channels, tile.cluster_n)
    runs = -(-outputs // (4 * 32 * tile.warps))
    return f"{runs} runs a thread; at most {_MAX_RUNS}" if runs > _MAX_RUNS else None


def as_chain(shape: ConvShape) -> ChainShape:
    """The convolution as a chain of one stage."""
    return ChainShape(shape, ())


@lru_cache(maxsize=512)
def window_tiles(shape: ConvShape, target: Target, precision: str) -> tuple[ChainTile, ...]:
    """Every window worth considering, all legal, in a fixed order; none for 1x1 and for images."""
    if shape.taps == 1 or shape.source_vector == 0:
        return ()
    listed = chain_space.window_space(as_chain(shape), target, precision)
    return tuple(t for t in listed if objection(t, shape, target, precision) is None)


def block_of(tile: Conv2dTile) -> tuple[int, ...]:
    """What a tile has in common with those that differ from it in details only."""
    if isinstance(tile, ConvTile):
        return tile.block_m, tile.block_n, tile.warps_k, tile.cluster_k, tile.sharers
    return tile.block_m, tile.rows, tile.cluster_n, tile.warps, 0


__all__ = [
    "Conv2dTile", "as_chain", "attribute_of", "block_of", "kind_named", "objection",
    "stated_tile", "window_tiles",
]  # fmt: skip
