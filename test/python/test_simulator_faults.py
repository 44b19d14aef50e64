"""Every fault of a kernel, planted once and caught at the op that commits it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_kernels import SHARED, run

from yolomlir.simulator import FAULT_KINDS, Checks, SimulationError

TILE = f"memref<256xf32, {SHARED}>"
FLAT = "memref<?xf32>"
_seen: set[str] = set()


def caught(body: str, kind: str, arrays=None, *, location: str = '"fault"', **options) -> str:
    """Run under both schedules and two seeds; the fault, alike each time. Returns its message."""
    message = ""
    for schedule in ("lockstep", "warps"):
        for seed in (0, 1):
            given = [np.ones(256, np.float32), np.zeros(256, np.float32)]
            given = given if arrays is None else [np.copy(a) for a in arrays]
            with pytest.raises(SimulationError) as error:
                run(
                    body, given, seed=seed, schedule=schedule,
                    **{"shared": f"%s: {TILE}", "block": (64, 1, 1), **options},
                )  # fmt: skip
            assert error.value.kind == kind, error.value
            assert error.value.location == location, error.value
            message = str(error.value)
    _seen.add(kind)
    return message


def clean(body: str, **options) -> None:
    for schedule in ("lockstep", "warps"):
        for seed in (0, 1, 2):
            arrays = [np.ones(256, np.float32), np.zeros(256, np.float32)]
            run(body, arrays, seed=seed, schedule=schedule,
                **{"shared": f"%s: {TILE}", "block": (64, 1, 1), **options})  # fmt: skip


# ---- bounds and alignment -----------------------------------------------------------------------


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


def copy(to: str, source: str, *, location: str = "fault", amount: str = "") -> str:
    types = f"{FLAT} to {TILE}"
    return (
        f"%t{location.replace('.', '_')} = nvgpu.device_async_copy %x[{source}], %s[{to}], 4"
        f'{amount} : {types} loc("{location}")'
    )


QUAD = "%q = arith.muli %tid, %c4 : index"


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


# ---- races --------------------------------------------------------------------------------------

OTHER_WARP = """
        %w = arith.addi %tid, %c32 : index
        %other = arith.remui %w, %c64 : index
"""


def test_read_after_write_without_a_barrier():
    body = f"""
        {OTHER_WARP}
        memref.store %one, %s[%tid] : {TILE} loc("store")
        BARRIER
        %v = memref.load %s[%other] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    # Warp by warp, the first warp reads what no warp has written yet: that is the same fault.
    lockstep = pytest.raises(SimulationError)
    with lockstep as error:
        run(body.replace("BARRIER", ""), [np.ones(64, "f4"), np.zeros(64, "f4")],
            shared=f"%s: {TILE}", block=(64, 1, 1), schedule="lockstep")  # fmt: skip
    assert error.value.kind == "race"
    assert error.value.location == '"fault"'
    assert '"store"' in str(error.value)
    _seen.add("race")
    with pytest.raises(SimulationError) as error:
        run(body.replace("BARRIER", ""), [np.ones(64, "f4"), np.zeros(64, "f4")],
            shared=f"%s: {TILE}", block=(64, 1, 1), schedule="warps")  # fmt: skip
    assert error.value.kind == "uninitialised"
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_write_after_read_without_a_barrier():
    body = f"""
        {OTHER_WARP}
        memref.store %one, %s[%tid] : {TILE}
        gpu.barrier
        %v = memref.load %s[%other] : {TILE} loc("load")
        BARRIER
        memref.store %v, %s[%tid] : {TILE} loc("fault")
    """
    for schedule in ("lockstep", "warps"):
        with pytest.raises(SimulationError) as error:
            run(body.replace("BARRIER", ""), [np.ones(64, "f4"), np.zeros(64, "f4")],
                shared=f"%s: {TILE}", block=(64, 1, 1), schedule=schedule)  # fmt: skip
        assert error.value.kind == "race"
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_two_warps_write_one_word():
    caught(
        f"""
        %i = arith.remui %tid, %c32 : index
        memref.store %one, %s[%i] : {TILE} loc("fault")
        """,
        "race",
    )


