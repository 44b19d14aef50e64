"""Which output pixels a block of a chain computes: a run of them, or a rectangle.

Every place of a chain that reads or writes global memory by pixel asks this map, so none of them
knows how pixels are divided among blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.codegen.gpu.builder import TRUE, Bool, Int
from yolomlir.codegen.gpu.chain_tile import ChainPlan


@dataclass(frozen=True)
class Place:
    """An output pixel of a block. flat: its number in [0, M), where it exists.

    bounds: (coordinate, end): the pixel exists where every coordinate is below its end.
    """

    flat: Int
    bounds: tuple[tuple[Int, int], ...]

    def exists(self) -> Bool:
        """Whether there is such a pixel: tiles go beyond the edges of what they do not divide."""
        inside = TRUE
        for coordinate, end in self.bounds:
            inside = inside & (coordinate < end)
        return inside


class PixelMap:
    """The pixels of the block's tile: pixel `row` of it is the one at `at(row)`.

    image, top, left: of a rectangle (`plan.tile.rows` > 0), its place in the output.
    """

    def __init__(self, plan: ChainPlan, block: Int) -> None:
        shape, tile = plan.shape.first, plan.tile
        self._shape, self._plan = shape, plan
        self.first_pixel = self.image = self.top = self.left = Int.of(0)
        if not tile.rows:
            self.first_pixel = block * tile.block_m
            return
        down, across = plan.rectangles
        per_image = down * across
        self.image = block // per_image if shape.batch > 1 else Int.of(0)
        within = block - self.image * per_image
        self.top = (within // across) * tile.rows
        self.left = (within % across) * tile.columns

    def at(self, row: Int) -> Place:
        """The pixel of a row of the tile, in [0, block_m)."""
        shape, tile = self._shape, self._plan.tile
        if not tile.rows:
            flat = self.first_pixel + row
            return Place(flat, ((flat, shape.pixels),) if shape.pixels % tile.block_m else ())
        y, x = self.top + row // tile.columns, self.left + row % tile.columns
        bounds: tuple[tuple[Int, int], ...] = ()
        if shape.out_h % tile.rows:
            bounds += ((y, shape.out_h),)
        if shape.out_w % tile.columns:
            bounds += ((x, shape.out_w),)
        return Place((self.image * shape.out_h + y) * shape.out_w + x, bounds)


__all__ = ["PixelMap", "Place"]
