"""Matrix fragments of `mma.sync` and `ldmatrix`: registers of 32 lanes to matrices and back.

PTX ISA, "Matrix fragments for mma.m16n8k*": lane = 4 * group + t. With P elements a 32-bit
register (1 for tf32, 2 for 16-bit types, 4 for 8-bit ones), register i, element j of
- A (16 x K, row major) is row group + 8 (i % 2), column 4 P (i // 2) + P t + j;
- B (K x 8, column major) is row 4 P i + P t + j, column group;
- C and D (16 x 8): value i is row group + 8 (i // 2), column 2 t + i % 2.

Numerics: the products are exact, their sum over K is taken in float64 and added to C there, and
rounded to float32 (float16 for float16 accumulators) once an instruction. NVIDIA does not document
the order or the width of the hardware's accumulation; on every GPU it differs from this by less
than K + 1 roundings to float32. TF32 inputs lose their low 13 bits first.
"""

from __future__ import annotations

import numpy as np

from yolomlir.simulator.elements import Array

WARP = 32


def a_matrix(registers: Array) -> Array:
    """A (warps, 16, K) of registers (lanes, count, P)."""
    lanes, count, packed = registers.shape
    warps, half = lanes // WARP, max(1, count // 2)
    by = registers.reshape(warps, 8, 4, half, 2, packed)
    return np.asarray(by.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, half * 4 * packed))


def b_matrix(registers: Array) -> Array:
    """B (warps, K, 8) of registers (lanes, count, P)."""
    lanes, count, packed = registers.shape
    warps = lanes // WARP
    by = registers.reshape(warps, 8, 4, count, packed)
    return np.asarray(by.transpose(0, 3, 2, 4, 1).reshape(warps, count * 4 * packed, 8))


def c_matrix(values: Array) -> Array:
    """C (warps, 16, 8) of values (lanes, 4)."""
    warps = len(values) // WARP
    by = values.reshape(warps, 8, 4, 2, 2)
    return np.asarray(by.transpose(0, 3, 1, 2, 4).reshape(warps, 16, 8))


def d_values(matrix: Array) -> Array:
    """Values (lanes, 4) of D (warps, 16, 8)."""
    warps = len(matrix)
    by = matrix.reshape(warps, 2, 8, 4, 2)
    return np.asarray(by.transpose(0, 2, 3, 1, 4).reshape(warps * WARP, 4))


def multiply(a: Array, b: Array, c: Array) -> Array:
    """D values (lanes, 4) of A and B registers (lanes, count, P) and C values (lanes, 4).

    Integers wrap in int32; floats as the module says. The result has C's type.
    """
    wide = np.dtype(np.int64 if a.dtype.kind in "iu" else np.float64)
    product = a_matrix(a).astype(wide) @ b_matrix(b).astype(wide)
    return d_values((product + c_matrix(c)).astype(c.dtype))


def distribute_rows(rows: Array) -> Array:
    """What each lane gets of `ldmatrix`: 32-bit words (lanes, count).

    rows: (warps, count, 8, 4) 32-bit words; lane l gets word l % 4 of row l // 4.
    """
    warps, count = rows.shape[:2]
    by = rows.reshape(warps, count, WARP)
    return np.asarray(by.transpose(0, 2, 1).reshape(warps * WARP, count))


def transpose_b16(rows: Array) -> Array:
    """Each 8 x 8 matrix of 16-bit elements transposed, for `ldmatrix.trans`; same shape."""
    halves = np.ascontiguousarray(rows).view(np.uint16)
    return np.asarray(np.ascontiguousarray(halves.swapaxes(-1, -2)).view(rows.dtype))
