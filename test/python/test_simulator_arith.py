"""What single ops of arith and math compute in the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_kernels import run

RANDOM = np.random.default_rng(7)
INTEGERS = np.array(
    [0, 1, -1, 2, -2, 7, -7, 31, 100, -100, 2**31 - 1, -(2**31), 12345, -54321, 65536, 3] * 2,
    np.int32,
)
OTHERS = np.array(
    [1, -1, 3, -3, 7, 2**31 - 1, -(2**31), 5, -5, 31, 2, 16, -7, 9, 1, 4] * 2, np.int32
)


def signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def unsigned(value: int) -> int:
    return value % 2**32


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


INTEGER_OPS = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "divsi": truncated,
    "remsi": lambda a, b: a - truncated(a, b) * b,
    "floordivsi": lambda a, b: a // b,
    "ceildivsi": lambda a, b: -((-a) // b),
    "divui": lambda a, b: unsigned(a) // unsigned(b),
    "remui": lambda a, b: unsigned(a) % unsigned(b),
    "ceildivui": lambda a, b: -(-unsigned(a) // unsigned(b)),
    "minsi": min,
    "maxsi": max,
    "minui": lambda a, b: min(unsigned(a), unsigned(b)),
    "maxui": lambda a, b: max(unsigned(a), unsigned(b)),
}


@pytest.mark.parametrize("name", INTEGER_OPS)
def test_integer_arithmetic_wraps(name):
    out = np.zeros(32, np.int32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xi32>
        %b = memref.load %z[%tid] : memref<?xi32>
        %r = arith.{name} %a, %b : i32
        memref.store %r, %y[%tid] : memref<?xi32>
        """,
        [INTEGERS.copy(), OTHERS.copy(), out],
        "%x: memref<?xi32>, %z: memref<?xi32>, %y: memref<?xi32>",
    )
    pairs = zip(INTEGERS.tolist(), OTHERS.tolist(), strict=True)
    assert out.tolist() == [signed(INTEGER_OPS[name](a, b)) for a, b in pairs]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("shli", lambda a, n: signed(a << n)),
        ("shrsi", lambda a, n: a >> n),
        ("shrui", lambda a, n: signed(unsigned(a) >> n)),
    ],
)
def test_shifts_by_a_number_of_each_lane(name, function):
    out = np.zeros(32, np.int32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xi32>
        %r = arith.{name} %a, %lane : i32
        memref.store %r, %y[%tid] : memref<?xi32>
        """,
        [INTEGERS.copy(), out],
        "%x: memref<?xi32>, %y: memref<?xi32>",
    )
    assert out.tolist() == [function(a, n) for n, a in enumerate(INTEGERS.tolist())]


INTEGER_PREDICATES = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
    "ult": lambda a, b: unsigned(a) < unsigned(b),
    "ule": lambda a, b: unsigned(a) <= unsigned(b),
    "ugt": lambda a, b: unsigned(a) > unsigned(b),
    "uge": lambda a, b: unsigned(a) >= unsigned(b),
}


@pytest.mark.parametrize("name", INTEGER_PREDICATES)
def test_integer_comparisons(name):
    out = np.zeros(32, np.int32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xi32>
        %b = memref.load %z[%tid] : memref<?xi32>
        %r = arith.cmpi {name}, %a, %b : i32
        %e = arith.extui %r : i1 to i32
        memref.store %e, %y[%tid] : memref<?xi32>
        """,
        [INTEGERS.copy(), OTHERS[::-1].copy(), out],
        "%x: memref<?xi32>, %z: memref<?xi32>, %y: memref<?xi32>",
    )
    pairs = zip(INTEGERS.tolist(), OTHERS[::-1].tolist(), strict=True)
    assert out.tolist() == [int(INTEGER_PREDICATES[name](a, b)) for a, b in pairs]


FLOATS = np.array([0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, 3.25] * 4, np.float32)
FLOAT_PREDICATES = {
    "oeq": (lambda a, b: a == b, False),
    "ogt": (lambda a, b: a > b, False),
    "oge": (lambda a, b: a >= b, False),
    "olt": (lambda a, b: a < b, False),
    "ole": (lambda a, b: a <= b, False),
    "one": (lambda a, b: a != b, False),
    "ord": (lambda a, b: True, False),
    "ueq": (lambda a, b: a == b, True),
    "ugt": (lambda a, b: a > b, True),
    "uge": (lambda a, b: a >= b, True),
    "ult": (lambda a, b: a < b, True),
    "ule": (lambda a, b: a <= b, True),
    "une": (lambda a, b: a != b, True),
    "uno": (lambda a, b: False, True),
    "false": (lambda a, b: False, False),
    "true": (lambda a, b: True, True),
}


