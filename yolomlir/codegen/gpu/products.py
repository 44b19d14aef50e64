"""Products of fragments on tensor cores: of float16, of TF32, or of three TF32 for a float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu.builder import f32
from yolomlir.codegen.gpu.element import FLOAT32, Element

Fragments = list[list[list[ir.Value]]]
"""Accumulators of a warp: [16-pixel row][8-channel column][4 registers]."""


@dataclass(frozen=True)
class Operand:
    """A fragment's registers: TF32 bits, or pairs of float16. rest: of what the rounding to TF32
    left over, for `fp32`."""

    bits: list[ir.Value]
    rest: list[ir.Value]
    element: Element = FLOAT32


def split(
    values: Sequence[ir.Value], element: Element = FLOAT32, *, exact: bool, rounded: bool
) -> Operand:
    """A fragment as an operand. exact: for `fp32`; rounded: float32 values are TF32 already."""
    if element is not FLOAT32:
        return Operand(list(values), [], element)
    if not exact:
        to_bits = instructions.bits if rounded else instructions.round_to_tf32
        return Operand([to_bits(v) for v in values], [])
    big = [instructions.round_to_tf32(v) for v in values]
    rest = [arith.subf(v, instructions.from_bits(b)) for v, b in zip(values, big, strict=True)]
    return Operand(big, [instructions.round_to_tf32(r) for r in rest])


def multiply(a: Operand, b: Operand, c: list[ir.Value]) -> list[ir.Value]:
    """a b + c. For `fp32` the three leading of four partial products, the small ones first; the
    fourth is below 2^-22 of the product."""
    if a.element is not FLOAT32:
        return instructions.multiply_f16(a.bits, b.bits, c)
    if a.rest:
        c = instructions.multiply_tf32(a.rest, b.bits, c)
    if b.rest:
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
