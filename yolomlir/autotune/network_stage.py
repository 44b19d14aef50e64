"""The last stage: alternatives of the kernels that matter most, tried in the whole graph.

Kernels interact there: a successor starts while its predecessor ends (programmatic edges), branches
run side by side, and a tile that is fastest alone may leave no room for either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from yolomlir.autotune.build import Built
from yolomlir.autotune.measure import Measure, Timing

logger = logging.getLogger(__name__)

_SAMPLES = 9
GAIN = 0.003
"""Relative gain of the whole inference from which an alternative is taken, seen twice."""


@dataclass(frozen=True)
class Alternatives:
    """Of one function: its candidates, the winner first; weight: its share of an inference, us."""

    function: str
    candidates: tuple[Built, ...]
    weight: float


@dataclass(frozen=True)
class NetworkResult:
    """Microseconds of an inference with the winners of each function alone, and after the exchange;
    the key now chosen for each function."""

    before: Timing
    after: Timing
    chosen: dict[str, str]
    tried: int


def exchange(
    alternatives: list[Alternatives],
    measure: Measure,
    time_left: Callable[[], float],
    tell: Callable[[int, int], None] | None = None,
) -> NetworkResult:
    """Go through the functions, heaviest first, and keep every alternative that helps the whole.

    A gain must be seen in two measurements, each beside a new one of what it replaces, so that a
    change of the clock does not count as one.
    """
    current = {a.function: a.candidates[0] for a in alternatives}
    ordered = sorted(alternatives, key=lambda a: (-a.weight, a.function))
    before = best = measure.network(current, 2 * _SAMPLES)
    trials = [(a, built) for a in ordered for built in a.candidates[1:]]
    tried = 0
    for number, (alternative, built) in enumerate(trials):
        if time_left() <= 0:
            logger.info("%d of %d alternatives were tried in time", number, len(trials))
            break
        changed = {**current, alternative.function: built}
        tried += 1
        if _helps(measure, changed, current, best):
            current = changed
            best = measure.network(current, _SAMPLES)
        if tell:
            tell(number + 1, len(trials))
    after = measure.network(current, 2 * _SAMPLES)
    return NetworkResult(before, after, {n: b.key for n, b in current.items()}, tried)


def _helps(
    measure: Measure, changed: dict[str, Built], current: dict[str, Built], best: Timing
) -> bool:
    if measure.network(changed, _SAMPLES).us > best.us * (1 - GAIN):
        return False
    again = measure.network(current, _SAMPLES)
    return measure.network(changed, _SAMPLES).us <= again.us * (1 - GAIN)
