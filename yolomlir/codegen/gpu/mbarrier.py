"""Barriers in shared memory that count bytes and arrivals; stores and copies that they count.

A block says how many bytes will come (`expect_bytes`); others send them (`send`), and a barrier of
the receiver counts what has arrived; whoever reads it waits for all of it (`wait_for_bytes`). The
senders wait for nothing, where a barrier of the cluster makes every thread wait until all that it
wrote before, to global memory too, is visible to the whole GPU. `copy_in_bulk` brings what lies
together in global memory into one block or several, with one instruction of one thread; the
barriers of such a ring are used again and again, phase after phase. Of sm_90 and later.
"""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.bindings import arith, ir, llvm, nvvm, vector
from yolomlir.codegen.gpu.builder import Buffer, Int, i32_type
from yolomlir.codegen.gpu.instructions import (
    DISTRIBUTED,
    RemoteBuffer,
    global_address,
    shared_address,
    shared_pointer,
)

LEAST_BYTES = 4
"""The least that is sent."""
_FIRST_LANE = 1
"""The mask of a warp's first lane alone."""
_SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
_WAIT = """{
.reg .pred done;
wait:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra.uni wait;
}"""
_WAIT_OF_PHASE = """{
.reg .pred done;
wait:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@!done bra.uni wait;
}"""
BARRIER_BYTES = 8
"""Of a barrier, and its alignment."""


def expect_bytes(barrier: Buffer, count: Int | int) -> None:
    """The first thread of a warp makes `barrier` one that `count` bytes complete, once."""
    make_barrier(barrier)
    stay_in_branch()
    expect_sent(barrier, count)


def stay_in_branch() -> None:
    """The first thread of a warp, which has made a barrier in a branch of its own.

    Without this ptxas may predicate the branch away. What makes the barrier is then one instruction
    of the whole warp, and compute-sanitizer reports a race with the lane that uses it.
    """
    nvvm.bar_warp_sync(arith.constant(i32_type(), _FIRST_LANE))


def make_barrier(barrier: Buffer, arrivals: int = 1, at: int = 0) -> None:
    """One thread makes `barrier` one of so many arrivals, to which bytes can be sent before it is
    known how many. at: of several barriers, the element of `barrier` where this one is."""
    nvvm.mbarrier_init(shared_address(barrier, at), arith.constant(i32_type(), arrivals))


def expect_sent(barrier: Buffer, count: Int | int, at: Int | int = 0) -> None:
    """One thread arrives at a barrier that was made and says that `count` bytes complete it."""
    nvvm.mbarrier_arrive_expect_tx(None, shared_address(barrier, at), Int.of(count).value)


def arrive(barrier: RemoteBuffer, at: Int | int = 0) -> None:
    """This thread arrives at a barrier of another block of the cluster, or of its own.

    What was read before, by threads that it met as well, comes before what the waiter then does.
    No write to global memory is made visible: for that all earlier ones had to be waited for.
    """
    nvvm.mbarrier_arrive(None, barrier.address(at))


def publish_barriers() -> None:
    """The other blocks of the cluster see this thread's barriers, once they have met it."""
    nvvm.fence_mbarrier_init()


def reuse_for_copies() -> None:
    """What this thread has written to shared memory comes before bulk copies to the same place
    that a thread starts which it meets then."""
    shared = ir.Attribute.parse("#nvvm.shared_space<cta>")
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=shared)


def send(
    target: RemoteBuffer, offset: Int | int, values: Sequence[ir.Value], barrier: RemoteBuffer
) -> None:
    """`st.async`: 4, 8 or 16 bytes of neighbours, which a barrier of that block counts.

    The address must be a multiple of their size. They are visible behind `wait_for_bytes`.
    """
    address = target.address(offset)
    if isinstance(values[0].type, ir.F16Type):
        pair = ir.VectorType.get([2], values[0].type)
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [vector.from_elements(pair, [low, high]) for low, high in pairs]
    operands = [address, *values, barrier.pointer]
    names = [f"${i + 1}" for i in range(len(values))]
    several = f".v{len(values)}" if len(values) > 1 else ""
    what = f"{{{', '.join(names)}}}" if several else names[0]
    registers = ["f" if isinstance(v.type, ir.F32Type) else "r" for v in values]
    llvm.inline_asm(
        None,
        operands,
        f"{_SEND}{several}.b32 [$0], {what}, [${len(values) + 1}];",
        ",".join(["l", *registers, "l", "~{memory}"]),
        has_side_effects=True,
    )


def wait_for_bytes(barrier: Buffer) -> None:
    """This thread waits until all bytes have come, and sees them."""
    llvm.inline_asm(None, [shared_pointer(barrier)], _WAIT, "l,~{memory}", has_side_effects=True)


def wait_for_phase(barrier: Buffer, parity: Int | int, at: Int | int = 0) -> None:
    """This thread waits for the end of the phase of that parity (0: the first, the third, …), and
    sees what this block's and others' bulk copies have brought in it."""
    operands = [shared_address(barrier, at), Int.of(parity).value]
    llvm.inline_asm(None, operands, _WAIT_OF_PHASE, "l,r,~{memory}", has_side_effects=True)


def copy_in_bulk(
    target: Buffer,
    target_offset: Int | int,
    source: Buffer,
    source_offset: Int | int,
    elements: int,
    barrier: Buffer,
    at: Int | int = 0,
    *,
    blocks: int | None = None,
) -> None:
    """One thread copies neighbours from global to shared memory: 16 bytes or a multiple of that, to
    and from multiples of 16 bytes.

    They come to the same place of every block whose bit is set in the mask `blocks` (this block
    alone without one), and the barrier at the same place there counts them.
    """
    integer = ir.IntegerType.get_signless
    size = arith.constant(i32_type(), elements * target.element_bytes)
    own = shared_address(target, target_offset)
    there = llvm.addrspacecast(llvm.PointerType.get(DISTRIBUTED), own)
    mask = None if blocks is None else arith.constant(integer(16), blocks)
    nvvm.cp_async_bulk_shared_cluster_global(
        there, global_address(source, source_offset), shared_address(barrier, at), size,
        multicast_mask=mask,
    )  # fmt: skip
