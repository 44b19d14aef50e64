"""What the simulator reports of a kernel in which a fault has been planted."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest

from yolomlir.simulator import SimulationError

SCHEDULES = ("lockstep", "warps")


def faults(simulated: Callable[..., object], *, seeds: int) -> list[SimulationError]:
    """The faults that both schedules find, with each of so many orders of warps; none finds none.

    simulated: runs the kernel, given `schedule` and `seed`.
    """
    found = []
    for schedule, seed in product(SCHEDULES, range(seeds)):
        with pytest.raises(SimulationError) as error:
            simulated(schedule=schedule, seed=seed)
        found.append(error.value)
    return found


def kinds(simulated: Callable[..., object], *, seeds: int) -> set[str]:
    """The kinds of `faults`."""
    return {fault.kind for fault in faults(simulated, seeds=seeds)}


def caught(
    simulated: Callable[..., object], expected: str, *, at: str | None = None, seeds: int
) -> str:
    """One of the kinds that `expected` names each time, at a location that `at` matches.

    Returns the last message.
    """
    found = faults(simulated, seeds=seeds)
    for fault in found:
        assert fault.kind in expected.split(), fault
        assert at is None or re.fullmatch(at, fault.location), fault
    return str(found[-1])
