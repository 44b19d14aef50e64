"""Every fault of a kernel, planted once and caught at the op that commits it.

Those of order, races and copies that are read too early, are those of `test_simulator_races`.
"""

from __future__ import annotations

import numpy as np
import pytest
from planted_faults import FLAT, QUAD, TILE, UNORDERED, caught, clean, copy, fault, seen
from simulated_kernels import SHARED, run

from yolomlir.simulator import FAULT_KINDS, Checks, SimulationError

# ---- bounds and alignment ------------------------------------------------------------------------


def test_global_out_of_bounds():
    text = caught(
        f"""
        %v = memref.load %x[%tid] : {FLAT} loc("fault")
        """,
        "out-of-bounds",
        [np.ones(40, np.float32), np.zeros(1, np.float32)],
    )
    assert "thread 40" in text or "thread" in text
    assert "argument 0" in text
    assert "160" in text


def test_negative_index():
    caught(f'%m = arith.subi %tid, %c1 : index\n%v = memref.load %x[%m] : {FLAT} loc("fault")',
           "out-of-bounds")  # fmt: skip


def test_only_active_lanes_are_checked():
    clean(
        f"""
        %c200 = arith.constant 200 : index
        %i = arith.addi %tid, %c200 : index
        %c256 = arith.constant 256 : index
        %in = arith.cmpi ult, %i, %c256 : index
        scf.if %in {{
          %v = memref.load %x[%i] : {FLAT}
          memref.store %v, %y[%i] : {FLAT}
        }}
        """
    )


def test_shared_out_of_bounds():
    caught(
        f"""
        %c200 = arith.constant 200 : index
        %i = arith.addi %tid, %c200 : index
        memref.store %one, %s[%i] : {TILE} loc("fault")
        """,
        "out-of-bounds",
    )


def test_dimension_out_of_bounds_within_the_buffer():
    caught(
        f"""
        memref.store %one, %m[%c1, %tid] : memref<4x32xf32, {SHARED}> loc("fault")
        """,
        "out-of-bounds",
        shared=f"%m: memref<4x32xf32, {SHARED}>",
    )


def test_subview_bounds():
    caught(
        f"""
        %v = memref.subview %s[64] [32] [1] : {TILE}
            to memref<32xf32, strided<[1], offset: 64>, {SHARED}>
        memref.store %one, %v[%tid] : memref<32xf32, strided<[1], offset: 64>, {SHARED}>
            loc("fault")
        """,
        "out-of-bounds",
    )


def test_dynamic_shared_memory_ends_with_the_launch():
    body = f"""
        %d = memref.get_global @dynamic : memref<0xf32, {SHARED}>
        %m = memref.reinterpret_cast %d to offset: [0], sizes: [64], strides: [1]
            : memref<0xf32, {SHARED}> to memref<64xf32, {SHARED}>
        memref.store %one, %m[%tid] : memref<64xf32, {SHARED}> loc("fault")
    """
    name = f'memref.global "private" @dynamic : memref<0xf32, {SHARED}>'
    options = {"constants": name, "shared": ""}
    clean(body, shared_bytes=256, **options)
    caught(body, "out-of-bounds", shared_bytes=252, **options)


@pytest.mark.parametrize("access", ["load", "store"])
def test_misaligned_vectors(access):
    op = f"%v = vector.load %x[%i] {{alignment = 8 : i64}} : {FLAT}, vector<2xf32>"
    if access == "store":
        op = f"vector.store %k, %y[%i] {{alignment = 8 : i64}} : {FLAT}, vector<2xf32>"
    caught(
        f"""
        %k = arith.constant dense<1.0> : vector<2xf32>
        %i = arith.addi %tid, %c1 : index
        {op} loc("fault")
        """,
        "misaligned",
    )


def test_vectors_without_an_alignment_are_noted():
    arrays = [np.ones(256, np.float32), np.zeros(256, np.float32)]
    report = run(f"%v = vector.load %x[%tid] : {FLAT}, vector<2xf32>", arrays)
    assert len(report.split_vectors) == 1
    assert "vector.load" in str(report)


