"""Which of the batch sizes that were measured stands for one that was not."""

from __future__ import annotations

from collections.abc import Iterable


def standing_for(batch: int, measured: Iterable[int]) -> list[int]:
    """The measured sizes that may serve `batch` images, the nearest first.

    Those within a factor of two; and for more images than any was measured with, the largest: a GPU
    that is full has more waves of the same blocks.
    """
    known = sorted(set(measured))
    near = [b for b in known if max(b, batch) <= 2 * min(b, batch)]
    if known and batch > known[-1] and known[-1] not in near:
        near.append(known[-1])
    return sorted(near, key=lambda b: (max(b / batch, batch / b), -b))