@pytest.mark.parametrize("name", FLOAT_PREDICATES)
def test_float_comparisons(name):
    other = np.roll(FLOATS, 5)
    other[::3] = FLOATS[::3]
    out = np.zeros(32, np.int32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xf32>
        %b = memref.load %z[%tid] : memref<?xf32>
        %r = arith.cmpf {name}, %a, %b : f32
        %e = arith.extui %r : i1 to i32
        memref.store %e, %y[%tid] : memref<?xi32>
        """,
        [FLOATS.copy(), other, out],
        "%x: memref<?xf32>, %z: memref<?xf32>, %y: memref<?xi32>",
    )
    compare, with_nan = FLOAT_PREDICATES[name]
    want = [
        with_nan if math.isnan(a) or math.isnan(b) else compare(a, b)
        for a, b in zip(FLOATS.tolist(), other.tolist(), strict=True)
    ]
    assert out.tolist() == [int(w) for w in want]


FLOAT_OPS = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.minimumf": np.minimum,
    "arith.maximumf": np.maximum,
    "arith.minnumf": np.fmin,
    "arith.maxnumf": np.fmax,
}


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_float_arithmetic(name):
    other = np.roll(FLOATS, 3)
    out = np.zeros(32, np.float32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xf32>
        %b = memref.load %z[%tid] : memref<?xf32>
        %r = {name} %a, %b : f32
        memref.store %r, %y[%tid] : memref<?xf32>
        """,
        [FLOATS.copy(), other, out],
        "%x: memref<?xf32>, %z: memref<?xf32>, %y: memref<?xf32>",
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, FLOAT_OPS[name](FLOATS, other))


FUNCTIONS = {
    "math.exp %a : f32": np.exp,
    "math.exp2 %a : f32": np.exp2,
    "math.log2 %a : f32": np.log2,
    "math.sqrt %a : f32": np.sqrt,
    "math.rsqrt %a : f32": lambda v: 1 / np.sqrt(v),
    "math.tanh %a : f32": np.tanh,
    "math.absf %a : f32": np.abs,
    "math.floor %a : f32": np.floor,
    "math.erf %a : f32": np.vectorize(math.erf),
    "math.fma %a, %a, %one : f32": lambda v: v * v + 1,
    "arith.negf %a : f32": np.negative,
    "nvvm.rcp.approx.ftz.f %a : f32": lambda v: 1 / v,
    'llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"(%a) : (f32) -> f32': np.exp2,
    'llvm.call_intrinsic "llvm.nvvm.rsqrt.approx.ftz.f"(%a) : (f32) -> f32': (
        lambda v: 1 / np.sqrt(v)
    ),
    'llvm.call_intrinsic "llvm.fma.f32"(%a, %a, %one) : (f32, f32, f32) -> f32': (
        lambda v: v * v + 1
    ),
}


