"""How a convolution's block applies the epilogue and stores its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.builder import TRUE, Bool, Int, KernelBuilder, guard, select
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvProblem
from yolomlir.codegen.gpu.element import FLOAT32
from yolomlir.codegen.gpu.instructions import copy_async

Run = tuple[Int, Sequence[ir.Value]]
"""Neighbouring accumulators of one pixel: the first one's channel within the block, the values."""


class OutputStore:
    """The epilogue with what it reads: vectors by channel (staged in shared memory), residuals."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: ConvProblem,
        tile: ConvTile,
        first_channel: Int,
        vectors_at_bytes: int,
    ) -> None:
        self._k, self._problem, self._tile = k, problem, tile
        self._first_channel = first_channel
        self._epilogue = problem.epilogue
        self._output = k.arguments[problem.result]
        self.vector = min(problem.store_vector, FLOAT32.chunk)
        """Elements of the widest store: at most what one access has of their float32 sums."""
        self._channel = {
            argument: k.shared(
                "float32", tile.block_n, offset_bytes=vectors_at_bytes + 4 * i * tile.block_n
            )
            for i, argument in enumerate(self._epilogue.channel)
        }

    def load_vectors(self) -> None:
        """Bring this block's part of the channel vectors into shared memory, asynchronously."""
        channels, block = self._problem.shape.out_channels, self._tile.block_n
        width = min(FLOAT32.widest(channels), FLOAT32.widest(block))
        copies = block // width
        for argument, shared in self._channel.items():
            for i in range(-(-copies // self._tile.threads)):
                copy = self._k.thread + i * self._tile.threads
                exists = copy < copies if (i + 1) * self._tile.threads > copies else TRUE
                channel = self._first_channel + copy * width
                live = channel < channels if channels % block else TRUE
                with guard(exists):
                    copy_async(
                        shared, copy * width, self._k.arguments[argument].buffer, channel,
                        width, live=live,
                    )  # fmt: skip

    def store_row(self, pixel: Int, runs: Sequence[Run]) -> None:
        """Apply the epilogue to runs of one pixel's channels, and store them.

        Residuals of all runs are loaded before the first store: stores might alias them.
        """
        shape = self._problem.shape
        with guard(pixel < shape.pixels if self._tile.ragged(shape) else TRUE):
            pieces = [piece for run in runs for piece in self._split(run)]
            residuals = [
                {a: self._residual(a, pixel, piece) for a in self._epilogue.element}
                for piece in pieces
            ]
            for piece, residual in zip(pieces, residuals, strict=True):
                self._store_piece(pixel, piece, residual)

    def _split(self, run: Run) -> list[Run]:
        """A run as runs no longer than a store."""
        first, values = run
        width = min(self.vector, len(values))
        return [(first + i, values[i : i + width]) for i in range(0, len(values), width)]

    def _inside(self, column: Int) -> Bool:
        """Whether a run's channels exist; it begins at a multiple of its length."""
        channels = self._problem.shape.out_channels
        if channels % self._tile.block_n == 0:
            return TRUE
        return (self._first_channel + column) < channels

    def _residual(self, argument: int, pixel: Int, piece: Run) -> list[ir.Value]:
        """The residual beside a run; element 0 where the run does not exist."""
        column, values = piece
        operand = self._k.arguments[argument]
        offset = pixel * operand.pitch_or_fail() + (self._first_channel + column)
        offset = select(self._inside(column), offset, 0)
        width = min(self._problem.residual_vectors[argument], len(values))
        loaded: list[ir.Value] = []
        for i in range(0, len(values), width):
            loaded += operand.buffer.load_vector(offset + i, width)
        return loaded

    def _store_piece(self, pixel: Int, piece: Run, residual: dict[int, list[ir.Value]]) -> None:
        column, values = piece
        by_channel = {
            argument: shared.load_vector(column, len(values))
            for argument, shared in self._channel.items()
        }
        results = []
        for i, value in enumerate(values):
            operands = {a: v[i] for a, v in (*by_channel.items(), *residual.items())}
            results.append(self._epilogue.apply(value, operands))
        offset = pixel * self._output.pitch_or_fail() + (self._first_channel + column)
        with guard(self._inside(column)):
            self._output.buffer.store_vector(offset, results)
