"""One cluster of blocks at work: its shared memory, its barriers, and the order of its warps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.async_copy import PendingCopies
from yolomlir.simulator.banks import BankCounter
from yolomlir.simulator.decode import Execution, Program, execute
from yolomlir.simulator.elements import Array, Value
from yolomlir.simulator.faults import SimulationError, Site
from yolomlir.simulator.lanes import WARP, Lanes
from yolomlir.simulator.mbarriers import MemoryBarriers
from yolomlir.simulator.memory import Bytes, GlobalMemory
from yolomlir.simulator.races import Clocks, SharedShadow
from yolomlir.simulator.report import SimulationReport

Dimensions = tuple[int, int, int]


@dataclass(frozen=True)
class Checks:
    """What to check beyond what is always checked.

    written_once: an element written a second time, by any block, is a fault. outputs_written: every
    element of an output (or of its mask) must have been written at the end; off when only some
    blocks run. bank_conflict_ways: the most ways allowed; None only counts. loop_limit: iterations
    of an `scf.while` before it counts as endless.
    """

    written_once: bool = False
    outputs_written: bool = False
    bank_conflict_ways: int | None = None
    loop_limit: int = 1 << 20


@dataclass
class Barrier:
    """A rendezvous, phase after phase.

    expected: threads (whole warps) that complete it. released: for each past phase what its
    arrivals had seen (races.Clocks), and whether one of them had waited for the previous kernel,
    which then holds for all (`griddepcontrol.wait` makes its results visible to the grid).
    """

    expected: int
    phase: int = 0
    arrived: int = 0
    site: Site | None = None
    joined: Array | None = None
    waited: bool = False
    released: list[tuple[Array, bool]] = field(default_factory=list)

    def arrive(self, threads: int, seen: Array, site: Site, *, waited: bool) -> int:
        """Count an arrival; returns the phase it belongs to."""
        phase = self.phase
        self.joined = seen if self.joined is None else np.maximum(self.joined, seen)
        self.arrived += threads
        self.waited |= waited
        self.site = self.site or site
        if self.arrived >= self.expected:
            self.released.append((self.joined, self.waited))
            self.joined, self.arrived, self.site, self.waited = None, 0, None, False
            self.phase += 1
        return phase


class Machine:
    """Runs one cluster (one block where there are no clusters).

    number: the cluster's number in the grid, from 1; it marks what the cluster writes to global
    memory. guarded: arguments wait for a previous kernel. acquired: the cluster has executed an
    atomic operation on global memory and may read what other blocks wrote.
    """

    def __init__(
        self,
        program: Program,
        launch: Any,
        global_memory: GlobalMemory,
        report: SimulationReport,
        banks: BankCounter,
        checks: Checks,
        random: np.random.Generator,
        *,
        guarded: bool,
    ) -> None:
        self.program = program
        self.launch = launch
        self.global_memory = global_memory
        self.report = report
        self.banks = banks
        self.checks = checks
        self.random = random
        self.guarded = guarded
        self.grid: Dimensions = tuple(launch.grid)
        self.block: Dimensions = tuple(launch.block)
        self.cluster: Dimensions = tuple(getattr(launch, "cluster", None) or (1, 1, 1))
        self.block_threads = int(np.prod(self.block))
        self.padded_threads = -(-self.block_threads // WARP) * WARP
        self.cluster_blocks = int(np.prod(self.cluster))
        self.shared_bytes = program.static_shared_bytes + int(launch.shared_bytes)
        self.number = 0
        self.acquired = False
        self.progress = 0

    def run(
        self, number: int, cluster_id: Dimensions, arguments: list[Value], *, warps: bool
    ) -> None:
        """Run the cluster at `cluster_id`, its blocks in lockstep or warp by warp."""
        self._reset(number)
        self.groups = self._groups(cluster_id, warps=warps)
        running: list[tuple[Lanes, Execution]] = []
        for lanes in self.groups:
            for slot, value in zip(self.program.body.arguments, arguments, strict=False):
                lanes.registers[slot] = value
            self._place_attributions(lanes)
            running.append((lanes, execute(self.program.body, lanes)))
        while running:
            running = self._round(running)
        self._check_waited()
        self.mbarriers.check_end()
        if self.cluster_blocks > 1:
            self.shadow.check_exits(self.cluster_blocks)

    def _reset(self, number: int) -> None:
        self.number = number
        self.acquired = False
        warps = self.padded_threads // WARP * self.cluster_blocks
        self.clocks = Clocks(warps, self.program.mbarriers * self.cluster_blocks)
        self.mbarriers = MemoryBarriers(self)
        size = max(16, -(-self.shared_bytes // 16) * 16)
        self.shared_stride = size
        self.shared_memory = Bytes(size * self.cluster_blocks)
        self.shadow = SharedShadow(
            size * self.cluster_blocks, self.program.granule_bytes, self.clocks, self.program.sites
        )
        self.barriers: dict[Any, Barrier] = {}
        self.board: dict[Any, dict[int, Value]] = {}

    def _groups(self, cluster_id: Dimensions, *, warps: bool) -> list[Lanes]:
        groups = []
        corners = product(*(range(n) for n in reversed(self.cluster)))
        for rank, (z, y, x) in enumerate(corners):
            block_id = tuple(
                c * n + i for c, n, i in zip(cluster_id, self.cluster, (x, y, z), strict=True)
            )
            count = WARP if warps else self.padded_threads
            groups += [
                Lanes(self, rank, (block_id[0], block_id[1], block_id[2]), first, count)
                for first in range(0, self.padded_threads, count)
            ]
        return groups

    def _place_attributions(self, lanes: Lanes) -> None:
        for slot, place in zip(
            self.program.body.arguments[len(self.program.argument_types) :],
            self.program.attributions,
            strict=True,
        ):
            lanes.registers[slot] = place(lanes)

    def _round(self, running: list[tuple[Lanes, Execution]]) -> list[tuple[Lanes, Execution]]:
        """Every group, in a random order, to its next wait that is not over yet."""
        before = self.progress
        left = []
        for i in self.random.permutation(len(running)):
            lanes, execution = running[i]
            if _advance(execution):
                left.append(running[i])
            else:
                self.progress += 1
                lanes.waiting_at = None
        if left and self.progress == before:
            raise self._deadlock([lanes for lanes, _ in left])
        return left

    def _deadlock(self, waiting: list[Lanes]) -> SimulationError:
        first = waiting[0]
        if first.waiting_at is None:
            raise InternalError("the simulator suspended a warp without saying where")
        done = len(self.groups) - len(waiting)
        others = {
            f"{w.waiting_at.location} ({w.waiting_at.text()})"
            for w in waiting
            if w.waiting_at is not None and w.waiting_at is not first.waiting_at
        }
        reasons = [f"{done} of {len(self.groups)} warps have exited"] if done else []
        reasons += [f"others wait at {o}" for o in sorted(others)]
        reasons += self.mbarriers.unfinished()
        return first.waiting_at.fault(
            "barrier",
            f"warp {first.warp_slice.start} of block {first.block_id} waits for ever: "
            + ("; ".join(reasons) or "not enough threads arrive"),
        )

    def _check_waited(self) -> None:
        """With programmatic launch a block must wait for its predecessors before it ends."""
        if not self.guarded:
            return
        for rank in range(self.cluster_blocks):
            groups = [g for g in self.groups if g.rank == rank]
            if not any(g.some_waited() for g in groups):
                raise SimulationError(
                    self.program.name,
                    "programmatic-launch",
                    f"block {groups[0].block_id} ends without griddepcontrol.wait, so the next "
                    "kernel could start before the previous one is complete",
                )

    # ---- synchronisation ------------------------------------------------------------------------

    def barrier(self, key: Any, expected: int) -> Barrier:
        """The barrier of that name in this cluster."""
        found = self.barriers.get(key)
        if found is None:
            found = self.barriers[key] = Barrier(expected)
        return found

    def arrive(
        self, lanes: Lanes, key: Any, expected: int, site: Site, *, relaxed: bool = False
    ) -> None:
        """The group arrives at a barrier; its token is kept for `wait`. relaxed: no memory."""
        barrier = self.barrier(key, expected)
        barrier.expected = expected
        seen = self.clocks.arrive(lanes.warp_slice, relaxed=relaxed)
        threads = int(lanes.exists.sum())
        before = barrier.phase
        waited = lanes.some_waited() and not relaxed
        lanes.tokens[key] = barrier.arrive(threads, seen, site, waited=waited)
        self.progress += 1
        if barrier.phase != before and key[0] == "block":
            self.report.barriers += 1

    def wait(self, lanes: Lanes, key: Any, site: Site) -> Execution:
        """The group waits until the phase it arrived in is complete."""
        barrier = self.barriers.get(key)
        if barrier is None or key not in lanes.tokens:
            raise site.fault("barrier", "waits at a barrier at which it has not arrived")
        token = lanes.tokens.pop(key)
        lanes.waiting_at = site
        while barrier.phase == token:
            yield
        seen, waited = barrier.released[token]
        self.clocks.acquire(lanes.warp_slice, seen)
        if waited:
            lanes.unwaited = None

    def new_copies(self, lanes: int) -> PendingCopies:
        """The asynchronous copies of a new group."""
        return PendingCopies(lanes)


def _advance(execution: Execution) -> bool:
    """Run to the next suspension; False at the end."""
    try:
        next(execution)
    except StopIteration:
        return False
    return True
