"""Which tensors of `@main` lie in one buffer, and whether they may.

A slice lies in its operand's buffer at a channel offset; the operands of a concat that is a view
lie in its result's. The tensors that such views tie together are one `Buffer`. Two results in it
may share channels only when every read of the first is finished, by true dependencies alone, before
the dispatch that writes the second begins: then any order that respects dependencies is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from yolomlir.dialects import yolo
from yolomlir.passes.outlining import is_weight, operations, producer

from yolomlir.bindings import ir

Span = tuple[int, int]
"""Channels [start, end)."""
LOOKED_THROUGH = ("yolo.slice", "yolo.concat", "yolo.upsample")
"""Ops that are addressing: views, or part of the body of whatever reads them."""


@dataclass
class Buffer:
    """Tensors in one piece of memory; `offsets` has each one's first channel, maybe negative."""

    offsets: dict[ir.Value, int] = field(default_factory=dict)

    def span(self, value: ir.Value) -> Span:
        """The channels a tensor occupies."""
        start = self.offsets[value]
        return start, start + channels_of(value)

    @property
    def extent(self) -> Span:
        """First channel of all, and one past the last."""
        spans = [self.span(value) for value in self.offsets]
        return min(s for s, _ in spans), max(e for _, e in spans)


def channels_of(value: ir.Value) -> int:
    """Channels of a 4-D tensor; the last dimension of another."""
    shape = yolo.shape_of(value)
    return shape[1] if len(shape) == 4 else (shape[-1] if shape else 1)


def overlap(a: Span, b: Span) -> bool:
    """Whether two spans share a channel."""
    return max(a[0], b[0]) < min(a[1], b[1])


class Dependencies:
    """What must run before what in a block, by true dependencies alone.

    A dispatch depends on the ops whose results it reads. Slices, concats and upsamplings are looked
    through, channel by channel: reading a part of a concat waits for what wrote that part. Good
    only while the block is not changed: MLIR hashes an operation by its contents.
    """

    def __init__(self, block: ir.Block) -> None:
        self.ops = operations(block)
        self.index = {op: i for i, op in enumerate(self.ops)}
        self.ancestors: list[int] = []
        for op in self.ops:
            mask = 0
            for operand in op.operands:
                for before in sources_of(operand, (0, channels_of(operand))):
                    index = self.index[before]
                    mask |= self.ancestors[index] | 1 << index
            self.ancestors.append(mask)

    def before(self, first: ir.Operation, second: ir.Operation) -> bool:
        """Whether `second` needs, directly or not, what `first` computes."""
        return bool(self.ancestors[self.index[second]] >> self.index[first] & 1)


def sources_of(value: ir.Value, span: Span) -> list[ir.Operation]:
    """The ops, no views among them, that compute channels `span` (relative) of a tensor."""
    op = producer(value)
    if op is None:
        return []
    start, end = span
    if op.name == "yolo.slice":
        offset = yolo.integer(op, "offset")
        return sources_of(op.operands[0], (start + offset, end + offset))
    if op.name == "yolo.upsample":
        return sources_of(op.operands[0], span)
    if op.name != "yolo.concat":
        return [op]
    split = channels_of(op.operands[0])
    found = []
    if start < split:
        found += sources_of(op.operands[0], (start, min(end, split)))
    if end > split:
        found += sources_of(op.operands[1], (max(start - split, 0), end - split))
    return found


