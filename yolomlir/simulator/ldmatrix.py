"""`ldmatrix`, shared by its `nvgpu` and `nvvm` forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yolomlir.simulator.elements import Array, Value
from yolomlir.simulator.fragments import distribute_rows, transpose_b16
from yolomlir.simulator.lanes import WARP
from yolomlir.simulator.memory import Reference, within
from yolomlir.simulator.races import COLLECTIVE

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

ROW_BYTES = 16


def load_matrices(
    lanes: Lanes, reference: Reference, address: Value, count: int, site: Site, *, transpose: bool
) -> Array:
    """Load `count` 8 x 16-byte matrices a warp: 32-bit words (lanes, count).

    Lanes 8 i to 8 i + 7 give the rows of matrix i; the other lanes' addresses are not used.
    """
    lanes.whole_warps(site)
    active = lanes.mask is None or lanes.mask[::WARP]
    address = lanes.broadcast(address).reshape(-1, WARP)
    used = address[:, : 8 * count]
    used = used if active is True else used[active]
    rows = np.ascontiguousarray(used).reshape(-1)
    _check(lanes, reference, rows, site)
    warps = lanes.warps[::WARP] if active is True else lanes.warps[::WARP][active]
    machine = lanes.machine
    machine.shadow.read(
        machine.shadow.granules(rows, ROW_BYTES),
        np.full(len(rows), COLLECTIVE, np.int64),
        np.repeat(warps, 8 * count),
        site,
    )
    _count_banks(lanes, rows, count, site)
    words = lanes.memory("shared").view(np.dtype(np.uint32))
    loaded = words[(rows // 4)[:, None] + np.arange(4)].reshape(-1, count, 8, 4)
    if transpose:
        loaded = transpose_b16(loaded)
    values = distribute_rows(loaded)
    if active is True:
        return values
    full = np.zeros((lanes.count, count), np.uint32)
    full[lanes.mask] = values
    return full


def _check(lanes: Lanes, reference: Reference, rows: Array, site: Site) -> None:
    if reference.space != "shared":
        raise site.fault("out-of-bounds", f"ldmatrix reads {reference.space} memory")
    if within(rows, np.min(reference.low), np.max(reference.high), ROW_BYTES):
        if int(np.bitwise_or.reduce(rows)) & (ROW_BYTES - 1) == 0:
            return
        row = int(np.argmax(rows & (ROW_BYTES - 1) != 0))
        raise site.fault(
            "misaligned",
            f"row {row % 8} of matrix {row // 8} is at shared byte {int(rows[row])}, "
            f"no multiple of {ROW_BYTES}",
        )
    low, high = int(np.min(reference.low)), int(np.max(reference.high))
    row = int(np.argmax((rows < low) | (rows + ROW_BYTES > high)))
    raise site.fault(
        "out-of-bounds",
        f"row {row % 8} of matrix {row // 8} is at shared byte {int(rows[row])}, outside "
        f"[{low}, {high})",
    )


def _count_banks(lanes: Lanes, rows: Array, count: int, site: Site) -> None:
    """Eight rows are a phase; matrices fill lanes up to a warp with repeated rows."""
    machine = lanes.machine
    padded = np.full((len(rows) // (8 * count), WARP), -1, np.int64)
    padded[:, : 8 * count] = rows.reshape(-1, 8 * count)
    flat = padded.reshape(-1)
    active = flat >= 0
    ways = machine.banks.record(site.index, np.where(active, flat, rows[0]), active, ROW_BYTES)
    limit = machine.checks.bank_conflict_ways
    if limit is not None and ways > limit:
        raise site.fault("bank-conflict", f"{ways}-way bank conflict; at most {limit} allowed")
