"""How the blocks of a cluster hand each other the results of a chain's stages.

Every stage whose result a later one reads has a barrier in each block's shared memory, used once.
A block stores its own part of a result in its own memory and sends it to each of the others; it
reads a stage's input when the block's threads have met, and all that the others send has come.

Nothing else orders the exchanges, and nothing else has to:
- An input of a stage is memory of its own, and each of its channels is stored once, so what is sent
  never meets what lay there before, and a block may send before another has read the last result.
- Every channel of every row of a piece is sent, of pixels beyond the image, too: how many bytes
  come is known beforehand.
- What is too narrow to be sent (single float16) is stored, and a barrier of the cluster shows it.
- No block sends before all blocks of the cluster have begun and made their barriers (they meet once
  at the start), and none ends before all has come that is sent to it: some stage waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.codegen.gpu import instructions, mbarrier
from yolomlir.codegen.gpu.builder import Buffer, Int, KernelBuilder, guard
from yolomlir.codegen.gpu.chain_input import pick
from yolomlir.codegen.gpu.chain_problem import ChainProblem, Piece
from yolomlir.codegen.gpu.chain_tile import BARRIER_BYTES, ChainPlan


@dataclass(frozen=True)
class _Peer:
    """Another block: the stages' inputs there, and the barrier of the result at hand."""

    inputs: dict[int, instructions.RemoteBuffer]
    barrier: instructions.RemoteBuffer | None


def neighbours(piece: Piece) -> int:
    """Channels (4, 2 or 1) of a result that lie together, aligned to so many, in a piece of it."""
    places = (piece.first, piece.offset, piece.channels)
    return next(width for width in (4, 2, 1) if not any(place % width for place in places))


class ClusterExchange:
    """The barriers of a block and its ways to the other blocks. With one block all is local."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: ChainProblem,
        plan: ChainPlan,
        inputs: Sequence[Buffer | None],
        rank: Int,
    ) -> None:
        self._k, self._problem, self._plan = k, problem, plan
        self._inputs, self._rank = inputs, rank
        self.several = plan.tile.cluster_n > 1
        start = plan.shared_bytes - plan.barrier_bytes
        self._barriers: dict[int, Buffer] = {}
        self._bytes_each = problem.first.shape.element.bytes
        for index in range(len(problem.stages)):
            if self.several and self._sent(index):
                at = start + len(self._barriers) * BARRIER_BYTES
                self._barriers[index] = k.shared("float32", 2, offset_bytes=at)
        self._waited: set[int] = set()
        self._met = False
        self._peers: list[_Peer] = []

    def readers(self, index: int) -> list[tuple[int, Piece]]:
        """The later stages that read a stage's result, and which piece of their input it is."""
        return [
            (later, piece)
            for later, other in enumerate(self._problem.stages)
            for piece in other.pieces
            if piece.stage == index
        ]

    def open(self) -> None:
        """First of all: make the barriers, and tell the other blocks that this one runs."""
        if not self.several:
            return
        if self._barriers:
            with guard(self._k.thread.equals(0)):
                for index, barrier in self._barriers.items():
                    mbarrier.expect_bytes(barrier, self._bytes(index))
                mbarrier.publish_barriers()
        instructions.cluster_arrive(relaxed=True)

    def connect(self, index: int) -> None:
        """Before a stage's result is handed on."""
        if not self.several:
            return
        if not self._met:
            instructions.cluster_wait()
            self._met = True
        inputs = {later: self._inputs[later] for later, _ in self.readers(index)}
        self._peers = []
        for distance in range(1, self._plan.tile.cluster_n):
            # Each block begins with another one, so that no block receives from all at once.
            rank = (self._rank + distance) % self._plan.tile.cluster_n
            there = {
                later: instructions.shared_of_block(buffer, rank)
                for later, buffer in inputs.items()
                if buffer is not None
            }
            own = self._barriers.get(index)
            barrier = None if own is None else instructions.shared_of_block(own, rank)
            self._peers.append(_Peer(there, barrier))

    def store(self, later: int, offset: Int, values: list[ir.Value]) -> None:
        """Neighbouring values of the result at hand, to a later stage's input in every block."""
        buffer = self._inputs[later]
        if buffer is None:
            return
        for peer in self._peers:
            if peer.barrier is None:
                peer.inputs[later].store_vector(offset, values)
            else:
                mbarrier.send(peer.inputs[later], offset, values, peer.barrier)
        buffer.store_vector(offset, values)

    def receive(self, index: int) -> None:
        """Before a stage's products, behind a barrier of the block: all its input is there."""
        stages = {p.stage for p in self._problem.stages[index].pieces if p.stage is not None}
        missing = sorted(stages - self._waited) if self.several else []
        for stage in missing:
            if stage in self._barriers:
                mbarrier.wait_for_bytes(self._barriers[stage])
        if any(stage not in self._barriers for stage in missing):
            instructions.cluster_barrier()
        self._waited |= stages

    def _sent(self, index: int) -> bool:
        """Whether a stage's result goes to other blocks in pieces that can be sent."""
        widths = [neighbours(piece) * self._bytes_each for _, piece in self.readers(index)]
        return bool(widths) and min(widths) >= mbarrier.LEAST_BYTES

    def _bytes(self, index: int) -> Int:
        """What the other blocks send of a stage's result, which depends on what this one has."""
        n, counts = self._plan.stages[index].n, []
        for rank in range(self._plan.tile.cluster_n):
            channels = 0
            for _, piece in self.readers(index):
                first, end = piece.offset, piece.offset + piece.channels
                own = max(0, min(end, (rank + 1) * n) - max(first, rank * n))
                channels += piece.channels - own
            counts.append(self._bytes_each * self._plan.stages[index].pixels * channels)
        return pick(self._rank, counts)


__all__ = ["ClusterExchange"]
