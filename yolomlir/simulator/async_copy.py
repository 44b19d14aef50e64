"""Asynchronous copies in flight: `cp.async` groups, a thread at a time.

A copy lands (becomes visible to its thread) when that thread waits for its group; other threads
see it only behind a barrier after that, which the shadow of shared memory checks. Its destination
may be neither read nor written while it is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yolomlir.simulator.elements import Array

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes


@dataclass
class _Batch:
    """Copies that one instruction issued: an entry a lane, `data` (lanes, bytes)."""

    lanes: Array
    group: Array
    address: Array
    data: Array


class PendingCopies:
    """The copies of a group of lanes; `committed` counts each lane's commit instructions."""

    def __init__(self, lanes: int) -> None:
        self.committed: Array = np.zeros(lanes, np.int64)
        self._batches: list[_Batch] = []

    def issue(self, lanes: Array, address: Array, data: Array) -> None:
        """Remember copies of `data` (lanes, bytes) to shared byte addresses."""
        self._batches.append(_Batch(lanes, self.committed[lanes], address, data))

    def commit(self, mask: Array | None) -> None:
        """Close the active lanes' current group."""
        self.committed[slice(None) if mask is None else mask] += 1

    def wait(self, owner: Lanes, newest: int | None) -> None:
        """Land the active lanes' groups but the `newest` ones; None lands uncommitted ones too."""
        kept: list[_Batch] = []
        for batch in self._batches:
            done = np.ones(len(batch.lanes), np.bool_)
            if newest is not None:
                done = batch.group < self.committed[batch.lanes] - newest
            if owner.mask is not None:
                done = done & owner.mask[batch.lanes]
            if done.any():
                self._land(owner, batch, done)
            if not done.all():
                kept.append(_part(batch, ~done))
        self._batches = kept

    @staticmethod
    def _land(owner: Lanes, batch: _Batch, done: Array) -> None:
        if not done.all():
            batch = _part(batch, done)
        machine = owner.machine
        size = batch.data.shape[1]
        machine.shared_memory.data[batch.address[:, None] + np.arange(size)] = batch.data
        granules = machine.shadow.granules(batch.address, size)
        machine.shadow.land(granules, owner.warps[batch.lanes])


def _part(batch: _Batch, which: Array) -> _Batch:
    return _Batch(batch.lanes[which], batch.group[which], batch.address[which], batch.data[which])
