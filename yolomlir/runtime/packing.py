"""The order in which kernels that copy weights in bulk want them: as they lie in shared memory.

A bulk copy moves what lies together and arranges nothing. So the weights O x K of a convolution are
stored tile after tile, `rows` output channels and `columns` of K each, and within a row in the
order that `codegen/gpu/conv2d_load.py` gives chunks of 16 bytes, so that the eight rows of an
`ldmatrix` meet eight different banks. It is a permutation: sizes and shapes stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.runtime.plan import Plan

Order = tuple[int, ...]
"""(rows, columns, paired), or empty for none. paired: 1 where a row holds the channel that
`conv2d_load.paired_channel` says, not its own."""

_CHUNK_BYTES = 16
_LINE_CHUNKS = 8


def packed(values: NDArray[Any], order: Order) -> NDArray[Any]:
    """Weights O x (K in any number of dimensions) in that order, in the same shape.

    columns are whole chunks. Where rows do not divide O, or columns K, there are zeros for what is
    missing, and the result is O' x K' of the multiples.
    """
    if not order:
        return values
    rows, columns, paired = order
    size = _CHUNK_BYTES // values.itemsize
    chunks = columns // size
    values = _filled(values, rows, columns)
    flat = np.ascontiguousarray(values).reshape(len(values) // rows, rows, -1, chunks, size)
    row = np.arange(rows)
    channel = row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2 if paired else row
    lines = row // max(1, _LINE_CHUNKS // chunks) % min(chunks, _LINE_CHUNKS)
    chunk = np.arange(chunks)[None, :] ^ lines[:, None]
    # (tiles over O, K's tiles, rows, chunks, elements of a chunk)
    tiles = flat.transpose(0, 2, 1, 3, 4)[:, :, channel[:, None], chunk]
    return np.ascontiguousarray(tiles).reshape(values.shape)


def _filled(values: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """With zeros up to multiples of rows and columns."""
    flat = values.reshape(len(values), -1)
    missing = [-flat.shape[0] % rows, -flat.shape[1] % columns]
    return np.pad(flat, [(0, count) for count in missing]) if any(missing) else values


def orders(plan: Plan, kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, Order]:
    """The order that its kernel wants each of a plan's weights in, by the weights' names, of those
    that do not stay as they are. kernels: the program's records."""
    found: dict[str, Order] = {}
    for step in plan.steps:
        parameters = kernels[step.kernel]["parameters"]
        for argument, parameter in zip(step.arguments, parameters, strict=False):
            order = tuple(parameter.get("packed", ()))
            if argument.weight is not None and order:
                found[str(argument.weight)] = order
    return found


__all__ = ["Order", "orders", "packed"]