@pytest.mark.parametrize("text", FUNCTIONS)
def test_functions_of_float32(text):
    """Within 2 ulp of float64: numpy's own float32 functions are good to 1 ulp and a rounding."""
    x = RANDOM.uniform(0.05, 6, 32).astype(np.float32)
    out = np.zeros(32, np.float32)
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?xf32>
        %r = {text}
        memref.store %r, %y[%tid] : memref<?xf32>
        """,
        [x, out],
    )
    want = FUNCTIONS[text](x.astype(np.float64))
    assert (np.abs(out - want) <= 2 * np.spacing(np.abs(want).astype(np.float32))).all()


def test_ftz_flushes_subnormals():
    x = np.full(32, -130.0, np.float32)
    out = np.ones(32, np.float32)
    run(
        """
        %a = memref.load %x[%tid] : memref<?xf32>
        %r = llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"(%a) : (f32) -> f32
        memref.store %r, %y[%tid] : memref<?xf32>
        """,
        [x, out],
    )
    assert (out == 0).all()


CASTS = [
    ("i32", "f32", "arith.sitofp", lambda v: v.astype(np.float32)),
    ("i32", "f32", "arith.uitofp", lambda v: v.view(np.uint32).astype(np.float32)),
    ("f32", "i32", "arith.fptosi", lambda v: np.trunc(v).astype(np.int32)),
    ("i32", "f32", "arith.bitcast", lambda v: v.view(np.float32)),
    ("f32", "i32", "arith.bitcast", lambda v: v.view(np.int32)),
    ("i32", "i64", "arith.extsi", lambda v: v.astype(np.int64)),
    ("i32", "i64", "arith.extui", lambda v: v.view(np.uint32).astype(np.int64)),
    ("i32", "i8", "arith.trunci", lambda v: v.astype(np.int8)),
    ("i8", "f32", "arith.uitofp", lambda v: v.view(np.uint8).astype(np.float32)),
    ("f32", "f16", "arith.truncf", lambda v: v.astype(np.float16)),
    ("f16", "f32", "arith.extf", lambda v: v.astype(np.float32)),
]
NUMPY = {"i8": "i1", "i32": "i4", "i64": "i8", "f16": "f2", "f32": "f4"}


@pytest.mark.parametrize(("source", "target", "name", "function"), CASTS)
def test_casts_agree_with_numpy(source, target, name, function):
    x = RANDOM.integers(-100, 100, 32).astype(NUMPY[source])
    if source.startswith("f"):
        x = (x * np.float32(1.3)).astype(NUMPY[source])
    out = np.zeros(32, NUMPY[target])
    run(
        f"""
        %a = memref.load %x[%tid] : memref<?x{source}>
        %r = {name} %a : {source} to {target}
        memref.store %r, %y[%tid] : memref<?x{target}>
        """,
        [x, out],
        f"%x: memref<?x{source}>, %y: memref<?x{target}>",
    )
    np.testing.assert_array_equal(out, function(x))


def bfloat16_bits(value: float) -> int:
    """Round to nearest even by comparing with both neighbours exactly."""
    bits = int(np.float32(value).view(np.uint32))
    low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    low_value, high_value = np.array([low, high], np.uint32).view(np.float32).tolist()
    below, above = abs(low_value - value), abs(high_value - value)
    if below == above:
        return (low if (low >> 16) % 2 == 0 else high) >> 16
    return (low if below < above else high) >> 16


def test_bfloat16_rounds_to_nearest_even():
    x = RANDOM.standard_normal(32).astype(np.float32)
    x[0], x[1] = np.float32(1 + 2**-8), np.float32(1 + 3 * 2**-8)
    out = np.zeros(32, np.uint16)
    run(
        """
        %a = memref.load %x[%tid] : memref<?xf32>
        %r = arith.truncf %a : f32 to bf16
        memref.store %r, %y[%tid] : memref<?xbf16>
        """,
        [x, out],
        "%x: memref<?xf32>, %y: memref<?xbf16>",
    )
    assert out.tolist() == [bfloat16_bits(v) for v in x.tolist()]


def test_select_and_index_casts():
    out = np.zeros(32, np.int32)
    run(
        """
        %k = arith.constant 10 : i32
        %less = arith.cmpi slt, %lane, %k : i32
        %r = arith.select %less, %lane, %k : i32
        %i = arith.index_cast %r : i32 to index
        %t = arith.addi %i, %c1 : index
        %b = arith.index_cast %t : index to i32
        memref.store %b, %y[%tid] : memref<?xi32>
        """,
        [np.zeros(1, np.float32), out],
        "%x: memref<?xf32>, %y: memref<?xi32>",
    )
    np.testing.assert_array_equal(out, np.minimum(np.arange(32), 10) + 1)


def test_extended_multiplication():
    out = np.zeros(64, np.int32)
    run(
        """
        %a = memref.load %x[%tid] : memref<?xi32>
        %low, %high = arith.mului_extended %a, %a : i32
        %i = arith.addi %tid, %c32 : index
        memref.store %low, %y[%tid] : memref<?xi32>
        memref.store %high, %y[%i] : memref<?xi32>
        """,
        [INTEGERS.copy(), out],
        "%x: memref<?xi32>, %y: memref<?xi32>",
    )
    full = [unsigned(a) ** 2 for a in INTEGERS.tolist()]
    assert out[:32].tolist() == [signed(f) for f in full]
    assert out[32:].tolist() == [signed(f >> 32) for f in full]
