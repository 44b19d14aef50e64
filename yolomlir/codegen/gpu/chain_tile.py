"""Tiles of the `chain` family: how a cluster of blocks divides a chain, and what is legal.

A cluster computes block_m pixels through every stage. Its blocks divide the channels of each stage
among themselves; each gives its part of the result to all, so that every block has the whole input
of the next stage in its shared memory and streams only its own part of the weights.

The pixels are a run of those of the output, whose inputs come a step of K at a time, or a rectangle
of them (`rows`), whose inputs come at once as a window (`chain_window.py`).

Where several stages in a row have more than one tap, each but the first reads a window of the
result before it, and a block computes that result for all pixels of the window: a region larger
than the rectangle by the border that the taps need, which blocks beside each other compute twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from yolomlir.codegen.gpu.bulk_weights import RingLayout
from yolomlir.codegen.gpu.chain_window import Window, window_of
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.codegen.gpu.element import Element
from yolomlir.codegen.gpu.tile import carveout_objection, later_option
from yolomlir.target import Target

BARRIER_BYTES = 8
"""Of a barrier that counts bytes, and what its address must be a multiple of."""
_MAX_UNROLLED = 2048
"""Tensor-core instructions of a warp over the whole chain, which is unrolled."""
_MAX_COPIES = 160
"""Asynchronous copies of a thread over the whole chain."""
_MAX_ACCUMULATORS = 64
_LEAST_COLUMNS = 4
_MAX_RUNS = 8
"""Runs of four channels of a thread in one epilogue: each keeps its residual in registers."""


@dataclass(frozen=True)
class ChainShape:
    """What a tile depends on. first: the first stage; later: (K, N) of the 1x1 stages after it.

    kept: stages whose result a later one adds, which keep it in registers until then. depthwise:
    the first stage convolves each channel alone. inner: those of the later stages that have several
    taps; they follow the first stage at once, each reads the result of the one before and no more.
    """

    first: ConvShape
    later: tuple[tuple[int, int], ...]
    kept: tuple[int, ...] = ()
    depthwise: bool = False
    inner: tuple[ConvShape, ...] = ()

    @property
    def element(self) -> Element:
        """The type of what is multiplied, and of what goes from stage to stage."""
        return self.first.element

    @property
    def last(self) -> ConvShape:
        """The last stage of several taps: its pixels are those of the chain's results."""
        return self.inner[-1] if self.inner else self.first

    def sizes(self) -> list[tuple[int, int]]:
        """(K, N) of every stage."""
        k = self.first.taps if self.depthwise else self.first.k
        return [(k, self.first.out_channels), *self.later]

    def stage(self, index: int) -> ConvShape:
        """A stage as a convolution."""
        if index <= len(self.inner):
            return (self.first, *self.inner)[index]
        k, n = self.later[index - 1]
        f = self.last
        return ConvShape(
            f.batch, f.out_h, f.out_w, k, f.out_h, f.out_w, n, 1, 1,
            source_vector=f.element.chunk, dtype=f.dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class ChainTile:
    """A configuration of a chain.

    block_m pixels a cluster of `cluster_n` blocks of `warps` warps each. step_kib: KiB of weights
    of one step over K, at most; slots: buffers of the asynchronous pipeline, which runs on from one
    stage to the next. rows: of the rectangle that the pixels are, whose input is loaded as a
    window; 0 where they follow each other in the output and the input comes a step at a time.
    release_early: dependent kernels may start with this one, not only before its last epilogue.
    carveout: see `tile.CARVEOUTS`.
    bulk: 1 where one thread brings a step's weights with one copy, 0 where all threads share them.
    """

    block_m: int
    cluster_n: int
    warps: int
    step_kib: int = 16
    slots: int = 4
    rows: int = 0
    release_early: bool = later_option(False)
    carveout: int = later_option(0)
    bulk: int = later_option(0)

    @property
    def columns(self) -> int:
        """Of the rectangle."""
        return self.block_m // self.rows if self.rows else self.block_m


@dataclass(frozen=True)
class StagePlan:
    """How a block computes one stage.

    n: channels of a block, a multiple of 8. block_k: of a step; steps: how many, none where there
    are no matrix products; last: products (of k_step) of the last one. warps_m x warps_n x warps_k
    divide pixels, channels, and the products of a step; they may be fewer than the block's warps.
    m: rows of products, a multiple of 16 warps_m; pixels: how many of them there are.
    """

    n: int
    block_k: int
    steps: int
    last: int
    warps_m: int
    warps_n: int
    warps_k: int
    k_step: int
    m: int
    pixels: int

    @property
    def staged_row(self) -> int:
        """Floats from one row of the partial sums to the next: 8 or 24 banks apart, so that neither
        their stores nor their loads meet in a bank."""
        return self.n + (8 if self.n % 16 == 0 else 0)

    @property
    def padded_k(self) -> int:
        """K with the zeros that fill the last product."""
        return (self.steps - 1) * self.block_k + self.k_step * self.last

    def products(self, step: int) -> int:
        """Products of a step."""
        return self.last if step == self.steps - 1 else self.block_k // self.k_step


@dataclass(frozen=True)
class ChainPlan:
    """A tile worked out for a shape; sizes of parts of one block's shared memory.

    ring: elements of each buffer of the ring. staging: floats of the partial sums. inputs: elements
    of each later stage's input. vector_bytes: of the channel vectors (one a stage is assumed where
    tiles are chosen), and of the weights of a depthwise first stage. windows: of the first stage's
    input, which shares its memory with the partial sums, and of the input of each of the `inner`
    stages; none where the input comes by steps.
    """

    tile: ChainTile
    shape: ChainShape
    stages: tuple[StagePlan, ...]
    ring: tuple[int, ...]
    staging: int
    inputs: tuple[int, ...]
    vector_bytes: int
    windows: tuple[Window, ...] = ()

    @property
    def window(self) -> Window | None:
        """Of the first stage's input, if that comes as one."""
        return self.windows[0] if self.windows else None

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.tile.warps

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def slots(self) -> int:
        """Buffers of the ring."""
        return len(self.ring)

    def slot(self, step: int) -> int:
        """Where in the ring the operands of a step are, in elements."""
        return sum(self.ring[: step % self.slots])

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        elements = sum(self.ring) + sum(self.inputs)
        inner = self.shape.element.bytes * elements + self.scratch_bytes + self.vector_bytes
        return inner + self.ring_barrier_bytes + self.barrier_bytes

    @property
    def weight_ring(self) -> RingLayout | None:
        """Of weights that come by bulk copies."""
        return RingLayout(self.slots, self.steps) if self.tile.bulk and self.steps else None

    @property
    def ring_barrier_bytes(self) -> int:
        """Of the barriers of weights that come by bulk copies."""
        ring = self.weight_ring
        return ring.barrier_bytes if ring is not None else 0

    @property
    def barrier_bytes(self) -> int:
        """The end of a block's shared memory: a barrier for every exchange of a cluster."""
        return BARRIER_BYTES * (len(self.stages) - 1) if self.tile.cluster_n > 1 else 0

    @property
    def scratch_bytes(self) -> int:
        """Of the partial sums, or of the window before them."""
        size = self.window.size if self.window else 0
        return max(4 * self.staging, self.shape.element.bytes * size)

    @property
    def resident(self) -> bool:
        """Whether all weights and a window arrive before the first product, for no step to wait."""
        return self.window is not None and self.steps <= self.slots

    def meets(self, step: int, index: int, within: int) -> bool:
        """Whether the block's threads meet before a step, which is number `within` of a stage: for
        what they have copied or computed, or for a slot that is free then."""
        if not self.tile.bulk:
            return within == 0 or not self.resident
        refills = 0 < step < self.steps - self.slots + 1
        return within == 0 or refills or self.loaded_rows(index) > 0

    def overwrites_input(self, step: int) -> bool:
        """Whether the bulk copy that a step starts goes to where copies of threads have put a tile
        of the input."""
        new = step + self.slots - 1
        if not self.tile.bulk or step == 0 or new >= self.steps or not self.loaded_rows(0):
            return False
        return new >= self.stages[0].steps > new % self.slots

    @property
    def rectangles(self) -> tuple[int, int]:
        """Rectangles that an image has down and across."""
        last, tile = self.shape.last, self.tile
        return -(-last.out_h // tile.rows), -(-last.out_w // tile.columns)

    @property
    def clusters(self) -> int:
        """Clusters of the launch."""
        if self.tile.rows:
            down, across = self.rectangles
            return self.shape.first.batch * down * across
        return -(-self.shape.first.pixels // self.tile.block_m)

    def loaded_rows(self, index: int) -> int:
        """Rows of a stage's input that come with each step of its weights."""
        return self.tile.block_m if index == 0 and self.window is None else 0

    def row(self, index: int) -> int:
        """Elements from one pixel to the next of the input of a later stage that is no window: an
        odd number of 16-byte chunks, so that the eight rows of an `ldmatrix` meet eight different
        banks."""
        return self.stages[index].padded_k + self.shape.element.chunk

    def window_of_stage(self, index: int) -> Window | None:
        """The window that a stage reads, if it reads one."""
        return self.windows[index] if index < len(self.windows) else None

    def loader_tile(self, index: int) -> ConvTile:
        """The tile by which a stage's operands are loaded."""
        stage = self.stages[index]
        again = index == 0 and self.shape.first.taps > 1
        return ConvTile(
            self.tile.block_m, stage.n, stage.block_k, self.tile.warps, through_l1=again
        )


@lru_cache(maxsize=4096)
def plan(tile: ChainTile, shape: ChainShape, vectors: tuple[int, ...] | None = None) -> ChainPlan:
    """Work a tile out. vectors: channel vectors a stage (default one)."""
    element = shape.element
    windows = _windows(tile, shape) if tile.rows else ()
    pixels = [w.height * w.width for w in windows[1:]]
    pixels += [tile.block_m] * (1 + len(shape.later) - len(pixels))
    sizes = zip(shape.sizes(), pixels, strict=True)
    stages = tuple(_stage(tile, *size, element, count) for size, count in sizes)
    if shape.depthwise:
        m = tile.block_m
        stages = (StagePlan(stages[0].n, element.k_step, 0, 0, 1, 1, 1, 8, m, m), *stages[1:])
    first = 0 if windows else tile.block_m
    loads = [first if index == 0 else 0 for index in range(len(stages))]
    pairs = list(zip(loads, stages, strict=True))
    steps = [(rows + s.n) * s.block_k for rows, s in pairs for _ in range(s.steps)]
    slots = min(tile.slots, len(steps))
    ring = tuple(max(steps[slot::slots]) for slot in range(slots))
    # Where a stage adds the result of another, which one is known to the kernel only.
    direct = (False,) * len(stages) if shape.kept else direct_stages(stages, tile.warps)
    staging = max(
        s.warps_k * s.m * s.staged_row if s.steps and not without else 0
        for s, without in zip(stages, direct, strict=True)
    )
    plain = stages[max(1, len(windows)) :]
    inputs = tuple(window.size for window in windows[1:])
    inputs += tuple(s.m * (s.padded_k + element.chunk) for s in plain)
    counts = vectors or (1,) * len(stages)
    bytes_ = 4 * sum(s.n * count for s, count in zip(stages, counts, strict=True))
    bytes_ += element.bytes * stages[0].n * shape.first.taps if shape.depthwise else 0
    return ChainPlan(tile, shape, stages, ring, staging, inputs, bytes_, windows)


def direct_stages(
    stages: Sequence[StagePlan], warps: int, additions: Iterable[tuple[int, int]] = ()
) -> tuple[bool, ...]:
    """Which stages' sums need no shared memory: every lane has runs of four channels of them.

    That takes whole sums, in all warps, and pairs of fragments (`paired_channel`). additions:
    (earlier, later) where a stage adds an earlier one's result, whose runs must be the same.
    """
    direct = [
        s.steps > 0
        and (s.warps_k, s.warps_m * s.warps_n) == (1, warps)
        and s.n // 8 // s.warps_n % 2 == 0
        for s in stages
    ]
    pairs = list(additions)
    for _ in pairs:  # one may end another
        for earlier, later in pairs:
            a, b = stages[earlier], stages[later]
            alike = (a.n, a.warps_m, a.warps_n, a.m) == (b.n, b.warps_m, b.warps_n, b.m)
            if not (direct[earlier] and direct[later] and alike):
                direct[earlier] = direct[later] = False
    return tuple(direct)


def _windows(tile: ChainTile, shape: ChainShape) -> tuple[Window, ...]:
    """What the first stage and the inner ones read, from the last of them on: its outputs are the
    tile's, and what one reads is what the one before computes."""
    rows, columns = tile.rows, tile.columns
    found: list[Window] = []
    for conv in reversed((shape.first, *shape.inner)):
        channels = conv.in_channels
        if shape.depthwise:  # each channel goes alone: only those of the block's own part
            channels = part_of(conv.out_channels, tile.cluster_n)
        found.append(window_of(conv, rows, columns, channels, padded=not shape.depthwise))
        rows, columns = found[-1].height, found[-1].width
    return tuple(reversed(found))


def part_of(channels: int, blocks: int) -> int:
    """Channels of a block, a multiple of 8, where so many blocks divide a stage."""
    return -(-channels // (8 * blocks)) * 8


@lru_cache(maxsize=4096)
def _stage(tile: ChainTile, k: int, n: int, element: Element, pixels: int) -> StagePlan:
    part, k_step = part_of(n, tile.cluster_n), element.k_step
    row_bytes, most = element.bytes * part, 1024 * tile.step_kib
    block_k = 16 * k_step
    while block_k > k_step and (row_bytes * block_k > most or block_k >= 2 * k):
        block_k //= 2
    products = (block_k // k_step, -(-k // k_step))
    warps_m, warps_n, warps_k = _divide(pixels, tile.warps, part, *products)
    steps = -(-k // block_k)
    rest = k - (steps - 1) * block_k
    last = -(-rest // (k_step * warps_k)) * warps_k
    m = 16 * warps_m * -(-pixels // (16 * warps_m))
    return StagePlan(part, block_k, steps, last, warps_m, warps_n, warps_k, k_step, m, pixels)


@lru_cache(maxsize=4096)
def _divide(pixels: int, warps: int, n: int, step: int, every: int) -> tuple[int, int, int]:
    """The division of a stage among warps that costs a warp the fewest cycles.

    step: products along K of a step; every: of all of K. Pixels that are no power of two are those
    of a region, whose rows may go to warps unevenly: the last ones then have rows of no pixel.
    """
    best, least = (1, 1, 1), float("inf")
    rows, columns = -(-pixels // 16), n // 8
    over_m = [w for w in (1, 2, 4, 8) if rows % w == 0]
    if pixels & (pixels - 1):
        over_m = [w for w in range(1, warps + 1) if w <= rows and -(-rows // w) * (w - 1) < rows]
    over_n = [w for w in range(1, warps + 1) if columns % w == 0]
    over_k = [w for w in (1, 2, 4, 8) if step % w == 0]
    for warps_m, warps_n, warps_k in product(over_m, over_n, over_k):
        r, c = -(-rows // warps_m), columns // warps_n
        if warps_m * warps_n * warps_k > warps or 4 * r * c > _MAX_ACCUMULATORS:
            continue
        chain = max(8 * r * c + 2 * r + c, 18)
        cycles = -(-every // warps_k) * chain + warps_k * pixels * n / (8 * warps)
        if cycles < least:
            best, least = (warps_m, warps_n, warps_k), cycles
    return best


def objection(tile: ChainTile, shape: ChainShape, target: Target, precision: str) -> str | None:
    """Why a kernel cannot be made of this tile; None where it can."""
    if tile.block_m not in (16, 32, 64, 128, 256):
        return f"block_m = {tile.block_m} is not one of 16, 32, 64, 128, 256"
    if tile.cluster_n not in (1, 2, 4, 8) or (tile.cluster_n > 1 and not target.clusters):
        return f"cluster_n = {tile.cluster_n} is not a cluster of {target.name}"
    if tile.warps not in (2, 4, 8, 16):
        return f"warps = {tile.warps} is not one of 2, 4, 8, 16"
    if tile.slots < 2 or tile.step_kib < 1:
        return "slots must be at least 2, step_kib at least 1"
    if (reason := carveout_objection(tile)) is not None:
        return reason
    if tile.bulk not in (0, 1) or (tile.bulk and not target.clusters):
        return f"bulk = {tile.bulk} is not a way of copies of {target.name}"
    if tile.rows and (reason := _window_objection(tile, shape)) is not None:
        return reason
    if shape.inner and (reason := _inner_objection(tile, shape)) is not None:
        return reason
    if any((tile.cluster_n - 1) * part_of(n, tile.cluster_n) >= n for _, n in shape.sizes()):
        return f"cluster_n = {tile.cluster_n} leaves a block without channels"
    p = plan(tile, shape)
    threads = 32 * tile.warps
    limit = _MAX_ACCUMULATORS // (2 if precision == "fp32" else 1) // (2 if threads > 256 else 1)
    instructions = copies = kept = 0
    counted = 3 if precision == "fp32" else 1
    copies += p.window.copies(threads) if p.window else 0
    for index, stage in enumerate(p.stages):
        convolution = shape.stage(index)
        runs = -(-stage.m * stage.n // (4 * threads))
        kept += runs if index in shape.kept else 0
        gathers = not stage.steps and p.window is None
        most = _most_gathered(threads, shape) if gathers else _MAX_RUNS
        if runs > most:
            return f"{runs} runs a thread in an epilogue; at most {most}"
        if not stage.steps:
            continue
        r, c = stage.m // 16 // stage.warps_m, stage.n // 8 // stage.warps_n
        if 4 * r * c > limit:
            return f"{4 * r * c} accumulators a thread; at most {limit}"
        count = sum(stage.products(step) for step in range(stage.steps))
        instructions += counted * r * c * count // stage.warps_k
        rows, weights = p.loader_tile(index).copies(convolution)
        weights = 0 if tile.bulk else weights
        copies += stage.steps * (weights + (rows if p.loaded_rows(index) else 0))
        vectors = [convolution.source_vector] if p.loaded_rows(index) or not tile.bulk else []
        for vector in vectors if tile.bulk else [*vectors, convolution.weight_vector]:
            if threads % (stage.block_k // vector):
                return f"{threads} threads cannot share rows of {stage.block_k // vector} copies"
    if kept > _MAX_RUNS:
        return f"{kept} runs a thread kept for a later addition; at most {_MAX_RUNS}"
    if instructions > _MAX_UNROLLED:
        return f"{instructions} unrolled products; at most {_MAX_UNROLLED}"
    if copies > _MAX_COPIES:
        return f"{copies} unrolled copies a thread; at most {_MAX_COPIES}"
    if p.shared_bytes > target.shared_memory_bytes:
        return (
            f"{p.shared_bytes} bytes of shared memory; {target.name} has "
            f"{target.shared_memory_bytes}"
        )
    return None


def _window_objection(tile: ChainTile, shape: ChainShape) -> str | None:
    """Why the first stage cannot read a window."""
    if tile.block_m % tile.rows or tile.columns < _LEAST_COLUMNS:
        return f"rows = {tile.rows} is not a power of two that leaves {_LEAST_COLUMNS} columns"
    if shape.first.taps == 1:
        return "a window is for a convolution of more than one tap"
    if shape.first.in_channels % shape.first.element.chunk and not shape.depthwise:
        return f"a window's pixels are chunks of 16 bytes, not {shape.first.in_channels} channels"
    return None


def _inner_objection(tile: ChainTile, shape: ChainShape) -> str | None:
    """Why the inner stages cannot be computed."""
    if not tile.rows:
        return "rows = 0 leaves no window to a second stage of several taps"
    if shape.depthwise:
        return "a depthwise stage is followed by 1x1 convolutions only"
    if any(index < len(shape.inner) for index in shape.kept):
        return "a result of more pixels than the last one is not kept for an addition"
    chunk = shape.element.chunk
    for conv in shape.inner:
        if conv.in_channels % chunk:
            return f"a window's pixels are chunks of 16 bytes, not {conv.in_channels} channels"
    return None


def _most_gathered(threads: int, shape: ChainShape) -> int:
    """Runs of a depthwise stage that reads its taps from global memory: ptxas has those of all runs
    on their way at once. With more, some of YOLO26's chains spill registers."""
    packed = shape.element.packed > 1
    if threads > 256:
        return 2 if packed else 4
    return 4 if packed else 6


__all__ = ["ChainPlan", "ChainShape", "ChainTile", "StagePlan", "objection", "plan"]
