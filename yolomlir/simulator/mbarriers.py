"""Barriers in shared memory that count bytes and arrivals (`mbarrier`), and what they count.

What `st.async` stores, or a bulk copy brings, is on its way until the phase of the receiver's
barrier that counts it is complete; when that is, once all of it has been sent, is drawn at random.
It is visible to whoever then waits at that barrier, and to those who meet the waiter later: the
barrier releases what was stored through it, and nothing else that the senders did. In the clocks of
`races.py` each barrier is therefore a warp of its own, the one that writes what arrives.

A plain arrival releases what its thread has met before (not what it did itself since it last met
its warp), and a phase that arrivals alone complete is over at once.

Modelled are phases waited for by parity: by whole warps where bytes come, by single threads, too,
where only arrivals are counted. A phase must be waited for before the next but one ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.elements import Array
from yolomlir.simulator.races import Clocks

if TYPE_CHECKING:
    from yolomlir.simulator.decode import Execution
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes
    from yolomlir.simulator.machine import Machine

BYTES = 8
"""Of a barrier, and its alignment."""
_DELAY = 0.5
"""How likely what has been sent does not arrive before other warps go on."""


@dataclass
class _Store:
    """One instruction's stores to one barrier: `data` (accesses, bytes) to shared addresses."""

    site: Site
    address: Array
    data: Array


