"""`mbarrier` and `st.async`: ops of `nvvm`, and the inline assembly that stands for others.

The one inline assembly that is simulated is a single instruction of these forms, or the loop around
`try_wait`; any other is refused.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Control, Execution, Scope, Step, operation
from yolomlir.simulator.elements import ELEMENTS, Array, Value
from yolomlir.simulator.lanes import Lanes
from yolomlir.simulator.mbarriers import BYTES, one_thread
from yolomlir.simulator.memory import checked_addresses
from yolomlir.simulator.pointers import SHARED_CLUSTER, address_space, reference_at

_BYTE = ELEMENTS["i8"]
_SEND = re.compile(
    r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v(?P<count>[24]))?\.b32 "
    r"\[\$0\], \{?(?P<values>[$\d, ]+)\}?, \[\$(?P<barrier>\d+)\];"
)
_WAIT = re.compile(
    r"\{ \.reg \.pred done; wait: mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64 "
    r"done, \[\$0\], (?P<parity>[01]); @!done bra\.uni wait; \}"
)
_WAIT_OF_PHASE = re.compile(
    r"\{ \.reg \.pred done; wait: mbarrier\.try_wait\.parity\.shared::cta\.b64 "
    r"done, \[\$0\], \$1; @!done bra\.uni wait; \}"
)


def _barrier_address(lanes: Lanes, pointer: Value, space: int, site: Any) -> Array:
    """Where the active lanes' barriers are, checked to be within shared memory and aligned."""
    reference = reference_at(lanes, pointer, space, _BYTE)
    return checked_addresses(lanes, reference, reference.address, BYTES, BYTES, site)


def _touch(lanes: Lanes, address: int, site: Any) -> None:
    """An operation on a barrier of this block comes behind its initialisation."""
    threads, warps = lanes.active_threads()
    shadow = lanes.machine.shadow
    where = np.full(len(threads), address, np.int64)
    shadow.read(shadow.granules(where, BYTES), threads, warps, site)


@operation("nvvm.mbarrier.init")
def _init(op: Any, scope: Scope) -> Step:
    pointer, count = scope.uses(list(op.operands)[:2])
    space = address_space(op.operands[0].type)
    scope.program.mbarriers += 1
    site = scope.site

    def step(lanes: Lanes) -> None:
        machine = lanes.machine
        number = one_thread(lanes, lanes.registers[count], site, "mbarrier.init")
        address = _barrier_address(lanes, lanes.registers[pointer], space, site)
        threads, warps = lanes.active_threads()
        machine.shadow.write(machine.shadow.granules(address, BYTES), threads, warps, site)
        machine.mbarriers.make(lanes, int(address[0]), number, site)

    return step


@operation("nvvm.mbarrier.arrive.expect_tx")
def _arrive(op: Any, scope: Scope) -> Step:
    if len(op.results) or len(op.operands) != 2:
        raise InternalError("the state of an mbarrier is not simulated", where=scope.site.text())
    pointer, count = scope.uses(list(op.operands))
    space = address_space(op.operands[0].type)
    site = scope.site

    def step(lanes: Lanes) -> None:
        number = one_thread(lanes, lanes.registers[count], site, "mbarrier.arrive")
        address = int(_barrier_address(lanes, lanes.registers[pointer], space, site)[0])
        _touch(lanes, address, site)
        lanes.machine.mbarriers.arrive(address, number, site)

    return step