def test_two_lanes_write_different_values():
    body = """
        %f = arith.sitofp %lane : i32 to f32
        memref.store %f, MEMORY loc("fault")
    """
    caught(body.replace("MEMORY", f"%s[%c0] : {TILE}"), "race", block=(32, 1, 1))
    caught(body.replace("MEMORY", f"%y[%c0] : {FLAT}"), "race", block=(32, 1, 1))


def test_lanes_of_a_warp_need_a_warp_barrier():
    body = f"""
        %k = arith.constant 1 : index
        %n = arith.xori %tid, %k : index
        memref.store %one, %s[%tid] : {TILE}
        BARRIER
        %v = memref.load %s[%n] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    caught(body.replace("BARRIER", ""), "race")
    sync = "%all = arith.constant -1 : i32\nnvvm.bar.warp.sync %all : i32"
    clean(body.replace("BARRIER", sync))
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_one_thread_needs_no_barrier():
    clean(
        f"""
        memref.store %one, %s[%tid] : {TILE}
        %v = memref.load %s[%tid] : {TILE}
        memref.store %v, %s[%tid] : {TILE}
        """
    )


def test_bytes_of_one_word_do_not_race():
    clean(
        f"""
        %b = arith.constant 1 : i8
        %h = arith.remui %tid, %c32 : index
        %two = arith.constant 2 : index
        %twice = arith.muli %h, %two : index
        %warp = arith.divui %tid, %c32 : index
        %i = arith.addi %twice, %warp : index
        memref.store %b, %m[%i] : memref<64xi8, {SHARED}>
        """,
        shared=f"%m: memref<64xi8, {SHARED}>",
    )


@pytest.mark.parametrize("again", ["%v = memref.load", "memref.store %one,"])
def test_global_memory_races_within_a_block(again):
    body = f"""
        {OTHER_WARP}
        memref.store %one, %y[%tid] : {FLAT}
        BARRIER
        {again} %y[%other] : {FLAT} loc("fault")
    """
    with pytest.raises(SimulationError) as error:
        run(body.replace("BARRIER", ""), [np.ones(64, "f4"), np.zeros(64, "f4")],
            block=(64, 1, 1), schedule="lockstep")  # fmt: skip
    assert (error.value.kind, error.value.location) == ("race", '"fault"')
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_two_lanes_copy_to_one_place():
    caught(copy("%c0", "%c0"), "race", block=(32, 1, 1))


def test_another_block_has_written_it():
    caught(
        f"""
        %b = gpu.block_id x
        %i = arith.constant 7 : index
        %t0 = arith.cmpi eq, %tid, %c0 : index
        scf.if %t0 {{
          %v = memref.load %y[%i] : {FLAT} loc("fault")
          %w = arith.addf %v, %one : f32
          memref.store %w, %y[%i] : {FLAT}
        }}
        """,
        "race",
        grid=(2, 1, 1),
    )


# ---- asynchronous copies ------------------------------------------------------------------------


def test_copies_are_invisible_until_waited_for():
    body = f"""
        {QUAD}
        {copy("%q", "%q", location="copy")}
        nvvm.cp.async.commit.group
        WAIT
        BARRIER
        %i = arith.constant 3 : index
        %o = arith.addi %q, %i : index
        %v = memref.load %s[%o] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    text = caught(body.replace("WAIT", "").replace("BARRIER", "gpu.barrier"), "in-flight")
    assert '"copy"' in text
    clean(body.replace("WAIT", "nvvm.cp.async.wait.group 0").replace("BARRIER", ""))


