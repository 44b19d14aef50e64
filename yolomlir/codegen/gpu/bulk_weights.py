"""A ring of shared-memory slots that bulk copies fill with weights, shared by blocks of a cluster.

One thread of a block brings a step's weights with one instruction. Where several blocks of a
cluster want the same ones, each brings its part of them into all, so that they leave L2 once.

Every slot has a barrier that a block's whole slot of bytes completes, whoever sends them; a turn of
the ring is a phase of it. A slot is filled anew when nobody reads it any more. In one block the
threads have met since. Blocks that share have a second barrier a slot, at which each arrives (in
all blocks) when its threads are done; what they free in one step is filled in the next, so that no
block waits for another while they keep pace. Where every step has its slot, none is filled twice,
and there are no second barriers.

No block copies before all have made their barriers, and none ends before it has waited for
everything that is sent to it: it reads each step's weights, and it is told that a slot is free only
when it fills that slot once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from yolomlir.codegen.gpu import instructions, mbarrier
from yolomlir.codegen.gpu.builder import TRUE, Bool, Buffer, Int, KernelBuilder, guard
from yolomlir.diagnostics import InternalError

_WORDS = mbarrier.BARRIER_BYTES // 4
_ALIGNMENT = 16


@dataclass(frozen=True)
class RingLayout:
    """slots: of the ring, at most one a step. steps: that pass through it. blocks: that share."""

    slots: int
    steps: int
    blocks: int = 1

    @property
    def reused(self) -> bool:
        """Whether slots are filled more than once."""
        return self.steps > self.slots

    @property
    def returned(self) -> bool:
        """Whether blocks tell each other that slots are free."""
        return self.reused and self.blocks > 1

    @property
    def lag(self) -> int:
        """Steps behind its last use in which a slot is filled anew."""
        return 2 if self.blocks > 1 else 1

    @property
    def barriers(self) -> int:
        """How many there are."""
        return self.slots * (2 if self.returned else 1)

    @property
    def barrier_bytes(self) -> int:
        """Shared memory for them, so that what lies behind is aligned."""
        return -(-self.barriers * mbarrier.BARRIER_BYTES // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Route:
    """Where a step's weights come from and go to: element offsets, and how many there are.

    source: of a step, in global memory. target: of a slot, in shared memory.
    """

    weights: Buffer
    shared: Buffer
    elements: int
    source: Callable[[Int], Int]
    target: Callable[[Int], Int]


class BulkRing:
    """The ring of one block. route: of all steps, or of each where they differ and are known.
    rank: its number among those that share, which is its own number in the cluster. barriers_at:
    where in shared memory its barriers are.

    A kernel calls `open` first of all and `fill` once; then, in each step behind a barrier of the
    block, `advance` and `wait`.
    """

    def __init__(
        self, k: KernelBuilder, layout: RingLayout, route: Route | Sequence[Route], rank: Int,
        barriers_at: int,
    ) -> None:  # fmt: skip
        self._k, self._layout, self._route, self._rank = k, layout, route, rank
        size = _WORDS * layout.slots
        self._full = k.shared("float32", size, offset_bytes=barriers_at)
        self._free = self._full
        if layout.returned:
            end = barriers_at + layout.slots * mbarrier.BARRIER_BYTES
            self._free = k.shared("float32", size, offset_bytes=end)

    def open(self) -> None:
        """Make the barriers; tell the blocks that share that this one runs."""
        layout = self._layout
        with self._one_thread():
            for slot in range(layout.slots):
                mbarrier.make_barrier(self._full, 1, _WORDS * slot)
            for slot in range(layout.slots if layout.returned else 0):
                mbarrier.make_barrier(self._free, layout.blocks, _WORDS * slot)
            mbarrier.stay_in_branch()
            mbarrier.publish_barriers()
        if layout.blocks > 1:
            instructions.cluster_arrive(relaxed=True)

    def fill(self) -> None:
        """Start the first copies, one a slot."""
        if self._layout.blocks > 1:
            instructions.cluster_wait()
        with self._one_thread():
            for step in range(min(self._layout.slots, self._layout.steps)):
                self._copy(Int.of(step))

    def advance(self, step: Int) -> None:
        """The block has met, at the beginning of a step: start the next copies."""
        layout = self._layout
        if not layout.reused:
            return
        if layout.returned:
            done = step - 1
            self._where(
                ~step.equals(0) & ((done + layout.slots) < layout.steps),
                lambda: self._give_back(done % layout.slots),
            )
        new = step + (layout.slots - layout.lag)
        self._where((step >= layout.lag) & (new < layout.steps), lambda: self._refill(new))

    def wait(self, step: Int) -> None:
        """Every thread: a step's weights are there."""
        slots = self._layout.slots
        mbarrier.wait_for_phase(self._full, step // slots % 2, step % slots * _WORDS)

    def _refill(self, step: Int) -> None:
        """A step's copy into a slot that is used once more."""
        if self._layout.returned:
            turn, slot = step // self._layout.slots - 1, step % self._layout.slots
            mbarrier.wait_for_phase(self._free, turn % 2, slot * _WORDS)
        self._copy(step)

    def _copy(self, step: Int) -> None:
        """This block's part of a step, to every block that shares."""
        route, blocks = self._route_of(step), self._layout.blocks
        slot = step % self._layout.slots
        at = slot * _WORDS
        size = route.elements * route.shared.element_bytes
        mbarrier.expect_sent(self._full, size, at)
        part = route.elements // blocks
        first = self._rank * part if blocks > 1 else Int.of(0)
        mbarrier.copy_in_bulk(
            route.shared, route.target(slot) + first, route.weights, route.source(step) + first,
            part, self._full, at, blocks=(1 << blocks) - 1 if blocks > 1 else None,
        )  # fmt: skip

    def _route_of(self, step: Int) -> Route:
        if isinstance(self._route, Route):
            return self._route
        if step.known is None:
            raise InternalError("a step in a loop has no route of its own")
        return self._route[step.known]

    def _give_back(self, slot: Int) -> None:
        """Tell all blocks that share, this one too, that this one has read a slot."""
        for rank in range(self._layout.blocks):
            mbarrier.arrive(instructions.shared_of_block(self._free, rank), slot * _WORDS)

    def _where(self, condition: Bool, code: Callable[[], None]) -> None:
        """The code for one thread, where the condition holds."""
        if condition.known is not False:
            with self._one_thread(condition):
                code()

    @contextmanager
    def _one_thread(self, condition: Bool = TRUE) -> Iterator[None]:
        """The body runs on the block's first thread where the condition holds."""
        with guard(self._k.thread.equals(0) & condition):
            yield


__all__ = ["BulkRing", "RingLayout", "Route"]
