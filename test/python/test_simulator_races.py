"""Memory that kernels share, accessed in no order: every such fault is caught at its op."""

from __future__ import annotations

import pytest
from planted_faults import FLAT, OTHER_WARP, QUAD, TILE, UNORDERED, caught, clean, copy, fault, seen
from simulated_kernels import SHARED


def test_read_after_write_without_a_barrier():
    body = f"""
        {OTHER_WARP}
        memref.store %one, %s[%tid] : {TILE} loc("store")
        BARRIER
        %v = memref.load %s[%other] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    # Warp by warp, the first warp reads what no warp has written yet: that is the same fault.
    error = fault(body.replace("BARRIER", ""), schedule="lockstep")
    assert error.kind == "race"
    assert error.location == '"fault"'
    assert '"store"' in str(error)
    error = fault(body.replace("BARRIER", ""), schedule="warps")
    assert error.kind == "uninitialised"
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
        error = fault(body.replace("BARRIER", ""), schedule=schedule)
        assert error.kind == "race"
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
    error = fault(body.replace("BARRIER", ""), schedule="lockstep")
    assert (error.kind, error.location) == ("race", '"fault"')
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


# ---- asynchronous copies -------------------------------------------------------------------------


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
    error = fault(body.replace("BARRIER", ""), schedule="lockstep")
    assert error.kind == "race"
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
    error = fault(body.replace("BARRIER", ""), schedule="lockstep")
    assert error.kind == "race"
    assert error.location == '"fault"'
    clean(body.replace("BARRIER", "gpu.barrier"))


def test_both_kinds_of_fault_of_order_are_planted_here():
    """Runs last in this file; alone it has seen nothing and is skipped."""
    if not seen:
        pytest.skip("runs with the other tests of this file")
    assert seen >= UNORDERED
