"""Whether two sets of detections are the same, row order aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
NEAR_PX, NEAR_SIDE = 1.0, 0.05
"""Two boxes of a class are one detection when every side is within a pixel, or within this part of
the longer side; of several, the nearest is taken."""


@dataclass(frozen=True)
class DetectionMatch:
    """Two runs' detections of one or more images.

    matched: pairs. only_first, only_second: detections that the other run does not have at all.
    box_px, score: the largest differences among pairs.
    """

    matched: int
    only_first: int
    only_second: int
    box_px: float
    score: float

    @property
    def changed(self) -> bool:
        """Whether a detection appeared, vanished, or became another."""
        return bool(self.only_first or self.only_second)

    def within(self, box_px: float, score: float) -> bool:
        """Whether nothing changed, and pairs differ by at most so much."""
        return not self.changed and self.box_px <= box_px and self.score <= score

    def __str__(self) -> str:
        text = f"{self.matched} matched, boxes within {self.box_px:.2g} px, scores {self.score:.2g}"
        if not self.changed:
            return text
        return f"{text}; {self.only_first} only in the first, {self.only_second} in the second"


def match_detections(
    first: Array, second: Array, *, confidence: float = 0.0, cut: float | None = None
) -> DetectionMatch:
    """Pair the rows of [N, rows, 6] (x1, y1, x2, y2, score, class) with scores of `confidence` up.

    A row at or above the confidence in one run may be below it in the other. cut: rows whose scores
    are within it of the other run's last row may be missing there, for only so many rows are kept;
    None allows no missing row.
    """
    found = [
        _match(a.astype(np.float64), b.astype(np.float64), confidence, cut)
        for a, b in zip(first, second, strict=True)
    ]
    return DetectionMatch(
        sum(m.matched for m in found),
        sum(m.only_first for m in found),
        sum(m.only_second for m in found),
        max((m.box_px for m in found), default=0.0),
        max((m.score for m in found), default=0.0),
    )


def _match(a: Array, b: Array, confidence: float, cut: float | None) -> DetectionMatch:
    distance = np.abs(a[:, None, :4] - b[None, :, :4]).max(-1)
    sides = np.abs(a[:, 2:4] - a[:, :2]).max(-1)
    allowed = np.maximum(NEAR_PX, NEAR_SIDE * sides)[:, None]
    possible = (a[:, None, 5] == b[None, :, 5]) & (distance <= allowed)
    # The nearest pair first: by distance, then by score, for one anchor gives several rows.
    cost = np.where(possible, distance + np.abs(a[:, None, 4] - b[None, :, 4]), np.inf)
    partner = np.full(len(a), -1)
    taken = np.zeros(len(b), bool)
    for flat in np.argsort(cost, axis=None, kind="stable"):
        i, j = divmod(int(flat), len(b))
        if not np.isfinite(cost[i, j]):
            break
        if partner[i] < 0 and not taken[j]:
            partner[i], taken[j] = j, True
    paired = partner >= 0
    wanted = paired & (np.maximum(a[:, 4], b[partner, 4]) >= confidence)
    boxes = distance[wanted, partner[wanted]]
    scores = np.abs(a[wanted, 4] - b[partner[wanted], 4])
    return DetectionMatch(
        int(wanted.sum()),
        _missing(a[~paired], b, confidence, cut),
        _missing(b[~taken], a, confidence, cut),
        float(boxes.max(initial=0.0)),
        float(scores.max(initial=0.0)),
    )


def _missing(rows: Array, other: Array, confidence: float, cut: float | None) -> int:
    """Rows without a partner that the other run should have."""
    counted = rows[:, 4] >= confidence
    if cut is not None:
        counted &= rows[:, 4] > np.nanmin(other[:, 4], initial=np.inf) + cut
    return int((counted | ~np.isfinite(rows).all(-1)).sum())
