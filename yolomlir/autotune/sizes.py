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
    """The measured sizes that may serve `size`, the best first.

    What counts is the pixels of all images. A size stands for as few as a third of its pixels, the
    nearest first, and after those a smaller one for up to twice as many: tiles whose blocks just
    fill a GPU leave it half idle in a second wave when there are a few more. The largest, where its
    images fill a GPU, stands for all above it; the smallest, where it is of one image, for all
    below it.

    Measured with YOLO26n at level 3 on an H200, beside tiles that the cost model chose for the size
    itself (time with the other size's tiles, tf32 and fp16): fewer pixels than the tiles are for:
    3 of 8 images 0.98 and 0.94, 2 of 8 1.23 and 1.09; one image of 384x640 with tiles for 640x640
    0.94 and 0.90 (with the pairs of that size 0.91 and 0.83), of 320x320 with those 1.02 and 0.94
    and with tiles for 384x640 0.88 and 0.92; one of 1280x1280 with tiles for 8 of 640x640 0.99 and
    0.92. More pixels: 2 images with tiles for 1 1.03 and 0.94, 3 1.02 and 1.03; 16 with tiles for 8
    0.89 and 0.85; one of 960x960 with tiles for 640x640 1.05 and 0.97; one of 480x640 with tiles
    for 384x640 took 192.8 us at tf32, more than one of 640x640 with its own.
    """
    known = sorted(set(measured), key=lambda s: (s.pixels, s))
    near = [s for s in known if size.pixels <= 2 * s.pixels and s.pixels <= 3 * size.pixels]
    if known and size.pixels > 2 * known[-1].pixels and known[-1].images >= _FULL:
        near.append(known[-1])
    if known and known[0].pixels > 3 * size.pixels and known[0].images == 1:
        near.append(known[0])
    return sorted(near, key=lambda s: _rank(s, size))


def _rank(found: Size, wanted: Size) -> tuple[bool, float, int, Size]:
    """Larger ones first, by the ratio of pixels; of two as far, the one with as many images."""
    smaller = found.pixels < wanted.pixels
    ratio = found.pixels / wanted.pixels
    return smaller, max(ratio, 1 / ratio), abs(found.images - wanted.images), found