@dataclass
class _Barrier:
    """One barrier. agent: the warp that stands for it in the clocks; maker: who initialised it.

    published: the maker's clock at its `fence.mbarrier_init`, None before. arrivals: how many are
    missing in this phase. awaited: bytes that are expected in it, sent: those on their way. bytes:
    whether any phase had some. joined: what arrivals of this phase have released (`seen`, `met`),
    released: those of all phases that are over. loose: an arrival by another block in this phase,
    passed: one in a phase that is over, which nobody has waited for.
    """

    agent: int
    maker: int
    made: int
    count: int
    arrivals: int
    published: int | None = None
    phase: int = 0
    awaited: int = 0
    sent: int = 0
    bytes: bool = False
    joined: Array | None = None
    released: Array | None = None
    loose: Site | None = None
    passed: Site | None = None
    stores: list[_Store] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the phase may end."""
        return self.arrivals == 0 and self.sent == self.awaited


class MemoryBarriers:
    """The barriers of one cluster, by their shared byte address."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._barriers: dict[int, _Barrier] = {}

    # ---- operations -----------------------------------------------------------------------------

    def make(self, lanes: Lanes, address: int, count: int, site: Site) -> None:
        """`mbarrier.init`, by one thread. Raises InternalError for one that is made again."""
        clocks: Clocks = self._machine.clocks
        if address in self._barriers:
            raise InternalError("an mbarrier made twice is not simulated", where=site.text())
        agent = clocks.warps + len(self._barriers)
        if agent >= len(clocks.clock):
            raise InternalError("mbarriers made in a loop are not simulated", where=site.text())
        _, warps = lanes.active_threads()
        maker = int(warps[0])
        made = int(clocks.clock[maker])
        self._barriers[address] = _Barrier(agent, maker, made, count, count)

    def publish(self, lanes: Lanes) -> None:
        """`fence.mbarrier_init`: barriers that this warp made so far can be met by a cluster."""
        clocks = self._machine.clocks
        for warp in np.unique(lanes.active_threads()[1]):
            for barrier in self._barriers.values():
                if barrier.maker == warp and barrier.published is None:
                    barrier.published = int(clocks.clock[warp])

    def arrive(self, address: int, expected: int, site: Site) -> None:
        """`mbarrier.arrive.expect_tx`, by one thread."""
        barrier = self._find(address, site)
        if barrier.arrivals == 0:
            raise site.fault("barrier", f"too many arrivals at the mbarrier at byte {address}")
        barrier.awaited += expected
        barrier.bytes = True
        barrier.arrivals -= 1
        self._check_excess(barrier, address, site)
        self._machine.progress += 1

    def arrive_plainly(self, lanes: Lanes, address: int, site: Site) -> None:
        """`mbarrier.arrive`, by one thread, of any block of the cluster."""
        barrier = self._find(address, site)
        _, warps = lanes.active_threads()
        self._check_met(barrier, address, warps, site)
        if barrier.arrivals == 0:
            raise site.fault("barrier", f"too many arrivals at the mbarrier at byte {address}")
        clocks = self._machine.clocks
        known = np.stack([clocks.seen[warps[0]], clocks.met[warps[0]]])
        barrier.joined = known if barrier.joined is None else np.maximum(barrier.joined, known)
        if address // self._machine.shared_stride != lanes.rank:
            barrier.loose = site
        barrier.arrivals -= 1
        self._machine.progress += 1
        if barrier.arrivals == 0 and not barrier.bytes:
            self._finish(barrier)

    def send(
        self, lanes: Lanes, target: Array, data: Array, barrier_address: Array, site: Site
    ) -> None:
        """`st.async` of the active lanes: (lanes, bytes) to shared addresses (checked by now)."""
        stride = self._machine.shared_stride
        strays = target // stride != barrier_address // stride
        if strays.any():
            lane = int(np.argmax(strays))
            raise site.fault(
                "out-of-bounds",
                f"stores to block {target[lane] // stride} of the cluster and counts the bytes in "
                f"block {barrier_address[lane] // stride}",
            )
        threads, warps = lanes.active_threads()
        self.bring(threads, warps, target, data, barrier_address, site)

    def bring(
        self,
        threads: Array,
        warps: Array,
        target: Array,
        data: Array,
        barrier_address: Array,
        site: Site,
    ) -> None:
        """Put `data` (accesses, bytes) on its way; threads and warps: whose access each is."""
        machine = self._machine
        granules = machine.shadow.granules(target, data.shape[1])
        machine.shadow.write(granules, threads, warps, site, asynchronous=True)
        for address in np.unique(barrier_address):
            barrier = self._find(int(address), site)
            mine = barrier_address == address
            self._check_met(barrier, int(address), warps[mine], site)
            barrier.stores.append(_Store(site, target[mine], data[mine]))
            barrier.sent += int(mine.sum()) * data.shape[1]
            barrier.bytes = True
            self._check_excess(barrier, int(address), site)
        machine.progress += 1

    def wait(self, lanes: Lanes, address: int, parity: int, site: Site) -> Execution:
        """Until the phase of that parity is complete, whose stores the active warps then see."""
        machine = self._machine
        barrier = self._find(address, site)
        if barrier.bytes or barrier.awaited:
            lanes.whole_warps(site, full=False)
        lanes.waiting_at = site
        while barrier.phase & 1 == parity:
            if barrier.complete and machine.random.random() >= _DELAY:
                self._finish(barrier)
                break
            machine.progress += int(barrier.complete)
            yield
        barrier.passed = None
        _, warps = lanes.active_threads()
        machine.clocks.acquire_agent(np.unique(warps), barrier.agent, barrier.released)

    # ---- reports --------------------------------------------------------------------------------

    def unfinished(self) -> Iterator[str]:
        """What barriers still wait for, in words."""
        for address, barrier in self._barriers.items():
            if barrier.arrivals or barrier.sent != barrier.awaited:
                missing = f"{barrier.sent} of {barrier.awaited} bytes sent"
                missing += f", {barrier.arrivals} arrivals missing" if barrier.arrivals else ""
                yield f"the mbarrier at shared byte {address}: {missing}"

    def check_end(self) -> None:
        """No block may end while others store to it or arrive at it. Raises for the first."""
        for address, barrier in self._barriers.items():
            for store in barrier.stores:
                raise store.site.fault(
                    "race",
                    f"the block of the mbarrier at shared byte {address} ends without a wait for "
                    "what is stored here, which may arrive later",
                )
            site = barrier.loose or barrier.passed
            if site is not None:
                raise site.fault(
                    "race",
                    f"the block of the mbarrier at shared byte {address} does not wait for this "
                    "arrival, and may end before it",
                )

    # ---- parts ----------------------------------------------------------------------------------

    def _find(self, address: int, site: Site) -> _Barrier:
        if address not in self._barriers:
            raise site.fault(
                "uninitialised", f"there is no mbarrier at shared byte {address} (yet)"
            )
        return self._barriers[address]

    def _check_met(self, barrier: _Barrier, address: int, warps: Array, site: Site) -> None:
        """Every sender knows that the barrier has been made: by a barrier of the cluster behind
        `fence.mbarrier_init`, or by one that releases all memory."""
        clocks = self._machine.clocks
        seen = clocks.seen[warps, barrier.maker] >= barrier.made
        if barrier.published is not None:
            seen |= clocks.met[warps, barrier.maker] >= barrier.published
            seen |= warps == barrier.maker
        if seen.all():
            return
        warp = int(warps[np.argmin(seen)])
        raise site.fault(
            "race",
            f"warp {warp} sends to the mbarrier at shared byte {address}, which warp "
            f"{barrier.maker} made with no fence.mbarrier_init and barrier of the cluster between",
        )

    @staticmethod
    def _check_excess(barrier: _Barrier, address: int, site: Site) -> None:
        if barrier.arrivals == 0 and barrier.sent > barrier.awaited:
            raise site.fault(
                "barrier",
                f"{barrier.sent} bytes are sent to the mbarrier at shared byte {address}, which "
                f"expects {barrier.awaited}",
            )

    def _finish(self, barrier: _Barrier) -> None:
        """End the phase: all that was sent arrives."""
        machine = self._machine
        machine.clocks.clock[barrier.agent] += 1
        for store in barrier.stores:
            size = store.data.shape[1]
            machine.shared_memory.data[store.address[:, None] + np.arange(size)] = store.data
            granules = machine.shadow.granules(store.address, size)
            machine.shadow.land_by(granules, barrier.agent)
        barrier.stores = []
        if barrier.joined is not None:
            known = barrier.released
            barrier.released = (
                barrier.joined if known is None else np.maximum(known, barrier.joined)
            )
            barrier.joined = None
        barrier.passed, barrier.loose = barrier.loose or barrier.passed, None
        barrier.awaited = barrier.sent = 0
        barrier.arrivals = barrier.count
        barrier.phase += 1


def one_thread(lanes: Lanes, value: Array, site: Site, what: str) -> int:
    """The register of the only active lane. Raises InternalError where there are several."""
    active = np.atleast_1d(lanes.active(value))
    if lanes.active_count() != 1:
        raise InternalError(f"{what} by several threads is not simulated", where=site.text())
    return int(active[0])
