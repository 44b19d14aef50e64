"""`math.exp` on float32 as arithmetic that vectorises, so that no kernel calls libm.

exp(x) = 2^n * e^r with n = round(x / ln 2) and r = x - n ln 2, subtracted in two steps (Cody and
Waite), so |r| <= ln 2 / 2. e^r is a polynomial of degree 6 interpolated at Chebyshev nodes: its
relative error is below 3e-9, far below float32's rounding, so the result is right to about 2 units
in the last place.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from yolomlir.bindings import arith, ir
from yolomlir.bindings import math as math_dialect
from yolomlir.dialects import yolo

_DEGREE = 6
_LOWEST = -87.33654
"""exp of less is below float32's smallest normal number and becomes that number, about 1.2e-38."""
_HIGHEST = 88.37626
"""exp of more would need an exponent of 128; it becomes exp of this, about 2.4e38."""
_ROUND = 1.5 * 2.0**23
"""Adding it to |x| < 2^22 leaves round(x) in the low bits."""
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_MANTISSA_BITS = 23
_ONE_BITS = 0x3F800000


@functools.lru_cache(maxsize=1)
def coefficients() -> tuple[float, ...]:
    """The polynomial of e^r on |r| <= ln 2 / 2, the constant term first."""
    half = math.log(2) / 2
    fit = np.polynomial.Chebyshev.interpolate(np.exp, _DEGREE, domain=[-half, half])
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef)


def expand_exp(module: ir.Module) -> int:
    """Rewrite every scalar float32 `math.exp` of the module; returns how many there were."""
    ops = [op for op in yolo.ops_in(module, "math.exp") if str(op.results[0].type) == "f32"]
    for op in ops:
        with ir.InsertionPoint(op), op.location:
            op.results[0].replace_all_uses_with(_exp(op.operands[0]))
        op.erase()
    return len(ops)


def _f32(value: float) -> ir.Value:
    return arith.constant(ir.F32Type.get(), value)


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _exp(x: ir.Value) -> ir.Value:
    """A NaN fails both comparisons and stays one."""
    low, high = _f32(_LOWEST), _f32(_HIGHEST)
    x = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, low), low, x)
    x = arith.select(arith.cmpf(arith.CmpFPredicate.OGT, x, high), high, x)
    shifted = math_dialect.fma(x, _f32(1 / math.log(2)), _f32(_ROUND))
    n = arith.subf(shifted, _f32(_ROUND))
    r = math_dialect.fma(n, _f32(-_LN2_HIGH), x)
    r = math_dialect.fma(n, _f32(-_LN2_LOW), r)
    *lower, value = (_f32(c) for c in coefficients())
    for c in reversed(lower):
        value = math_dialect.fma(value, r, c)
    integer = ir.IntegerType.get_signless(32)
    exponent = arith.shli(arith.bitcast(integer, shifted), _i32(_MANTISSA_BITS))
    power = arith.bitcast(ir.F32Type.get(), arith.addi(exponent, _i32(_ONE_BITS)))
    return arith.mulf(value, power)
