"""The last stage: alternatives of the kernels that matter most, tried in the whole graph.

Kernels interact there: a successor starts while its predecessor ends (programmatic edges), branches
run side by side, and a tile that is fastest alone may leave no room for either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yolomlir.autotune.build import Built
from yolomlir.autotune.measure import Measure, Timing
from yolomlir.target import Target

logger = logging.getLogger(__name__)

SAMPLES = 9
GAIN = 0.003
"""Relative gain of the whole inference from which an alternative is taken, seen twice."""
_CLEARLY = 0.75
"""Of the winner's share of the GPU, what a modest alternative takes at most."""


@dataclass(frozen=True)
class Alternatives:
    """Of one function: its candidates, the winner first; weight: its share of an inference, us."""

    function: str
    candidates: tuple[Built, ...]
    weight: float


@dataclass(frozen=True)
class NetworkResult:
    """Microseconds of an inference with the winners of each function alone, and after the exchange;
    the key now chosen for each function; how many exchanges were tried, and after them launches."""

    before: Timing
    after: Timing
    chosen: dict[str, str]
    tried: int
    launches: int = 0


def share_of_gpu(built: Built, target: Target) -> float:
    """The part of all multiprocessors' room that a launch takes at once, of what it takes most of:
    shared memory, registers or threads. 1 at most: further blocks wait."""
    launch = built.launch
    assert launch is not None
    threads = math.prod(launch.block)
    block = max(
        launch.shared_bytes / target.shared_memory_per_sm_bytes,
        threads * built.registers / target.registers_per_sm,
        threads / target.threads_per_sm,
    )
    return min(1.0, math.prod(launch.grid) * block / target.multiprocessors)


def most_modest(winner: Built, others: Sequence[Built], target: Target) -> tuple[Built, ...]:
    """The one of the others that takes the least of the GPU, if that is clearly less than the
    winner does: what runs beside it, or is to start before it ends, finds room."""
    limit = _CLEARLY * share_of_gpu(winner, target)
    best = min(others, key=lambda b: (share_of_gpu(b, target), b.key), default=None)
    return (best,) if best is not None and share_of_gpu(best, target) <= limit else ()


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
    before = best = measure.network(current, 2 * SAMPLES)
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
            best = measure.network(current, SAMPLES)
        if tell:
            tell(number + 1, len(trials))
    after = measure.network(current, 2 * SAMPLES)
    return NetworkResult(before, after, {n: b.key for n, b in current.items()}, tried)


def _helps(
    measure: Measure, changed: dict[str, Built], current: dict[str, Built], best: Timing
) -> bool:
    if measure.network(changed, SAMPLES).us > best.us * (1 - GAIN):
        return False
    again = measure.network(current, SAMPLES)
    return measure.network(changed, SAMPLES).us <= again.us * (1 - GAIN)
