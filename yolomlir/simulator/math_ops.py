"""`math` in numpy's float32 (float16 and bfloat16 through float32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from yolomlir.simulator.arith_ops import elementwise
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import Value, element_of


def fused_multiply_add(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of float32 with one rounding, up to a double rounding through float64."""
    exact = np.multiply(a, b, dtype=np.float64) + np.asarray(c, np.float64)
    return exact.astype(np.asarray(a).dtype)[()]


def reciprocal_square_root(x: Value) -> Value:
    """1 / sqrt(x), rounded once."""
    return (1.0 / np.sqrt(np.asarray(x, np.float64))).astype(np.asarray(x).dtype)[()]


def _erf(x: Value) -> Value:
    """erf by its complementary continued expansion: Abramowitz and Stegun 7.1.26 is too coarse, so
    the series 2/sqrt(pi) * sum (-1)^n x^(2n+1) / (n! (2n+1)) in float64 for |x| < 4, else 1."""
    value = np.asarray(x, np.float64)
    clipped = np.clip(value, -4.0, 4.0)
    term = clipped.copy()
    total = clipped.copy()
    for n in range(1, 80):
        term = term * (-(clipped**2)) / n
        total = total + term / (2 * n + 1)
    erf = np.where(np.abs(value) >= 4.0, np.sign(value), total * (2.0 / np.sqrt(np.pi)))
    return erf.astype(np.asarray(x).dtype)[()]


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.expm1": np.expm1,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.log1p": np.log1p,
    "math.sqrt": np.sqrt,
    "math.rsqrt": reciprocal_square_root,
    "math.tanh": np.tanh,
    "math.sin": np.sin,
    "math.cos": np.cos,
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.trunc": np.trunc,
    "math.roundeven": np.rint,
    "math.absf": np.abs,
    "math.absi": np.abs,
    "math.powf": np.power,
    "math.copysign": np.copysign,
    "math.erf": _erf,
    "math.fma": fused_multiply_add,
    "math.isnan": np.isnan,
    "math.isinf": np.isinf,
    "math.isfinite": np.isfinite,
}


@operation(*_FUNCTIONS)
def _function(op: Any, scope: Scope) -> Step:
    function = _FUNCTIONS[op.name]
    source = element_of(op.operands[0].type)
    if source.name == "f16" and element_of(op.results[0].type).name == "f16":
        wide = function

        def through_float32(*operands: Value) -> Value:
            result = wide(*(np.asarray(o, np.float32) for o in operands))
            return result.astype(np.float16)[()]

        function = through_float32
    return elementwise(op, scope, element_of(op.results[0].type).rounded(function))


def _count_bits(value: Value, bits: int) -> Value:
    unsigned = np.asarray(value).view(f"u{np.asarray(value).dtype.itemsize}").astype(np.uint64)
    total = np.zeros_like(unsigned)
    for i in range(bits):
        total = total + ((unsigned >> np.uint64(i)) & np.uint64(1))
    return total


def population_count(value: Value, bits: int) -> Value:
    """How many bits are set."""
    return _count_bits(value, bits).astype(np.asarray(value).dtype)[()]


def leading_zeros(value: Value, bits: int) -> Value:
    """Zero bits above the highest set one; `bits` for zero."""
    unsigned = np.asarray(value).view(f"u{np.asarray(value).dtype.itemsize}").astype(np.uint64)
    zeros = np.full(unsigned.shape, bits)
    for i in range(bits):
        zeros = np.where((unsigned >> np.uint64(i)) & np.uint64(1), bits - 1 - i, zeros)
    return zeros.astype(np.asarray(value).dtype)[()]


def trailing_zeros(value: Value, bits: int) -> Value:
    """Zero bits below the lowest set one; `bits` for zero."""
    lowest = np.bitwise_and(value, np.negative(value))
    zeros = bits - 1 - leading_zeros(lowest, bits)
    return np.where(lowest == 0, bits, zeros).astype(np.asarray(value).dtype)[()]


@operation("math.ctpop", "math.ctlz", "math.cttz")
def _bits(op: Any, scope: Scope) -> Step:
    bits = element_of(op.results[0].type).bits
    count = {
        "math.ctpop": population_count,
        "math.ctlz": leading_zeros,
        "math.cttz": trailing_zeros,
    }[op.name]
    return elementwise(op, scope, lambda v: count(v, bits))
