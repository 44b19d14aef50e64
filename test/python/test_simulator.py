"""The simulator's entry point: arguments, launches, schedules, what it refuses; a whole kernel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from simulated_kernels import SHARED, kernel_text, run

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.simulator import Checks, SimulationError, SimulationReport, simulate
from yolomlir.simulator.simulate import Schedule

ADD_ONE = """
    %b = gpu.block_id x
    %base = arith.muli %b, %c32 : index
    %i = arith.addi %base, %tid : index
    %v = memref.load %x[%i] : memref<?xf32>
    %w = arith.addf %v, %one : f32
    memref.store %w, %y[%i] : memref<?xf32>
"""


def floats(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


# ---- arguments ----------------------------------------------------------------------------------


def test_scalars_come_after_their_pointers():
    y = np.zeros(64, np.float32)
    run(
        """
        %n = arith.index_cast %pitch : i32 to index
        %i = arith.muli %tid, %n : index
        memref.store %one, %y[%i] : memref<?xf32>
        """,
        [floats(1), y, 2],
        "%x: memref<?xf32>, %y: memref<?xf32>, %pitch: i32",
    )
    np.testing.assert_array_equal(y, np.arange(64) % 2 == 0)


def test_views_of_one_array_keep_their_places():
    """Two channel slices of one buffer interleave."""
    arena = np.zeros(256, np.float32)
    body = """
        %i = arith.muli %tid, %c4 : index
        memref.store %one, %x[%i] : memref<?xf32>
        %two = arith.constant 2.0 : f32
        memref.store %two, %y[%i] : memref<?xf32>
    """
    run(body, [arena[0:128], arena[2:130]])
    np.testing.assert_array_equal(arena[:128].reshape(32, 4), np.tile([1, 0, 2, 0], (32, 1)))
    assert (arena[128:] == 0).all()


def test_a_view_has_the_alignment_of_its_place():
    arena = np.zeros(256, np.float32)
    body = """
        %v = vector.load %x[%c0] {alignment = 16 : i64} : memref<?xf32>, vector<4xf32>
        vector.store %v, %y[%c0] {alignment = 16 : i64} : memref<?xf32>, vector<4xf32> loc("store")
    """
    run(body, [arena[:16], arena[32:48]], block=(1, 1, 1))
    with pytest.raises(SimulationError) as error:
        run(body, [arena[:16], arena[34:50]], block=(1, 1, 1))
    assert (error.value.kind, error.value.location) == ("misaligned", '"store"')


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([floats(32)], "takes 2 arguments, 1 came"),
        ([floats(32), floats(32).astype(np.float64)], "an array of float64"),
        ([floats(32), 3], "got int"),
        ([floats(32), floats(64)[::2]], "not contiguous"),
    ],
)
def test_arguments_that_do_not_fit(arrays, message):
    with pytest.raises(UserError, match=message):
        run(ADD_ONE, arrays)


def test_the_grid_must_be_whole_clusters():
    with pytest.raises(UserError, match="multiple of the cluster"):
        run(ADD_ONE, [floats(96), floats(96)], grid=(3, 1, 1), cluster=(2, 1, 1))


def test_unsigned_bytes_and_signed_ones_are_both_i8():
    for dtype in (np.uint8, np.int8):
        out = np.zeros(32, np.int32)
        run(
            """
            %v = memref.load %x[%tid] : memref<?xi8>
            %w = arith.extui %v : i8 to i32
            memref.store %w, %y[%tid] : memref<?xi32>
            """,
            [np.full(32, 200, np.uint8).view(dtype), out],
            "%x: memref<?xi8>, %y: memref<?xi32>",
        )
        assert (out == 200).all()


# ---- launches -----------------------------------------------------------------------------------


def test_blocks_of_three_dimensions():
    out = np.zeros(2 * 3 * 8, np.int32)
    run(
        """
        %tx = gpu.thread_id x
        %ty = gpu.thread_id y
        %n = gpu.block_dim x
        %b = gpu.block_id y
        %m = gpu.block_dim y
        %g = gpu.grid_dim y
        %row = arith.muli %b, %m : index
        %r = arith.addi %row, %ty : index
        %o = arith.muli %r, %n : index
        %i = arith.addi %o, %tx : index
        %v0 = arith.muli %g, %i : index
        %v = arith.index_cast %v0 : index to i32
        memref.store %v, %y[%i] : memref<?xi32>
        """,
        [floats(1), out],
        "%x: memref<?xf32>, %y: memref<?xi32>",
        grid=(1, 2, 1),
        block=(8, 3, 1),
        check=Checks(written_once=True),
    )
    np.testing.assert_array_equal(out, 2 * np.arange(48))


def test_a_sample_of_blocks():
    x, y = floats(320), np.zeros(320, np.float32)
    report = run(ADD_ONE, [x, y], grid=(10, 1, 1), blocks=4, outputs=[1])
    written = report.written[1].reshape(10, 32)
    assert report.blocks == 4
    assert written.all(1).sum() == 4
    assert written[0].all()
    assert written[9].all()
    np.testing.assert_array_equal(y, np.where(report.written[1], x + 1, 0))
    report = run(ADD_ONE, [x, y], grid=(10, 1, 1), blocks=[(3, 0, 0)])
    np.testing.assert_array_equal(np.flatnonzero(report.written[1].reshape(10, 32).all(1)), [3])


def test_the_report_counts():
    report = run(ADD_ONE, [floats(64), np.zeros(64, np.float32)], grid=(2, 1, 1))
    assert isinstance(report, SimulationReport)
    assert (report.blocks, report.global_read_bytes, report.global_written_bytes) == (2, 256, 256)
    assert report.operations["memref.load"] == 2
    assert report.mma_count == report.barriers == 0
    assert report.worst_bank_conflict == 1
    assert "k: 2 blocks" in str(report)


def test_the_kernel_is_found_by_name():
    launch = SimpleNamespace(function="k", grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=0)
    text = kernel_text(ADD_ONE, "%x: memref<?xf32>, %y: memref<?xf32>")
    with ir.Context():
        module = ir.Module.parse(text)
        y = np.zeros(32, np.float32)
        kernel = module.body.operations[0].regions[0].blocks[0].operations[0]
        simulate(kernel, launch, [floats(32), y])
        np.testing.assert_array_equal(y, floats(32) + 1)
        launch.function = "other"
        with pytest.raises(UserError, match="no kernel named 'other'"):
            simulate(module, launch, [floats(32), y])


# ---- order --------------------------------------------------------------------------------------

REVERSE = f"""
    %f = arith.sitofp %lane : i32 to f32
    memref.store %f, %s[%tid] : memref<128xf32, {SHARED}>
    gpu.barrier
    %last = arith.constant 127 : index
    %o = arith.subi %last, %tid : index
    %v = memref.load %s[%o] : memref<128xf32, {SHARED}>
    gpu.barrier
    memref.store %v, %s[%tid] : memref<128xf32, {SHARED}>
    %sum = gpu.all_reduce add %v {{}} : (f32) -> f32
    %r = arith.addf %sum, %v : f32
    memref.store %r, %y[%tid] : memref<?xf32>
