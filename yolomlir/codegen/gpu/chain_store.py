"""How a block of a chain ends a stage: the epilogue, and where its result goes.

A thread has runs of four neighbouring channels of a pixel: those whose sums its warp has, or, where
several warps have parts of a sum, those that it adds up in shared memory. Their places are the same
in a stage and in a later one that adds its result, which stays in the thread's registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    select,
    select_float,
    widen,
    zero_of,
)
from yolomlir.codegen.gpu.chain_exchange import ClusterExchange, neighbours
from yolomlir.codegen.gpu.chain_pixels import PixelMap, Region
from yolomlir.codegen.gpu.chain_problem import STAGE, ChainProblem, Piece
from yolomlir.codegen.gpu.chain_tile import ChainPlan, StagePlan, direct_stages
from yolomlir.codegen.gpu.chain_window import Window
from yolomlir.codegen.gpu.conv2d_load import copy_in, pixel_at
from yolomlir.codegen.gpu.conv_problem import widest
from yolomlir.codegen.gpu.element import FLOAT32
from yolomlir.codegen.gpu.linalg_match import refuse
from yolomlir.codegen.gpu.products import Fragments

RUN = 4
"""Channels of a run."""


@dataclass(frozen=True)
class Run:
    """Channels [column, column + 4) of a block's part of a stage, for row `row` of its pixels."""

    row: Int
    column: Int
    exists: Bool


def direct_of(problem: ChainProblem, plan: ChainPlan) -> tuple[bool, ...]:
    """Which stages' sums do not go through shared memory."""
    additions = [
        (number - STAGE, later)
        for later, stage in enumerate(problem.stages)
        for number in stage.epilogue.element
        if number >= STAGE
    ]
    return direct_stages(plan.stages, plan.tile.warps, additions)


