"""Attention's shape, tile and linalg form."""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.element import Element, element_named
from yolomlir.codegen.gpu.tile import later_option
from yolomlir.dialects import yolo
from yolomlir.target import Target


@dataclass(frozen=True)
class AttentionShape:
    """`tokens` are the positions of the height x width map; channels of the input lie a head after
    the other, each query, key, value. kernel: of the positional convolution, None without one.
    rounded: the input is TF32 already; round_result: the result is to be. dtype: of the input, the
    positional weights and the result."""

    batch: int
    height: int
    width: int
    heads: int
    key_dim: int
    head_dim: int
    scale: float
    kernel: tuple[int, int] | None
    padding: match.Padding = (0, 0, 0, 0)
    rounded: bool = False
    round_result: bool = False
    dtype: str = "float32"

    @property
    def element(self) -> Element:
        """The type of the input, the positional weights and the result."""
        return element_named(self.dtype)

    @property
    def tiles_a_product(self) -> int:
        """Tiles of 8 keys that one product with the values takes: a step of K."""
        return self.element.k_step // 8

    @property
    def tokens(self) -> int:
        """Positions of one image."""
        return self.height * self.width

    @property
    def depth(self) -> int:
        """Channels of one head in the input."""
        return 2 * self.key_dim + self.head_dim


@dataclass(frozen=True)
class AttentionTile:
    """query_tiles: of 16 queries, a block. key_tiles: of 8 keys, a step of a warp. warps: of a
    block. cluster: blocks that have the same queries; all their warps share the keys.
    release_early: dependent kernels may start with this one, not only after its last key. carveout:
    see `tile.CARVEOUTS`."""

    query_tiles: int = 1
    key_tiles: int = 2
    warps: int = 8
    cluster: int = 1
    release_early: bool = later_option(False)
    carveout: int = later_option(0)

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return 16 * self.query_tiles

    @property
    def keys(self) -> int:
        """Keys of one step of a warp."""
        return 8 * self.key_tiles

    @property
    def rows(self) -> int:
        """Queries that a block finishes."""
        return self.queries // self.cluster

    @property
    def workers(self) -> int:
        """Warps that share the keys."""
        return self.warps * self.cluster


_QUERIES = 2
"""Tiles of queries of a block in a cluster: its keys are read half as often as with one."""


