"""Samples of a time in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Statistics:
    """Of samples in one unit, usually milliseconds.

    spread: by rounds where there are several, the largest less the smallest round's median, else
    the range from the 10th to the 90th percentile; relative to the median.
    """

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    minimum: float
    maximum: float
    deviation: float
    spread: float


def summarize(samples: Sequence[float], rounds: Sequence[float] | None = None) -> Statistics:
    """Statistics of at least one sample. rounds: the medians of the rounds they were taken in."""
    values = np.asarray(samples, np.float64)
    p10, median, p90, p99 = (float(v) for v in np.percentile(values, [10, 50, 90, 99]))
    low, high = (p10, p90) if not rounds or len(rounds) < 2 else (min(rounds), max(rounds))
    return Statistics(
        len(values),
        float(values.mean()),
        median,
        p90,
        p99,
        float(values.min()),
        float(values.max()),
        float(values.std()),
        (high - low) / median if median else 0.0,
    )
