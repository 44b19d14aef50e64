"""What ops of vector and memref read, shuffle and write in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_kernels import SHARED, run

RANDOM = np.random.default_rng(7)


def test_vectors_are_loaded_shuffled_and_stored():
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


def test_pairs_of_float16_are_shuffled_and_keep_a_nan():
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
