"""What ops of scf do in the simulator where the lanes of a warp part ways."""

from __future__ import annotations

import numpy as np
from simulated_kernels import run


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
