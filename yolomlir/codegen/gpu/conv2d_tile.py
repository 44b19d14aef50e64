"""Tiles of the `conv2d` family: what can be chosen, what is legal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.bulk_weights import RingLayout
from yolomlir.codegen.gpu.conv2d_registers import overfull
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.codegen.gpu.element import FLOAT32, Element
from yolomlir.codegen.gpu.image_window import ImageWindow, image_window
from yolomlir.codegen.gpu.tile import later_option, to_attribute
from yolomlir.diagnostics import UserError
from yolomlir.target import Target

STAGING_PADDING = 8
"""Floats between rows of the staged output: rows 8 banks apart make its writes conflict-free."""
SHARERS = (1, 2, 4)
"""Blocks that may share weights; one that does not may copy them in bulk, too."""
BARRIER_BYTES = 16
"""Of a barrier that counts bytes, so that what lies behind it is aligned."""
_MAX_COPIES = 16
"""Copies of a thread a step: each holds an address and a mask in registers."""
_MAX_UNROLLED_COPIES = 96
"""The same over an unrolled loop, whose addresses ptxas computes ahead."""
_MAX_THREADS = 512
_MAX_UNROLLED = 1536
"""Tensor-core instructions of a fully unrolled warp; more makes ptxas slow and misses the
instruction cache."""


def block_ks(element: Element) -> tuple[int, ...]:
    """What a step of K may have: 1 to 16 products, so rows of 32 to 512 bytes."""
    return tuple(element.k_step * count for count in (1, 2, 4, 8, 16))


@dataclass(frozen=True)
class ConvTile:
    """A configuration of the implicit GEMM.

    block_m x block_n outputs (pixels x channels) a block, in steps of block_k over K. Its warps
    divide the outputs warps_m x warps_n ways, and each step of K warps_k ways: their partial sums
    are added in a fixed order. stages: buffers of the asynchronous pipeline. unroll: the whole
    loop over K. through_l1: inputs come through L1 (a pixel is read once a tap). staged: the result
    goes through shared memory, so that stores are whole rows (always so where K is divided).
    release_early: dependent kernels may start with this one, not only after its main loop.
    cluster_k: blocks of a cluster that divide K among themselves. cluster_m: weights come by bulk
    copies (`bulk_weights.py`), which so many blocks of a cluster share (1: none do); 0: every
    thread copies some. carveout: see `tile.CARVEOUTS`.
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int = 1
    warps_n: int = 1
    warps_k: int = 1
    stages: int = 3
    unroll: bool = False
    through_l1: bool = False
    staged: bool = False
    cluster_k: int = 1
    release_early: bool = False
    cluster_m: int = 0
    carveout: int = later_option(0)

    @property
    def sharers(self) -> int:
        """Blocks over pixels that share their weights."""
        return max(1, self.cluster_m)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_m(self) -> int:
        """Output pixels of a warp."""
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Output channels of a warp."""
        return self.block_n // self.warps_n

    @property
    def is_staged(self) -> bool:
        """Whether the result goes through shared memory."""
        return self.staged or self.warps_k > 1 or self.cluster_k > 1

    def pairs(self, shape: ConvShape) -> bool:
        """Whether a lane has four neighbouring channels of two fragments, so that its stores of
        float16 have 8 bytes, not 4: the rows of the weights' tile are put in that order."""
        return shape.element.packed == 2 and not self.is_staged and self.warp_n % 16 == 0

    def k_tiles(self, shape: ConvShape) -> int:
        """Steps over K of a block."""
        return -(-shape.k // (self.block_k * self.cluster_k))

    def padded_k(self, shape: ConvShape) -> int:
        """K with the zeros that fill the last steps."""
        return self.k_tiles(shape) * self.block_k * self.cluster_k

    def buffers(self, shape: ConvShape) -> int:
        """Stages that are of use: at most one a step."""
        return min(self.stages, self.k_tiles(shape))

    def unrolled(self, shape: ConvShape) -> bool:
        """Whether the loop over K is unrolled: by choice, or since every step has its buffer."""
        return self.unroll or self.k_tiles(shape) <= self.stages

    def copies(self, shape: ConvShape) -> tuple[int, int]:
        """Copies of a thread a step: of inputs (rows, where they are converted), of weights."""
        rows = -(-self.block_m // self.threads)
        if shape.source_vector:
            rows = -(-self.block_m * self.block_k // (shape.source_vector * self.threads))
        weights = -(-self.block_n * self.block_k // (shape.weight_vector * self.threads))
        return rows, 0 if self.cluster_m else weights

    def grid(self, shape: ConvShape) -> tuple[int, int, int]:
        """Blocks: over pixels, over channels, over K."""
        over_m, over_n = -(-shape.pixels // self.block_m), -(-shape.out_channels // self.block_n)
        return -(-over_m // self.sharers) * self.sharers, over_n, self.cluster_k

    def ragged(self, shape: ConvShape) -> bool:
        """Whether some rows of the grid's blocks are beyond the last pixel."""
        return shape.pixels % (self.block_m * self.sharers) != 0

    def ring(self, shape: ConvShape) -> RingLayout | None:
        """Of weights that come by bulk copies."""
        if not self.cluster_m:
            return None
        return RingLayout(self.buffers(shape), self.k_tiles(shape), self.cluster_m)

    def weight_order(self, shape: ConvShape) -> tuple[int, ...]:
        """The `runtime.packing.Order` of the weights."""
        return (self.block_n, self.block_k, int(self.pairs(shape))) if self.cluster_m else ()

    def stage_elements(self) -> int:
        """Elements of one pipeline stage: the input's tile, then the weights'."""
        return (self.block_m + self.block_n) * self.block_k

    def staging_elements(self) -> int:
        """Floats of the staged partial sums of warps; those of one go to other blocks at once."""
        if not self.is_staged or (self.cluster_k > 1 and self.warps_k == 1):
            return 0
        return self.warps_k * self.block_m * (self.block_n + STAGING_PADDING)

    def pipeline_bytes(self, shape: ConvShape) -> int:
        """Shared memory of the pipeline, which the staged output reuses."""
        ring = shape.element.bytes * self.buffers(shape) * self.stage_elements()
        return max(ring, 4 * self.staging_elements())

    def exchange_bytes(self) -> int:
        """Shared memory for every block's sums of this one's rows, and a barrier."""
        if self.cluster_k == 1:
            return 0
        return 4 * self.block_m * (self.block_n + STAGING_PADDING) + BARRIER_BYTES

    def main_bytes(self, shape: ConvShape) -> int:
        """Shared memory of the pipeline and, behind it, of what other blocks send and barriers."""
        ring = self.ring(shape)
        barriers = ring.barrier_bytes if ring is not None else 0
        return self.pipeline_bytes(shape) + self.exchange_bytes() + barriers

    def shared_bytes(self, shape: ConvShape, channel_vectors: int = 1) -> int:
        """Shared memory of a block: the pipeline, then bias-like vectors."""
        return self.main_bytes(shape) + self.vector_bytes(channel_vectors)

    def vector_bytes(self, channel_vectors: int) -> int:
        """Of them, those of bias-like vectors."""
        return 4 * self.block_n * channel_vectors

    def image_bytes(self, shape: ConvShape, window: ImageWindow) -> int:
        """Shared memory where an image is converted: its window and the weights, which the staged
        output reuses."""
        weights = shape.element.bytes * self.block_n * image_weight_row(shape, window)
        return max(window.size_bytes + weights, 4 * self.staging_elements())

    def to_attribute(self) -> ir.Attribute:
        """The `yolo.tile` dictionary, in the current context."""
        return to_attribute(self)

    @staticmethod
    def from_attribute(attribute: ir.Attribute) -> ConvTile:
        """The inverse; missing options have their defaults. Raises UserError for unknown ones."""
        fields = {f.name: f for f in dataclasses.fields(ConvTile)}
        values: dict[str, Any] = {}
        for named in ir.DictAttr(attribute):
            if named.name not in fields:
                raise UserError(
                    f"a conv2d tile has no option '{named.name}'",
                    where="yolo.tile",
                    hint=f"options: {', '.join(fields)}",
                )
            number = int(ir.IntegerAttr(named.attr).value)  # an i1 is an integer of one bit
            flag = isinstance(fields[named.name].default, bool)
            values[named.name] = number != 0 if flag else number
        missing = {"block_m", "block_n", "block_k"} - values.keys()
        if missing:
            raise UserError(f"a conv2d tile needs {', '.join(sorted(missing))}", where="yolo.tile")
        return ConvTile(**values)


def image_weight_row(shape: ConvShape, window: ImageWindow) -> int:
    """Elements of a row of the weights of an image: 32 a group, and what makes rows begin half a
    line (float16) or 16 bytes (float32) apart, for neighbours to meet different banks."""
    groups = len(window.groups)
    if shape.element is FLOAT32:
        return 32 * groups + 4
    return 32 * (groups | 1)


def most_image_bytes(shape: ConvShape, tile: ConvTile) -> int:
    """Shared memory of a block that converts an image, of the wider of the types it may have."""
    sizes = (1,) if shape.element is FLOAT32 else (1, 4)
    windows = [image_window(shape, tile.block_m, tile.threads, size) for size in sizes]
    return max(tile.image_bytes(shape, window) for window in windows) + tile.vector_bytes(1)


def objection(tile: ConvTile, shape: ConvShape, target: Target, precision: str) -> str | None:
    """Why a kernel cannot be made of this tile; None where it can.

    What passes assembles within the target's limits, and without spills but for very few unrolled
    loops (`conv2d_registers.py`).
    """
    t = tile
    if min(t.block_m, t.block_n, t.warps_m, t.warps_n, t.warps_k, t.stages) < 1:
        return "sizes and counts must be positive"
    element = shape.element
    if t.block_k not in block_ks(element):
        return f"block_k = {t.block_k} is not one of {', '.join(map(str, block_ks(element)))}"
    if t.block_m % (16 * t.warps_m):
        return f"block_m = {t.block_m} is not a multiple of 16 x warps_m = {16 * t.warps_m}"
    if t.block_n % (8 * t.warps_n):
        return f"block_n = {t.block_n} is not a multiple of 8 x warps_n = {8 * t.warps_n}"
    if t.cluster_k not in (1, 2, 4, 8) or (t.cluster_k > 1 and not target.clusters):
        return f"cluster_k = {t.cluster_k} is not a cluster of {target.name}"
    if t.cluster_k > 1 and (t.cluster_k - 1) * t.k_tiles(shape) * t.block_k >= shape.k:
        return f"cluster_k = {t.cluster_k} leaves a block without a part of K"
    reason = _bulk_objection(t, shape, target)
    if reason is not None:
        return reason
    depth = t.block_k // element.k_step
    if depth % t.warps_k:
        return f"warps_k = {t.warps_k} does not divide the {depth} products of a step"
    if t.threads > _MAX_THREADS:
        return f"{t.threads} threads; at most {_MAX_THREADS} keep 128 registers a thread"
    for vector in (shape.source_vector or element.chunk, shape.weight_vector):
        if t.threads % (t.block_k // vector):
            return f"{t.threads} threads cannot share rows of {t.block_k // vector} copies"
    limit = 96 if t.threads <= 256 else 64
    if precision == "fp32":
        limit //= 2
    if t.warp_m * t.warp_n // 32 > limit:
        return f"{t.warp_m * t.warp_n // 32} accumulators a thread; at most {limit}"
    if t.stages < 2 and t.k_tiles(shape) > 1:
        return "one stage cannot hold a loop of several steps"
    if shape.source_vector == 0 and (t.cluster_k > 1 or not t.unrolled(shape)):
        return "an input that is converted needs an unrolled loop of one block"
    if shape.source_vector == 0 and t.warps_k > 1:
        return f"warps_k = {t.warps_k}; an input that is converted is not divided along K"
    products = (t.warp_m // 16) * (t.warp_n // 8) * depth // t.warps_k
    if t.unrolled(shape) and t.k_tiles(shape) * products > _MAX_UNROLLED:
        return f"{t.k_tiles(shape) * products} unrolled products; at most {_MAX_UNROLLED}"
    inputs, weights = t.copies(shape)
    if max(inputs, weights) > _MAX_COPIES or (not shape.source_vector and inputs > 2):
        return f"{inputs} and {weights} copies a thread a step; at most {_MAX_COPIES} (2 rows)"
    if t.unrolled(shape) and t.k_tiles(shape) * (inputs + weights) > _MAX_UNROLLED_COPIES:
        return f"{t.k_tiles(shape) * (inputs + weights)} unrolled copies a thread"
    both = inputs, weights
    if shape.source_vector and t.unroll and overfull(t, shape, target, precision, both):
        return f"an unrolled loop that spills what {inputs} and {weights} copies a step need"
    need = t.shared_bytes(shape) if shape.source_vector else most_image_bytes(shape, t)
    if need > target.shared_memory_bytes:
        return f"{need} bytes of shared memory; {target.name} has {target.shared_memory_bytes}"
    return None


def _bulk_objection(t: ConvTile, shape: ConvShape, target: Target) -> str | None:
    """Why weights cannot come by bulk copies as the tile says."""
    if t.cluster_m not in (0, *SHARERS) or (t.cluster_m and not target.clusters):
        return f"cluster_m = {t.cluster_m} is not a number of blocks that share on {target.name}"
    if not t.cluster_m:
        return None
    if shape.source_vector == 0:
        return "the weights of an input that is converted are not copied in bulk"
    if t.cluster_m > 1 and t.cluster_k > 1:
        return (
            f"a cluster of cluster_m = {t.cluster_m} and cluster_k = {t.cluster_k}; one must be 1"
        )
    if shape.out_channels % t.block_n or shape.k % (t.block_k * t.cluster_k):
        return "bulk copies bring no zeros: block_n and the steps must divide the weights"
    if t.cluster_m > 1 and t.stages < 3 and t.k_tiles(shape) > t.stages:
        return "blocks that share need three stages, one of which is on its way back"
    return None


def tile_space(shape: ConvShape, target: Target, precision: str) -> Iterator[ConvTile]:
    """Every candidate worth considering, all legal, in a fixed order."""
    for tile in _without_pipeline(shape, target):
        for stages in _DEPTHS:
            if stages > max(2, tile.k_tiles(shape)):
                continue
            choices = [_with(tile, stages, unroll, l1) for unroll in _FLAGS for l1 in _FLAGS]
            for candidate in choices:
                if candidate.through_l1 and shape.taps == 1:
                    continue  # nothing is read twice by a block
                redundant = candidate.unroll and tile.k_tiles(shape) <= stages
                if not redundant and objection(candidate, shape, target, precision) is None:
                    yield candidate


_DEPTHS = (2, 3, 4, 6, 8)
_FLAGS = (False, True)


def _with(tile: ConvTile, stages: int, unroll: bool, through_l1: bool) -> ConvTile:
    return ConvTile(
        tile.block_m, tile.block_n, tile.block_k, tile.warps_m, tile.warps_n, tile.warps_k,
        stages, unroll, through_l1, cluster_k=tile.cluster_k,
    )  # fmt: skip


def _without_pipeline(shape: ConvShape, target: Target) -> Iterator[ConvTile]:
    for block_m in (16, 32, 64, 128, 256):
        if block_m > 16 and block_m >= 2 * shape.pixels:
            continue
        for block_n in _channel_blocks(shape.out_channels):
            for warps_m, warps_n in _warp_grids(block_m, block_n):
                for tile in _over_k(block_m, block_n, warps_m, warps_n, shape):
                    yield tile
                    yield from _clusters(tile, shape, target)


def _clusters(tile: ConvTile, shape: ConvShape, target: Target) -> Iterator[ConvTile]:
    """Division of K among blocks, where there are fewer of them than multiprocessors."""
    blocks = tile.grid(shape)[0] * tile.grid(shape)[1]
    for cluster_k in (2, 4, 8):
        steps = -(-shape.k // (tile.block_k * cluster_k))
        too_many = blocks * cluster_k > 2 * target.multiprocessors
        if target.clusters and steps >= 2 and not too_many:
            yield ConvTile(
                tile.block_m, tile.block_n, tile.block_k, tile.warps_m, tile.warps_n, tile.warps_k,
                cluster_k=cluster_k,
            )  # fmt: skip


def _channel_blocks(channels: int) -> list[int]:
    """Multiples of 8 up to 128 that waste less than a quarter, or the least that covers all."""
    covering = min(-(-channels // 8) * 8, 128)
    sizes = {covering}
    for size in (8, 16, 24, 32, 40, 48, 64, 80, 96, 128):
        if size <= covering and -(-channels // size) * size <= 1.25 * channels:
            sizes.add(size)
    return sorted(sizes)


def _warp_grids(block_m: int, block_n: int) -> list[tuple[int, int]]:
    grids = []
    for warps_m in (1, 2, 4, 8):
        for warps_n in (1, 2, 4, 5):
            fits = block_m % (16 * warps_m) == 0 and block_n % (8 * warps_n) == 0
            if fits and warps_m * warps_n <= 8:
                grids.append((warps_m, warps_n))
    return grids


def _over_k(
    block_m: int, block_n: int, warps_m: int, warps_n: int, shape: ConvShape
) -> Iterator[ConvTile]:
    """Steps over K and their division among warps."""
    least, *more = block_ks(shape.element)
    depths = [least, *(depth for depth in more if depth // 2 < shape.k)]
    if shape.source_vector == 0:  # a converted input cannot be prefetched: as few steps as can be
        depths = depths[-1:]
    for block_k in depths:
        for warps_k in (1, 2, 4, 8):
            few = 32 * warps_m * warps_n * warps_k <= _MAX_THREADS
            if few and block_k // least % warps_k == 0:
                yield ConvTile(block_m, block_n, block_k, warps_m, warps_n, warps_k)
