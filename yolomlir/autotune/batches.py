"""Which of the batch sizes that were measured stands for one that was not."""

from __future__ import annotations

from collections.abc import Iterable

_FULL = 4
"""Images that fill a GPU: with more there are more waves of the same blocks."""


def standing_for(batch: int, measured: Iterable[int]) -> list[int]:
    """The measured sizes that may serve `batch` images, the nearest first.

    A size stands for up to twice as many images and down to a third; the largest, where it fills a
    GPU, for all above it. Measured with YOLO26n at level 3 on an H200, beside tiles that the cost
    model chose for the size itself: 2 images with tiles for 1 took 0.94 of the time at fp16 and
    1.03 at tf32, with tiles for 8 1.09 and 1.23; 3 images with tiles for 1 took 1.03 and 1.02, with
    tiles for 8 0.94 and 0.98; 16 with tiles for 8 took 0.85 and 0.89.
    """
    known = sorted(set(measured))
    near = [b for b in known if batch <= 2 * b and b <= 3 * batch]
    if known and known[-1] >= _FULL and batch > known[-1] and known[-1] not in near:
        near.append(known[-1])
    return sorted(near, key=lambda b: (max(b / batch, batch / b), -b))