class ChainStore:
    """The epilogues of a chain with what they read, and the places their results go to."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: ChainProblem,
        plan: ChainPlan,
        staged: Buffer,
        window: Buffer,
        inputs: Sequence[Buffer | None],
        exchange: ClusterExchange,
        pixels: Sequence[PixelMap | Region],
        rank: Int,
        vectors_at_bytes: int,
        *,
        exact: bool,
    ) -> None:
        self._k, self._problem, self._plan = k, problem, plan
        self.staged, self._window = staged, window
        self._element = problem.first.shape.element
        self._inputs, self._exchange = inputs, exchange
        self._pixels, self._rank, self._exact = pixels, rank, exact
        self._vectors: list[dict[int, Buffer]] = []
        for stage, part in zip(problem.stages, plan.stages, strict=True):
            own = {}
            for number in stage.epilogue.channel:
                own[number] = k.shared("float32", part.n, offset_bytes=vectors_at_bytes)
                vectors_at_bytes += 4 * part.n
            self._vectors.append(own)
        taps = problem.first.shape.taps if problem.depthwise else 0
        self._taps: Buffer | None = None
        if taps:
            self._taps = k.shared(
                self._element.name, taps * plan.stages[0].n, offset_bytes=vectors_at_bytes
            )
        self._residuals: dict[int, list[list[ir.Value]]] = {}
        """Of the stage at hand: by argument, a run's values each."""
        self._kept: dict[int, list[list[ir.Value]]] = {}
        """Results of stages that later ones add."""
        self.direct = direct_of(problem, plan)
        """Which stages' sums do not go through shared memory."""
        self._unstored: tuple[int, list[list[ir.Value]]] | None = None
        """A stage's result that is to go to global memory, too, and has not yet."""

    # ---- before the stages ----------------------------------------------------------------------

    def load_vectors(self) -> None:
        """Bring this block's part of every channel vector into shared memory, asynchronously."""
        for stage, part, own in zip(
            self._problem.stages, self._plan.stages, self._vectors, strict=True
        ):
            channels = stage.shape.out_channels
            width = min(widest(channels), RUN)
            for number, shared in own.items():
                source = self._k.arguments[number].buffer
                for copy, exists in self._shares(part.n // width):
                    channel = self._rank * part.n + copy * width
                    live = channel < channels if self._ragged(channels, part) else TRUE
                    with guard(exists):
                        instructions.copy_async(
                            shared, copy * width, source, channel, width, live=live
                        )

    def load_taps(self) -> None:
        """Bring this block's part of a depthwise first stage's weights into shared memory."""
        stage, part = self._problem.stages[0], self._plan.stages[0]
        channels, width = stage.shape.out_channels, min(widest(stage.shape.out_channels), RUN)
        source, per_tap = self._k.arguments[stage.weight].buffer, part.n // width
        for copy, exists in self._shares(stage.shape.taps * per_tap):
            tap, column = copy // per_tap, (copy % per_tap) * width
            channel = self._rank * part.n + column
            live = channel < channels if self._ragged(channels, part) else TRUE
            if self._taps is not None:
                with guard(exists):
                    copy_in(
                        self._taps, tap * part.n + column, source, tap * channels + channel,
                        width, live=live,
                    )  # fmt: skip

    def clear_padding(self) -> None:
        """Zeros beyond the channels of every later stage's input."""
        for index in range(1, len(self._plan.stages)):
            k, padded = self._problem.stages[index].shape.k, self._plan.stages[index].padded_k
            buffer = self._inputs[index]
            if k == padded or buffer is None or self._plan.window_of_stage(index) is not None:
                continue
            count = padded - k
            for item, exists in self._shares(self._plan.stages[index].m * count):
                with guard(exists):
                    offset = (item // count) * self._plan.row(index) + (item % count + k)
                    buffer.store(offset, zero_of(buffer.dtype))

    def load_pieces(self, index: int) -> None:
        """Copy what a later stage reads from global memory into its input; zeros beyond M."""
        for piece in self._problem.stages[index].pieces:
            if piece.argument is not None:
                self._load_piece(index, piece, piece.argument)

    def _load_piece(self, index: int, piece: Piece, number: int) -> None:
        argument, buffer = self._k.arguments[number], self._inputs[index]
        if buffer is None:
            return
        per_row = piece.channels // piece.vector
        for copy, exists in self._shares(self._plan.tile.block_m * per_row):
            row, column = copy // per_row, (copy % per_row) * piece.vector
            pixel = self._pixels[index].at(row)
            with guard(exists):
                copy_in(
                    buffer, row * self._plan.row(index) + column + piece.first,
                    argument.buffer, pixel.flat * argument.pitch_or_fail() + column,
                    piece.vector, live=pixel.exists(),
                )  # fmt: skip

    def _shares(self, count: int) -> list[tuple[Int, Bool]]:
        """The items of `count` that fall to a thread, and whether each exists."""
        threads = self._plan.threads
        found = []
        for i in range(-(-count // threads)):
            item = self._k.thread + i * threads
            found.append((item, item < count if (i + 1) * threads > count else TRUE))
        return found

    def _ragged(self, channels: int, part: StagePlan) -> bool:
        """Whether some block's part of a stage goes beyond the last channel."""
        return part.n * self._plan.tile.cluster_n != channels

    # ---- a stage --------------------------------------------------------------------------------

    def rounded(self, index: int, first: int, end: int) -> bool:
        """Whether channels [first, end) of a stage's input are rounded to TF32 already."""
        if index == 0:
            return all(source.rounded for source in self._problem.first.sources)
        pieces = self._problem.stages[index].pieces
        return all(
            p.stage is not None or p.rounded
            for p in pieces
            if p.first < end and first < p.first + p.channels
        )

    def _runs(self, index: int) -> list[Run]:
        """A thread's runs of a stage; one that does not exist stands for the first."""
        if self.direct[index]:
            return self._runs_of_fragments(self._plan.stages[index])
        per_row = self._plan.stages[index].n // RUN
        runs = []
        for item, exists in self._shares(self._plan.stages[index].m * per_row):
            run = select(exists, item, 0)
            runs.append(Run(run // per_row, (run % per_row) * RUN, exists))
        return runs

    def _runs_of_fragments(self, part: StagePlan) -> list[Run]:
        """The runs that a lane's sums are, in the order of `_fragment_sums`."""
        lane, warp = self._k.thread % 32, self._k.thread // 32
        rows = part.m // part.warps_m
        columns = part.n // part.warps_n
        row = (warp % part.warps_m) * rows + lane // 4
        column = (warp // part.warps_m) * columns + (lane % 4) * RUN
        return [
            Run(row + i, column + j, TRUE)
            for i, j in product(range(0, rows, 8), range(0, columns, 16))
        ]

    def load_residuals(self, index: int) -> None:
        """Start the loads of what a stage adds from global memory, before its products."""
        self._residuals = {
            number: [self._residual(index, number, run) for run in self._runs(index)]
            for number in self._problem.stages[index].epilogue.element
            if number < STAGE
        }

    def _residual(self, index: int, number: int, run: Run) -> list[ir.Value]:
        channels = self._problem.stages[index].shape.out_channels
        part = self._plan.stages[index]
        operand = self._k.arguments[number]
        pixel = self._pixels[index].at(run.row)
        channel = self._rank * part.n + run.column
        inside = pixel.exists()
        width = min(RUN, self._problem.vector(number, channels))
        loaded: list[ir.Value] = []
        for i in range(0, RUN, width):
            live = inside
            if self._ragged(channels, part):
                live = live & ((channel + i) < channels)
            offset = pixel.flat * operand.pitch_or_fail() + (channel + i)
            loaded += operand.buffer.load_vector(select(live, offset, 0), width)
        return loaded

    def finish(self, index: int, sums: Fragments | None = None) -> None:
        """Apply a stage's epilogue to its sums (None: staged ones) and hand the result on.

        What goes to other blocks goes first: to global memory it may go while they wait for it, and
        `store_late` is called for that.
        """
        stage = self._problem.stages[index]
        wanted = {n - STAGE for s in self._problem.stages[index + 1 :] for n in s.epilogue.element}
        kept: list[list[ir.Value]] = []
        readers = self._exchange.readers(index)
        late = bool(readers) and self._exchange.several
        if readers:
            self._exchange.connect(index)
        totals = None if sums is None else _fragment_sums(sums)
        for i, run in enumerate(self._runs(index)):
            values = self._values(index, i, run, None if totals is None else totals[i])
            kept.append(values)
            if stage.result is not None and not late:
                self._store(index, stage.result, run, values)
            if readers:
                self._hand_on(index, readers, run, values)
        if index in wanted:
            self._kept[index] = kept
        if stage.result is not None and late:
            self._unstored = (index, kept)

    def store_late(self) -> None:
        """Store the last stage's result to global memory, if that is still to be done."""
        if self._unstored is None:
            return
        index, results = self._unstored
        self._unstored = None
        result = self._problem.stages[index].result
        if result is None:
            return
        for run, values in zip(self._runs(index), results, strict=True):
            self._store(index, result, run, values)

    def _values(
        self, index: int, number: int, run: Run, total: list[ir.Value] | None
    ) -> list[ir.Value]:
        """A run after the epilogue. total: its sum, where it need not be put together."""
        part, stage = self._plan.stages[index], self._problem.stages[index]
        if total is None:
            total = self._sum(part, run) if part.steps else self._convolved(run)
        operands = {
            argument: shared.load_vector(run.column, RUN)
            for argument, shared in self._vectors[index].items()
        }
        for element in stage.epilogue.element:
            if element < STAGE:
                operands[element] = self._residuals[element][number]
            else:
                operands[element] = self._kept_result(index, element - STAGE, number)
        return [
            stage.epilogue.apply(value, {a: v[i] for a, v in operands.items()})
            for i, value in enumerate(total)
        ]

    def _sum(self, part: StagePlan, run: Run) -> list[ir.Value]:
        """A run's sum over the slices of K, in their order."""
        length = part.staged_row
        size = part.m * length
        start = run.row * length + run.column
        total = self.staged.load_vector(start, RUN)
        for i in range(1, part.warps_k):
            more = self.staged.load_vector(start + i * size, RUN)
            total = [arith.addf(a, b) for a, b in zip(total, more, strict=True)]
        return total

    def _convolved(self, run: Run) -> list[ir.Value]:
        """A run of a depthwise first stage: tap by tap, in float32."""
        part, window = self._plan.stages[0], self._plan.window
        read = self._taps_read(run) if window is None else self._taps_of_window(window, run)
        total = [f32(0.0)] * RUN
        for tap, values in enumerate(read):
            if self._taps is not None:
                weights = self._taps.load_vector(run.column + tap * part.n, RUN)
                total = [
                    instructions.fma(x, widen(w), t)
                    for x, w, t in zip(values, weights, total, strict=True)
                ]
        return total

    def _taps_of_window(self, window: Window, run: Run) -> list[list[ir.Value]]:
        """A run's inputs at every tap, from the window."""
        start = (run.row // window.columns) * window.pixel(window.columns)
        start = start + ((run.row % window.columns) * window.pitch + run.column)
        taps = product(range(window.shape.kernel_h), range(window.shape.kernel_w))
        read = [self._window.load_vector(start + window.tap(*tap), RUN) for tap in taps]
        return [[widen(value) for value in values] for values in read]

    def _taps_read(self, run: Run) -> list[list[ir.Value]]:
        """A run's inputs at every tap, from global memory."""
        shape, part = self._problem.first.shape, self._plan.stages[0]
        source = self._problem.first.sources[0]
        operand = self._k.arguments[source.argument]
        pixel = pixel_at(
            self._pixels[0].at(run.row).flat, shape, self._plan.tile.block_m, use_mask=False
        )
        channel = self._rank * part.n + run.column
        width = min(RUN, shape.source_vector)
        read: list[list[ir.Value]] = []
        for tap in range(shape.taps):
            kh, kw = divmod(tap, shape.kernel_w)
            row, column = pixel.top + kh * shape.dilation_h, pixel.left + kw * shape.dilation_w
            live = pixel.inside & (row < shape.height) & (column < shape.width)
            place = (pixel.image * shape.height + row) * shape.width + column
            start = place * operand.pitch_or_fail() + channel
            values: list[ir.Value] = []
            for i in range(0, RUN, width):
                own = live
                if self._ragged(shape.out_channels, part):
                    own = own & ((channel + i) < shape.out_channels)
                loaded = operand.buffer.load_vector(select(own, start + i, 0), width)
                values += [select_float(own, widen(v), f32(0.0)) for v in loaded]
            read.append(values)
        return read

    def _kept_result(self, index: int, earlier: int, number: int) -> list[ir.Value]:
        if self._plan.stages[earlier].n != self._plan.stages[index].n:
            refuse(self._location(), "adds the result of a stage of another number of channels")
        return self._kept[earlier][number]

    def _location(self) -> ir.Operation:
        generic = self._problem.stages[0].epilogue.generic
        return generic if generic is not None else self._k.module.operation

    def _channel(self, index: int, run: Run) -> Int:
        """The first channel of a run, of those of the whole stage."""
        return self._rank * self._plan.stages[index].n + run.column

    def _store(self, index: int, result: int, run: Run, values: list[ir.Value]) -> None:
        """Store a run to global memory, in the widest stores its alignment allows."""
        channels, channel = (
            self._problem.stages[index].shape.out_channels,
            self._channel(index, run),
        )
        output = self._k.arguments[result]
        pixel = self._pixels[index].at(run.row)
        width = min(RUN, self._problem.vector(result, channels))
        if self._problem.round_results:
            values = [instructions.from_bits(instructions.round_to_tf32(v)) for v in values]
        with guard(run.exists & pixel.exists()):
            for i in range(0, RUN, width):
                live = TRUE
                if self._ragged(channels, self._plan.stages[index]):
                    live = (channel + i) < channels
                offset = pixel.flat * output.pitch_or_fail() + (channel + i)
                with guard(live):
                    output.buffer.store_vector(offset, values[i : i + width])

    def _hand_on(
        self, index: int, readers: list[tuple[int, Piece]], run: Run, values: list[ir.Value]
    ) -> None:
        """Store a run to the inputs of the stages that read it, in every block of the cluster."""
        channel = self._channel(index, run)
        if not self._exact and self._element is FLOAT32:
            values = [instructions.from_bits(instructions.round_to_tf32(v)) for v in values]
        region, there = self._pixels[index], run.exists
        if isinstance(region, Region):  # the next stage's padding is zeros, not what this one gives
            image = region.at(run.row).exists()
            zero = arith.constant(values[0].type, 0.0)
            values = [select_float(image, v, zero) for v in values]
            if self._plan.stages[index].m > region.count:
                there = there & (run.row < region.count)
        for later, piece in readers:
            width = neighbours(piece)
            for i in range(0, RUN, width):
                within = channel + i - piece.offset
                offset = self._row_in(index, later, run.row) + within + piece.first
                with guard(there & (within < piece.channels)):
                    self._exchange.store(later, offset, values[i : i + width])

    def _row_in(self, index: int, later: int, row: Int) -> Int:
        """Where a pixel of a stage's result begins in the input of a later stage."""
        region = self._pixels[index]
        return region.offset(row) if isinstance(region, Region) else row * self._plan.row(later)


def _fragment_sums(sums: Fragments) -> list[list[ir.Value]]:
    """The runs in a lane's fragments of paired channels: row by row, pair by pair."""
    return [
        [*a[2 * half : 2 * half + 2], *b[2 * half : 2 * half + 2]]
        for row in sums
        for half in (0, 1)
        for a, b in zip(row[::2], row[1::2], strict=True)
    ]
