"""Atomic read-modify-write: lanes one after another, in a random order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.simulator.elements import Array, Value
from yolomlir.simulator.memory import (
    Reference,
    checked_addresses,
    note_global_read,
    note_global_write,
)

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

Update = Callable[[Any, Any], Any]


def _as_unsigned(function: Update) -> Update:
    def update(old: Any, new: Any) -> Any:
        kind = np.dtype(f"u{old.dtype.itemsize}")
        return function(old.view(kind), new.view(kind)).view(old.dtype)

    return update


ATOMIC_KINDS: dict[int, Update] = {
    0: np.add,
    1: np.add,
    2: np.bitwise_and,
    3: lambda old, new: new,
    4: np.maximum,
    5: np.fmax,
    6: np.maximum,
    7: _as_unsigned(np.maximum),
    8: np.minimum,
    9: np.fmin,
    10: np.minimum,
    11: _as_unsigned(np.minimum),
    12: np.multiply,
    13: np.multiply,
    14: np.bitwise_or,
    15: np.bitwise_xor,
}
"""arith::AtomicRMWKind: addf addi andi assign maximumf maxnumf maxs maxu minimumf minnumf mins minu
mulf muli ori xori."""


def atomic_update(
    lanes: Lanes, reference: Reference, address: Value, value: Value, update: Update, site: Site
) -> Array:
    """Apply `update(old, value)` in memory; returns each lane's old value."""
    element = reference.element
    size = element.size_bytes
    where = np.array(lanes.broadcast(address))
    active = checked_addresses(lanes, reference, where, size, size, site)
    machine = lanes.machine
    if reference.space == "shared":
        threads, warps = lanes.active_threads()
        granules = machine.shadow.granules(active, size)
        machine.shadow.check_initialised(granules, threads, site)
        machine.shadow.write(granules, threads, warps, site, atomic=True)
    elif reference.space == "global":
        machine.acquired = True
        note_global_write(lanes, active, size, site, atomic=True)
        note_global_read(lanes, active, size, site, atomic=True)
    view = lanes.memory(reference.space).view(element.register)
    old = np.zeros(lanes.count, element.register)
    numbers = np.flatnonzero(np.ones(lanes.count, bool) if lanes.mask is None else lanes.mask)
    values = lanes.broadcast(value)
    for lane in machine.random.permutation(numbers):
        index = where[lane] // size
        old[lane] = view[index]
        view[index] = update(view[index], values[lane])
    return old


LLVM_ATOMICS: dict[int, Update] = {
    0: lambda old, new: new,
    1: np.add,
    2: np.subtract,
    3: np.bitwise_and,
    5: np.bitwise_or,
    6: np.bitwise_xor,
    7: np.maximum,
    8: np.minimum,
    9: _as_unsigned(np.maximum),
    10: _as_unsigned(np.minimum),
    11: np.add,
    12: np.subtract,
    13: np.fmax,
    14: np.fmin,
}
"""LLVM's AtomicBinOp: xchg add sub and (nand) or xor max min umax umin fadd fsub fmax fmin."""