def test_a_wait_shows_copies_to_ones_own_thread_only():
    body = f"""
        {QUAD}
        {copy("%q", "%q", location="copy")}
        nvvm.cp.async.commit.group
        nvvm.cp.async.wait.group 0
        BARRIER
        {OTHER_WARP}
        %v = memref.load %s[%other] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    with pytest.raises(SimulationError) as error:
        run(body.replace("BARRIER", ""), [np.ones(256, "f4"), np.zeros(64, "f4")],
            shared=f"%s: {TILE}", block=(64, 1, 1), schedule="lockstep")  # fmt: skip
    assert error.value.kind == "race"
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_waiting_for_too_few_groups():
    """Two groups on their way, `wait 1` lands the older one only."""
    body = f"""
        {QUAD}
        %low = arith.cmpi ult, %tid, %c32 : index
        %l = arith.remui %tid, %c32 : index
        scf.if %low {{
          {copy("%q", "%q", location="first")}
        }}
        nvvm.cp.async.commit.group
        scf.if %low {{ }} else {{
          {copy("%q", "%q", location="second")}
        }}
        nvvm.cp.async.commit.group
        nvvm.cp.async.wait.group LEFT
        gpu.barrier
        %c128 = arith.constant 128 : index
        %a = memref.load %s[%tid] : {TILE} loc("first read")
        %o = arith.addi %tid, %c128 : index
        %b = memref.load %s[%o] : {TILE} loc("fault")
        %r = arith.addf %a, %b : f32
        memref.store %r, %y[%tid] : {FLAT}
    """
    caught(body.replace("LEFT", "1"), "in-flight")
    clean(body.replace("LEFT", "0"))


def test_overwriting_a_buffer_that_is_being_copied_to():
    caught(
        f"""
        {QUAD}
        {copy("%q", "%q", location="copy")}
        memref.store %one, %s[%q] : {TILE} loc("fault")
        """,
        "in-flight",
    )


def test_copying_over_what_another_warp_still_reads():
    body = f"""
        {QUAD}
        {OTHER_WARP}
        memref.store %one, %s[%tid] : {TILE}
        gpu.barrier
        %v = memref.load %s[%other] : {TILE} loc("load")
        BARRIER
        {copy("%q", "%q")}
        nvvm.cp.async.commit.group
        nvvm.cp.async.wait.group 0
    """
    with pytest.raises(SimulationError) as error:
        run(body.replace("BARRIER", ""), [np.ones(256, "f4"), np.zeros(64, "f4")],
            shared=f"%s: {TILE}", block=(64, 1, 1), schedule="lockstep")  # fmt: skip
    assert error.value.kind == "race"
    assert error.value.location == '"fault"'
    clean(body.replace("BARRIER", "gpu.barrier"))


# ---- uninitialised, unwritten, written twice ----------------------------------------------------


def test_uninitialised_shared_memory():
    caught(f'%v = memref.load %s[%tid] : {TILE} loc("fault")', "uninitialised")


def test_uninitialised_output():
    caught(f'%v = memref.load %y[%tid] : {FLAT} loc("fault")', "uninitialised", outputs=[1])


def test_output_not_written():
    body = f"memref.store %one, %y[%tid] : {FLAT}"
    arrays = [np.ones(1, np.float32), np.zeros(65, np.float32)]
    with pytest.raises(SimulationError) as error:
        run(body, arrays, block=(64, 1, 1), outputs=[1], check=Checks(outputs_written=True))
    assert error.value.kind == "not-written"
    assert "1 of 65" in str(error.value)
    assert "element 64" in str(error.value)
    _seen.add("not-written")
    mask = np.arange(65) < 64
    check = Checks(outputs_written=True)
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


# ---- programmatic launch ------------------------------------------------------------------------


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


# ---- control flow -------------------------------------------------------------------------------


def test_barrier_under_a_divergent_branch():
    body = """
        %low = arith.cmpi ult, %tid, LIMIT : index
        scf.if %low { gpu.barrier loc("fault") }
    """
    caught(body.replace("LIMIT", "%c4"), "divergence")
    for schedule, kind in (("lockstep", "divergence"), ("warps", "barrier")):
        with pytest.raises(SimulationError) as error:
            run(body.replace("LIMIT", "%c32"), [np.ones(1, "f4"), np.ones(1, "f4")],
                block=(64, 1, 1), schedule=schedule)  # fmt: skip
        assert error.value.kind == kind
        assert error.value.location == '"fault"'
    _seen.add("barrier")


def test_warps_at_different_barriers():
    body = """
        %low = arith.cmpi ult, %tid, %c32 : index
        scf.if %low { gpu.barrier } else { gpu.barrier }
    """
    with pytest.raises(SimulationError) as error:
        run(body, [np.ones(1, "f4"), np.ones(1, "f4")], block=(64, 1, 1), schedule="warps")
    assert error.value.kind == "barrier"


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


# ---- bank conflicts -----------------------------------------------------------------------------


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


def test_every_kind_of_fault_is_planted_here():
    """Runs last in this file; alone it has seen nothing and is skipped."""
    if not _seen:
        pytest.skip("runs with the other tests of this file")
    assert _seen == set(FAULT_KINDS)
