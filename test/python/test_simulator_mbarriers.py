"""Barriers that count bytes and stores to other blocks, in the simulator: results and faults."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import simulated_faults
from simulated_kernels import SHARED, run

from yolomlir.diagnostics import InternalError

SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
WAIT = (
    "{\\0A.reg .pred done;\\0Await:\\0Ambarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
    "done, [$0], 0;\\0A@!done bra.uni wait;\\0A}"
)
MAKE = """
        scf.if %first {
          nvvm.mbarrier.init %mine, %i1 : !llvm.ptr<3>, i32
          nvvm.mbarrier.arrive.expect_tx %mine, %bytes : !llvm.ptr<3>, i32
          nvvm.fence.mbarrier.init
        }
"""
MEET = "nvvm.cluster.arrive.relaxed\nnvvm.cluster.wait\n"
POINTERS = f"""
        %rank = nvvm.read.ptx.sreg.cluster.ctarank : i32
        %i1 = arith.constant 1 : i32
        %i0 = arith.constant 0 : i32
        %bytes = arith.constant BYTES : i32
        %peer = arith.xori %rank, %i1 : i32
        %first = arith.cmpi eq, %tid, %c0 : index
        %low = arith.cmpi ult, %tid, %c32 : index
        %t = arith.index_cast %tid : index to i32
        %h = arith.constant 100 : i32
        %hundred = arith.muli %rank, %h : i32
        %value = arith.addi %hundred, %t : i32
        %sp = memref.extract_aligned_pointer_as_index %s : memref<256xi32, {SHARED}> -> index
        %s64 = arith.index_cast %sp : index to i64
        %own = llvm.inttoptr %s64 : i64 to !llvm.ptr<3>
        %bp = memref.extract_aligned_pointer_as_index %m : memref<2xi64, {SHARED}> -> index
        %b64 = arith.index_cast %bp : index to i64
        %mine = llvm.inttoptr %b64 : i64 to !llvm.ptr<3>
        %there = nvvm.mapa %own, %peer : !llvm.ptr<3> -> !llvm.ptr<7>
        %theirs = nvvm.mapa %mine, %peer : !llvm.ptr<3> -> !llvm.ptr<7>
        %at = llvm.getelementptr %there[%t] : (!llvm.ptr<7>, i32) -> !llvm.ptr<7>, i32
"""
STORE = f"""
        llvm.inline_asm has_side_effects "{SEND}.b32 [$0], $1, [$2];", "l,r,l,~{{memory}}"
            %at, %value, %theirs : (!llvm.ptr<7>, i32, !llvm.ptr<7>) -> () loc("send")
"""
RECEIVE = f"""
        llvm.inline_asm has_side_effects "{WAIT}", "l,~{{memory}}"
            %mine : (!llvm.ptr<3>) -> () loc("wait")
"""
READ = f"""
        %next = arith.addi %tid, %c1 : index
        %o = arith.remui %next, %c64 : index
        %v = memref.load %s[%o] : memref<256xi32, {SHARED}> loc("read")
        %b = gpu.block_id x
        %base = arith.muli %b, %c64 : index
        %i = arith.addi %base, %tid : index
        memref.store %v, %y[%i] : memref<?xi32>
