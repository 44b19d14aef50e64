"""Bulk copies and the ring of a cluster that shares them, in the simulator: results and faults."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import simulated_faults
from simulated_kernels import SHARED, run

from yolomlir.diagnostics import InternalError

ASSEMBLY = (
    "{\\0A.reg .pred done;\\0Await:\\0Ambarrier.try_wait.parity.shared::cta.b64 "
    "done, [$0], $1;\\0A@!done bra.uni wait;\\0A}"
)
START = f"""
        %rank = nvvm.read.ptx.sreg.cluster.ctarank : i32
        %b = gpu.block_id x
        %i0 = arith.constant 0 : i32
        %i1 = arith.constant 1 : i32
        %i2 = arith.constant 2 : i32
        %half = arith.constant 32 : i32
        %size = arith.constant 128 : i32
        %all = arith.constant 256 : i32
        %both = arith.constant 3 : i16
        %first = arith.cmpi eq, %tid, %c0 : index
        %base = arith.muli %b, %c64 : index
        %i = arith.addi %base, %tid : index
        %xp = memref.extract_aligned_pointer_as_index %x : memref<?xi32> -> index
        %x64 = arith.index_cast %xp : index to i64
        %source = llvm.inttoptr %x64 : i64 to !llvm.ptr<1>
        %sp = memref.extract_aligned_pointer_as_index %s : memref<64xi32, {SHARED}> -> index
        %s64 = arith.index_cast %sp : index to i64
        %own = llvm.inttoptr %s64 : i64 to !llvm.ptr<3>
        %slot = llvm.addrspacecast %own : !llvm.ptr<3> to !llvm.ptr<7>
        %mp = memref.extract_aligned_pointer_as_index %m : memref<4xi64, {SHARED}> -> index
        %m64 = arith.index_cast %mp : index to i64
        %full = llvm.inttoptr %m64 : i64 to !llvm.ptr<3>
        %free = llvm.getelementptr %full[1] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i64
        %mine = arith.muli %rank, %half : i32
        %to = llvm.getelementptr %slot[%mine] : (!llvm.ptr<7>, i32) -> !llvm.ptr<7>, i32
        %next = arith.addi %tid, %c1 : index
        %o = arith.remui %next, %c64 : index
"""
MAKE = """
        scf.if %first {
          nvvm.mbarrier.init %full, %i1 : !llvm.ptr<3>, i32
          nvvm.mbarrier.init %free, %i2 : !llvm.ptr<3>, i32
          nvvm.fence.mbarrier.init
        }