def test_misaligned_copies():
    plus = "%p = arith.addi %q, %c1 : index"
    caught(f"{QUAD}\n{plus}\n{copy('%q', '%p')}", "misaligned",
           [np.ones(300, np.float32), np.zeros(1, np.float32)])  # fmt: skip
    half = "%two = arith.constant 2 : index\n%h = arith.muli %tid, %two : index"
    caught(f"{half}\n{copy('%h', '%c0')}", "misaligned")


def test_copies_out_of_bounds_unless_zero_filled():
    arrays = [np.ones(200, np.float32), np.zeros(1, np.float32)]
    caught(f"{QUAD}\n{copy('%q', '%q')}", "out-of-bounds", arrays)
    guarded = f"""
        {QUAD}
        %c200 = arith.constant 200 : index
        %in = arith.cmpi ult, %q, %c200 : index
        %n = arith.select %in, %c4, %c0 : index
        {copy("%q", "%q", amount=", %n")}
        nvvm.cp.async.commit.group
        nvvm.cp.async.wait.group 0
        gpu.barrier
        %v = memref.load %s[%tid] : {TILE}
        memref.store %v, %y[%tid] : {FLAT}
    """
    run(guarded, [arrays[0], np.zeros(64, np.float32)], shared=f"%s: {TILE}", block=(64, 1, 1))


def test_misaligned_ldmatrix_rows():
    fill = f"memref.store %one, %s[%tid] : {TILE}\ngpu.barrier\n"
    text = caught(
        fill
        + f"""
        %r = nvgpu.ldmatrix %s[%tid] {{numTiles = 1 : i32, transpose = false}}
            : {TILE} -> vector<1x1xf32> loc("fault")
        """,
        "misaligned",
    )
    assert "row 1 of matrix 0" in text


# ---- uninitialised, unwritten, written twice -----------------------------------------------------


def test_uninitialised_shared_memory():
    caught(f'%v = memref.load %s[%tid] : {TILE} loc("fault")', "uninitialised")


def test_uninitialised_output():
    caught(f'%v = memref.load %y[%tid] : {FLAT} loc("fault")', "uninitialised", outputs=[1])


def test_output_not_written():
    body = f"memref.store %one, %y[%tid] : {FLAT}"
    arrays = [np.ones(1, np.float32), np.zeros(65, np.float32)]
    check = Checks(outputs_written=True)
    error = fault(body, arrays, schedule="warps", outputs=[1], check=check)
    assert error.kind == "not-written"
    assert "1 of 65" in str(error)
    assert "element 64" in str(error)
    mask = np.arange(65) < 64
    report = run(body, arrays, block=(64, 1, 1), outputs={1: mask}, check=check)
    np.testing.assert_array_equal(report.written[1], mask)


def test_writing_beside_the_output():
    caught(
        f'memref.store %one, %y[%tid] : {FLAT} loc("fault")',
        "read-only",
        outputs={1: np.arange(256) % 8 < 4},
    )


def test_two_outputs_may_be_slices_of_one_buffer():
    """Channels 0 and 2 of 4; channel 1 is an input, 3 belongs to nobody."""
    body = """
        %i = arith.muli %tid, %c4 : index
        %v = memref.load %z[%i] : memref<?xf32>
        %w = arith.addf %v, %one : f32
        memref.store %w, %x[%i] : memref<?xf32>
        %j = arith.addi %i, OFFSET : index
        memref.store %v, %y[%j] : memref<?xf32> loc("fault")
    """
    buffer = np.full(132, 5, np.float32)
    channel = np.zeros(128, bool)
    channel[::4] = True
    arguments = "%x: memref<?xf32>, %y: memref<?xf32>, %z: memref<?xf32>"
    options = {"outputs": {0: channel, 1: channel}, "check": Checks(outputs_written=True)}
    arrays = [buffer[:128], buffer[2:130], buffer[1:129]]
    run(body.replace("OFFSET", "%c0"), arrays, arguments, **options)
    np.testing.assert_array_equal(buffer[:128].reshape(32, 4), np.tile([6, 5, 5, 5], (32, 1)))
    with pytest.raises(SimulationError) as error:
        run(body.replace("OFFSET", "%c1"), arrays, arguments, **options)
    assert (error.value.kind, error.value.location) == ("read-only", '"fault"')


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 1, 1)])
def test_written_twice(grid):
    again = f'memref.store %one, %y[%tid] : {FLAT} loc("fault")'
    first = "" if grid[0] == 2 else f"memref.store %one, %y[%tid] : {FLAT}\n"
    text = caught(first + again, "written-twice", grid=grid, check=Checks(written_once=True))
    assert ("another block" if grid[0] == 2 else "this block") in text
    clean(first + again, grid=grid)


