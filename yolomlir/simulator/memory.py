"""The memories of a GPU as byte arrays, the references into them, and loads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.simulator.elements import Array, Element, Value, is_uniform, select

if TYPE_CHECKING:
    from yolomlir.simulator.faults import Site
    from yolomlir.simulator.lanes import Lanes

SpaceName = Literal["global", "shared", "local"]

PDL_GUARDED = 1
UNWRITTEN = 2
PROTECTED = 4
READ_ONLY = 8

_ALIGNMENT = 256
"""What cudaMalloc and the arena promise for the start of a buffer."""

GLOBAL_BASE = 1 << 32
"""Generic addresses: shared memory below, global memory from here."""


class Bytes:
    """A memory: bytes that can be seen as any numpy type."""

    def __init__(self, size_bytes: int) -> None:
        padded = -(-size_bytes // 16) * 16
        self.data: Array = np.zeros(padded, np.uint8)
        self._views: dict[np.dtype[Any], Array] = {}

    def view(self, dtype: np.dtype[Any]) -> Array:
        """All of it as elements of that type."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = self.data.view(dtype)
        return found


@dataclass(frozen=True)
class Segment:
    """One kernel argument (or constant) in global memory: bytes [start, end)."""

    name: str
    start: int
    end: int


class GlobalMemory(Bytes):
    """Global memory with the arguments laid out in it.

    Arguments that are views of one numpy array keep their places in it, so aliasing and alignment
    are those of the caller's buffers; other arrays start at a multiple of 256 bytes.
    """

    def __init__(self, arrays: Sequence[Array], names: Sequence[str], extra_bytes: int = 0) -> None:
        self.segments: list[Segment] = []
        roots: dict[int, tuple[Array, int]] = {}
        end = _ALIGNMENT
        for array, name in zip(arrays, names, strict=True):
            root = _root(array, name)
            if id(root) not in roots:
                roots[id(root)] = (root, end)
                end += -(-root.nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
            base = roots[id(root)][1] + _offset(array, root)
            self.segments.append(Segment(name, base, base + array.nbytes))
        self._constants = end
        super().__init__(end + extra_bytes)
        self.arrays = list(arrays)
        for segment, array in zip(self.segments, arrays, strict=True):
            self.data[segment.start : segment.end] = _raw(array)
        self.granule_bytes = min((a.itemsize for a in arrays), default=1)
        count = len(self.data) // self.granule_bytes
        self.flags: Array = np.zeros(count, np.uint8)
        self.writer: Array = np.zeros(count, np.int32)
        self.write_clock: Array = np.zeros(count, np.int32)
        self.write_thread: Array = np.zeros(count, np.int32)

    def add_constant(self, name: str, data: Array) -> Segment:
        """Place a read-only constant behind the arguments."""
        start = self._constants
        end = start + data.nbytes
        self._constants = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.data[start:end] = _raw(data)
        segment = Segment(name, start, end)
        self.segments.append(segment)
        self.flag(segment, READ_ONLY)
        return segment

    def flag(self, segment: Segment, bits: int, where: Array | None = None) -> None:
        """Set flag bits on a segment, or on the elements of it where `where`."""
        flags = self.flags[self._granules_of(segment)]
        if where is None:
            flags |= np.uint8(bits)
            return
        each = len(flags) // where.size
        flags |= np.repeat(where.reshape(-1), each).astype(np.uint8) * np.uint8(bits)

    def claim(self, segment: Segment, where: Array | None) -> None:
        """Make elements an output: unwritten so far, and allowed to be written."""
        every = np.ones(segment.end - segment.start, np.bool_)
        if where is not None:
            every = np.repeat(where.reshape(-1), every.size // where.size)
        mine = every[:: self.granule_bytes]
        flags = self.flags[self._granules_of(segment)]
        flags[mine] = (flags[mine] | UNWRITTEN) & (0xFF ^ PROTECTED)

    def written(self, segment: Segment) -> Array:
        """Which granules of a segment some thread has written, one bool a granule."""
        return np.asarray(self.writer[self._granules_of(segment)] != 0)

    def copy_back(self) -> None:
        """Write what the kernel wrote into the caller's arrays."""
        for segment, array in zip(self.segments, self.arrays, strict=False):
            if array.flags.writeable:
                _raw(array)[...] = self.data[segment.start : segment.end]

    def name_of(self, address: int) -> str:
        """The argument an address is in or just behind."""
        before = [s for s in self.segments if s.start <= address]
        if not before:
            return "nothing"
        segment = max(before, key=lambda s: s.start)
        return f"{segment.name} byte {address - segment.start} of {segment.end - segment.start}"

    def _granules_of(self, segment: Segment) -> slice:
        size = self.granule_bytes
        return slice(segment.start // size, -(-segment.end // size))


def _root(array: Array, name: str) -> Array:
    """The array that owns the memory, if it is plain; else the array itself."""
    if not array.flags.c_contiguous:
        raise UserError(f"argument {name} is not contiguous", hint="pass a flat, contiguous array")
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root if root.flags.c_contiguous else array


def _offset(array: Array, root: Array) -> int:
    return int(array.__array_interface__["data"][0] - root.__array_interface__["data"][0])


def _raw(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A memref value: where element zero is and how to get from an index to a byte.

    address, low, high: bytes in the space, one for all lanes or one a lane; accesses must lie in
    [low, high). strides: in elements. sizes: None where unknown (`memref<?xf32>` arguments).
    """

    space: SpaceName
    address: Value
    low: Value
    high: Value
    element: Element
    sizes: tuple[Value, ...]
    strides: tuple[Value, ...]

    def select(self, condition: Array, other: Reference) -> Reference:
        """This one in the lanes where `condition`, `other` elsewhere (same type)."""
        pick = [
            select(condition, getattr(self, name), getattr(other, name))
            for name in ("address", "low", "high")
        ]
        strides = tuple(
            select(condition, a, b) for a, b in zip(self.strides, other.strides, strict=True)
        )
        return replace(self, address=pick[0], low=pick[1], high=pick[2], strides=strides)

    def at(self, indices: Sequence[Value]) -> Value:
        """The byte address of an element."""
        offset: Value = np.int64(0)
        for index, stride in zip(indices, self.strides, strict=True):
            offset = offset + index * stride
        return self.address + offset * self.element.size_bytes


def check_indices(
    lanes: Lanes, reference: Reference, indices: Sequence[Value], count: int, site: Site
) -> None:
    """Every index within its dimension, the last with `count` elements from it.

    With one dimension the reference's bounds say the same, and are checked at the access.
    """
    last = len(indices) - 1
    if not last:
        return
    for axis, (index, size) in enumerate(zip(indices, reference.sizes, strict=True)):
        if size is None:
            continue
        active = lanes.active(index)
        limit = size - (count if axis == last else 1)
        if not np.size(active) or (active.min() >= 0 and not (active > limit).any()):
            continue
        bad = active[(active < 0) | (active > limit)] if np.ndim(active) else active
        extent = f" (and {count - 1} more)" if axis == last and count > 1 else ""
        raise site.fault(
            "out-of-bounds",
            f"index {int(np.ravel(bad)[0])}{extent} of dimension {axis}, whose size is {size}",
        )


def checked_addresses(
    lanes: Lanes, reference: Reference, address: Value, size_bytes: int, align: int, site: Site
) -> Array:
    """The active lanes' addresses (one for all where uniform), in bounds and aligned."""
    active = np.atleast_1d(lanes.active(address))
    low, high = reference.low, reference.high
    if not is_uniform(low):
        low, high = lanes.active(low), lanes.active(high)
        if np.size(low) != active.size:
            active = np.broadcast_to(active, np.shape(low))
    if not within(active, low, high, size_bytes):
        outside = (active < low) | (active + size_bytes > high)
        raise _out_of_bounds(lanes, reference, active, outside, size_bytes, site)
    if align > 1 and int(np.bitwise_or.reduce(active)) & (align - 1):
        bad = int(active[(active & (align - 1)) != 0][0])
        raise site.fault(
            "misaligned",
            f"{reference.space} address {bad} ({lanes.place(reference, bad)}) "
            f"is not a multiple of {align} bytes",
        )
    return active


def within(active: Array, low: Value, high: Value, size_bytes: int) -> bool:
    """Whether all of [address, address + size) is in [low, high): negative wraps to huge."""
    if not active.size:
        return True
    if is_uniform(low):
        room = int(high) - int(low) - size_bytes
        return room >= 0 and int((active - low).view(np.uint64).max()) <= room
    return bool(((active >= low) & (active + size_bytes <= high)).all())


def _out_of_bounds(
    lanes: Lanes, reference: Reference, active: Array, outside: Array, size_bytes: int, site: Site
) -> Exception:
    at = int(np.argmax(outside))
    address = int(active[at])
    low = int(np.ravel(np.broadcast_to(reference.low, ()))[0]) if is_uniform(reference.low) else 0
    thread = lanes.thread_of(at, len(active))
    extent = ""
    if is_uniform(reference.low):
        extent = f"; the buffer has {int(reference.high) - low} bytes, this is byte {address - low}"
    return site.fault(
        "out-of-bounds",
        f"{thread} accesses {size_bytes} bytes of {reference.space} memory "
        f"at {lanes.place(reference, address)}{extent}",
    )


def load(
    lanes: Lanes, reference: Reference, address: Value, count: int, align: int, site: Site
) -> Value:
    """Load `count` consecutive elements: a scalar register, or a vector one where count > 0.

    count 0 loads one element as a scalar. Inactive lanes get zero.
    """
    element = reference.element
    number = max(1, count)
    size = number * element.size_bytes
    active = checked_addresses(lanes, reference, address, size, align, site)
    if not active.size:
        return np.zeros((), element.register)[()]
    note_read(lanes, reference.space, active, size, site)
    items = take(lanes, reference.space, active, element, number)
    if is_uniform(address) and len(active) == 1:
        return items if count else items[0, 0]
    full = lanes.spread(items)
    return full if count else full[:, 0]


def take(lanes: Lanes, space: SpaceName, address: Array, element: Element, count: int) -> Array:
    """Elements at checked addresses, as register values: (addresses, count)."""
    view = lanes.memory(space).view(element.memory)
    index = address // element.size_bytes
    return element.from_memory(view[index[:, None] + np.arange(count)])


def store(
    lanes: Lanes, reference: Reference, address: Value, value: Value, count: int, align: int,
    site: Site,
) -> None:  # fmt: skip
    """Store a scalar register (count 0) or a vector of `count` elements."""
    element = reference.element
    number = max(1, count)
    size = number * element.size_bytes
    if is_uniform(address):
        address = np.full(lanes.count, address, np.int64)
    active = checked_addresses(lanes, reference, address, size, align, site)
    if not active.size:
        return
    note_write(lanes, reference.space, active, size, site)
    raw = element.to_memory(value)
    rows = raw if count else np.atleast_1d(raw)[:, None]
    rows = np.broadcast_to(rows, (lanes.count, number))
    rows = rows if lanes.mask is None else rows[lanes.mask]
    view = lanes.memory(reference.space).view(element.memory)
    index = (active // element.size_bytes)[:, None] + np.arange(number)
    view[index] = rows
    _check_overwritten(reference, view[index], rows, active, site)


def _check_overwritten(
    reference: Reference, now: Array, rows: Array, active: Array, site: Site
) -> None:
    """Two lanes of one instruction that store different values to one place."""
    unsigned = np.dtype(f"u{now.dtype.itemsize}")
    rows = np.ascontiguousarray(rows)
    lost = np.ascontiguousarray(now).view(unsigned) != rows.view(unsigned)
    if lost.any():
        at = int(np.argwhere(lost)[0][0])
        raise site.fault(
            "race",
            f"two lanes store different values to {reference.space} address {int(active[at])} "
            "in one instruction",
        )


def note_read(lanes: Lanes, space: SpaceName, active: Array, size: int, site: Site) -> None:
    """Check and count a read of checked addresses."""
    if space == "shared":
        machine = lanes.machine
        threads, warps = lanes.readers(len(active))
        everyone = np.broadcast_to(active, threads.shape)
        machine.shadow.read(machine.shadow.granules(everyone, size), threads, warps, site)
        lanes.count_banks(site, active, size)
    elif space == "global":
        note_global_read(lanes, active, size, site)


def note_global_read(
    lanes: Lanes, active: Array, size: int, site: Site, *, atomic: bool = False
) -> None:
    """Flags of a global read: waits of programmatic launches, unwritten outputs, races."""
    machine = lanes.machine
    memory = machine.global_memory
    machine.report.global_read_bytes += len(active) * size
    granules = _global_granules(machine, active, size)
    flags = memory.flags[granules]
    if (flags & UNWRITTEN).any():
        at = int(np.argwhere(flags & UNWRITTEN)[0][0])
        raise site.fault(
            "uninitialised", f"reads {memory.name_of(int(active[at]))}, which nothing has written"
        )
    if lanes.unwaited is not None and (flags & PDL_GUARDED).any():
        _check_waited(lanes, active, flags, site)
    writer = memory.writer[granules]
    if not writer.any():
        return
    if not atomic:
        _check_own_writes(lanes, active, granules, writer == machine.number, "reads", site)
    foreign = (writer != 0) & (writer != machine.number)
    if foreign.any() and not machine.acquired:
        at = int(np.argwhere(foreign)[0][0])
        raise site.fault(
            "race",
            f"reads {memory.name_of(int(active[at]))}, which another block wrote in this launch, "
            "with no atomic operation in between",
        )


def _check_own_writes(
    lanes: Lanes, active: Array, granules: Array, own: Array, verb: str, site: Site
) -> None:
    """What this cluster wrote to global memory: by oneself, or before a barrier."""
    if not own.any():
        return
    memory, clocks = lanes.machine.global_memory, lanes.machine.clocks
    threads, warps = lanes.readers(len(active))
    writer = memory.write_thread[granules]
    late = memory.write_clock[granules] > clocks.seen[warps[:, None], writer >> 5]
    late = late & own & (writer != threads[:, None])
    if not late.any():
        return
    at = tuple(np.argwhere(late)[0])
    place = memory.name_of(int(active[min(at[0], len(active) - 1)]))
    other = int(np.broadcast_to(writer, late.shape)[at])
    raise site.fault(
        "race",
        f"{verb} {place}, which thread {other} (warp {other >> 5}) wrote with no barrier between",
    )


def _check_waited(lanes: Lanes, active: Array, flags: Array, site: Site) -> None:
    guarded = (flags & PDL_GUARDED).any(1)
    early = np.broadcast_to(lanes.early(len(active)), guarded.shape)
    if not (guarded & early).any():
        return
    at = int(np.argmax(guarded & early))
    raise site.fault(
        "programmatic-launch",
        f"reads {lanes.machine.global_memory.name_of(int(active[at]))}, which the previous kernel "
        "writes, before griddepcontrol.wait",
    )


def note_write(lanes: Lanes, space: SpaceName, active: Array, size: int, site: Site) -> None:
    """Check and count a write to checked addresses (an entry an active lane)."""
    if space == "shared":
        machine = lanes.machine
        threads, warps = lanes.active_threads()
        machine.shadow.write(machine.shadow.granules(active, size), threads, warps, site)
        lanes.count_banks(site, active, size)
    elif space == "global":
        note_global_write(lanes, active, size, site)


def note_global_write(
    lanes: Lanes, active: Array, size: int, site: Site, *, atomic: bool = False
) -> None:
    """Flags of a global write (an atomic one may repeat, but not start from nothing)."""
    machine = lanes.machine
    memory = machine.global_memory
    machine.report.global_written_bytes += len(active) * size
    if lanes.unwaited is not None and lanes.early(len(active)).any():
        raise site.fault(
            "programmatic-launch",
            f"writes {memory.name_of(int(active[0]))} before griddepcontrol.wait, while the "
            "previous kernel may still use that buffer",
        )
    granules = _global_granules(machine, active, size)
    flags = memory.flags[granules]
    if (flags & (PROTECTED | READ_ONLY)).any():
        at = int(np.argwhere(flags & (PROTECTED | READ_ONLY))[0][0])
        raise site.fault(
            "read-only",
            f"writes {memory.name_of(int(active[at]))}, which is not this kernel's to write",
        )
    if not atomic:
        own = memory.writer[granules] == machine.number
        if machine.checks.written_once:
            _check_first_write(machine, granules, active, site)
        _check_own_writes(lanes, active, granules, own, "overwrites", site)
        memory.flags[granules] = flags & np.uint8(0xFF ^ UNWRITTEN)
    threads, warps = lanes.active_threads()
    memory.writer[granules] = machine.number
    memory.write_clock[granules] = machine.clocks.clock[warps][:, None]
    memory.write_thread[granules] = threads[:, None]


def _check_first_write(machine: Any, granules: Array, active: Array, site: Site) -> None:
    writer = machine.global_memory.writer[granules]
    again = writer != 0
    twice = granules.size != np.unique(granules).size
    if not again.any() and not twice:
        return
    at = int(np.argwhere(again)[0][0]) if again.any() else 0
    who = "this block"
    if again.any() and int(writer[again][0]) != machine.number:
        who = "another block"
    place = machine.global_memory.name_of(int(active[at]))
    raise site.fault("written-twice", f"writes {place}, which {who} has written already")


def _global_granules(machine: Any, active: Array, size: int) -> Array:
    granule = machine.global_memory.granule_bytes
    return np.asarray((active // granule)[:, None] + np.arange(max(1, size // granule)))