"""


@pytest.mark.parametrize("schedule", Schedule.__args__)
def test_schedules_and_seeds_agree_bit_by_bit(schedule):
    want = 128 * 127 / 2 + np.arange(127, -1, -1)
    for seed in range(4):
        y = np.zeros(128, np.float32)
        report = run(REVERSE, [floats(1), y], block=(128, 1, 1), schedule=schedule, seed=seed,
                     shared=f"%s: memref<128xf32, {SHARED}>")  # fmt: skip
        np.testing.assert_array_equal(y, want.astype(np.float32))
        assert report.barriers == 4


def test_seeds_change_the_order_of_warps():
    """What each warp gets of a shared ticket counter shows the order they ran in."""
    orders = set()
    for seed in range(6):
        tickets = np.zeros(1, np.int32)
        got = np.zeros(128, np.int32)
        run(
            """
            %k = arith.constant 1 : i32
            %t = memref.atomic_rmw addi %k, %y[%c0] : (i32, memref<?xi32>) -> i32
            memref.store %t, %z[%tid] : memref<?xi32>
            """,
            [tickets, got],
            "%y: memref<?xi32>, %z: memref<?xi32>",
            block=(128, 1, 1),
            schedule="warps",
            seed=seed,
        )
        assert sorted(got.tolist()) == list(range(128))
        orders.add(tuple(np.argsort(got.reshape(4, 32).min(1)).tolist()))
    assert len(orders) > 2


def test_the_last_block_reduces():
    """Blocks write partial sums and take a ticket; whoever comes last adds them up."""
    body = """
        %b = gpu.block_id x
        %k = arith.constant 1 : i32
        %first = arith.cmpi eq, %tid, %c0 : index
        %three = arith.constant 3 : i32
        scf.if %first {
          %n = arith.index_cast %b : index to i32
          %f = arith.sitofp %n : i32 to f32
          memref.store %f, %x[%b] : memref<?xf32>
          %t = memref.atomic_rmw addi %k, %z[%c0] : (i32, memref<?xi32>) -> i32
          %last = arith.cmpi eq, %t, %three : i32
          scf.if %last {
            %sum = scf.for %i = %c0 to %c4 step %c1 iter_args(%s = %zero) -> f32 {
              %v = memref.load %x[%i] : memref<?xf32>
              %w = arith.addf %s, %v : f32
              scf.yield %w : f32
            }
            memref.store %sum, %y[%c0] : memref<?xf32>
          }
        }
    """
    for seed in range(5):
        y = np.zeros(1, np.float32)
        run(
            body,
            [np.zeros(4, np.float32), y, np.zeros(1, np.int32)],
            "%x: memref<?xf32>, %y: memref<?xf32>, %z: memref<?xi32>",
            grid=(4, 1, 1),
            outputs=[0, 1],
            seed=seed,
        )
        assert y[0] == 6


def test_one_thread_may_wait_for_the_previous_kernel_for_all():
    body = """
        %first = arith.cmpi eq, %tid, %c0 : index
        scf.if %first { nvvm.griddepcontrol wait }
        BARRIER
        %v = memref.load %x[%tid] : memref<?xf32> loc("load")
        memref.store %v, %y[%tid] : memref<?xf32>
    """
    for schedule in ("lockstep", "warps"):
        options = {"block": (64, 1, 1), "pdl_inputs": [0], "schedule": schedule}
        y = np.zeros(64, np.float32)
        run(body.replace("BARRIER", "gpu.barrier"), [floats(64), y], **options)
        np.testing.assert_array_equal(y, floats(64))
        with pytest.raises(SimulationError) as error:
            run(body.replace("BARRIER", ""), [floats(64), y], **options)
        assert (error.value.kind, error.value.location) == ("programmatic-launch", '"load"')


# ---- refusals -----------------------------------------------------------------------------------


def test_an_unknown_op_is_named():
    with pytest.raises(InternalError, match=r"'nvvm.pmevent'") as error:
        run('nvvm.pmevent id = 1 loc("odd")', [floats(1), floats(1)])
    assert error.value.where == '"odd"'


def test_inline_assembly_is_refused():
    body = 'llvm.inline_asm has_side_effects "membar.gl;", "" : () -> () loc("odd")'
    with pytest.raises(InternalError, match="inline assembly") as error:
        run(body, [floats(1), floats(1)])
    assert error.value.where == '"odd"'


def test_an_unknown_intrinsic_is_named():
    with pytest.raises(InternalError, match=r"llvm.cosh.f32"):
        run('%r = llvm.call_intrinsic "llvm.cosh.f32"(%one) : (f32) -> f32',
            [floats(1), floats(1)])  # fmt: skip


def test_float32_matrices_without_tf32_are_refused():
    body = """
        %a = arith.constant dense<1.0> : vector<4x1xf32>
        %b = arith.constant dense<1.0> : vector<2x1xf32>
        %c = arith.constant dense<1.0> : vector<2x2xf32>
        %d = nvgpu.mma.sync (%a, %b, %c) {mmaShape = [16, 8, 8]}
            : (vector<4x1xf32>, vector<2x1xf32>, vector<2x2xf32>) -> vector<2x2xf32>
    """
    with pytest.raises(InternalError, match="tf32Enabled"):
        run(body, [floats(1), floats(1)])
