"""Kernels with one planted fault, which the simulator must report, and the same without it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import simulated_faults
from simulated_faults import SCHEDULES
from simulated_kernels import SHARED, run

from yolomlir.simulator import SimulationError

TILE = f"memref<256xf32, {SHARED}>"
FLAT = "memref<?xf32>"
QUAD = "%q = arith.muli %tid, %c4 : index"
OTHER_WARP = """
        %w = arith.addi %tid, %c32 : index
        %other = arith.remui %w, %c64 : index
"""

UNORDERED = {"race", "in-flight"}
"""Kinds of `test_simulator_races`; the others are those of `test_simulator_faults`."""
seen: set[str] = set()
"""Kinds that have been caught in this session."""


def two_warps(**options: Any) -> dict[str, Any]:
    """A launch of 64 threads that share %s, unless `options` say otherwise."""
    return {"shared": f"%s: {TILE}", "block": (64, 1, 1), **options}


def words(count: int = 256) -> list[np.ndarray]:
    """Two arguments, %x of ones and %y of zeros."""
    return [np.ones(count, np.float32), np.zeros(count, np.float32)]


def fault(
    body: str, arrays: Sequence[np.ndarray] | None = None, *, schedule: str, **options: Any
) -> SimulationError:
    """What the simulator reports of a kernel."""
    given = words() if arrays is None else [np.copy(a) for a in arrays]
    with pytest.raises(SimulationError) as error:
        run(body, given, schedule=schedule, **two_warps(**options))
    seen.add(error.value.kind)
    return error.value


def caught(
    body: str,
    kind: str,
    arrays: Sequence[np.ndarray] | None = None,
    *,
    location: str = '"fault"',
    **options: Any,
) -> str:
    """Run under both schedules and two seeds; the fault, alike each time. Returns its message."""
    given = words() if arrays is None else arrays

    def simulated(**order: Any) -> None:
        run(body, [np.copy(a) for a in given], **order, **two_warps(**options))

    message = simulated_faults.caught(simulated, kind, at=re.escape(location), seeds=2)
    seen.add(kind)
    return message


def clean(body: str, **options: Any) -> None:
    """Run under both schedules and three seeds, without a fault."""
    for schedule, seed in product(SCHEDULES, (0, 1, 2)):
        run(body, words(), seed=seed, schedule=schedule, **two_warps(**options))


def copy(to: str, source: str, *, location: str = "fault", amount: str = "") -> str:
    """A copy of four words from %x to %s."""
    types = f"{FLAT} to {TILE}"
    return (
        f"%t{location.replace('.', '_')} = nvgpu.device_async_copy %x[{source}], %s[{to}], 4"
        f'{amount} : {types} loc("{location}")'
    )
