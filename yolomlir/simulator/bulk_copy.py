"""`cp.async.bulk` from global to shared memory: of one block, or of several of a cluster.

One thread copies many bytes with one instruction. In every block that the mask names they come to
the same place of its shared memory, and the barrier at the same place there counts them
(`mbarriers.py`): until a wait there they are on their way, and may neither be read nor written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import ELEMENTS, Array, Value
from yolomlir.simulator.faults import Site
from yolomlir.simulator.lanes import Lanes
from yolomlir.simulator.mbarriers import BYTES, one_thread
from yolomlir.simulator.memory import checked_addresses, note_global_read
from yolomlir.simulator.pointers import SHARED_CLUSTER, address_space, reference_at

_BYTE = ELEMENTS["i8"]
_UNIT = 16
"""What sizes and addresses are multiples of."""


@operation("nvvm.cp.async.bulk.shared.cluster.global")
def _copy(op: Any, scope: Scope) -> Step:
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    if counts[:4] != [1] * 4 or any(counts[5:]) or address_space(op.operands[0].type) != 7:
        raise InternalError("a bulk copy of another form", where=scope.site.text())
    target, source, barrier, size, *mask = scope.uses(list(op.operands))
    spaces = [address_space(op.operands[i].type) for i in (1, 2)]
    scope.note_access(_UNIT)
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        length = one_thread(lanes, registers[size], site, "a bulk copy")
        if length <= 0 or length % _UNIT:
            raise site.fault("misaligned", f"{length} bytes are no multiple of {_UNIT}")
        to = _address(lanes, registers[target], SHARED_CLUSTER, length, _UNIT, site)
        origin = _address(lanes, registers[source], spaces[0], length, _UNIT, site)
        counted = _address(lanes, registers[barrier], spaces[1], BYTES, BYTES, site)
        note_global_read(lanes, np.array([origin]), length, site)
        data = lanes.machine.global_memory.data[origin : origin + length]
        chosen = one_thread(lanes, registers[mask[0]], site, "a bulk copy") if mask else None
        _bring(lanes, to, counted, data, chosen, site)

    return step


def _bring(lanes: Lanes, to: int, counted: int, data: Array, mask: int | None, site: Site) -> None:
    """To this block, or to all of the mask."""
    machine = lanes.machine
    stride = machine.shared_stride
    if to // stride != lanes.rank or counted // stride != lanes.rank:
        raise site.fault("out-of-bounds", "a bulk copy names memory of another block")
    ranks = np.array([lanes.rank])
    if mask is not None:
        bits = mask & 0xFFFF
        ranks = np.flatnonzero([bits >> rank & 1 for rank in range(16)])
        if not ranks.size or ranks.max() >= machine.cluster_blocks:
            raise site.fault(
                "out-of-bounds", f"mask {bits:#x} for a cluster of {machine.cluster_blocks} blocks"
            )
    threads, warps = (np.repeat(part, ranks.size) for part in lanes.active_threads())
    places = ranks * stride
    machine.mbarriers.bring(
        threads, warps, places + to % stride, np.tile(data, (ranks.size, 1)),
        places + counted % stride, site,
    )  # fmt: skip


def _address(lanes: Lanes, pointer: Value, space: int, size: int, align: int, site: Site) -> int:
    """Of the one active lane, checked."""
    where = lanes.broadcast(pointer)
    reference = reference_at(lanes, where, space, _BYTE)
    return int(checked_addresses(lanes, reference, reference.address, size, align, site)[0])
