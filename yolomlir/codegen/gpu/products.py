"""Products of fragments on tensor cores, of one TF32 product an element pair or of three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu.builder import f32

Fragments = list[list[list[ir.Value]]]
"""Accumulators of a warp: [16-pixel row][8-channel column][4 registers]."""


@dataclass(frozen=True)
class Operand:
    """TF32 bits of a fragment's values; rest: of what the rounding left over, for `fp32`."""

    bits: list[ir.Value]
    rest: list[ir.Value]


def split(values: Sequence[ir.Value], *, exact: bool, rounded: bool) -> Operand:
    """A fragment as an operand. exact: for `fp32`; rounded: the values are TF32 already."""
    if not exact:
        to_bits = instructions.bits if rounded else instructions.round_to_tf32
        return Operand([to_bits(v) for v in values], [])
    big = [instructions.round_to_tf32(v) for v in values]
    rest = [arith.subf(v, instructions.from_bits(b)) for v, b in zip(values, big, strict=True)]
    return Operand(big, [instructions.round_to_tf32(r) for r in rest])


def multiply(a: Operand, b: Operand, c: list[ir.Value]) -> list[ir.Value]:
    """a b + c. For `fp32` the three leading of four partial products, the small ones first; the
    fourth is below 2^-22 of the product."""
    if a.rest:
        c = instructions.multiply_tf32(a.rest, b.bits, c)
        c = instructions.multiply_tf32(a.bits, b.rest, c)
    return instructions.multiply_tf32(a.bits, b.bits, c)


def zeros(rows: int, columns: int) -> Fragments:
    """Accumulators of 16 rows x 8 columns each."""
    zero = f32(0.0)
    return [[[zero] * 4 for _ in range(columns)] for _ in range(rows)]


def add(x: Fragments, y: Fragments) -> Fragments:
    """The elementwise sum."""
    return [
        [[arith.addf(u, v) for u, v in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]
        for a, b in zip(x, y, strict=True)
    ]
