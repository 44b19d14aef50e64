"""Which of the sizes that were measured stands for one that was not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_FULL = 4
"""Images that fill a GPU: with more there are more waves of the same blocks."""


class Size(NamedTuple):
    """Images at once, and the height and width of each in pixels (or in those of a tensor)."""

    images: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Of all images: what a kernel's blocks divide among them."""
        return self.images * self.height * self.width


def standing_for(size: Size, measured: Iterable[Size]) -> list[Size]:
    """The measured sizes that may serve `size`, the nearest first.

    What counts is the pixels of all images. A size stands for up to twice as many and down to a
    third; the largest, where its images fill a GPU, for all above it; the smallest, where it is of
    one image, for all below it. Measured with YOLO26n at level 3 on an H200, beside tiles that the
    cost model chose for the size itself: 2 images with tiles for 1 took 0.94 of the time at fp16
    and 1.03 at tf32, with tiles for 8 1.09 and 1.23; 3 images with tiles for 1 took 1.03 and 1.02,
    with tiles for 8 0.94 and 0.98; 16 with tiles for 8 took 0.85 and 0.89. One image of 384x640
    with tiles for 640x640 took 0.90 and 0.94, and with the pairs of that size 0.83 and 0.91; one of
    320x320 0.94 and 1.02; one of 1280x1280 with tiles for 8 of 640x640 0.92 and 0.99; one of
    960x960 with tiles for 640x640 0.97 and 1.05.
    """
    known = sorted(set(measured), key=lambda s: (s.pixels, s))
    near = [s for s in known if size.pixels <= 2 * s.pixels and s.pixels <= 3 * size.pixels]
    if known and size.pixels > 2 * known[-1].pixels and known[-1].images >= _FULL:
        near.append(known[-1])
    if known and known[0].pixels > 3 * size.pixels and known[0].images == 1:
        near.append(known[0])
    return sorted(near, key=lambda s: _distance(s, size))


def _distance(found: Size, wanted: Size) -> tuple[float, int, int, Size]:
    """By the ratio of pixels; of two as far, the larger, the one with as many images."""
    ratio = found.pixels / wanted.pixels
    return max(ratio, 1 / ratio), -found.pixels, abs(found.images - wanted.images), found