"""
BARRIER = "gpu.barrier\n"
GOOD = POINTERS + MAKE + MEET + STORE + BARRIER + RECEIVE + READ


def simulated(body: str, *, size: int = 256, seed: int = 0, schedule: str = "warps") -> np.ndarray:
    out = np.full(256, -1, np.int32)
    run(
        body.replace("BYTES", str(size)), [np.zeros(1, np.float32), out],
        "%x: memref<?xf32>, %y: memref<?xi32>", seed=seed, schedule=schedule,
        grid=(4, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1),
        shared=f"%s: memref<256xi32, {SHARED}>, %m: memref<2xi64, {SHARED}>",
    )  # fmt: skip
    return out.reshape(4, 64)


def caught(body: str, kinds: str, *, at: str | None = None, size: int = 256) -> str:
    """The fault, under both schedules and several seeds; its message."""
    kernel = partial(simulated, body, size=size)
    return simulated_faults.caught(kernel, kinds, at=at and f'"({at})"', seeds=3)


@pytest.mark.parametrize("schedule", ["lockstep", "warps"])
def test_what_is_sent_arrives(schedule):
    ranks = np.arange(4) % 2 ^ 1
    want = 100 * ranks[:, None] + (np.arange(64) + 1) % 64
    for seed in range(4):
        np.testing.assert_array_equal(simulated(GOOD, seed=seed, schedule=schedule), want)


def test_vectors():
    """Every fourth thread sends four neighbours; a pair of floats and bits go through alike."""
    four = f"""
        %c3 = arith.constant 3 : i32
        %inner = arith.andi %t, %c3 : i32
        %sends = arith.cmpi eq, %inner, %i0 : i32
        %f = arith.bitcast %value : i32 to f32
        scf.if %sends {{
          llvm.inline_asm has_side_effects
              "{SEND}.v4.b32 [$0], {{$1, $2, $3, $4}}, [$5];", "l,r,f,r,r,l,~{{memory}}"
              %at, %i0, %f, %i1, %value, %theirs
              : (!llvm.ptr<7>, i32, f32, i32, i32, !llvm.ptr<7>) -> ()
        }}
    """
    ranks = np.arange(4) % 2 ^ 1
    place = np.arange(64)
    value = 100 * ranks[:, None] + place // 4 * 4
    want = np.where(place % 4 == 0, 0, np.where(place % 4 == 2, 1, value))
    got = simulated(GOOD.replace(STORE, four))
    np.testing.assert_array_equal(got, np.roll(want, -1, 1))


def test_reading_without_the_wait():
    """Sent or not yet: it is neither there nor to be read."""
    caught(GOOD.replace(RECEIVE, ""), "in-flight uninitialised", at="read")
    before = MEET + STORE + MEET  # everyone has sent, and nobody waited
    message = caught(GOOD.replace(MEET + STORE, before).replace(RECEIVE, ""), "in-flight")
    assert "has not been waited for" in message


def test_a_wait_by_another_warp_shows_nothing():
    """Warp 1 reads what only warp 0 has waited for, arrived or not."""
    waited = "scf.if %low {" + RECEIVE + "}\n"
    caught(GOOD.replace(RECEIVE, waited), "in-flight race uninitialised", at="read")
    simulated(GOOD.replace(RECEIVE, waited + BARRIER))


def test_bytes_that_never_come():
    message = caught(GOOD, "barrier", at="wait", size=260)
    assert "256 of 260 bytes sent" in message


def test_more_bytes_than_expected():
    assert "expects 252" in caught(GOOD, "barrier", at="send", size=252)


def test_sending_to_a_block_that_may_not_have_begun():
    caught(GOOD.replace(MEET, ""), "race uninitialised", at="send")


def test_a_barrier_that_is_not_published():
    hidden = GOOD.replace("nvvm.fence.mbarrier.init", "")
    assert "fence.mbarrier_init" in caught(hidden, "race", at="send")
    simulated(hidden.replace(".relaxed", ""))


def test_waiting_at_a_barrier_that_another_warp_makes():
    caught(GOOD.replace(BARRIER, ""), "race uninitialised", at="wait")


def test_sending_over_what_the_receiver_still_reads():
    read = f"""
        memref.store %value, %s[%tid] : memref<256xi32, {SHARED}>
        %old = memref.load %s[%tid] : memref<256xi32, {SHARED}>
    """
    early = GOOD.replace(MEET, MEET + read)
    caught(early, "race in-flight")
    simulated(GOOD.replace(MEET, read + MEET.replace(".relaxed", "")))


def test_a_relaxed_arrival_orders_no_memory():
    read = f"memref.store %value, %s[%tid] : memref<256xi32, {SHARED}>\n"
    caught(GOOD.replace(MEET, read + MEET), "race", at="send")


def test_ending_before_all_has_come():
    without = GOOD[: GOOD.index(RECEIVE)]
    assert "without a wait" in caught(without, "race", at="send")


def test_counting_in_another_block():
    body = GOOD.replace("%at, %value, %theirs", "%at, %value, %self").replace(
        "%at =", "%self = nvvm.mapa %mine, %rank : !llvm.ptr<3> -> !llvm.ptr<7>\n%at ="
    )
    caught(body, "out-of-bounds", at="send")


def test_a_misaligned_vector():
    body = GOOD.replace(f"{SEND}.b32 [$0], $1, [$2]", f"{SEND}.v2.b32 [$0], {{$1, $2}}, [$3]")
    body = body.replace('"l,r,l,', '"l,r,r,l,').replace("%at, %value,", "%at, %value, %value,")
    body = body.replace(
        "(!llvm.ptr<7>, i32, !llvm.ptr<7>)", "(!llvm.ptr<7>, i32, i32, !llvm.ptr<7>)"
    )
    caught(body, "misaligned", at="send")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{SEND}.b32 [$0], $1, [$2];", f"{SEND}.b32 [$0], $2, [$1];"),
        (".weak.", ".release."),
        ("try_wait.parity.acquire", "test_wait.parity.acquire"),
    ],
)
def test_other_assembly_is_refused(old, new):
    assert old in GOOD
    with pytest.raises(InternalError, match=r"inline assembly|st\.async"):
        simulated(GOOD.replace(old, new))
