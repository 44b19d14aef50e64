"""A group of threads that execute together: a whole block in lockstep, or one warp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.simulator.elements import Array, Value, is_uniform
from yolomlir.simulator.memory import Bytes, Reference, SpaceName
from yolomlir.simulator.races import COLLECTIVE

if TYPE_CHECKING:
    from yolomlir.simulator.async_copy import PendingCopies
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.machine import Machine

WARP = 32
_POISON = 0xFF
"""What a thread's own buffers hold at first: NaN as floats, -1 as integers."""


class Lanes:
    """Registers and state of consecutive warps of one block.

    count: lanes, a multiple of 32; those behind the block's last thread are never active.
    rank: the block's number in its cluster. threads: each lane's number in the cluster's
    numbering (rank times the block's padded size, plus the thread), warps: that over 32.
    mask: the active lanes, None when all are.
    unwaited: lanes that have not executed `griddepcontrol.wait`; None where nothing depends on it.
    """

    def __init__(
        self, machine: Machine, rank: int, block_id: tuple[int, int, int], first: int, count: int
    ) -> None:
        self.machine = machine
        self.rank = rank
        self.block_id = block_id
        self.count = count
        self.warp_count = count // WARP
        self.registers: list[Value] = list(machine.program.preset)
        self.thread_ids: Array = np.arange(first, first + count, dtype=np.int64)
        base = rank * machine.padded_threads
        self.threads: Array = self.thread_ids + base
        self.warps: Array = self.threads // WARP
        self.warp_slice = slice((base + first) // WARP, (base + first + count) // WARP)
        self.exists: Array = self.thread_ids < machine.block_threads
        self.mask: Array | None = None
        self.active_warps = self.warp_count
        self.set_mask(self.exists)
        self.unwaited: Array | None = np.ones(count, np.bool_) if machine.guarded else None
        self.tokens: dict[Any, int] = {}
        self.copies: PendingCopies = machine.new_copies(count)
        self.local: Bytes | None = None
        self.waiting_at: Site | None = None

    # ---- activity -------------------------------------------------------------------------------

    def set_mask(self, mask: Array | None) -> None:
        """Make those lanes the active ones (None: all)."""
        if mask is None or mask.all():
            self.mask = None
            self.active_warps = self.warp_count
            return
        self.mask = mask
        self.active_warps = int(mask.reshape(-1, WARP).any(1).sum())

    def active(self, value: Value) -> Value:
        """A scalar register's values in the active lanes (itself where uniform)."""
        if is_uniform(value) or self.mask is None:
            return value
        return value[self.mask]

    def active_count(self) -> int:
        """How many lanes are active."""
        return self.count if self.mask is None else int(self.mask.sum())

    def broadcast(self, value: Value) -> Array:
        """A scalar register as one value a lane."""
        if isinstance(value, np.ndarray) and value.ndim == 1:
            return value
        return np.full(self.count, value)

    def spread(self, items: Array) -> Array:
        """(active lanes, k) to (lanes, k), zeros in the inactive ones."""
        if self.mask is None and len(items) == self.count:
            return items
        full = np.zeros((self.count, items.shape[1]), items.dtype)
        full[slice(None) if self.mask is None else self.mask] = items
        return full

    def converged(self) -> bool:
        """Whether every thread of the group is active."""
        return self.mask is None or bool((self.mask == self.exists).all())

    def whole_warps(self, site: Site, *, full: bool = True) -> Array | None:
        """Which warps are active; each must be whole (None: all are). Raises for a divergent one.

        full: all 32 lanes must take part, as `mma.sync` and `ldmatrix` want; else only all that
        exist.
        """
        if self.mask is None:
            return None
        lanes = self.mask.reshape(-1, WARP)
        active = lanes.any(1)
        whole = lanes.all(1) if full else (lanes == self.exists.reshape(-1, WARP)).all(1)
        if (active & ~whole).any():
            warp = int(np.argmax(active & ~whole))
            inactive = int(np.argmin(lanes[warp]))
            raise site.fault(
                "divergence",
                f"warp {self.warp_slice.start + warp} executes a warp-wide operation with "
                f"{int(lanes[warp].sum())} of 32 lanes active; lane {inactive} is not",
            )
        return np.asarray(active)

    # ---- who ------------------------------------------------------------------------------------

    def active_threads(self) -> tuple[Array, Array]:
        """(threads, warps) of the active lanes."""
        if self.mask is None:
            return self.threads, self.warps
        return self.threads[self.mask], self.warps[self.mask]

    def readers(self, accesses: int) -> tuple[Array, Array]:
        """(threads, warps) of a read: a lane an access, or, of one uniform access, each warp."""
        threads, warps = self.active_threads()
        if accesses == len(threads):
            return threads, warps
        warps = np.unique(warps)
        return np.full(len(warps), COLLECTIVE, np.int64), warps

    def early(self, accesses: int) -> Array:
        """Which active lanes have not waited for the previous kernel."""
        if self.unwaited is None:
            return np.zeros(accesses, np.bool_)
        early = self.unwaited if self.mask is None else self.unwaited[self.mask]
        return early if len(early) == accesses else np.asarray([early.any()])

    def some_waited(self) -> bool:
        """Whether some thread of the group has waited for the previous kernel."""
        return self.unwaited is None or not bool(self.unwaited[self.exists].all())

    def thread_of(self, position: int, accesses: int) -> str:
        """The thread behind the position-th active access, for a message."""
        threads, _ = self.active_threads()
        block = f"block {self.block_id}"
        if accesses != len(threads):
            return f"every thread of {block}"
        thread = int(threads[position]) - self.rank * self.machine.padded_threads
        return f"thread {thread} of {block}"

    # ---- memory ---------------------------------------------------------------------------------

    def memory(self, space: SpaceName) -> Bytes:
        """The bytes of a space as this group sees them."""
        if space == "global":
            return self.machine.global_memory
        if space == "shared":
            return self.machine.shared_memory
        if self.local is None:
            self.local = Bytes(self.count * self.machine.program.local_bytes)
            self.local.data[:] = _POISON
        return self.local

    def place(self, reference: Reference, address: int) -> str:
        """An address for a message."""
        if reference.space == "global":
            return self.machine.global_memory.name_of(address)
        return f"{reference.space} byte {address}"

    def count_banks(self, site: Site, active: Array, size_bytes: int) -> None:
        """Count the bank conflicts of a shared-memory access."""
        machine = self.machine
        if len(active) != self.active_count():
            machine.banks.broadcast(site.index, self.active_warps)
            return
        addresses = active
        if self.mask is not None:
            addresses = np.full(self.count, active[0], np.int64)
            addresses[self.mask] = active
        ways = machine.banks.record(site.index, addresses, self.mask, size_bytes)
        limit = machine.checks.bank_conflict_ways
        if limit is not None and ways > limit:
            raise site.fault("bank-conflict", f"{ways}-way bank conflict; at most {limit} allowed")