def test_writing_a_constant():
    caught(
        """
        %t = memref.get_global @table : memref<4xf32>
        memref.store %one, %t[%c1] : memref<4xf32> loc("fault")
        """,
        "read-only",
        constants='memref.global "private" constant @table : memref<4xf32> = dense<1.0>',
    )


# ---- programmatic launch -------------------------------------------------------------------------


def test_reading_the_previous_kernels_result_too_early():
    body = f"""
        WAIT
        %v = memref.load %x[%tid] : {FLAT} loc("fault")
        LATE
        memref.store %v, %y[%tid] : {FLAT}
    """
    wait = "nvvm.griddepcontrol wait"
    early, late = body.replace("WAIT", ""), body.replace("LATE", "")
    caught(early.replace("LATE", wait), "programmatic-launch", pdl_inputs=[0])
    clean(early.replace("LATE", wait), pdl_inputs=[])
    clean(late.replace("WAIT", wait), pdl_inputs=[0])


def test_asynchronous_copies_wait_for_the_previous_kernel_too():
    caught(f"{QUAD}\n{copy('%q', '%q')}", "programmatic-launch", pdl_inputs=[0])


def test_weights_may_be_read_before_the_wait():
    clean(
        f"""
        %v = memref.load %y[%tid] : {FLAT}
        nvvm.griddepcontrol wait
        nvvm.griddepcontrol launch_dependents
        memref.store %v, %x[%tid] : {FLAT}
        """,
        pdl_inputs=[0],
    )


def test_writing_before_the_wait():
    caught(
        f"""
        memref.store %one, %y[%tid] : {FLAT} loc("fault")
        nvvm.griddepcontrol wait
        """,
        "programmatic-launch",
        pdl_inputs=[0],
    )


def test_never_waiting():
    caught("", "programmatic-launch", pdl_inputs=[0], location="k")


# ---- control flow --------------------------------------------------------------------------------


def test_barrier_under_a_divergent_branch():
    body = """
        %low = arith.cmpi ult, %tid, LIMIT : index
        scf.if %low { gpu.barrier loc("fault") }
    """
    caught(body.replace("LIMIT", "%c4"), "divergence")
    for schedule, kind in (("lockstep", "divergence"), ("warps", "barrier")):
        error = fault(body.replace("LIMIT", "%c32"), schedule=schedule)
        assert (error.kind, error.location) == (kind, '"fault"')


def test_warps_at_different_barriers():
    body = """
        %low = arith.cmpi ult, %tid, %c32 : index
        scf.if %low { gpu.barrier } else { gpu.barrier }
    """
    assert fault(body, schedule="warps").kind == "barrier"


def test_barrier_in_a_loop_of_unequal_length():
    caught('scf.for %i = %c0 to %tid step %c4 { gpu.barrier loc("fault") }', "divergence")


def test_matrix_instruction_in_a_divergent_warp():
    text = caught(
        f"""
        memref.store %one, %s[%tid] : {TILE}
        gpu.barrier
        %low = arith.cmpi ult, %tid, %c31 : index
        scf.if %low {{
          %r = nvgpu.ldmatrix %s[%c0] {{numTiles = 1 : i32, transpose = false}}
            : {TILE} -> vector<1x1xf32> loc("fault")
        }}
        """,
        "divergence",
        block=(32, 1, 1),
    )
    assert "31 of 32 lanes" in text


