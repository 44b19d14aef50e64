"""How the blocks of a cluster that divide K among themselves add their partial sums.

They divide the rows of the result, too. Each block sends its sums of a row to the block that owns
it, into memory that nothing else uses and that has a place for every block's; the owner waits until
a barrier has counted all bytes, and adds in the blocks' order, so that results repeat bit by bit.

No block sends before all have begun and made their barriers (they meet once: they arrive at the
start, and wait when the products are done), and none ends before all has come that is sent to it.
Nobody reads another block's memory, so nothing else has to be ordered.
"""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.bindings import ir
from yolomlir.codegen.gpu import instructions, mbarrier
from yolomlir.codegen.gpu.builder import Bool, Int, KernelBuilder, guard, select_float
from yolomlir.codegen.gpu.conv2d_tile import STAGING_PADDING, ConvTile
from yolomlir.codegen.gpu.products import Fragments


class PartialSums:
    """The memory for the sums of a block's own rows, and the ways to the other blocks.

    at_bytes: where in the block's shared memory `ConvTile.exchange_bytes` are free for it.
    """

    def __init__(self, k: KernelBuilder, tile: ConvTile, rank: Int, at_bytes: int) -> None:
        self._k, self._tile, self._rank = k, tile, rank
        self.rows = tile.block_m // tile.cluster_k
        """Of the block's own."""
        self._length = tile.block_n + STAGING_PADDING
        count = tile.block_m * self._length
        self._sums = k.shared("float32", count, offset_bytes=at_bytes)
        self._barrier = k.shared("float32", 2, offset_bytes=at_bytes + 4 * count)

    def open(self) -> None:
        """First of all: make the barrier, and tell the other blocks that this one runs."""
        others = self._tile.cluster_k - 1
        with guard(self._k.thread.equals(0)):
            mbarrier.expect_bytes(self._barrier, 4 * others * self.rows * self._tile.block_n)
            mbarrier.publish_barriers()
        instructions.cluster_arrive(relaxed=True)

    def connect(self) -> None:
        """Before the first is sent."""
        instructions.cluster_wait()

    def send(self, row: Int, column: Int, values: Sequence[ir.Value]) -> None:
        """Four neighbouring sums of one of the tile's rows, to its owner."""
        owner = row // self.rows
        place = (self._rank * self.rows + row % self.rows) * self._length + column
        own = owner.equals(self._rank)
        with guard(own):
            self._sums.store_vector(place, values)
        with guard(~own):
            there = instructions.shared_of_block(self._sums, owner)
            counted = instructions.shared_of_block(self._barrier, owner)
            mbarrier.send(there, place, values, counted)

    def send_fragments(self, accumulators: Fragments, row: Int, column: Int) -> None:
        """The sums in a warp's registers. row, column: where they begin.

        A lane has two neighbours of rows l / 4 and l / 4 + 8. It gives one pair to the lane beside
        it for the other: even lanes have four neighbours of the former row, odd ones of the latter.
        """
        lane = self._k.thread % 32
        odd = (lane % 2).equals(1)
        row = row + lane // 4 + (lane % 2) * 8
        column = column + (lane % 4 // 2) * 4
        for i, fragments in enumerate(accumulators):
            for j, values in enumerate(fragments):
                self.send(row + 16 * i, column + 8 * j, _four_of_a_row(values, odd))

    def receive(self) -> None:
        """Wait for the sums of this block's rows; the block's threads meet."""
        instructions.barrier()
        mbarrier.wait_for_bytes(self._barrier)

    def parts(self, row: Int, column: Int, width: int) -> list[list[ir.Value]]:
        """Neighbouring sums of one of the block's own rows: each block's, in their order."""
        first = row * self._length + column
        between = self.rows * self._length
        blocks = range(self._tile.cluster_k)
        return [self._sums.load_vector(first + block * between, width) for block in blocks]


def _four_of_a_row(values: Sequence[ir.Value], odd: Bool) -> list[ir.Value]:
    """Of a fragment's values in two lanes side by side, those of one row."""
    upper, lower = values[:2], values[2:]
    given = [select_float(odd, a, b) for a, b in zip(upper, lower, strict=True)]
    taken = [instructions.shuffle_xor(value, 1) for value in given]
    left = [select_float(odd, t, a) for t, a in zip(taken, upper, strict=True)]
    right = [select_float(odd, b, t) for t, b in zip(taken, lower, strict=True)]
    return [*left, *right]


__all__ = ["PartialSums"]