@operation("nvvm.mbarrier.arrive")
def _arrive_plainly(op: Any, scope: Scope) -> Step:
    relaxed = "relaxed" in op.attributes and "true" in str(op.attributes["relaxed"])
    plain = len(op.operands) == 1 and not len(op.results) and not relaxed
    if not plain or address_space(op.operands[0].type) != SHARED_CLUSTER:
        raise InternalError("mbarrier.arrive of another form", where=scope.site.text())
    pointer = scope.use(op.operands[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        place = lanes.broadcast(lanes.registers[pointer])
        one_thread(lanes, place, site, "mbarrier.arrive")
        address = int(_barrier_address(lanes, place, SHARED_CLUSTER, site)[0])
        lanes.machine.mbarriers.arrive_plainly(lanes, address, site)

    return step


@operation("nvvm.fence.mbarrier.init")
def _publish(op: Any, scope: Scope) -> Step:
    del op, scope
    return lambda lanes: lanes.machine.mbarriers.publish(lanes)


# ---- inline assembly ----------------------------------------------------------------------------


@operation("llvm.inline_asm", "nvvm.inline_ptx")
def _assembly(op: Any, scope: Scope) -> Step | Control:
    name = "asm_string" if "asm_string" in op.attributes else "ptxCode"
    text = " ".join(ir.StringAttr(op.attributes[name]).value.split())
    if op.name == "llvm.inline_asm":
        if (found := _SEND.fullmatch(text)) is not None:
            return _send(op, scope, found)
        if (found := _WAIT.fullmatch(text)) is not None:
            return _wait(op, scope, int(found["parity"]))
        if _WAIT_OF_PHASE.fullmatch(text) is not None:
            return _wait(op, scope, None)
    raise InternalError(
        f"inline assembly is not simulated: {scope.site.text()}",
        where=scope.site.location,
        hint="use an op of nvvm or nvgpu, or an intrinsic",
    )


def _send(op: Any, scope: Scope, found: re.Match[str]) -> Step:
    count = int(found["count"] or 1)
    names = found["values"].replace(" ", "").split(",")
    if names != [f"${i + 1}" for i in range(count)] or int(found["barrier"]) != count + 1:
        raise InternalError("st.async of other operands", where=scope.site.text())
    target, *values, barrier = scope.uses(list(op.operands))
    spaces = [address_space(op.operands[i].type) for i in (0, count + 1)]
    if spaces != [SHARED_CLUSTER] * 2:
        raise InternalError("st.async to other memory than a cluster's", where=scope.site.text())
    size = 4 * count
    scope.note_access(size)
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        place = lanes.broadcast(registers[target])
        reference = reference_at(lanes, place, SHARED_CLUSTER, _BYTE)
        address = checked_addresses(lanes, reference, reference.address, size, size, site)
        if not address.size:
            return
        where = lanes.broadcast(registers[barrier])
        counted = _barrier_address(lanes, where, SHARED_CLUSTER, site)
        words = np.stack([_words(lanes, registers[v]) for v in values], 1)
        data = np.ascontiguousarray(words).view(np.uint8)
        lanes.machine.mbarriers.send(lanes, address, data, counted, site)

    return step


def _words(lanes: Lanes, value: Value) -> Array:
    """A register of 32 bits in the active lanes: a float, an integer, or two float16."""
    array = np.asarray(value)
    if array.dtype.itemsize == 4:
        return np.ascontiguousarray(lanes.active(lanes.broadcast(value))).view(np.uint32)
    pairs = np.ascontiguousarray(np.broadcast_to(array, (lanes.count, 2)))
    return np.asarray(lanes.active(pairs.view(np.uint32)[:, 0]))


def _wait(op: Any, scope: Scope, parity: int | None) -> Control:
    """parity: None where it is the second operand."""
    pointer, *rest = scope.uses(list(op.operands))
    space = address_space(op.operands[0].type)
    site = scope.site

    def run(lanes: Lanes) -> Execution:
        addresses = _barrier_address(lanes, lanes.registers[pointer], space, site)
        wanted = parity
        if wanted is None:
            values = np.atleast_1d(lanes.active(lanes.registers[rest[0]]))
            if (values != values[0]).any() or int(values[0]) not in (0, 1):
                raise site.fault("barrier", f"waits for a phase of parity {np.unique(values)}")
            wanted = int(values[0])
        if (addresses != addresses[0]).any():
            raise InternalError("a warp waits at several mbarriers", where=site.text())
        address = int(addresses[0])
        _touch(lanes, address, site)
        yield from lanes.machine.mbarriers.wait(lanes, address, wanted, site)

    return Control(run)
