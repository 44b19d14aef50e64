"""The tiles of a `conv2d` shape as columns of numpy arrays: thousands are judged at once.

`conv2d_tile.objection` says of one tile why it is illegal; `legal` says the same of all rows of a
table, tested against it. Rows come in a fixed order, so that ties are broken the same way always.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from yolomlir.codegen.gpu import conv2d_tile
from yolomlir.codegen.gpu.conv2d_registers import overfull
from yolomlir.codegen.gpu.conv2d_tile import (
    BARRIER_BYTES,
    SHARERS,
    STAGING_PADDING,
    ConvTile,
    block_ks,
    most_image_bytes,
)
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.target import Target

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

BLOCK_M = (16, 32, 64, 128, 256)
DEPTHS = (2, 3, 4, 6, 8)
CLUSTERS = (1, 2, 4, 8)
FLAGS = ("unroll", "through_l1", "staged", "release_early")
_LARGEST_N = 128
_FIELDS = {f.name: f for f in dataclasses.fields(ConvTile) if f.name != "carveout"}
"""All options but the one that is not the kernel's."""


@dataclass(frozen=True)
class ConvTiles:
    """Rows of tiles of one shape. columns: an array an option of `ConvTile`, flags as 0 and 1."""

    shape: ConvShape
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.columns["block_m"])

    def __getattr__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None

    def tile(self, row: int) -> ConvTile:
        """The tile of a row."""
        values = {name: int(column[row]) for name, column in self.columns.items()}
        return ConvTile(**{n: _typed(n, v) for n, v in values.items()})  # type: ignore[arg-type]

    def where(self, chosen: Mask | NDArray[np.intp]) -> ConvTiles:
        """The chosen rows, by mask or by number."""
        return ConvTiles(self.shape, {n: c[chosen] for n, c in self.columns.items()})

    def with_options(self, **options: Column | int) -> ConvTiles:
        """The same rows with some options replaced."""
        size = len(self)
        filled = {n: np.broadcast_to(np.asarray(v, np.int64), size) for n, v in options.items()}
        return ConvTiles(self.shape, {**self.columns, **filled})

    @staticmethod
    def of(shape: ConvShape, tiles: list[ConvTile]) -> ConvTiles:
        """A row a tile."""
        columns = {n: np.array([int(getattr(t, n)) for t in tiles], np.int64) for n in _FIELDS}
        return ConvTiles(shape, columns)

    @staticmethod
    def concatenate(parts: list[ConvTiles]) -> ConvTiles:
        """The rows of several tables of one shape, one after the other."""
        columns = {n: np.concatenate([p.columns[n] for p in parts]) for n in _FIELDS}
        return ConvTiles(parts[0].shape, columns)

    # ---- what follows from the options, a value a row; the same as ConvTile's ------------------

    @property
    def warps(self) -> Column:
        """Of a block."""
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_m(self) -> Column:
        """Output pixels of a warp."""
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> Column:
        """Output channels of a warp."""
        return self.block_n // self.warps_n

    @property
    def is_staged(self) -> Mask:
        """Whether the result goes through shared memory."""
        staged: Mask = (self.staged > 0) | (self.warps_k > 1) | (self.cluster_k > 1)
        return staged

    @property
    def k_tiles(self) -> Column:
        """Steps over K of a block."""
        return -(-self.shape.k // (self.block_k * self.cluster_k))

    @property
    def unrolled(self) -> Mask:
        """Whether the loop over K is unrolled."""
        return (self.unroll > 0) | (self.k_tiles <= self.stages)

    @property
    def copies(self) -> tuple[Column, Column]:
        """Copies of a thread a step: of inputs (rows, where they are converted), of weights."""
        threads, vector = 32 * self.warps, self.shape.source_vector
        rows = self.block_m * self.block_k if vector else self.block_m
        weights = np.where(self.cluster_m > 0, 0, self.block_n * self.block_k)
        return -(-rows // (max(1, vector) * threads)), -(
            -weights // (self.shape.weight_vector * threads)
        )

    @property
    def blocks(self) -> Column:
        """Of the whole grid."""
        sharers = np.maximum(self.cluster_m, 1)
        over_m = -(-self.shape.pixels // (self.block_m * sharers)) * sharers
        over_n = -(-self.shape.out_channels // self.block_n)
        return over_m * over_n * self.cluster_k

    @property
    def shared_bytes(self) -> Column:
        """Shared memory of a block, with one bias-like vector."""
        stage = (self.block_m + self.block_n) * self.block_k
        pipeline = np.minimum(self.stages, self.k_tiles) * stage
        sums = 4 * self.block_m * (self.block_n + STAGING_PADDING)
        clustered = self.cluster_k > 1
        in_block = self.is_staged & ~(clustered & (self.warps_k == 1))
        ring = self.shape.element.bytes * pipeline
        main: Column = np.maximum(ring, np.where(in_block, self.warps_k * sums, 0))
        main = main + np.where(clustered, sums + BARRIER_BYTES, 0)
        slots = np.minimum(self.stages, self.k_tiles)
        returned = (self.cluster_m > 1) & (self.k_tiles > slots)
        barriers = 8 * slots * np.where(returned, 2, 1)
        main = main + np.where(self.cluster_m > 0, -(-barriers // 16) * 16, 0)
        return np.asarray(main + 4 * self.block_n, np.int64)


def _typed(name: str, value: int) -> int | bool:
    return bool(value) if name in FLAGS else value


def legal(tiles: ConvTiles, target: Target, precision: str) -> Mask:
    """Which rows a kernel can be made of."""
    t, shape = tiles, tiles.shape
    threads = 32 * t.warps
    element = shape.element
    products = t.block_k // element.k_step
    good = np.isin(t.block_k, block_ks(element)) & (t.block_m % (16 * t.warps_m) == 0)
    good &= (t.block_n % (8 * t.warps_n) == 0) & (products % t.warps_k == 0)
    good &= threads <= conv2d_tile._MAX_THREADS
    good &= np.isin(t.cluster_k, CLUSTERS if target.clusters else (1,))
    good &= (t.cluster_k == 1) | ((t.cluster_k - 1) * t.k_tiles * t.block_k < shape.k)
    good &= (t.cluster_m == 0) | _bulk_legal(t, target)
    for vector in (shape.source_vector or element.chunk, shape.weight_vector):
        good &= threads % np.maximum(t.block_k // vector, 1) == 0
    limit = np.where(threads <= 256, 96, 64) // (2 if precision == "fp32" else 1)
    good &= t.warp_m * t.warp_n // 32 <= limit
    good &= (t.stages >= 2) | ((t.stages == 1) & (t.k_tiles == 1))
    if shape.source_vector == 0:
        good &= (t.cluster_k == 1) & t.unrolled & (t.warps_k == 1)
    of_warp = (t.warp_m // 16) * (t.warp_n // 8) * products // t.warps_k
    good &= ~t.unrolled | (t.k_tiles * of_warp <= conv2d_tile._MAX_UNROLLED)
    inputs, weights = t.copies
    good &= np.maximum(inputs, weights) <= conv2d_tile._MAX_COPIES
    if shape.source_vector == 0:
        good &= inputs <= 2
    few = t.k_tiles * (inputs + weights) <= conv2d_tile._MAX_UNROLLED_COPIES
    good &= ~t.unrolled | few
    if shape.source_vector:
        good &= ~overfull(t, shape, target, precision, t.copies)
    need = t.shared_bytes
    if shape.source_vector == 0:
        need = np.zeros(len(t), np.int64)
        need[good] = [most_image_bytes(shape, t.tile(int(row))) for row in np.flatnonzero(good)]
    good &= need <= target.shared_memory_bytes
    return np.asarray(good, np.bool_)


def _bulk_legal(t: ConvTiles, target: Target) -> Mask:
    """Which rows' weights can come by bulk copies, as they say."""
    shape = t.shape
    good = np.isin(t.cluster_m, SHARERS if target.clusters and shape.source_vector else ())
    good &= (t.cluster_m == 1) | (t.cluster_k == 1)
    good &= (shape.out_channels % t.block_n == 0) & (shape.k % (t.block_k * t.cluster_k) == 0)
    good &= (t.cluster_m == 1) | (t.stages >= 3) | (t.k_tiles <= t.stages)
    return np.asarray(good, np.bool_)


def geometries(shape: ConvShape, target: Target) -> ConvTiles:
    """Every division of the work among clusters, blocks and warps worth considering.

    The pipeline is 2 deep and the flags as is usual for the shape; `pipelines` and `flags` vary
    those. Not all are legal.
    """
    depths = block_ks(shape.element)
    grid = _grid(depths)
    keep = (grid["block_m"] == BLOCK_M[0]) | (grid["block_m"] < 2 * shape.pixels)
    keep &= np.isin(grid["block_n"], channel_blocks(shape.out_channels))
    deepest = [depth for depth in depths if depth == depths[0] or depth // 2 < shape.k]
    if shape.source_vector == 0:  # a converted input cannot be prefetched: as few steps as can be
        deepest = deepest[-1:]
    keep &= np.isin(grid["block_k"], deepest)
    base = {name: column[keep] for name, column in grid.items()}
    size = len(base["block_m"])
    for name, field in _FIELDS.items():
        if name not in base:
            base[name] = np.full(size, int(field.default), np.int64)  # type: ignore[arg-type]
    tiles = ConvTiles(shape, base).with_options(
        stages=DEPTHS[0], unroll=int(shape.source_vector == 0), through_l1=int(shape.taps > 1)
    )
    parts = [tiles]
    if target.clusters and shape.source_vector != 0:
        parts += [_clustered(tiles, count, target) for count in CLUSTERS[1:]]
    return ConvTiles.concatenate(parts)


def pipelines(tiles: ConvTiles) -> ConvTiles:
    """Each row with every depth of its pipeline that is of use."""
    parts = [tiles.with_options(stages=depth) for depth in DEPTHS]
    return ConvTiles.concatenate([p.where(p.stages <= np.maximum(2, p.k_tiles)) for p in parts])


def deep_pipelines(tiles: ConvTiles, target: Target, precision: str) -> ConvTiles:
    """Each row with the deepest pipeline of which two blocks fit a multiprocessor, so that the next
    kernel's first loads overlap this one's last products; rows that no depth makes legal go."""
    half = target.shared_memory_per_sm_bytes // 2 - 1024
    stages = np.zeros(len(tiles), np.int64)
    for depth in DEPTHS:
        deeper = tiles.with_options(stages=depth)
        fits = legal(deeper, target, precision) & (depth <= np.maximum(2, deeper.k_tiles))
        if depth > DEPTHS[0]:
            fits &= deeper.shared_bytes <= half
        stages[fits] = depth
    chosen = stages > 0
    return tiles.where(chosen).with_options(stages=stages[chosen])


def usual(tiles: ConvTiles) -> ConvTiles:
    """Rows without what seldom pays, from which the untuned choice is made: few or odd numbers of
    warps, steps of one product, a K divided among blocks though it is short."""
    k_step = tiles.shape.element.k_step
    shallow = (tiles.cluster_k > 1) & (tiles.shape.k < _CLUSTER_PRODUCTS * k_step)
    deep = tiles.block_k >= min(2 * k_step, tiles.shape.k)
    return tiles.where(np.isin(tiles.warps, (4, 8, 16)) & deep & ~shallow)


_CLUSTER_PRODUCTS = 128
"""The products along K from which dividing it among blocks can pay for the cluster."""


def flags(tiles: ConvTiles) -> ConvTiles:
    """Each row with every combination of flags that makes a difference."""
    parts = []
    for bits in range(1 << len(FLAGS)):
        options = {name: bits >> i & 1 for i, name in enumerate(FLAGS)}
        varied = tiles.with_options(**options)
        differs = np.ones(len(tiles), np.bool_)
        if options["unroll"]:  # a loop whose every step has its buffer is unrolled anyway
            differs &= varied.k_tiles > varied.stages
        if options["through_l1"] and (tiles.shape.taps == 1 or tiles.shape.source_vector == 0):
            differs &= False  # nothing is read twice by a block, or not by asynchronous copies
        if options["staged"]:
            differs &= (varied.warps_k == 1) & (varied.cluster_k == 1)
        parts.append(varied.where(differs))
    return ConvTiles.concatenate(parts)


def in_bulk(tiles: ConvTiles, target: Target, precision: str) -> ConvTiles:
    """Each row with its weights by bulk copies, too, shared by every number of blocks: those that
    are legal. Only an sm_90 brings one copy to several blocks in hardware made for it."""
    shared = SHARERS if target.name == "sm_90" else SHARERS[:1]
    plain = tiles.where(tiles.cluster_m == 0)
    parts = [plain.with_options(cluster_m=count) for count in shared]
    parts = [part.where(legal(part, target, precision)) for part in parts]
    return ConvTiles.concatenate([tiles, *parts])


def channel_blocks(channels: int) -> list[int]:
    """Multiples of 8 up to 128 that waste less than a quarter, or the least that covers all."""
    covering = min(-(-channels // 8) * 8, _LARGEST_N)
    sizes = {covering}
    for size in (8, 16, 24, 32, 40, 48, 64, 80, 96, 128):
        if size <= covering and -(-channels // size) * size <= 1.25 * channels:
            sizes.add(size)
    return sorted(sizes)


@cache
def _grid(depths: tuple[int, ...]) -> dict[str, Column]:
    """Blocks and their division among warps, as far as it depends on no shape."""
    names = ("block_m", "block_n", "warps_m", "warps_n", "block_k", "warps_k")
    axes = (BLOCK_M, range(8, _LARGEST_N + 1, 8), (1, 2, 4, 8), (1, 2, 4, 5), depths, (1, 2, 4, 8))
    mesh = np.meshgrid(*(np.array(a, np.int64) for a in axes), indexing="ij")
    flat = {name: axis.ravel() for name, axis in zip(names, mesh, strict=True)}
    good = flat["block_m"] % (16 * flat["warps_m"]) == 0
    good &= flat["block_n"] % (8 * flat["warps_n"]) == 0
    good &= flat["warps_m"] * flat["warps_n"] <= 8
    good &= 32 * flat["warps_m"] * flat["warps_n"] * flat["warps_k"] <= conv2d_tile._MAX_THREADS
    good &= flat["block_k"] // depths[0] % flat["warps_k"] == 0
    return {name: column[good] for name, column in flat.items()}


def _clustered(tiles: ConvTiles, count: int, target: Target) -> ConvTiles:
    """Division of K among blocks, where there are fewer of them than multiprocessors."""
    divided = tiles.with_options(cluster_k=count)
    return divided.where((divided.k_tiles >= 2) & (divided.blocks <= 2 * target.multiprocessors))