def test_shuffle_from_an_inactive_lane():
    caught(
        """
        %k = arith.constant 1 : i32
        %n = arith.constant 32 : i32
        %low = arith.cmpi ult, %tid, %c31 : index
        scf.if %low {
          %v, %p = gpu.shuffle xor %one, %k, %n : f32 loc("fault")
        }
        """,
        "divergence",
        block=(32, 1, 1),
    )


def test_endless_loop():
    caught(
        """
        %yes = arith.constant true
        scf.while : () -> () {
          scf.condition(%yes)
        } do {
          scf.yield
        } loc("fault")
        """,
        "endless-loop",
        check=Checks(loop_limit=50),
    )


def test_division_by_zero_in_an_active_lane():
    caught('%q = arith.divui %c4, %tid : index loc("fault")', "arithmetic")
    clean(
        """
        %more = arith.cmpi ugt, %tid, %c0 : index
        scf.if %more { %q = arith.divui %c4, %tid : index }
        """
    )


# ---- bank conflicts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "ways"), [(1, 1), (2, 2), (4, 4), (8, 8), (33, 1)])
def test_bank_conflicts_are_counted(stride, ways):
    body = f"""
        %k = arith.constant {stride} : index
        %i = arith.muli %tid, %k : index
        memref.store %one, %m[%i] : memref<2048xf32, {SHARED}> loc("fault")
    """
    shared = f"%m: memref<2048xf32, {SHARED}>"
    arrays = [np.ones(1, np.float32), np.zeros(1, np.float32)]
    report = run(body, arrays, shared=shared)
    assert report.worst_bank_conflict == ways
    assert report.shared_accesses[0].wavefronts == ways
    assert report.shared_accesses[0].excess == ways - 1
    assert [b.location for b in report.bank_conflicts] == (['"fault"'] if ways > 1 else [])
    if ways == 8:
        caught(body, "bank-conflict", check=Checks(bank_conflict_ways=4), shared=shared)


def test_vectors_are_served_by_quarter_warps():
    """16 bytes a lane, consecutive: 4 wavefronts and no conflict; 32 bytes apart: 2-way."""
    for stride, ways in ((4, 1), (8, 2)):
        report = run(
            f"""
            %k = arith.constant {stride} : index
            %i = arith.muli %tid, %k : index
            %v = arith.constant dense<1.0> : vector<4xf32>
            vector.store %v, %s[%i] {{alignment = 16 : i64}} : {TILE}, vector<4xf32>
            """,
            [np.ones(1, np.float32), np.zeros(1, np.float32)],
            shared=f"%s: {TILE}",
        )
        access = report.shared_accesses[0]
        assert (access.ideal, access.wavefronts, access.worst_ways) == (4, 4 * ways, ways)


@pytest.mark.parametrize(("pitch", "ways"), [(4, 1), (8, 2), (16, 4), (32, 8), (36, 1)])
def test_ldmatrix_conflicts(pitch, ways):
    """Eight rows of 16 bytes, `pitch` words apart."""
    report = run(
        f"""
        %last = arith.constant 288 : index
        scf.for %i = %tid to %last step %c32 {{
          memref.store %one, %m[%i] : memref<288xf32, {SHARED}>
        }}
        gpu.barrier
        %p = arith.constant {pitch} : index
        %k8 = arith.constant 8 : index
        %row = arith.remui %tid, %k8 : index
        %i = arith.muli %row, %p : index
        %r = nvgpu.ldmatrix %m[%i] {{numTiles = 1 : i32, transpose = false}}
            : memref<288xf32, {SHARED}> -> vector<1x1xf32> loc("matrix")
        """,
        [np.ones(1, np.float32), np.zeros(1, np.float32)],
        shared=f"%m: memref<288xf32, {SHARED}>",
    )
    (access,) = [a for a in report.shared_accesses if a.location == '"matrix"']
    assert access.worst_ways == ways


def test_every_other_kind_of_fault_is_planted_here():
    """Runs last in this file, alone is skipped; the others are `test_simulator_races`'s."""
    if not seen:
        pytest.skip("runs with the other tests of this file")
    assert seen - UNORDERED == set(FAULT_KINDS) - UNORDERED
