"""Happens-before by vector clocks, and the shadow of shared memory that uses it.

A warp has a clock that a synchronisation advances; `seen[w, v]` is the last clock of warp v whose
accesses happened before what warp w does now. An access races with an earlier one of another
thread when the earlier one's clock is not yet seen. For one's own warp `seen[w, w]` is `clock - 1`,
so lanes of a warp race, too, until `bar.warp.sync` or a barrier. (The method is that of FastTrack,
Flanagan and Freund, PLDI 2009, at the grain of a warp.) Behind the warps come agents: those that
write what other blocks have sent, one for each barrier that counts it (`mbarriers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from yolomlir.simulator.elements import Array

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site

_IN_FLIGHT = np.int32(2**31 - 1)
"""The write clock of what an asynchronous copy is still bringing: seen by nobody."""

_AGENT = np.int32(2**30)
"""The first clock of an agent: beyond every floor."""

COLLECTIVE = -1
"""The thread number of an access made by a whole warp at once (`ldmatrix`, uniform loads)."""


class Clocks:
    """The vector clocks of the warps of one cluster, and of its agents.

    seen: of memory. met: of what has been executed, though its writes need not be visible yet.
    """

    def __init__(self, warps: int, agents: int = 0) -> None:
        self.warps = warps
        self.clock: Array = np.ones(warps + agents, np.int32)
        self.clock[warps:] = _AGENT
        self.seen: Array = np.zeros((warps + agents, warps + agents), np.int32)
        self.met: Array = np.zeros_like(self.seen)
        self.floor = 0
        """A clock that every warp has seen of every other: older accesses race with nothing."""

    def arrive(self, warps: slice, *, relaxed: bool = False) -> Array:
        """What those warps release to whoever waits with them (`seen`, `met`); their next accesses
        come after. relaxed: no memory."""
        released = np.stack([self.seen[warps].max(0), self.met[warps].max(0)])
        released[:, warps] = self.clock[warps]
        if relaxed:
            released[0] = 0
        self.synchronise_warps(warps)
        return np.asarray(released)

    def acquire(self, warps: slice, released: Array) -> None:
        """From now on those warps come after everything `released`."""
        self.seen[warps] = np.maximum(self.seen[warps], released[0])
        self.met[warps] = np.maximum(self.met[warps], released[1])
        self._raise_floor()

    def acquire_agent(self, warps: Array, agent: int, released: Array | None = None) -> None:
        """From now on those warps see what the agent has written, and come after everything that
        was `released` to it."""
        self.seen[warps, agent] = self.clock[agent]
        if released is not None:
            self.seen[warps] = np.maximum(self.seen[warps], released[0])
            self.met[warps] = np.maximum(self.met[warps], released[1])
            self._raise_floor()

    def _raise_floor(self) -> None:
        self.floor = int(self.seen[: self.warps, : self.warps].min())

    def synchronise_warps(self, warps: slice | Array) -> None:
        """`bar.warp.sync` in each of those warps."""
        indices = np.arange(len(self.clock))[warps]
        self.seen[indices, indices] = self.clock[indices]
        self.clock[indices] += 1
        self._raise_floor()


class SharedShadow:
    """Who wrote and read each granule of shared memory, and when.

    granule_bytes: the smallest access of the kernel, so that two accesses share a granule only
    where they overlap.
    """

    def __init__(
        self, size_bytes: int, granule_bytes: int, clocks: Clocks, sites: Sequence[Site]
    ) -> None:
        count = -(-size_bytes // granule_bytes)
        self.granule_bytes = granule_bytes
        self.clocks = clocks
        self.sites = sites
        self.write_clock: Array = np.zeros(count, np.int32)
        self.write_thread: Array = np.zeros(count, np.int32)
        self.write_site: Array = np.zeros(count, np.int32)
        self.atomic: Array = np.zeros(count, np.bool_)
        self.read_clock: Array = np.zeros((count, len(clocks.clock)), np.int32)
        self.read_thread: Array = np.zeros(count, np.int32)
        self.read_site: Array = np.zeros(count, np.int32)

    def granules(self, address: Array, size_bytes: int) -> Array:
        """The granules of accesses at those byte addresses: (accesses, granules each)."""
        count = max(1, size_bytes // self.granule_bytes)
        return (address // self.granule_bytes)[:, None] + np.arange(count)

    def read(self, granules: Array, threads: Array, warps: Array, site: Site) -> None:
        """Check and record a read; `threads` and `warps` have an entry an access."""
        written = self.write_clock[granules]
        # One comparison settles the usual case; never written (0) wraps to the largest number.
        if (written - 1).view(np.uint32).max() >= self.clocks.floor:
            self.check_initialised(granules, threads, site)
            self._check_in_flight(granules, written, threads, site, "reads")
            self._check_writers(granules, written, threads, warps, site, "reads", atomic=False)
        column = warps[:, None]
        self.read_clock[granules, column] = self.clocks.clock[column]
        self.read_thread[granules] = threads[:, None]
        self.read_site[granules] = site.index

    def write(
        self,
        granules: Array,
        threads: Array,
        warps: Array,
        site: Site,
        *,
        asynchronous: bool = False,
        atomic: bool = False,
    ) -> None:
        """Check and record a write (or the issue of an asynchronous copy to there)."""
        written = self.write_clock[granules]
        if written.max() > self.clocks.floor:
            self._check_in_flight(granules, written, threads, site, "writes")
            self._check_writers(granules, written, threads, warps, site, "writes", atomic=atomic)
        if self.read_clock[granules].max() > self.clocks.floor:
            self._check_readers(granules, threads, warps, site)
        clock = _IN_FLIGHT if asynchronous else self.clocks.clock[warps][:, None]
        self.write_clock[granules] = clock
        self.write_thread[granules] = threads[:, None]
        self.write_site[granules] = site.index
        self.atomic[granules] = atomic
        if not atomic:
            self._check_same_instruction(granules, threads, site, lanes=asynchronous)

    def check_initialised(self, granules: Array, threads: Array, site: Site) -> None:
        """Every granule has been written (or is being copied to)."""
        written = self.write_clock[granules]
        if written.min() > 0:
            return
        at = tuple(np.argwhere(written == 0)[0])
        raise site.fault(
            "uninitialised",
            f"{self._who(threads[at[0]])} reads shared byte "
            f"{granules[at] * self.granule_bytes}, which nothing has written",
        )

    def land(self, granules: Array, warps: Array) -> None:
        """Asynchronous copies that their threads have waited for: written now."""
        self.write_clock[granules] = self.clocks.clock[warps][:, None]

    def land_by(self, granules: Array, agent: int) -> None:
        """What an agent brings has arrived: written now, by it."""
        self.write_clock[granules] = self.clocks.clock[agent]
        self.write_thread[granules] = agent << 5

    def check_exits(self, blocks: int) -> None:
        """No block of a cluster may end before the others are done with its shared memory.

        An access by another block is ordered before the end when some warp of the owner has seen
        it (a cluster barrier behind the access). Raises for the first that is not.
        """
        count = len(self.write_clock) // blocks
        warps = self.clocks.warps // blocks
        for rank in range(blocks):
            part = slice(rank * count, (rank + 1) * count)
            seen = self.clocks.seen[rank * warps : (rank + 1) * warps].max(0)
            seen[rank * warps : (rank + 1) * warps] = np.iinfo(np.int32).max
            late = (self.read_clock[part] > seen).any(1)
            self._check_exit(rank, part, late, self.read_site, "read")
            writer = self.write_thread[part] >> 5
            self._check_exit(
                rank, part, self.write_clock[part] > seen[writer], self.write_site, "written"
            )

    def _check_exit(self, rank: int, part: slice, late: Array, sites: Array, verb: str) -> None:
        if not late.any():
            return
        site = self.sites[int(sites[part][int(np.argmax(late))])]
        raise site.fault(
            "race",
            f"shared memory of block {rank} of the cluster is {verb} here by another block, and "
            "no cluster barrier behind this keeps that block from ending first",
        )

    def _check_in_flight(
        self, granules: Array, written: Array, threads: Array, site: Site, verb: str
    ) -> None:
        flying = written == _IN_FLIGHT
        if not flying.any():
            return
        at = tuple(np.argwhere(flying)[0])
        granule = granules[at]
        raise site.fault(
            "in-flight",
            f"{self._who(threads[at[0]])} {verb} shared byte {granule * self.granule_bytes} while "
            f"the asynchronous copy of {self._who(self.write_thread[granule])} to it, "
            f"{self._site(self.write_site[granule])}, has not been waited for",
        )

    def _check_writers(
        self,
        granules: Array,
        written: Array,
        threads: Array,
        warps: Array,
        site: Site,
        verb: str,
        *,
        atomic: bool,
    ) -> None:
        writer = self.write_thread[granules]
        racing = written > self.clocks.seen[warps[:, None], writer >> 5]
        racing &= writer != threads[:, None]
        if atomic:
            racing &= ~self.atomic[granules]
        if not racing.any():
            return
        at = tuple(np.argwhere(racing)[0])
        raise self._race(site, granules[at], threads[at[0]], verb, "written", writer[at])

    def _check_readers(self, granules: Array, threads: Array, warps: Array, site: Site) -> None:
        racing = self.read_clock[granules] > self.clocks.seen[warps][:, None, :]
        if not racing.any():
            return
        reader = self.read_thread[granules]
        rows = np.arange(len(warps))
        own = (reader == threads[:, None]) | (reader == COLLECTIVE)
        racing[rows, :, warps] &= ~own
        if not racing.any():
            return
        row, column, warp = np.argwhere(racing)[0]
        granule = granules[row, column]
        raise site.fault(
            "race",
            f"{self._who(threads[row])} writes shared byte {granule * self.granule_bytes}, which "
            f"warp {warp} read at {self._site(self.read_site[granule])} with no barrier between",
        )

    def _check_same_instruction(
        self, granules: Array, threads: Array, site: Site, *, lanes: bool
    ) -> None:
        """Two warps that write one place in one (simulated) instruction.

        Lanes of one warp count where `lanes`; else the caller compares their values.
        """
        winner = self.write_thread[granules]
        shift = 0 if lanes else 5
        other = (winner >> shift) != (threads[:, None] >> shift)
        if not other.any():
            return
        at = tuple(np.argwhere(other)[0])
        raise self._race(site, granules[at], threads[at[0]], "writes", "written", winner[at])

    def _race(
        self, site: Site, granule: int, thread: int, verb: str, past: str, other: int
    ) -> Exception:
        return site.fault(
            "race",
            f"{self._who(thread)} {verb} shared byte {granule * self.granule_bytes}, {past} by "
            f"{self._who(other)} at {self._site(self.write_site[granule])} with no barrier between",
        )

    def _site(self, index: int) -> str:
        site = self.sites[int(index)]
        return f"{site.location} ({site.text()})"

    def _who(self, thread: int) -> str:
        if thread == COLLECTIVE:
            return "a warp"
        if thread >> 5 >= self.clocks.warps:
            return "another block"
        return f"thread {thread} (warp {thread >> 5})"
