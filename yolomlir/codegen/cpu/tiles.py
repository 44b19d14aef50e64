"""Tile sizes from a shape and an instruction set: blocks for threads and caches, registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from yolomlir.codegen.cpu.isa import Isa

LOCAL_BYTES = 256 * 1024
"""What a block's padded input may take: a quarter of a common second-level cache."""
_LEAST_BLOCKS = 20
_BLOCKS_PER_CORE = 4
_LONGEST = 24
"""Pixels of a register tile: more than this never pays, weights being few loads by then."""
_STEP_OVERHEAD = 1.0
"""Cycles a reduction step costs besides its products and loads."""
_WAY_BYTES, _WAYS = 4096, 8
"""Of the first-level data cache: 32 KiB in 8 ways, as on most cores; larger ones conflict less."""
_CONFLICT = 3.0
"""How much slower a tile was whose pixels shared one set (512 channels, stride 2, measured)."""
_LATENCY = 8.0
"""Products in flight that hide a multiply-add's latency on two pipes."""


def wanted_blocks(isa: Isa) -> int:
    """Blocks a dispatch should have at least, so that the cores end at about the same time."""
    return max(_LEAST_BLOCKS, _BLOCKS_PER_CORE * isa.cores)


@dataclass(frozen=True)
class RegisterTile:
    """pixels x channels of the output whose sums stay in registers over the whole reduction."""

    pixels: int
    channels: int


def divisors(n: int) -> list[int]:
    """Every divisor, rising."""
    return [d for d in range(1, n + 1) if n % d == 0]


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit` (1 where limit is less)."""
    return max((d for d in divisors(n) if d <= limit), default=1)


def register_tile(
    width: int,
    channels: int,
    isa: Isa,
    *,
    prefer_channels: bool = False,
    pixel_bytes: int = 0,
) -> RegisterTile:
    """The tile of least modelled cycles a product, of sizes that divide `width` and `channels`.

    A step multiplies `pixels` broadcast inputs by `channels` weights: pixels * vectors
    multiply-adds, one a cycle of the widest registers; vectors weight loads and pixels broadcasts,
    two a cycle. Equal tiles: the one with more pixels, as weights come from a farther cache, or,
    for `prefer_channels`, with more channels, as the input is read again for every tile of them.
    pixel_bytes: between the inputs of neighbouring pixels; a tile whose pixels would push each
    other out of the first-level cache is avoided (a multiple of 4096 puts all of them in one set).
    """
    best: tuple[float, float, RegisterTile] | None = None
    for tile_channels in _channel_tiles(channels, isa):
        vectors = -(-tile_channels // isa.lanes)
        for pixels in (d for d in divisors(width) if d <= _LONGEST):
            sums = pixels * vectors
            if sums + vectors + 2 > isa.registers and (pixels, vectors) != (1, 1):
                continue
            loads = (vectors + pixels) / 2
            cycles = max(sums, loads, _LATENCY) + _STEP_OVERHEAD
            if _lines_in_a_set(pixels, pixel_bytes) > _WAYS:
                cycles *= _CONFLICT
            cost = cycles / (pixels * tile_channels)
            tile = RegisterTile(pixels, tile_channels)
            key = (round(cost, 4), 1 / (tile_channels if prefer_channels else pixels), tile)
            if best is None or key[:2] < best[:2]:
                best = key
    return best[2] if best else RegisterTile(1, channels)


def _lines_in_a_set(pixels: int, pixel_bytes: int) -> int:
    """How many of the pixels' cache lines share a set of the first-level cache."""
    distinct = _WAY_BYTES // math.gcd(_WAY_BYTES, pixel_bytes) if pixel_bytes else pixels
    return -(-pixels // distinct)


def _channel_tiles(channels: int, isa: Isa) -> list[int]:
    """Divisors of the channel count that fill registers; where none does, the largest small one."""
    full = [isa.lanes * n for n in (1, 2, 4) if channels % (isa.lanes * n) == 0]
    if full:
        return full
    return [largest_divisor(channels, 2 * isa.lanes)]


def rows_per_block(
    batch: int, height: int, blocks: int, *, row_bytes: int, stride: int = 1, halo: int = 0
) -> int:
    """Output rows of a block: few enough for `blocks` blocks and for the input to stay in cache.

    row_bytes: of an input row; halo: input rows read besides `stride` an output row.
    """
    wanted = max(1, batch * height // blocks)
    fits = max(1, (LOCAL_BYTES // max(1, row_bytes) - halo) // stride)
    return largest_divisor(height, min(wanted, fits, height))


def channels_per_block(channels: int, tile: RegisterTile, blocks: int) -> int:
    """Output channels of a block where rows alone make too few: `blocks` parts, or as many as there
    are register tiles. Each part reads the whole input, so rows come first."""
    parts = channels // tile.channels
    wanted = min((d for d in divisors(parts) if d >= blocks), default=parts)
    return channels // wanted
