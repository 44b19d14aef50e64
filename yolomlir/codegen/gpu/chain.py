"""The `chain` family: a convolution or two and the 1x1 convolutions that consume it, in one kernel.

A cluster of blocks computes a tile of pixels through every stage (`chain_tile.py` says how the work
is divided). Weights of all stages stream through one ring of buffers, so that those of a stage
arrive while the stage before is computed; results that a later stage reads go to the shared memory
of every block of the cluster (`chain_store.py`), and to global memory only where others read them.
"""

from __future__ import annotations

from yolomlir.bindings import func, ir
from yolomlir.codegen.gpu import instructions, mbarrier, products
from yolomlir.codegen.gpu.builder import TRUE, Buffer, Int, KernelBuilder, guard
from yolomlir.codegen.gpu.chain_exchange import ClusterExchange
from yolomlir.codegen.gpu.chain_input import WindowLoader, WindowReader
from yolomlir.codegen.gpu.chain_pixels import PixelMap, Region
from yolomlir.codegen.gpu.chain_problem import STAGE, ChainProblem, match_chain
from yolomlir.codegen.gpu.chain_space import default_tile, likely_tiles
from yolomlir.codegen.gpu.chain_store import ChainStore
from yolomlir.codegen.gpu.chain_tile import ChainPlan, ChainShape, ChainTile, objection, plan
from yolomlir.codegen.gpu.chain_weights import bulk_ring, with_orders
from yolomlir.codegen.gpu.conv2d_load import InputLoader, WeightLoader
from yolomlir.codegen.gpu.element import FLOAT32
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.products import Fragments, Operand
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UserError
from yolomlir.target import Target


