"""A kernel of the `conv2d` family whose blocks load steps of K.

Rows of A are output pixels, columns of B output channels, K runs over (kh, kw, c). A block loads
steps of K into a ring of buffers (`conv2d_load.py`), multiplies them fragment by fragment
(`mma.sync` of float16 or TF32; three products an element pair for `fp32`), and applies the
dispatch's epilogue to the accumulators before it stores them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import instructions, products
from yolomlir.codegen.gpu.builder import Bool, Buffer, Int, KernelBuilder, guard, loop, select
from yolomlir.codegen.gpu.bulk_weights import BulkRing, Route
from yolomlir.codegen.gpu.conv2d_exchange import PartialSums
from yolomlir.codegen.gpu.conv2d_load import InputLoader, WeightLoader, swizzle
from yolomlir.codegen.gpu.conv2d_store import OutputStore, Run
from yolomlir.codegen.gpu.conv2d_tile import STAGING_PADDING, ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvProblem
from yolomlir.codegen.gpu.element import FLOAT32
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.products import Fragments, Operand
from yolomlir.target import Target


class ConvKernel:
    """One kernel under construction; `build` runs its phases in order."""

    def __init__(
        self,
        problem: ConvProblem,
        tile: ConvTile,
        target: Target,
        precision: str,
        name: str,
        location: ir.Location,
    ) -> None:
        self.problem, self.tile = problem, tile
        self.shape = problem.shape
        self.element = problem.shape.element
        self.overlap = target.programmatic_launch
        self.exact = precision == "fp32"
        order = tile.weight_order(problem.shape)
        self._builder = KernelBuilder(
            name,
            [
                dataclasses.replace(p, packed=order) if i == problem.weight else p
                for i, p in enumerate(problem.parameters)
            ],
            threads=tile.threads,
            shared_bytes=self._main_bytes() + tile.vector_bytes(len(problem.epilogue.channel)),
            location=location,
            attributes=_cluster_attribute(self._cluster()),
        )

    def build(self) -> Kernel:
        """The kernel."""
        with self._builder as k:
            self._place(k)
            prologue = self._prologue()
            accumulators = self._accumulate(prologue)
            if self.overlap and not self.tile.release_early:
                instructions.release_dependents()
            if self.tile.is_staged:
                self._staged_epilogue(k, accumulators)
            else:
                self._direct_epilogue(accumulators)
        return k.finish(self._grid(), cluster=self._cluster(), programmatic=self.overlap)

    # ---- what a convolution of an image does in its own way, with most phases -------------------

    @property
    def paired(self) -> bool:
        """Whether a lane has four neighbouring channels of two fragments."""
        return self.tile.pairs(self.shape)

    def _main_bytes(self) -> int:
        """Shared memory of all but the vectors by channel."""
        return self.tile.main_bytes(self.shape)

    def _grid(self) -> tuple[int, int, int]:
        return self.tile.grid(self.shape)

    def _cluster(self) -> tuple[int, int, int]:
        return self.tile.sharers, 1, self.tile.cluster_k

    def _accumulate(self, ahead: int) -> Fragments:
        """The products, once `ahead` steps are on their way."""
        if self.tile.unrolled(self.shape):
            return self._unrolled_loop(ahead)
        return self._rolled_loop()

    def _store_lane(self, first: Int, offset: int, runs: Sequence[Run]) -> None:
        """Store runs of the warp's pixel l / 4 + `offset`; `first` is pixel l / 4."""
        self.store.store_row(first + offset, runs)

    def _store_row(self, row: Int, runs: Sequence[Run]) -> None:
        """Store runs of the block's pixel `row`."""
        self.store.store_row(self.first_pixel + row, runs)

    # ---- phases ---------------------------------------------------------------------------------

    def _place(self, k: KernelBuilder) -> None:
        """Which part of the output and of shared memory this thread has to do with."""
        t = self.tile
        self.first_pixel = k.block_x * t.block_m
        self.first_channel = k.block_y * t.block_n
        self.rank = k.block_z if t.cluster_k > 1 else Int.of(0)
        self.first_step = self.rank * t.k_tiles(self.shape)
        self.lane, warp = k.thread % 32, k.thread // 32
        self.warp_row = (warp % t.warps_m) * t.warp_m
        self.warp_column = (warp // t.warps_m % t.warps_n) * t.warp_n
        self.warp_slice = warp // (t.warps_m * t.warps_n)
        main_bytes = t.main_bytes(self.shape)
        self.ring = k.shared(self.element.name, t.buffers(self.shape) * t.stage_elements())
        if t.cluster_k > 1:
            self.sums = PartialSums(k, t, self.rank, t.pipeline_bytes(self.shape))
            self.sums.open()
        self.store = OutputStore(k, self.problem, t, self.first_channel, main_bytes)
        self.bulk = self._bulk_ring(k)
        if self.bulk is not None:
            self.bulk.open()
        else:
            self.weights = WeightLoader(
                t, self.shape, k.arguments[self.problem.weight].buffer, self.ring,
                k.thread, self.first_channel, paired=self.paired,
            )  # fmt: skip
        self.inputs = InputLoader(
            t, self.problem, k.arguments, self.ring, k.thread, self.first_pixel
        )
        self._place_fragments()

    def _bulk_ring(self, k: KernelBuilder) -> BulkRing | None:
        """The weights' slots where bulk copies fill them: parts of the pipeline's stages."""
        t, shape = self.tile, self.shape
        layout = t.ring(shape)
        if layout is None:
            return None
        size, inputs = t.block_n * t.block_k, t.block_m * t.block_k
        first = k.block_y * (shape.k // t.block_k) + self.first_step
        route = Route(
            k.arguments[self.problem.weight].buffer, self.ring, size,
            source=lambda step: (first + step) * size,
            target=lambda slot: slot * t.stage_elements() + inputs,
        )  # fmt: skip
        rank = k.block_x % t.sharers
        return BulkRing(k, layout, route, rank, t.main_bytes(shape) - layout.barrier_bytes)

    def _place_fragments(self) -> None:
        """Offsets in a stage that this lane gives `ldmatrix`, for the first product of a step.

        A's four matrices are rows 0-7 and 8-15 of the first chunk, then of the second; B's are the
        two chunks of channels 0-7, then of 8-15. Later products are reached by an exclusive or of
        the chunk's number, since rows begin at multiples of the row length.
        """
        t, lane = self.tile, self.lane
        own = self.warp_slice * (2 * self._products())
        size = self.element.chunk

        def offset(row: Int, chunk: Int) -> Int:
            return row * t.block_k + (swizzle(row, chunk ^ own, t.block_k // size) * size)

        self.a_offset = self.warp_row * t.block_k + offset(lane % 16, lane // 16)
        b_base = self.warp_column * t.block_k
        pairs = lane % 8 + (lane // 16) * 8
        self.b_offset = b_base + offset(pairs, (lane // 8) % 2)
        self.b_last_offset = b_base + offset(lane % 8, (lane // 8) % 2)

    def _prologue(self) -> int:
        """Start the first steps; how many. Weights do not depend on earlier kernels, so they come
        before the wait."""
        count = self._ahead()
        stages = [Int.of(s * self.tile.stage_elements()) for s in range(count)]
        if self.bulk is not None:
            self.bulk.fill()
        else:
            for step, stage in enumerate(stages):
                self.weights.load(self.first_step + step, stage)
        self.store.load_vectors()
        if self.overlap:
            instructions.wait_for_predecessors()
            if self.tile.release_early:
                instructions.release_dependents()
        for step, stage in enumerate(stages):
            self.inputs.load(self.first_step + step, stage)
            instructions.copy_commit()
        return count

    def _ahead(self) -> int:
        """Steps that are loaded before the first product."""
        steps, buffers = self.tile.k_tiles(self.shape), self.tile.buffers(self.shape)
        return steps if steps <= buffers else buffers - 1

    def _load(self, step: Int, stage: Int) -> None:
        if self.bulk is None:
            self.weights.load(self.first_step + step, stage)
        self.inputs.load(self.first_step + step, stage)

    def _begin_step(self, step: Int) -> None:
        """Behind a barrier of the block: bulk copies go on."""
        if self.bulk is not None:
            self.bulk.advance(step)

    def _wait_for_weights(self, step: Int) -> None:
        if self.bulk is not None:
            self.bulk.wait(step)

    def _unrolled_loop(self, ahead: int) -> Fragments:
        steps, buffers = self.tile.k_tiles(self.shape), self.tile.buffers(self.shape)
        accumulators = self._zero()
        committed = ahead
        for step in range(steps):
            instructions.copy_wait(committed - step - 1)
            instructions.barrier()
            self._begin_step(Int.of(step))
            if committed < steps:
                stage = committed % buffers * self.tile.stage_elements()
                self._load(Int.of(committed), Int.of(stage))
                instructions.copy_commit()
                committed += 1
            self._wait_for_weights(Int.of(step))
            stage = step % buffers * self.tile.stage_elements()
            accumulators = self._multiply_step(Int.of(stage), accumulators)
        return accumulators

    def _rolled_loop(self) -> Fragments:
        t = self.tile
        steps, size = t.k_tiles(self.shape), t.stage_elements()
        ahead, end = t.stages - 1, t.stages * t.stage_elements()

        def after(stage: Int) -> Int:
            moved = stage + size
            return select(moved.equals(end), 0, moved)

        flat = [v for row in self._zero() for column in row for v in column]
        start = [*flat, Int.of(0), Int.of(ahead * size)]
        with loop(0, steps, carried=start) as it:
            read, write = Int.of(it.carried[-2]), Int.of(it.carried[-1])
            instructions.copy_wait(ahead - 1)
            instructions.barrier()
            self._begin_step(it.index)
            with guard((it.index + ahead) < steps):
                self._load(it.index + ahead, write)
            instructions.copy_commit()
            self._wait_for_weights(it.index)
            result = self._multiply_step(read, self._fragments(it.carried[:-2]))
            values = [v for row in result for column in row for v in column]
            it.advance([*values, after(read), after(write)])
        return self._fragments(it.results[:-2])

    # ---- products -------------------------------------------------------------------------------

    def _products(self) -> int:
        """Products of a warp a step, one after the other along K."""
        return self.tile.block_k // self.element.k_step // self.tile.warps_k

    def _zero(self) -> Fragments:
        return products.zeros(self.tile.warp_m // 16, self.tile.warp_n // 8)

    def _fragments(self, values: Sequence[Int | ir.Value]) -> Fragments:
        rows, columns = self.tile.warp_m // 16, self.tile.warp_n // 8
        it = iter([v.value if isinstance(v, Int) else v for v in values])
        return [[[next(it) for _ in range(4)] for _ in range(columns)] for _ in range(rows)]

    def _multiply_step(self, stage: Int, accumulators: Fragments) -> Fragments:
        """Add a step's products to the accumulators."""
        for product in range(self._products()):
            a = self._load_a(stage, product)
            b = self._load_b(stage, product)
            accumulators = [
                [products.multiply(x, y, c) for y, c in zip(b, row, strict=True)]
                for x, row in zip(a, accumulators, strict=True)
            ]
        return accumulators

    def _load_a(self, stage: Int, product: int) -> list[Operand]:
        offset = stage + (self.a_offset ^ (product * self.element.k_step))
        rows = [
            instructions.load_matrices(self.ring, offset + i * 16 * self.tile.block_k, 4)
            for i in range(self.tile.warp_m // 16)
        ]
        rounded = all(source.rounded for source in self.problem.sources)
        return [self._split(values, rounded=rounded) for values in rows]

    def _load_b(self, stage: Int, product: int) -> list[Operand]:
        t = self.tile
        base = stage + t.block_m * t.block_k
        pair = base + (self.b_offset ^ (product * self.element.k_step))
        columns = t.warp_n // 8
        loaded: list[list[ir.Value]] = []
        for j in range(0, columns - 1, 2):
            values = instructions.load_matrices(self.ring, pair + j * 8 * t.block_k, 4)
            loaded += [values[:2], values[2:]]
        if columns % 2:
            last = base + (self.b_last_offset ^ (product * self.element.k_step))
            last = last + (columns - 1) * 8 * t.block_k
            loaded.append(instructions.load_matrices(self.ring, last, 2))
        return [self._split(values, rounded=True) for values in loaded]

    def _split(self, values: list[ir.Value], *, rounded: bool) -> Operand:
        return products.split(values, self.element, exact=self.exact, rounded=rounded)

    # ---- epilogues ------------------------------------------------------------------------------

    def _direct_epilogue(self, accumulators: Fragments) -> None:
        """Store from the registers: a lane has two neighbours of a row at a time, or four."""
        instructions.copy_wait(0)
        row = self.first_pixel + self.warp_row + self.lane // 4
        together = 2 if self.paired else 1
        column = self.warp_column + (self.lane % 4) * (2 * together)
        for i, fragments in enumerate(accumulators):
            for half in (0, 1):
                parts = [c[2 * half : 2 * half + 2] for c in fragments]
                runs = [
                    (column + 8 * j, [v for part in parts[j : j + together] for v in part])
                    for j in range(0, len(parts), together)
                ]
                self._store_lane(row, 16 * i + 8 * half, runs)

    def _staged_epilogue(self, k: KernelBuilder, accumulators: Fragments) -> None:
        """Add the partial sums of warps and blocks through shared memory, then store whole rows."""
        t, width = self.tile, self.store.vector
        instructions.copy_wait(0)
        if t.cluster_k > 1:
            self._store_over_cluster(k, accumulators)
            return
        staged = self._stage(k, accumulators)
        for row, column, inside in self._runs(k.thread, t.block_m, width):
            with guard(inside):
                total = self._sum_of_warps(staged, row, column, width)
                self._store_row(row, [(column, total)])

    def _stage(self, k: KernelBuilder, accumulators: Fragments) -> Buffer:
        """The warps' sums in shared memory, in place of the ring; the block's threads meet."""
        t = self.tile
        length = t.block_n + STAGING_PADDING
        staged = k.shared("float32", t.staging_elements())
        instructions.barrier()  # the ring is free
        row = self.warp_slice * t.block_m + self.warp_row + self.lane // 4
        start = row * length + self.warp_column + (self.lane % 4) * 2
        for i, fragments in enumerate(accumulators):
            for j, c in enumerate(fragments):
                for half in (0, 1):
                    offset = start + ((16 * i + 8 * half) * length + 8 * j)
                    staged.store_vector(offset, c[2 * half : 2 * half + 2])
        instructions.barrier()
        return staged

    def _store_over_cluster(self, k: KernelBuilder, accumulators: Fragments) -> None:
        """Add the warps' sums in each block, then the blocks', in their order."""
        t, width = self.tile, self.store.vector
        self.sums.connect()
        if t.warps_k == 1:
            self.sums.send_fragments(accumulators, self.warp_row, self.warp_column)
        else:
            staged = self._stage(k, accumulators)
            for row, column, inside in self._runs(k.thread, t.block_m, FLOAT32.chunk):
                with guard(inside):
                    total = self._sum_of_warps(staged, row, column, FLOAT32.chunk)
                    self.sums.send(row, column, total)
        self.sums.receive()
        first = self.first_pixel + self.rank * self.sums.rows
        for row, column, inside in self._runs(k.thread, self.sums.rows, width):
            with guard(inside):
                total = _add(self.sums.parts(row, column, width))
                self.store.store_row(first + row, [(column, total)])

    def _runs(self, thread: Int, rows: int, width: int) -> Iterator[tuple[Int, Int, Bool]]:
        """The runs of `width` channels that fall to a thread: row, column, whether it exists."""
        threads, per_row = self.tile.threads, self.tile.block_n // width
        runs = rows * per_row
        for i in range(-(-runs // threads)):
            run = thread + i * threads
            inside = run < runs if (i + 1) * threads > runs else Bool(None, True)
            yield run // per_row, (run % per_row) * width, inside

    def _sum_of_warps(self, staged: Buffer, row: Int, column: Int, width: int) -> list[ir.Value]:
        """One run's sum over the warps' slices of K, in their order."""
        t = self.tile
        length = t.block_n + STAGING_PADDING
        first, between = row * length + column, t.block_m * length
        return _add([staged.load_vector(first + i * between, width) for i in range(t.warps_k)])


def _add(parts: list[list[ir.Value]]) -> list[ir.Value]:
    """The elementwise sum of vectors, from the first to the last."""
    total = parts[0]
    for more in parts[1:]:
        total = [arith.addf(a, b) for a, b in zip(total, more, strict=True)]
    return total


def _cluster_attribute(cluster: tuple[int, int, int]) -> dict[str, ir.Attribute]:
    if cluster == (1, 1, 1):
        return {}
    return {"nvvm.cluster_dim": ir.Attribute.parse(f"array<i32: {', '.join(map(str, cluster))}>")}