class Placement:
    """The buffers of a block. Views are added step by step; those that cannot be are refused."""

    def __init__(self, block: ir.Block) -> None:
        self.dependencies = Dependencies(block)
        self._buffer: dict[ir.Value, Buffer] = {}
        self._users: dict[ir.Value, list[ir.Operation]] = {}
        self.views: set[ir.Value] = set()
        """Results of the slices and concats that are views."""
        for argument in block.arguments:
            self._add(argument)
        for op in self.dependencies.ops:
            for result in op.results:
                self._add(result)
            for operand in op.operands:
                self._users[operand].append(op)

    def _add(self, value: ir.Value) -> None:
        self._buffer[value] = Buffer({value: 0})
        self._users[value] = []

    def buffer_of(self, value: ir.Value) -> Buffer:
        """The buffer that a tensor lies in."""
        return self._buffer[value]

    def buffers(self) -> list[Buffer]:
        """Every buffer that holds something, in program order; weights have none."""
        found = {id(b): b for v, b in self._buffer.items() if not is_weight(v)}
        return list(found.values())

    def accesses(self, buffer: Buffer) -> tuple[list[ir.Operation], list[ir.Operation]]:
        """The ops that write and the ops that read a buffer."""
        writers, readers = [], []
        for value in buffer.offsets:
            op = producer(value)
            if op is not None and value not in self.views:
                writers.append(op)
            readers += self._readers(value)
        return writers, readers

    def last_reads(self, buffer: Buffer) -> dict[ir.Value, int]:
        """Index of the last op that reads each result (or argument) in a buffer; -1 for none."""
        atoms = [v for v in buffer.offsets if v not in self.views]
        reads = self._reads(buffer, atoms)
        index = self.dependencies.index
        return {v: max((index[op] for op, _ in reads[v]), default=-1) for v in atoms}

    def _readers(self, value: ir.Value) -> list[ir.Operation]:
        """The ops that read a tensor other than through a view.

        An op that looks through it but is no view (yet) may end up in its users' bodies, so they
        are the readers.
        """
        found = []
        for op in self._users[value]:
            if op.results and op.results[0] in self.views:
                continue
            found += self._final_users(op) if op.name in LOOKED_THROUGH else [op]
        return found

    def _final_users(self, op: ir.Operation) -> list[ir.Operation]:
        found = []
        for user in self._users[op.results[0]]:
            found += self._final_users(user) if user.name in LOOKED_THROUGH else [user]
        return found

    def try_views(self, ops: Iterable[ir.Operation], alignment: int = 1) -> str | None:
        """Make slices and concats views, all or none; the reason where it cannot be.

        `alignment`: the operands of each concat must start at a multiple of so many channels.
        """
        ops = list(ops)
        before = dict(self._buffer)
        contents = {id(b): dict(b.offsets) for b in self._buffer.values()}
        added = {op.results[0] for op in ops}
        self.views |= added
        reason = next(filter(None, (self._relate(op) for op in ops)), None)
        touched = {id(b): b for b in (self._buffer[op.results[0]] for op in ops)}
        reason = reason or next(filter(None, map(self._conflict, touched.values())), None)
        reason = reason or next(filter(None, (self._misaligned(op, alignment) for op in ops)), None)
        if reason is not None:
            self.views -= added
            self._buffer = before
            for buffer in before.values():
                buffer.offsets = contents[id(buffer)]
        return reason

    def _misaligned(self, op: ir.Operation, alignment: int) -> str | None:
        buffer = self._buffer[op.results[0]]
        start = buffer.extent[0]
        if op.name != "yolo.concat":
            return None
        if any((buffer.offsets[v] - start) % alignment for v in op.operands):
            return f"an operand would not start at a multiple of {alignment} channels"
        return None

    def _relate(self, op: ir.Operation) -> str | None:
        result = op.results[0]
        if op.name == "yolo.slice":
            return self._unite(op.operands[0], result, yolo.integer(op, "offset"))
        offset = 0
        for operand in op.operands:
            reason = _unplaceable(operand, self.views)
            reason = reason or self._unite(result, operand, offset)
            if reason is not None:
                return reason
            offset += channels_of(operand)
        return None

    def _unite(self, base: ir.Value, value: ir.Value, offset: int) -> str | None:
        """Make `value` start `offset` channels after `base` starts."""
        a, b = self._buffer[base], self._buffer[value]
        wanted = a.offsets[base] + offset
        if a is b:
            if b.offsets[value] == wanted:
                return None
            return "one tensor is wanted at two places of one buffer"
        shift = wanted - b.offsets[value]
        a.offsets.update({member: start + shift for member, start in b.offsets.items()})
        for member in b.offsets:
            self._buffer[member] = a
        return None

    # ---- conflicts ------------------------------------------------------------------------------

    def _conflict(self, buffer: Buffer) -> str | None:
        atoms = [v for v in buffer.offsets if v not in self.views]
        if len(atoms) < 2:
            return None
        if any(producer(v) is None for v in atoms):
            return "an argument of @main keeps its own buffer"
        reads = self._reads(buffer, atoms)
        for index, first in enumerate(atoms):
            for second in atoms[index + 1 :]:
                if not overlap(buffer.span(first), buffer.span(second)):
                    continue
                if not (
                    self._dead_before(first, second, buffer, reads)
                    or self._dead_before(second, first, buffer, reads)
                ):
                    return "another tensor that is still wanted lies there"
        return None

    def _reads(
        self, buffer: Buffer, atoms: list[ir.Value]
    ) -> dict[ir.Value, list[tuple[ir.Operation, Span]]]:
        """Who reads which channels of each result, through whichever views."""
        reads: dict[ir.Value, list[tuple[ir.Operation, Span]]] = {v: [] for v in atoms}
        for value in buffer.offsets:
            readers = self._readers(value)
            if not readers:
                continue
            for atom, span in self._pieces(value, buffer.span(value), buffer):
                reads[atom] += [(op, span) for op in readers]
        return reads

    def _pieces(self, value: ir.Value, span: Span, buffer: Buffer) -> list[tuple[ir.Value, Span]]:
        """The results that channels `span` of a tensor come from."""
        op = producer(value)
        if op is None or value not in self.views:
            return [(value, span)]
        found = []
        for operand in op.operands:
            start, end = buffer.span(operand)
            part = (max(start, span[0]), min(end, span[1]))
            if part[0] < part[1]:
                found += self._pieces(operand, part, buffer)
        return found

    def _dead_before(
        self,
        first: ir.Value,
        second: ir.Value,
        buffer: Buffer,
        reads: dict[ir.Value, list[tuple[ir.Operation, Span]]],
    ) -> bool:
        """Whether what they share of `first` is read for the last time before `second` comes."""
        writer = producer(second)
        before = producer(first)
        if writer is None or before is None or not self.dependencies.before(before, writer):
            return False
        place = buffer.span(second)
        return all(
            self.dependencies.before(op, writer)
            for op, span in reads[first]
            if overlap(span, place)
        )


def _unplaceable(operand: ir.Value, views: set[ir.Value]) -> str | None:
    op = producer(operand)
    if op is None:
        return "an argument of @main keeps its own buffer"
    if operand not in views and not yolo.is_dispatch(op):
        return f"no dispatch writes its operand ('{op.name}')"
    return None