@register_family("chain")
def generate_chain(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a `chain` dispatch, with the tile of its `yolo.tile` or the default one.

    Raises UnsupportedError for another form than `chain_problem.py` reads, UserError for a tile
    that is not legal.
    """
    problem = match_chain(function.operation, precision=precision)
    shape = shape_of(problem)
    tile = tile_or(function.operation, ChainTile, lambda: default_tile(shape, target, precision))
    reason = objection(tile, shape, target, precision)
    if reason is not None:
        raise UserError(f"illegal tile {tile}: {reason}", where=name)
    return ChainKernel(problem, tile, target, precision, name, function.operation.location).build()


def parse(function: ir.Operation) -> ChainShape:
    """The shape of a `chain` dispatch at the linalg level, on which its tile depends."""
    return shape_of(match_chain(function, precision="tf32"))


def shape_of(problem: ChainProblem) -> ChainShape:
    """What the choice of a tile depends on."""
    kept = {number - STAGE for s in problem.stages for number in s.epilogue.element}
    later = tuple((s.shape.k, s.shape.out_channels) for s in problem.stages[1:])
    added = tuple(sorted(k for k in kept if k >= 0))
    return ChainShape(problem.first.shape, later, added, problem.depthwise, problem.inner)


class ChainKernel:
    """One kernel under construction; `build` runs its phases in order."""

    def __init__(
        self,
        problem: ChainProblem,
        tile: ChainTile,
        target: Target,
        precision: str,
        name: str,
        location: ir.Location,
    ) -> None:
        vectors = tuple(len(stage.epilogue.channel) for stage in problem.stages)
        self.problem = problem
        self.plan: ChainPlan = plan(tile, shape_of(problem), vectors)
        self.element = problem.first.shape.element
        self.overlap = target.programmatic_launch
        self.exact = precision == "fp32"
        cluster = f"array<i32: 1, {tile.cluster_n}, 1>"
        self._builder = KernelBuilder(
            name,
            with_orders(problem, self.plan),
            threads=self.plan.threads,
            shared_bytes=self.plan.shared_bytes,
            location=location,
            attributes={"nvvm.cluster_dim": ir.Attribute.parse(cluster)}
            if tile.cluster_n > 1
            else {},
        )

    def build(self) -> Kernel:
        """The kernel."""
        with self._builder as k:
            self._place(k)
            committed = self._prologue(k)
            self._steps(committed)
        blocks = self.plan.tile.cluster_n
        return k.finish(
            (self.plan.clusters, blocks, 1), cluster=(1, blocks, 1), programmatic=self.overlap
        )

    # ---- phases ---------------------------------------------------------------------------------

    def _place(self, k: KernelBuilder) -> None:
        """Shared memory, and what of the work this thread has to do with."""
        p = self.plan
        self.pixels = PixelMap(p, k.block_x)
        regions = _regions(p, self.pixels)
        self.rank = k.block_y if p.tile.cluster_n > 1 else Int.of(0)
        self.lane, self.warp = k.thread % 32, k.thread // 32
        bytes_, dtype = self.element.bytes, self.element.name
        end = bytes_ * sum(p.ring)
        self.ring = k.shared(dtype, sum(p.ring))
        staged = k.shared("float32", p.scratch_bytes // 4, offset_bytes=end)
        self.scratch = staged
        if self.element is not FLOAT32:  # the same memory for a window
            self.scratch = k.shared(dtype, p.scratch_bytes // bytes_, offset_bytes=end)
        end += p.scratch_bytes
        inputs: list[Buffer | None] = [None]
        for size in p.inputs:
            inputs.append(k.shared(dtype, size, offset_bytes=end))
            end += bytes_ * size
        self.inputs = inputs
        self.exchange = ClusterExchange(k, self.problem, p, inputs, self.rank)
        self.exchange.open()
        self.store = ChainStore(
            k, self.problem, p, staged, self.scratch, inputs, self.exchange, regions,
            self.rank, end, exact=self.exact,
        )  # fmt: skip
        self.bulk = bulk_ring(k, self.problem, p, self.ring, self.rank)
        if self.bulk is not None:
            self.bulk.open()
        self.weights = {
            i: WeightLoader(
                p.loader_tile(i), stage.shape, k.arguments[stage.weight].buffer, self.ring,
                k.thread, self.rank * p.stages[i].n, paired=self.store.direct[i],
            )
            for i, stage in enumerate(self.problem.stages)
            if p.stages[i].steps and self.bulk is None
        }  # fmt: skip
        self.source: InputLoader | None = None
        self.window: WindowLoader | None = None
        if p.window is not None:
            first_channel = self.rank * p.stages[0].n if self.problem.depthwise else 0
            self.window = WindowLoader(
                p.window, self.problem.first, k.arguments, self.scratch, k.thread, p.threads,
                regions[0], first_channel,
            )  # fmt: skip
        elif not self.problem.depthwise:
            self.source = InputLoader(
                p.loader_tile(0), self.problem.first, k.arguments, self.ring, k.thread,
                self.pixels.first_pixel,
            )  # fmt: skip
        self.rounds_window = self.element is FLOAT32 and not (
            self.problem.depthwise or self.exact or self.store.rounded(0, 0, 0)
        )
        self.order = [(i, s) for i, stage in enumerate(p.stages) for s in range(stage.steps)]

    def _prologue(self, k: KernelBuilder) -> int:
        """Start the first steps; how many. Weights do not depend on earlier kernels, so they come
        before the wait."""
        p = self.plan
        count = p.steps if p.steps <= p.slots else p.slots - 1
        if self.bulk is not None:
            self.bulk.fill()
        for step in range(count if self.bulk is None else 0):
            self._load_weights(step)
        self.store.load_vectors()
        self.store.clear_padding()
        if self.problem.depthwise:
            self.store.load_taps()
            if self.window is None:
                instructions.copy_commit()
        if self.overlap:
            instructions.wait_for_predecessors()
            if p.tile.release_early:
                instructions.release_dependents()
        if self.window is not None:
            self.window.load()
            if self.problem.depthwise:
                instructions.copy_commit()
        for step in range(count):
            self._load_input(step)
            for later in range(1, len(p.stages)):
                first = self.order.index((later, 0))
                if step == min(first, count - 1):
                    self.store.load_pieces(later)
            instructions.copy_commit()
        return count

    def _load_weights(self, step: int) -> None:
        index, within = self.order[step]
        slot = self.plan.slot(step)
        if not self.plan.loaded_rows(index):  # the loader leaves room for an input's tile
            slot -= self.plan.tile.block_m * self.plan.stages[index].block_k
        self.weights[index].load(Int.of(within), Int.of(slot))

    def _load(self, step: int) -> None:
        if self.bulk is None:
            self._load_weights(step)
        self._load_input(step)

    def _load_input(self, step: int) -> None:
        index, within = self.order[step]
        if index == 0 and self.source is not None:
            self.source.load(Int.of(within), Int.of(self.plan.slot(step)))

    def _steps(self, committed: int) -> None:
        """Every step of every stage, and each stage's epilogue after its last."""
        p = self.plan
        if self.problem.depthwise:
            self.store.load_residuals(0)
            instructions.copy_wait(committed)
            instructions.barrier()
            self.store.finish(0)
        warps: _Warps | None = None
        sums: list[Fragments] = []
        for step, (index, within) in enumerate(self.order):
            stage = p.stages[index]
            if within == 0 and index == 0 and self.window is not None:
                self.store.load_residuals(index)  # they arrive with the window
            if p.meets(step, index, within):
                instructions.copy_wait(committed - step - 1)
                if step == 0 and self.window is not None and self.rounds_window:
                    self.window.round()
                if p.overwrites_input(step):
                    mbarrier.reuse_for_copies()
                instructions.barrier()
            if self.bulk is not None:
                self.bulk.advance(Int.of(step))
            if committed < p.steps:
                self._load(committed)
                instructions.copy_commit()
                committed += 1
            if warps is None or within == 0:
                if index or self.window is None:
                    self.store.load_residuals(index)
                warps = _Warps(self, index)
                sums = warps.zeros()
            if within == 0:
                self.store.store_late()
                self.exchange.receive(index)
            if self.bulk is not None:
                self.bulk.wait(Int.of(step))
            sums = warps.multiply_step(index, within, p.slot(step), sums)
            if within < stage.steps - 1:
                continue
            if self.overlap and step == p.steps - 1 and not p.tile.release_early:
                instructions.release_dependents()
            if self.store.direct[index]:
                self.store.finish(index, warps.total(sums))
                continue
            if index == 0 and self.window is not None:
                instructions.barrier()  # the sums go where the window was
            warps.stage_sums(self.store.staged, warps.total(sums))
            instructions.barrier()
            self.store.finish(index)


def _regions(plan: ChainPlan, pixels: PixelMap) -> list[PixelMap | Region]:
    """The pixels of every stage: those of the tile, and of the windows of them before that."""
    found: list[PixelMap | Region] = [pixels]
    for window in reversed(plan.windows[1:]):
        found.insert(0, Region(window, of=found[0]))
    return found + [pixels] * (len(plan.stages) - len(found))


class _Warps:
    """What one warp multiplies of a stage: offsets of its fragments, products, sums."""

    def __init__(self, kernel: ChainKernel, index: int) -> None:
        stage = kernel.plan.stages[index]
        self._kernel, self._stage = kernel, stage
        tile = kernel.plan.tile
        used = stage.warps_m * stage.warps_n * stage.warps_k
        self._active = kernel.warp < used if used < tile.warps else TRUE
        warp = kernel.warp % used if used < tile.warps else kernel.warp
        self.rows = stage.m // 16 // stage.warps_m
        self.columns = stage.n // 8 // stage.warps_n
        self._row = (warp % stage.warps_m) * (16 * self.rows)
        self._column = (warp // stage.warps_m % stage.warps_n) * (8 * self.columns)
        self._slice = warp // (stage.warps_m * stage.warps_n)
        self._reader: WindowReader | None = None
        window = kernel.plan.window_of_stage(index)
        if window is not None:
            self._reader = WindowReader(window, self._row, self.rows, kernel.lane, self._slice)

    def zeros(self) -> list[Fragments]:
        """Accumulators; several where one alone would make every product wait for the last."""
        ways = max(1, 4 // (self.rows * self.columns))
        return [products.zeros(self.rows, self.columns) for _ in range(ways)]

    def multiply_step(
        self, index: int, within: int, slot: int, sums: list[Fragments]
    ) -> list[Fragments]:
        """Add a step's products to the sums, in turn."""
        sums = list(sums)
        count = self._stage.products(within) // self._stage.warps_k
        for product in range(count):
            a = self._load_a(index, within, slot, product, count)
            b = self._load_b(index, slot, product, count)
            way = product % len(sums)
            sums[way] = [
                [products.multiply(x, y, c) for y, c in zip(b, row, strict=True)]
                for x, row in zip(a, sums[way], strict=True)
            ]
        return sums

    @staticmethod
    def total(sums: list[Fragments]) -> Fragments:
        """The sum of the accumulators."""
        total = sums[0]
        for more in sums[1:]:
            total = products.add(total, more)
        return total

    def stage_sums(self, staged: Buffer, total: Fragments) -> None:
        """Put this warp's sums where `ChainStore` adds those of all slices of K."""
        length = self._stage.staged_row
        lane = self._kernel.lane
        row = self._slice * self._stage.m + self._row + lane // 4
        start = row * length + self._column + (lane % 4) * 2
        with guard(self._active):
            for i, fragments in enumerate(total):
                for j, c in enumerate(fragments):
                    for half in (0, 1):
                        offset = start + ((16 * i + 8 * half) * length + 8 * j)
                        staged.store_vector(offset, c[2 * half : 2 * half + 2])

    # ---- operands -------------------------------------------------------------------------------

    def _place_in_ring(self, row: Int, half: Int, product: int, count: int) -> Int:
        """Offset of a row's 16-byte chunk of a product in a tile of the ring.

        A chunk's number and the row's permutation are combined by exclusive or. Where a slice
        begins at a multiple of a power of two, the product's part of the number can be, too.
        """
        block_k, size = self._stage.block_k, self._kernel.element.chunk
        chunks = block_k // size
        permutation = (row // max(1, 8 // chunks)) % min(chunks, 8)
        first = self._slice * (2 * count) + half if self._stage.warps_k > 1 else half
        if self._stage.warps_k == 1 or count & (count - 1) == 0:
            return row * block_k + (((first ^ permutation) * size) ^ (2 * product * size))
        return row * block_k + ((first + 2 * product) ^ permutation) * size

    def _load_a(
        self, index: int, within: int, slot: int, product: int, count: int
    ) -> list[Operand]:
        kernel, stage, lane = self._kernel, self._stage, self._kernel.lane
        row, half = lane % 16, lane // 16
        buffer = kernel.inputs[index]
        k_step, size = kernel.element.k_step, kernel.element.chunk
        first = within * stage.block_k
        if self._reader is not None:
            return self._load_window(self._reader, index, first, product, count)
        if buffer is None:
            buffer, step = kernel.ring, 16 * stage.block_k
            offset = self._place_in_ring(row, half, product, count)
            offset = self._row * stage.block_k + offset + slot
        else:
            length = kernel.plan.row(index)
            step = 16 * length
            offset = (self._row + row) * length + half * size + (first + k_step * product)
            if stage.warps_k > 1:
                offset = offset + self._slice * (k_step * count)
        rounded = kernel.store.rounded(index, first, first + k_step * stage.products(within))
        return self._fragments(buffer, [offset + i * step for i in range(self.rows)], rounded)

    def _load_window(
        self, reader: WindowReader, index: int, first: int, product: int, count: int
    ) -> list[Operand]:
        kernel = self._kernel
        k_step = kernel.element.k_step
        firsts = [first + k_step * (s * count + product) for s in range(self._stage.warps_k)]
        offsets = reader.offsets(firsts)
        buffer = kernel.inputs[index]
        if buffer is not None:  # the result of the stage before, rounded as it was handed on
            return self._fragments(buffer, offsets, rounded=True)
        rounded = kernel.rounds_window or kernel.store.rounded(0, 0, 0)
        return self._fragments(kernel.scratch, offsets, rounded)

    def _fragments(self, buffer: Buffer, offsets: list[Int], rounded: bool) -> list[Operand]:
        return [
            products.split(
                instructions.load_matrices(buffer, offset, 4),
                self._kernel.element,
                exact=self._kernel.exact,
                rounded=rounded,
            )
            for offset in offsets
        ]

    def _load_b(self, index: int, slot: int, product: int, count: int) -> list[Operand]:
        kernel, block_k, lane = self._kernel, self._stage.block_k, self._kernel.lane
        base = slot + kernel.plan.loaded_rows(index) * block_k
        half = (lane // 8) % 2
        start = self._column * block_k + base
        pair = start + self._place_in_ring(lane % 8 + (lane // 16) * 8, half, product, count)
        loaded: list[list[ir.Value]] = []
        for j in range(0, self.columns - 1, 2):
            values = instructions.load_matrices(kernel.ring, pair + j * 8 * block_k, 4)
            loaded += [values[:2], values[2:]]
        if self.columns % 2:
            last = start + self._place_in_ring(lane % 8, half, product, count)
            last = last + (self.columns - 1) * 8 * block_k
            loaded.append(instructions.load_matrices(kernel.ring, last, 2))
        return [products.split(v, kernel.element, exact=kernel.exact, rounded=True) for v in loaded]


__all__ = [
    "ChainKernel", "ChainTile", "default_tile", "generate_chain", "likely_tiles", "parse",
    "shape_of",
]  # fmt: skip
