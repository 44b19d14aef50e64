"""Shared-memory bank conflicts: how many wavefronts an access of a warp takes.

32 banks of 4 bytes. An access of up to 4 bytes a lane is served for 32 lanes at once, of 8 bytes
for 16, of 16 bytes for 8 (NVIDIA's documented half- and quarter-warp phases); lanes that read the
same word share it. A phase takes as many wavefronts as its busiest bank has distinct words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yolomlir.simulator.elements import Array

BANKS = 32
WORD_BYTES = 4
_ROW_BYTES = BANKS * WORD_BYTES
_UNUSED = -1


@dataclass(frozen=True)
class BankStatistics:
    """Conflicts of one op over the whole run.

    requests: accesses by a warp. wavefronts: what they took. ideal: what they would take without
    conflicts. worst_ways: the most distinct words that one phase wanted of one bank.
    """

    location: str
    op: str
    requests: int
    wavefronts: int
    ideal: int
    worst_ways: int

    @property
    def excess(self) -> int:
        """Wavefronts lost to conflicts."""
        return self.wavefronts - self.ideal


class BankCounter:
    """Counts wavefronts, remembering patterns already analysed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[int, int, int]] = {}
        self.totals: dict[int, list[int]] = {}

    def record(self, site: int, address: Array, active: Array | None, size_bytes: int) -> int:
        """Count an access of lanes (a multiple of 32) at byte addresses; returns its ways."""
        base = int(address.min()) // _ROW_BYTES * _ROW_BYTES
        relative = address - base
        if active is not None:
            relative = np.where(active, relative, _UNUSED)
        key = (size_bytes, relative.tobytes())
        counted = self._known.get(key)
        if counted is None:
            counted = self._known[key] = _wavefronts(relative, size_bytes)
        requests, wavefronts, ways = counted
        ideal = requests * _phases(size_bytes)
        self._add(site, requests, wavefronts, min(ideal, wavefronts), ways)
        return ways

    def broadcast(self, site: int, warps: int) -> None:
        """Count an access of those warps to one address: no conflict."""
        self._add(site, warps, warps, warps, 1)

    def _add(self, site: int, requests: int, wavefronts: int, ideal: int, ways: int) -> None:
        total = self.totals.setdefault(site, [0, 0, 0, 0])
        total[0] += requests
        total[1] += wavefronts
        total[2] += ideal
        total[3] = max(total[3], ways)


def _phases(size_bytes: int) -> int:
    return max(1, size_bytes // WORD_BYTES)


def _wavefronts(relative: Array, size_bytes: int) -> tuple[int, int, int]:
    """(requests, wavefronts, worst ways) of lanes at those addresses; negative: inactive."""
    lanes = 32 // _phases(size_bytes)
    per_phase = relative.reshape(-1, lanes)
    requests = wavefronts = 0
    worst = 0
    for warp in relative.reshape(-1, 32):
        requests += int((warp >= 0).any())
    for phase in per_phase:
        phase = phase[phase >= 0]
        if not phase.size:
            continue
        words = np.unique((phase // WORD_BYTES)[:, None] + np.arange(_phases(size_bytes)))
        ways = int(np.bincount(words % BANKS).max())
        wavefronts += ways
        worst = max(worst, ways)
    return requests, wavefronts, worst
