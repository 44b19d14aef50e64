"""Barriers in shared memory that count bytes, and stores to other blocks that they count.

A block says how many bytes will come (`expect_bytes`); others send them (`send`), and a barrier of
the receiver counts what has arrived; whoever reads it waits for all of it (`wait_for_bytes`). The
senders wait for nothing, where a barrier of the cluster makes every thread wait until all that it
wrote before, to global memory too, is visible to the whole GPU. Of sm_90 and later.
"""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.bindings import arith, ir, llvm, nvvm, vector
from yolomlir.codegen.gpu.builder import Buffer, Int, i32_type
from yolomlir.codegen.gpu.instructions import RemoteBuffer, shared_pointer

LEAST_BYTES = 4
"""The least that is sent."""
_SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
_WAIT = """{
.reg .pred done;
wait:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra.uni wait;
}"""


def expect_bytes(barrier: Buffer, count: Int | int) -> None:
    """One thread makes `barrier` one that `count` bytes complete, once."""
    make_barrier(barrier)
    expect_sent(barrier, count)


def make_barrier(barrier: Buffer) -> None:
    """One thread makes `barrier` one that bytes can be sent to before it is known how many."""
    nvvm.mbarrier_init(shared_pointer(barrier), arith.constant(i32_type(), 1))


def expect_sent(barrier: Buffer, count: Int | int) -> None:
    """One thread says that `count` bytes complete a barrier that was made, once."""
    nvvm.mbarrier_arrive_expect_tx(None, shared_pointer(barrier), Int.of(count).value)


def publish_barriers() -> None:
    """The other blocks of the cluster see this thread's barriers, once they have met it."""
    nvvm.fence_mbarrier_init()


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