"""
MEET = "nvvm.cluster.arrive.relaxed\nnvvm.cluster.wait\n"
BARRIER = "gpu.barrier\n"
BULK = "nvvm.cp.async.bulk.shared.cluster.global"


def wait(barrier: str, parity: str, name: str) -> str:
    return f"""
        llvm.inline_asm has_side_effects "{ASSEMBLY}", "l,r,~{{memory}}"
            %{barrier}, %{parity} : (!llvm.ptr<3>, i32) -> () loc("{name}")
    """


def copy(turn: int) -> str:
    """This block's half of turn's 64 numbers, to both blocks."""
    return f"""
        %at{turn} = llvm.getelementptr %source[{64 * turn}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32
        %from{turn} = llvm.getelementptr %at{turn}[%mine]
            : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
        nvvm.mbarrier.arrive.expect_tx %full, %all : !llvm.ptr<3>, i32 loc("expect{turn}")
        {BULK} %to, %from{turn}, %full, %size multicast_mask = %both
            : !llvm.ptr<7>, !llvm.ptr<1> loc("copy{turn}")
    """


def read(turn: int) -> str:
    return f"""
        %v{turn} = memref.load %s[%o] : memref<64xi32, {SHARED}> loc("read{turn}")
        memref.store %v{turn}, %y{turn}[%i] : memref<?xi32>
    """


GIVE_BACK = """
        scf.if %first {
          %there0 = nvvm.mapa %free, %i0 : !llvm.ptr<3> -> !llvm.ptr<7>
          nvvm.mbarrier.arrive %there0 : !llvm.ptr<7> loc("arrive0")
          %there1 = nvvm.mapa %free, %i1 : !llvm.ptr<3> -> !llvm.ptr<7>
          nvvm.mbarrier.arrive %there1 : !llvm.ptr<7> loc("arrive1")
        }
"""
FREED = wait("free", "i0", "freed")
FILL = "scf.if %first {" + copy(0) + "}\n"
REFILL = "scf.if %first {" + FREED + copy(1) + "}\n"
GET = BARRIER + wait("full", "i0", "wait0") + read(0)
AGAIN = wait("full", "i1", "wait1") + read(1)
GOOD = START + MAKE + MEET + FILL + GET + BARRIER + GIVE_BACK + REFILL + AGAIN


def simulated(
    body: str, *, seed: int = 0, schedule: str = "warps", count: int = 128
) -> list[np.ndarray]:
    results = [np.full(256, -1, np.int32) for _ in range(2)]
    run(
        body, [np.arange(100, 100 + count, dtype=np.int32), *results],
        "%x: memref<?xi32>, %y0: memref<?xi32>, %y1: memref<?xi32>", seed=seed, schedule=schedule,
        grid=(4, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1),
        shared=f"%s: memref<64xi32, {SHARED}>, %m: memref<4xi64, {SHARED}>",
    )  # fmt: skip
    return [r.reshape(4, 64) for r in results]


def caught(body: str, kinds: str, *, at: str | None = None, count: int = 128) -> str:
    """The fault, under both schedules and several seeds; its message."""
    assert body != GOOD or count != 128
    kernel = partial(simulated, body, count=count)
    return simulated_faults.caught(kernel, kinds, at=at and f'"({at})"', seeds=4)


@pytest.mark.parametrize("schedule", ["lockstep", "warps"])
def test_two_turns_of_a_shared_slot(schedule):
    for seed in range(6):
        for turn, result in enumerate(simulated(GOOD, seed=seed, schedule=schedule)):
            want = 100 + 64 * turn + (np.arange(64) + 1) % 64
            np.testing.assert_array_equal(result, np.broadcast_to(want, (4, 64)))


@pytest.mark.parametrize("turn", [0, 1])
def test_every_wait_for_bytes_is_needed(turn):
    """Sent or not yet: it is neither there nor to be read."""
    missing = GOOD.replace(wait("full", f"i{turn}", f"wait{turn}"), "")
    caught(missing, "in-flight race uninitialised barrier")


def test_a_wait_for_the_phase_before_shows_nothing():
    stale = GOOD.replace(wait("full", "i1", "wait1"), wait("full", "i0", "wait1"))
    caught(stale, "in-flight race", at="read1|copy1")


def test_a_wait_for_a_phase_that_never_ends():
    early = GOOD.replace(wait("full", "i0", "wait0"), wait("full", "i1", "wait0"))
    caught(early, "in-flight uninitialised", at="read0")
    late = START + MAKE + MEET + BARRIER + wait("full", "i0", "wait0")
    assert "arrivals missing" in caught(late, "barrier", at="wait0")


def test_bytes_that_never_come():
    """Each block brings its half to itself alone."""
    alone = GOOD.replace(" multicast_mask = %both", "")
    assert "128 of 256 bytes sent" in caught(alone, "barrier", at="wait0")


def test_more_bytes_than_expected():
    """One block's half completes the phase, so the other's is too much, or missing where it is
    read."""
    few = GOOD.replace("%all = arith.constant 256", "%all = arith.constant 128")
    caught(few, "barrier uninitialised in-flight")


def test_a_slot_that_others_still_read():
    """Without the free barrier nobody knows what the other block's threads have read."""
    caught(GOOD.replace(FREED, "").replace(GIVE_BACK, ""), "race in-flight", at="copy1")


def test_a_slot_that_this_block_still_reads():
    """The block's threads must meet before one of them gives the slot back."""
    caught(GOOD.replace(BARRIER + GIVE_BACK, GIVE_BACK), "race", at="copy1")


def test_too_few_blocks_give_back():
    one = GOOD.replace('nvvm.mbarrier.arrive %there1 : !llvm.ptr<7> loc("arrive1")', "")
    assert "1 arrivals missing" in caught(one, "barrier", at="freed|wait1")


def test_a_block_gives_back_twice():
    twice = GOOD.replace("%there1 = nvvm.mapa %free, %i1", "%there1 = nvvm.mapa %free, %i0")
    caught(twice, "barrier race in-flight")


def test_giving_back_to_a_block_that_may_have_ended():
    """A slot that is not filled again is not given back."""
    without = START + MAKE + MEET + FILL + GET + BARRIER + GIVE_BACK
    assert "may end before it" in caught(without, "race", at="arrive[01]")


def test_ending_before_all_has_come():
    without = START + MAKE + MEET + FILL
    assert "without a wait" in caught(without, "race", at="copy0")


def test_blocks_that_may_not_have_begun():
    caught(GOOD.replace(MEET, ""), "race uninitialised", at="copy0|expect0")


def test_barriers_that_are_not_published():
    hidden = GOOD.replace("nvvm.fence.mbarrier.init", "")
    assert "fence.mbarrier_init" in caught(hidden, "race", at="copy0")


def test_a_mask_of_more_blocks_than_there_are():
    more = GOOD.replace("%both = arith.constant 3 : i16", "%both = arith.constant 7 : i16")
    assert "cluster of 2" in caught(more, "out-of-bounds", at="copy0")


def test_a_size_that_is_no_multiple_of_16():
    odd = GOOD.replace("%size = arith.constant 128", "%size = arith.constant 120")
    assert "multiple of 16" in caught(odd, "misaligned", at="copy0")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%source[64]", "%source[63]"),
        ("%to = llvm.getelementptr %slot[%mine]", "%to = llvm.getelementptr %slot[%i1]"),
    ],
)
def test_addresses_that_are_no_multiples_of_16(old, new):
    assert old in GOOD
    caught(GOOD.replace(old, new), "misaligned", at="copy[01]")


def test_reading_beyond_the_source():
    caught(GOOD, "out-of-bounds", at="copy1", count=127)


def test_several_threads_are_refused():
    with pytest.raises(InternalError, match="several threads"):
        simulated(GOOD.replace("scf.if %first {" + FREED, "scf.if %all1 {" + FREED).replace(
            "%next =", "%all1 = arith.cmpi uge, %tid, %c0 : index\n%next ="))  # fmt: skip
