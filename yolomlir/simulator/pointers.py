"""Raw pointers: byte addresses in int64, by address space.

Generic (0): shared memory below 2^32, global memory from there. Global (1): as generic. Shared (3):
bytes in the cluster's shared memory, block after block. Shared of the cluster (7): the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.elements import Element, Value
from yolomlir.simulator.memory import GLOBAL_BASE, Reference, SpaceName

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

_SPACES = {"!llvm.ptr": 0, "!llvm.ptr<1>": 1, "!llvm.ptr<3>": 3, "!llvm.ptr<7>": 7}
SHARED_CLUSTER = 7


def address_space(type_: Any) -> int:
    """The address space of an `!llvm.ptr` type. Raises InternalError for another one."""
    if str(type_) not in _SPACES:
        raise InternalError(f"pointers of type {type_} are not simulated")
    return _SPACES[str(type_)]


def reference_at(lanes: Lanes, address: Value, space: int, element: Element) -> Reference:
    """The buffer a pointer points into, with that address as its start."""
    address = np.asarray(address, np.int64)[()]
    is_global = space == 1 or (space == 0 and bool(np.all(lanes.active(address) >= GLOBAL_BASE)))
    if is_global:
        return _global(lanes, address - np.int64(GLOBAL_BASE), element)
    machine = lanes.machine
    low = np.int64(lanes.rank * machine.shared_stride)
    high = low + machine.shared_bytes
    if space in (0, SHARED_CLUSTER):
        low = np.asarray(address // machine.shared_stride * machine.shared_stride)[()]
        high = np.minimum(low + machine.shared_bytes, len(machine.shared_memory.data))
    return _reference("shared", address, low, high, element)


def _global(lanes: Lanes, address: Value, element: Element) -> Reference:
    segments = sorted(lanes.machine.global_memory.segments, key=lambda s: s.start)
    starts = np.array([s.start for s in segments])
    ends = np.array([s.end for s in segments])
    index = np.maximum(np.searchsorted(starts, address, side="right") - 1, 0)
    return _reference("global", address, starts[index], ends[index], element)


def _reference(
    space: SpaceName, address: Value, low: Value, high: Value, element: Element
) -> Reference:
    return Reference(space, address, low, high, element, (None,), (np.int64(1),))
