"""Which unrolled loops of convolutions the assembler spills, though their tile needs little.

Found with the live ranges of `nvdisasm -plr` in 3000 kernels whose tiles need many registers
(sm_90; tf32, fp16, fp32; seven shapes, K from 96 to 2304):

A rolled loop has what one product needs: accumulators, fragments, addresses. Its back edge lets
nothing pass, and 1 of 1500 spilled.

An unrolled loop is a straight line. Products touch no memory, so the assembler delays them beyond
the barrier of the next step and fills the registers that a thread may have with fragments, up to
those of all products of two steps. That alone spills nothing. But of predicates a thread has seven,
and whether a row of the input lies inside, or one of the weights exists, is a predicate for every
copy. While there are copies to come, those that are too many lie packed in registers; unpacking
them takes more of these than were left, and addresses of copies are spilled. Where a tile has both,
more predicates and more fragments than a thread can hold, 1 in 10 spilled; else 1 in 200. Tiles of
few accumulators are no exception: of 90 that have both, 5 spilled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.target import Target

_PREDICATES = 5
"""Of copies that find room: a thread has seven, of which other conditions take one or two."""
_REST = 20
"""Registers for all but accumulators, fragments and copies: the median of rolled loops."""
_MOST_REGISTERS = 255
_SCHEDULERS = 4


def overfull(tile: Any, shape: ConvShape, target: Target, precision: str, copies: Any) -> Any:
    """Whether the loop over K is unrolled, copies while it multiplies, and has both more predicates
    and more fragments than a thread can hold. For inputs that are copied, not converted.

    tile: a `ConvTile`, or `ConvTiles`, for which the answer is an array. copies: the tile's.
    """
    k_tiles = -(-shape.k // (tile.block_k * tile.cluster_k))
    copying = (tile.unroll > 0) & (k_tiles > tile.stages)
    crowded = predicates(tile, shape, copies) > _PREDICATES
    return copying & crowded & (wanted(tile, shape, precision, copies) > available(tile, target))


def available(tile: Any, target: Target) -> Any:
    """Registers a thread: a warp has a multiple of eight for each, and warps are dealt to four
    schedulers, of which the fullest decides."""
    warps = tile.warps_m * tile.warps_n * tile.warps_k
    dealt = -(-warps // _SCHEDULERS) * _SCHEDULERS
    return np.minimum(_MOST_REGISTERS, target.registers_per_sm // (32 * dealt) // 8 * 8)


def wanted(tile: Any, shape: ConvShape, precision: str, copies: Any) -> Any:
    """Registers that the assembler fills where a thread may have them.

    Accumulators; the fragments of two steps (at `fp32` with what their rounding leaves over); two
    for the address of every row of the input, a third for its taps inside where there is padding;
    two for the weights' first row, from which the others are a constant away.
    """
    inputs, weights = copies
    parts = 2 if precision == "fp32" else 1
    products = tile.block_k // shape.element.k_step // tile.warps_k
    fragments = parts * (tile.warp_m // 4 + tile.warp_n // 4)
    addresses = inputs * (2 if shape.in_bounds else 3) + 2 * (weights > 0)
    return tile.warp_m * tile.warp_n // 32 + 2 * products * fragments + addresses + _REST


def predicates(tile: Any, shape: ConvShape, copies: Any) -> Any:
    """Of a step's copies: one for a row that may lie outside, for the end of K, and for a tile's
    last rows, which some threads do not copy."""
    inputs, weights = copies
    threads = 32 * tile.warps_m * tile.warps_n * tile.warps_k
    ragged = shape.pixels % (tile.block_m * np.maximum(1, tile.cluster_m)) != 0
    count = inputs * (ragged | (not shape.in_bounds))
    count = count + weights * (shape.out_channels % tile.block_n != 0)
    count = count + (shape.k % (tile.block_k * tile.cluster_k) != 0)
    count = count + (tile.block_m % _rows(threads, tile.block_k, shape.source_vector) != 0)
    left_over = tile.block_n % _rows(threads, tile.block_k, shape.weight_vector) != 0
    return count + ((weights > 0) & left_over)


def _rows(threads: Any, block_k: Any, vector: int) -> Any:
    """Rows that all threads copy at once."""
    return np.maximum(1, threads // np.maximum(1, block_k // vector))


__all__ = ["available", "overfull", "predicates", "wanted"]
