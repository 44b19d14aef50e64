"""After the tiles: how kernels are launched, judged by the whole graph's time alone.

Three things are chosen that make next to no difference to a kernel alone. The carve-out is the part
of an SM's memory that is shared memory, the rest being L1: an SM must drain before it changes, so a
kernel that asks for another than its predecessor's cannot start beside it. A kernel may release
those that depend on it early, to wait where they take room from others, or late. And its weights
may come by bulk copies: issuing them takes a block less time, which counts where it starts late.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from yolomlir.autotune import space
from yolomlir.autotune.build import Built
from yolomlir.autotune.measure import Measure
from yolomlir.autotune.network_stage import Alternatives
from yolomlir.diagnostics import InternalError

logger = logging.getLogger(__name__)

CARVEOUTS = (0, 50, 100)
"""Percent; those between made no difference that could be told from noise. 0 is the driver's."""
GAIN = 0.001
"""Relative gain of the whole inference from which a change is taken, seen twice."""
_ROUNDS = (3, 5)
"""Of the two comparisons."""
_PASSES = 2


@dataclass(frozen=True)
class LaunchResult:
    """A candidate for each function, and how many changes were tried."""

    chosen: dict[str, Built]
    tried: int


@dataclass(frozen=True)
class _Choice:
    """Of one function: the number of its candidate, and its carve-out in percent."""

    candidate: int
    carveout: int


def with_carveout(built: Built, percent: int) -> Built:
    """The same machine code, launched with another carve-out."""
    launch = built.launch
    if launch is None:
        raise InternalError(f"candidate {built.key} was not built: {built.fault}")
    if launch.carveout == percent:
        return built
    key = space.key_of(space.with_carveout(space.tile_of(built.family, built.key), percent))
    return dataclasses.replace(built, key=key, launch=dataclasses.replace(launch, carveout=percent))


def choose_launches(
    alternatives: Sequence[Alternatives],
    fixed: Mapping[str, Built],
    measure: Measure,
    time_left: Callable[[], float],
    tell: Callable[[int, int], None] | None = None,
) -> LaunchResult:
    """Try carve-outs for all functions at once, then, the heaviest function first, its carve-outs
    and its other candidates, which are launched or load in other ways; twice over.

    alternatives: of each function what it has now, then what else it could have. fixed: functions
    that stay as they are. Whatever makes the graph faster stays, if it does so in two comparisons.
    """
    search = _Search({a.function: a for a in alternatives}, fixed, measure)
    ordered = sorted(alternatives, key=lambda a: (-a.weight, a.function))
    names = [a.function for a in ordered]
    tried = 0
    most = len(CARVEOUTS) + _PASSES * sum(len(CARVEOUTS) + len(a.candidates) for a in ordered)
    for number, changed in enumerate(search.changes(names)):
        if time_left() <= 0:
            logger.info("%d ways of launching were tried in time", tried)
            break
        tried += search.take(changed)
        if tell:
            tell(number + 1, most)
    if tell:
        tell(most, most)
    return LaunchResult(search.chosen(), tried)


class _Search:
    """What is chosen so far, and what may be tried next."""

    def __init__(
        self, alternatives: Mapping[str, Alternatives], fixed: Mapping[str, Built], measure: Measure
    ) -> None:
        self._alternatives, self._fixed, self._measure = alternatives, fixed, measure
        self._now = {n: _Choice(0, _carveout(a.candidates[0])) for n, a in alternatives.items()}

    def chosen(self, changed: Mapping[str, _Choice] | None = None) -> dict[str, Built]:
        """A candidate for each function; changed: instead of what is chosen now."""
        found = dict(self._fixed)
        for name, choice in {**self._now, **(changed or {})}.items():
            built = self._alternatives[name].candidates[choice.candidate]
            found[name] = with_carveout(built, choice.carveout)
        return found

    def changes(self, names: list[str]) -> Iterator[dict[str, _Choice]]:
        """Each is made of what is chosen when it is asked for."""
        for percent in CARVEOUTS:
            yield {n: dataclasses.replace(c, carveout=percent) for n, c in self._now.items()}
        for _ in range(_PASSES):
            before = dict(self._now)
            for name in names:
                for percent in CARVEOUTS:
                    yield {name: dataclasses.replace(self._now[name], carveout=percent)}
                for number in range(len(self._alternatives[name].candidates)):
                    yield {name: dataclasses.replace(self._now[name], candidate=number)}
            if self._now == before:
                return

    def take(self, changed: dict[str, _Choice]) -> bool:
        """Keep a change that helps; whether it was one and was tried."""
        if all(self._now[name] == choice for name, choice in changed.items()):
            return False
        now, then = self.chosen(), self.chosen(changed)
        for rounds in _ROUNDS:
            old, new = self._measure.compare(now, then, rounds)
            if new > old * (1 - GAIN):
                return True
        self._now.update(changed)
        return True


def _carveout(built: Built) -> int:
    return built.launch.carveout if built.launch is not None else 0


__all__ = ["CARVEOUTS", "GAIN", "LaunchResult", "choose_launches", "with_carveout"]
