"""Which pixels a block of a chain computes: a run of the output's, or a rectangle; for a stage that
a later one reads a window of, a region around it.

Every place of a chain that reads or writes global memory by pixel asks this map, so none of them
knows how pixels are divided among blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.codegen.gpu.builder import TRUE, Bool, Int
from yolomlir.codegen.gpu.chain_tile import ChainPlan
from yolomlir.codegen.gpu.chain_window import Window


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
        shape, tile = plan.shape.last, plan.tile
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


class Region:
    """The pixels of a stage whose result is the window of the next: those that `window` reads.

    of: the pixels of that next stage. Some of the region lie outside the image, where the next
    stage's padding is: they do not exist. Pixel `row` lies in the window at `offset(row)`.
    """

    def __init__(self, window: Window, of: PixelMap | Region) -> None:
        self._window, shape = window, window.shape
        self.image: Int = of.image
        self.top: Int = of.top * shape.stride_h - shape.pad_top
        self.left: Int = of.left * shape.stride_w - shape.pad_left

    @property
    def count(self) -> int:
        """Pixels of the region."""
        return self._window.height * self._window.width

    def at(self, row: Int) -> Place:
        """The pixel of a row of the region; one of a row beyond its end does not exist."""
        window, shape = self._window, self._window.shape
        y, x = self.top + row // window.width, self.left + row % window.width
        flat = (self.image * shape.height + y) * shape.width + x
        return Place(flat, ((y, shape.height), (x, shape.width), (row, self.count)))

    def offset(self, row: Int) -> Int:
        """Elements from the start of the window to a pixel of the region."""
        window, stride = self._window, self._window.shape.stride_w
        y, x = row // window.width, row % window.width
        place = (x % stride) * window.phase + x // stride
        return y * window.row_pitch + place * window.pitch


__all__ = ["PixelMap", "Place", "Region"]