def default_tile(shape: AttentionShape, target: Target, precision: str) -> AttentionTile:
    """A cluster a 32 queries, where that many blocks run side by side and a warp then has its keys
    in one step; otherwise the warps of a block share them.

    Without clusters, 16 queries a block until as many blocks of 32 fill the GPU: those took 0.55 of
    the time on an H200 for 8 images (208 blocks). Then float16 wants half the warps, since each
    combines the sums of its queries with the others'. Registers bound the keys of a step.
    """
    sms = target.multiprocessors
    blocks = -(-shape.tokens // (16 * _QUERIES)) * shape.heads * shape.batch
    for cluster in (4, 2) if target.clusters else ():
        key_tiles = 2 if precision == "fp32" else 4
        warps = max(4, -(-shape.tokens // (8 * cluster * key_tiles)))
        if blocks * cluster <= sms and warps <= 8:
            return AttentionTile(_QUERIES, key_tiles, warps, cluster)
    if target.clusters and -(-shape.tokens // 16) * shape.heads * shape.batch * 2 <= sms:
        return AttentionTile(cluster=2)
    key_tiles = 1 if precision == "fp32" else 2
    larger = AttentionTile(_QUERIES, key_tiles, warps=4 if precision == "fp16" else 8)
    if blocks >= sms and _fits(shape, larger, precision):
        return larger
    return AttentionTile(key_tiles=key_tiles)


def tiles(shape: AttentionShape, target: Target, precision: str) -> list[AttentionTile]:
    """Every tile worth measuring whose warps probably have the registers."""
    found = []
    for cluster in (1, 2, 4, 8) if target.clusters else (1,):
        for query_tiles in (1, 2):
            for key_tiles in (1, 2, 4)[shape.tiles_a_product - 1 :]:
                one_step = -(-shape.tokens // (8 * key_tiles * cluster))
                for warps in sorted({4, 8, 16, max(4, one_step)}):
                    tile = AttentionTile(query_tiles, key_tiles, warps, cluster)
                    if warps <= 16 and _fits(shape, tile, precision):
                        found.append(tile)
    return found


def _fits(shape: AttentionShape, tile: AttentionTile, precision: str) -> bool:
    """Whether the registers suffice: sums, queries, keys and values, and the next ones in a loop,
    as compiled kernels have them; with all products in float32 the rests come to the operands."""
    rests = 2 if precision == "fp32" else 1
    loops = 2 if tile.workers * tile.keys < shape.tokens else 1
    packed = shape.element.packed
    each = (shape.key_dim + shape.head_dim) // (4 * packed)
    queries = tile.query_tiles * (shape.head_dim + rests * shape.key_dim // packed) // 2
    return 56 + queries + tile.key_tiles * each * loops <= min(255, 65536 // (32 * tile.warps))


def objection(
    tile: AttentionTile, shape: AttentionShape, target: Target, precision: str
) -> str | None:
    """Why a tile is not to be taken for a shape, perhaps one of other images; None where it may."""
    if (reason := misfit(tile, shape, target)) is not None:
        return reason
    return None if _fits(shape, tile, precision) else "a thread has too few registers"


def misfit(tile: AttentionTile, shape: AttentionShape, target: Target) -> str | None:
    """Why no kernel can be made of a tile; None where one can."""
    if tile.key_tiles % shape.tiles_a_product:
        return f"products of {shape.dtype} take {shape.tiles_a_product} tiles of keys"
    if tile.cluster not in ((1, 2, 4, 8) if target.clusters else (1,)):
        return f"{target.name} has {'clusters of 2, 4 or 8' if target.clusters else 'none'}"
    needed = shared_bytes(shape, tile)
    if needed > target.shared_memory_bytes:
        return f"{needed} bytes of shared memory; {target.name} has {target.shared_memory_bytes}"
    return None


def shared_bytes(shape: AttentionShape, tile: AttentionTile) -> int:
    """Every warp's sums, and its maximum and total a query; in a cluster, also every block's of
    the queries that this one finishes, and a barrier."""
    part = 4 * tile.queries * (shape.head_dim + 2)
    return tile.warps * part + (part + 8 if tile.cluster > 1 else 0)


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> AttentionShape:
    """The shape of a dispatch function. Raises UnsupportedError for another form.

    Arguments: qkv, then the weight (KH x KW x C in memory) and bias of the positional convolution
    where there is one.
    """
    arguments = list(function.regions[0].blocks[0].arguments)
    batch, height, width, channels = match.shape(arguments[0])
    heads, key_dim, head_dim = (yolo.integer(function, f"yolo.{k}") for k in _INTEGERS)
    kernel: tuple[int, int] | None = None
    padding = (0, 0, 0, 0)
    if len(arguments) == 3:
        conv = match.only(function, "linalg.depthwise_conv_2d_nhwc_hwc")
        rows, columns, _ = match.shape(conv.operands[1])
        kernel = (rows, columns)
        padding = match.unpadded(conv.operands[0])[1]
        weight = match.through(conv.operands[1], "tensor.collapse_shape")
        stretched = (match.pair(conv, "strides"), match.pair(conv, "dilations")) != ((1, 1),) * 2
        if match.argument_number(weight) != 1 or stretched:
            match.refuse(conv, "transposes the positional weight, or strides or dilates it")
    elif len(arguments) != 1:
        match.refuse(function, f"has {len(arguments)} arguments; expected qkv, weight and bias")
    shape = AttentionShape(
        batch, height, width, heads, key_dim, head_dim,
        yolo.real(function, "yolo.scale"), kernel, padding,
        "yolo.tf32_rounded" in function.attributes, "yolo.round_result" in function.attributes,
        match.dtype_of(arguments[0]),
    )  # fmt: skip
    ends = (0, len(arguments))
    element = shape.element
    if match.vector_width(function, element.chunk, ends, element) != element.chunk:
        match.refuse(function, "has rows that are not aligned to 16 bytes")
    if channels != heads * shape.depth:
        match.refuse(function, f"has {channels} channels for {heads} heads of {shape.depth}")
    return shape


_INTEGERS = ("heads", "key_dim", "head_dim")


__all__ = [
    "AttentionShape",
    "AttentionTile",
    "default_tile",
    "misfit",
    "objection",
    "parse",
    "shared_bytes",
    "tiles",
]
