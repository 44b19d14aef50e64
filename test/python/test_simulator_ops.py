"""What single ops of arith, math, vector, memref and scf compute in the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulated_kernels import SHARED, run

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
def test_shifts(name, function):
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
def test_casts(source, target, name, function):
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
    to_float = lambda b: float(np.array(b, np.uint32).view(np.float32))  # noqa: E731
    below, above = abs(to_float(low) - value), abs(to_float(high) - value)
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


# ---- vector -------------------------------------------------------------------------------------


def test_vectors():
    x = RANDOM.standard_normal(128).astype(np.float32)
    out = np.zeros(128, np.float32)
    run(
        """
        %i = arith.muli %tid, %c4 : index
        %v = vector.load %x[%i] {alignment = 16 : i64} : memref<?xf32>, vector<4xf32>
        %k = arith.constant dense<[1.0, 2.0, 3.0, 4.0]> : vector<4xf32>
        %p = vector.fma %v, %k, %k : vector<4xf32>
        %s = vector.shuffle %p, %v [3, 2, 4, 5] : vector<4xf32>, vector<4xf32>
        %e = vector.extract %s[1] : f32 from vector<4xf32>
        %b = vector.broadcast %e : f32 to vector<2xf32>
        %w = vector.insert_strided_slice %b, %s {offsets = [2], strides = [1]}
            : vector<2xf32> into vector<4xf32>
        %h = vector.extract_strided_slice %p {offsets = [0], sizes = [2], strides = [1]}
            : vector<4xf32> to vector<2xf32>
        %f = vector.extract %h[0] : f32 from vector<2xf32>
        %n = vector.insert %f, %w[0] : f32 into vector<4xf32>
        vector.store %n, %y[%i] {alignment = 16 : i64} : memref<?xf32>, vector<4xf32>
        """,
        [x, out],
    )
    v = x.reshape(32, 4).astype(np.float64)
    k = np.arange(1.0, 5)
    p = (v * k + k).astype(np.float32)
    want = np.stack([p[:, 0], p[:, 2], p[:, 2], p[:, 2]], 1)
    np.testing.assert_array_equal(out.reshape(32, 4), want)


def test_dynamic_positions_differ_between_lanes():
    x = RANDOM.standard_normal(128).astype(np.float32)
    out = np.zeros(128, np.float32)
    run(
        """
        %i = arith.muli %tid, %c4 : index
        %v = vector.load %x[%i] : memref<?xf32>, vector<4xf32>
        %p = arith.remui %tid, %c4 : index
        %e = vector.extract %v[%p] : f32 from vector<4xf32>
        %z = arith.constant dense<0.0> : vector<4xf32>
        %n = vector.insert %e, %z[%p] : f32 into vector<4xf32>
        vector.store %n, %y[%i] : memref<?xf32>, vector<4xf32>
        """,
        [x, out],
    )
    want = np.zeros((32, 4), np.float32)
    rows = np.arange(32)
    want[rows, rows % 4] = x.reshape(32, 4)[rows, rows % 4]
    np.testing.assert_array_equal(out.reshape(32, 4), want)


def test_reduction_shape_cast_transpose_and_bitcast():
    x = RANDOM.standard_normal(128).astype(np.float32)
    out, bits = np.zeros(64, np.float32), np.zeros(32, np.int32)
    run(
        """
        %i = arith.muli %tid, %c4 : index
        %v = vector.load %x[%i] : memref<?xf32>, vector<4xf32>
        %m = vector.shape_cast %v : vector<4xf32> to vector<2x2xf32>
        %t = vector.transpose %m, [1, 0] : vector<2x2xf32> to vector<2x2xf32>
        %r = vector.extract %t[0] : vector<2xf32> from vector<2x2xf32>
        %sum = vector.reduction <add>, %r, %one : vector<2xf32> into f32
        %most = vector.reduction <maximumf>, %v : vector<4xf32> into f32
        %j = arith.addi %tid, %c32 : index
        memref.store %sum, %y[%tid] : memref<?xf32>
        memref.store %most, %y[%j] : memref<?xf32>
        %h = arith.truncf %r : vector<2xf32> to vector<2xf16>
        %w = vector.bitcast %h : vector<2xf16> to vector<1xi32>
        %word = vector.extract %w[0] : i32 from vector<1xi32>
        memref.store %word, %b[%tid] : memref<?xi32>
        """,
        [x, out, bits],
        "%x: memref<?xf32>, %y: memref<?xf32>, %b: memref<?xi32>",
    )
    v = x.reshape(32, 4)
    np.testing.assert_array_equal(out[:32], (np.float32(1) + v[:, 0]) + v[:, 2])
    np.testing.assert_array_equal(out[32:], v.max(1))
    np.testing.assert_array_equal(bits.view(np.float16).reshape(32, 2), v[:, ::2].astype("f2"))


def test_masked_and_transfer_accesses_stay_in_bounds():
    x = RANDOM.standard_normal(32).astype(np.float32)
    out = np.full(34, -1.0, np.float32)
    run(
        """
        %v = memref.reinterpret_cast %x to offset: [0], sizes: [32], strides: [1]
            : memref<?xf32> to memref<32xf32>
        %last = arith.cmpi eq, %tid, %c31 : index
        scf.if %last {
          %r = vector.transfer_read %v[%tid], %one : memref<32xf32>, vector<4xf32>
          %m = vector.constant_mask [3] : vector<4xi1>
          vector.maskedstore %y[%tid], %m, %r : memref<?xf32>, vector<4xi1>, vector<4xf32>
        }
        """,
        [x, out],
    )
    np.testing.assert_array_equal(out[31:34], [x[31], 1, 1])
    assert (out[:31] == -1).all()


# ---- memref -------------------------------------------------------------------------------------


def test_views_of_shared_memory():
    """Dynamic bytes seen as f32, a 2-D shape and a subview."""
    x = RANDOM.standard_normal(64).astype(np.float32)
    out = np.zeros(32, np.float32)
    run(
        f"""
        %d = memref.get_global @dynamic : memref<0xi8, {SHARED}>
        %bytes = memref.reinterpret_cast %d to offset: [0], sizes: [320], strides: [1]
            : memref<0xi8, {SHARED}> to memref<320xi8, {SHARED}>
        %shift = arith.constant 64 : index
        %m = memref.view %bytes[%shift][] : memref<320xi8, {SHARED}> to memref<2x32xf32, {SHARED}>
        %j = arith.addi %tid, %c32 : index
        %a = memref.load %x[%tid] : memref<?xf32>
        %b = memref.load %x[%j] : memref<?xf32>
        memref.store %a, %m[%c0, %tid] : memref<2x32xf32, {SHARED}>
        memref.store %b, %m[%c1, %tid] : memref<2x32xf32, {SHARED}>
        gpu.barrier
        %half = memref.subview %m[1, 8] [1, 16] [1, 1] : memref<2x32xf32, {SHARED}>
            to memref<16xf32, strided<[1], offset: 40>, {SHARED}>
        %c16 = arith.constant 16 : index
        %k = arith.remui %tid, %c16 : index
        %r = memref.load %half[%k] : memref<16xf32, strided<[1], offset: 40>, {SHARED}>
        memref.store %r, %y[%tid] : memref<?xf32>
        """,
        [x, out],
        constants=f'memref.global "private" @dynamic : memref<0xi8, {SHARED}>',
        shared_bytes=320,
    )
    np.testing.assert_array_equal(out, x[40 + np.arange(32) % 16])


def test_constant_tables_and_private_buffers():
    out = np.zeros(32, np.float32)
    run(
        """
        %t = memref.get_global @table : memref<4xf32>
        %i = arith.remui %tid, %c4 : index
        %v = memref.load %t[%i] : memref<4xf32>
        %p = memref.alloca() : memref<2xf32>
        memref.store %v, %p[%c1] : memref<2xf32>
        %w = memref.load %p[%c1] : memref<2xf32>
        memref.store %w, %y[%tid] : memref<?xf32>
        """,
        [np.zeros(1, np.float32), out],
        constants='memref.global "private" constant @table : memref<4xf32> = '
        "dense<[5., 6., 7., 8.]>",
    )
    np.testing.assert_array_equal(out, 5 + np.arange(32) % 4)


def test_private_buffers_start_poisoned():
    out = np.zeros(32, np.float32)
    run(
        """
        %p = memref.alloca() : memref<2xf32>
        %w = memref.load %p[%c0] : memref<2xf32>
        memref.store %w, %y[%tid] : memref<?xf32>
        """,
        [np.zeros(1, np.float32), out],
    )
    assert np.isnan(out).all()


def test_selecting_a_buffer_per_lane():
    a, b = np.arange(32, dtype=np.float32), -np.arange(32, dtype=np.float32)
    out = np.zeros(32, np.float32)
    run(
        """
        %c7 = arith.constant 7 : index
        %low = arith.cmpi ult, %tid, %c7 : index
        %m = arith.select %low, %x, %z : memref<?xf32>
        %v = memref.load %m[%tid] : memref<?xf32>
        memref.store %v, %y[%tid] : memref<?xf32>
        """,
        [a, b, out],
        "%x: memref<?xf32>, %z: memref<?xf32>, %y: memref<?xf32>",
    )
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 7, a, b))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_add_up(space):
    counts = np.zeros(4, np.int32)
    old = np.zeros(64, np.int32)
    target = "%y" if space == "global" else "%s"
    type_ = "memref<?xi32>" if space == "global" else f"memref<4xi32, {SHARED}>"
    run(
        f"""
        %i = arith.remui %tid, %c4 : index
        %low = arith.cmpi ult, %tid, %c4 : index
        %k = arith.constant 3 : i32
        %none = arith.constant 0 : i32
        scf.if %low {{ memref.store %none, %s[%i] : memref<4xi32, {SHARED}> }}
        gpu.barrier
        %o = memref.atomic_rmw addi %k, {target}[%i] : (i32, {type_}) -> i32
        memref.store %o, %z[%tid] : memref<?xi32>
        gpu.barrier
        scf.if %low {{
          %v = memref.load {target}[%i] : {type_}
          memref.store %v, %y[%i] : memref<?xi32>
        }}
        """,
        [counts, old],
        "%y: memref<?xi32>, %z: memref<?xi32>",
        shared=f"%s: memref<4xi32, {SHARED}>",
        block=(64, 1, 1),
    )
    assert (counts == 48).all()
    for i in range(4):
        assert sorted(old[i::4].tolist()) == [3 * k for k in range(16)]


# ---- scf ----------------------------------------------------------------------------------------


def test_if_yields_per_lane():
    out = np.zeros(32, np.float32)
    run(
        """
        %c7 = arith.constant 7 : index
        %low = arith.cmpi ult, %tid, %c7 : index
        %f = arith.sitofp %lane : i32 to f32
        %r = scf.if %low -> f32 {
          %a = arith.addf %f, %one : f32
          scf.yield %a : f32
        } else {
          %b = arith.negf %f : f32
          scf.yield %b : f32
        }
        memref.store %r, %y[%tid] : memref<?xf32>
        """,
        [np.zeros(1, np.float32), out],
    )
    t = np.arange(32, dtype=np.float32)
    np.testing.assert_array_equal(out, np.where(t < 7, t + 1, -t))


def test_for_with_bounds_that_differ_between_lanes():
    out = np.zeros(64, np.int32)
    run(
        """
        %none = arith.constant 0 : i32
        %sum = scf.for %i = %c1 to %tid step %c4 iter_args(%s = %none) -> i32 {
          %k = arith.index_cast %i : index to i32
          %t = arith.addi %s, %k : i32
          scf.yield %t : i32
        }
        memref.store %sum, %y[%tid] : memref<?xi32>
        """,
        [np.zeros(1, np.float32), out],
        "%x: memref<?xf32>, %y: memref<?xi32>",
        block=(64, 1, 1),
    )
    assert out.tolist() == [sum(range(1, t, 4)) for t in range(64)]


def test_while_runs_a_lane_at_its_own_pace():
    """The Collatz steps of every lane's number."""
    out = np.zeros(32, np.int32)
    run(
        """
        %u = arith.constant 1 : i32
        %two = arith.constant 2 : i32
        %three = arith.constant 3 : i32
        %none = arith.constant 0 : i32
        %n0 = arith.addi %lane, %u : i32
        %r:2 = scf.while (%n = %n0, %k = %none) : (i32, i32) -> (i32, i32) {
          %more = arith.cmpi ne, %n, %u : i32
          scf.condition(%more) %n, %k : i32, i32
        } do {
        ^bb0(%n: i32, %k: i32):
          %odd = arith.remui %n, %two : i32
          %is = arith.cmpi eq, %odd, %u : i32
          %m = scf.if %is -> i32 {
            %a = arith.muli %n, %three : i32
            %b = arith.addi %a, %u : i32
            scf.yield %b : i32
          } else {
            %h = arith.divui %n, %two : i32
            scf.yield %h : i32
          }
          %k1 = arith.addi %k, %u : i32
          scf.yield %m, %k1 : i32, i32
        }
        memref.store %r#1, %y[%tid] : memref<?xi32>
        """,
        [np.zeros(1, np.float32), out],
        "%x: memref<?xf32>, %y: memref<?xi32>",
    )

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n = 3 * n + 1 if n % 2 else n // 2
            count += 1
        return count

    assert out.tolist() == [steps(t + 1) for t in range(32)]


def test_pairs_of_float16():
    """Constants of pairs, shuffles between them, maxima that keep a NaN."""
    x, out = RANDOM.standard_normal(64).astype(np.float16), np.zeros(64, np.float16)
    x[6] = np.nan
    run(
        """
        %two = arith.constant 2 : index
        %i = arith.muli %tid, %two : index
        %v = vector.load %x[%i] : memref<?xf16>, vector<2xf16>
        %low = arith.constant dense<0xFC00> : vector<2xf16>
        %k = arith.constant dense<[0.5, -0.25]> : vector<2xf16>
        %same = arith.maximumf %v, %low : vector<2xf16>
        %most = arith.maximumf %same, %k : vector<2xf16>
        %r = vector.shuffle %most, %k [1, 2] : vector<2xf16>, vector<2xf16>
        %s = vector.shuffle %most, %r [0, 2] : vector<2xf16>, vector<2xf16>
        vector.store %s, %y[%i] : memref<?xf16>, vector<2xf16>
        """,
        [x, out],
        "%x: memref<?xf16>, %y: memref<?xf16>",
    )
    limit = np.array([0.5, -0.25], np.float16)
    np.testing.assert_array_equal(out.reshape(32, 2), np.maximum(x.reshape(32, 2), limit))
