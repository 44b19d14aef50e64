"""The end of attention: what the warps, and the blocks of a cluster, know of the queries is put
together in their order; the positional convolution is added.

In a cluster every block adds up its own warps and sends each query's result to the block that
finishes the query, where a barrier counts the bytes (`mbarrier.py`): nobody waits for what is sent
to others. A block has a place for every block's results, which nothing else uses, and none ends
before it has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, ir, scf
from yolomlir.codegen.gpu import instructions, mbarrier
from yolomlir.codegen.gpu.attention_problem import AttentionShape, AttentionTile
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    narrow,
    select,
    select_float,
    widen,
)
from yolomlir.codegen.gpu.instructions import exp2, fma, round_to_tf32, shuffle_xor

Value: TypeAlias = ir.Value


@dataclass
class Rows:
    """What a warp knows of 16 queries: maximum (scaled, base 2) and this lane's share of the total
    for rows g and g + 8, and the sums, four values a group of 8 channels."""

    maxima: list[Value]
    totals: list[Value]
    sums: list[list[Value]]

    def flat(self) -> list[Value]:
        """All values, for a loop to carry."""
        return [*self.maxima, *self.totals, *(v for group in self.sums for v in group)]

    @staticmethod
    def of(values: Sequence[Value]) -> Rows:
        """The inverse of `flat`."""
        rest = list(values[4:])
        groups = [rest[i : i + 4] for i in range(0, len(rest), 4)]
        return Rows(list(values[:2]), list(values[2:4]), groups)


@dataclass(frozen=True)
class _Part:
    """A query's sums of 4 channels relative to a maximum, and the total of its weights."""

    maximum: Value
    total: Value
    sums: list[Value]


class AttentionEnd:
    """Combines, adds the position and stores. Threads take 4 channels (a chunk) of a query each."""

    def __init__(
        self, kernel: KernelBuilder, shape: AttentionShape, tile: AttentionTile, rank: Int
    ) -> None:
        self.kernel, self.shape, self.tile, self.rank = kernel, shape, tile, rank
        lane = kernel.thread % 32
        self.warp, self.g, self.t = kernel.thread // 32, lane // 4, lane % 4
        self.chunks = shape.head_dim // 4
        self.chunk = kernel.thread % self.chunks
        self.first_query = kernel.block_x // tile.cluster * tile.queries
        self.first_finished = self.first_query + rank * tile.rows
        words = tile.warps * tile.queries
        self.partial, end = self._shared(words * shape.head_dim, 0)
        self.statistics, end = self._shared(2 * words, end)
        if tile.cluster > 1:
            self.received, end = self._shared(tile.queries * shape.head_dim, end)
            self.received_statistics, end = self._shared(2 * tile.queries, end)
            self.barrier, _ = self._shared(2, end)

    def _shared(self, count: int, first: int) -> tuple[Buffer, int]:
        return self.kernel.shared("float32", count, offset_bytes=4 * first), first + count

    def open(self) -> None:
        """First of all: make the barrier, and tell the other blocks that this one runs."""
        if self.tile.cluster == 1:
            return
        values = self.tile.rows * (self.shape.head_dim + 2)
        with guard(self.kernel.thread.equals(0)):
            mbarrier.expect_bytes(self.barrier, 4 * (self.tile.cluster - 1) * values)
            mbarrier.publish_barriers()
        instructions.cluster_arrive(relaxed=True)

    # ---- the warps' shares

    def swizzle(self, row: Int, chunk: Int) -> Int:
        """Where a row keeps a chunk: neighbouring rows differ, so that no two lanes of a store
        meet in a bank."""
        return chunk ^ (row & 1)

    def write_partial(self, index: int, rows: Rows) -> None:
        """A warp's sums, maxima and totals to shared memory.

        Sum j, column n = 2t + e is channel 32 (j / 4) + 4 n + j % 4: the order of the values as
        they are read.
        """
        for half in (0, 1):
            row = self.g + (16 * index + 8 * half)
            base = (self.warp * self.tile.queries + row) * self.shape.head_dim
            for group in range(0, len(rows.sums), 4):
                for e in (0, 1):
                    chunk = self.t * 2 + (2 * group + e)
                    values = [rows.sums[group + j][2 * half + e] for j in range(4)]
                    self.partial.store_vector(base + self.swizzle(row, chunk) * 4, values)
            total = across(rows.totals[half], arith.addf)
            with guard(self.t.equals(0)):
                place = (self.warp * self.tile.queries + row) * 2
                self.statistics.store_vector(place, [rows.maxima[half], total])

    def finish(self, positions: list[list[Value]]) -> None:
        """After `write_partial`: everything else. positions: of `position`."""
        instructions.barrier()
        if self.tile.cluster > 1:
            instructions.cluster_wait()  # the others have begun
            self.send()
            instructions.barrier()
            mbarrier.wait_for_bytes(self.barrier)
        for item, position in zip(self.items(self.tile.rows), positions, strict=True):
            row, inside = item
            part = self.of_blocks(row) if self.tile.cluster > 1 else self.of_warps(row)
            self.store(row, inside, part, position)

    def items(self, rows: int) -> list[tuple[Int, Bool]]:
        """The rows whose `self.chunk` this thread has, and whether they exist."""
        threads = self.kernel.threads
        count = rows * self.chunks
        first = self.kernel.thread // self.chunks
        result = []
        for i in range(-(-count // threads)):
            row = first + i * (threads // self.chunks)
            inside = TRUE if (i + 1) * threads <= count else row < rows
            result.append((select(inside, row, 0), inside))
        return result

    def of_warps(self, row: Int) -> _Part:
        """One query's chunk over the warps of the block."""
        queries, size = self.tile.queries, self.shape.head_dim
        places = [row + warp * queries for warp in range(self.tile.warps)]
        known = [self.statistics.load_vector(place * 2, 2) for place in places]
        chunk = self.swizzle(row, self.chunk) * 4
        sums = [self.partial.load_vector(place * size + chunk, 4) for place in places]
        return _combined([_Part(m, t, s) for (m, t), s in zip(known, sums, strict=True)])

    def of_blocks(self, row: Int) -> _Part:
        """One finished query's chunk over the blocks of the cluster."""
        rows, size = self.tile.rows, self.shape.head_dim
        places = [row + block * rows for block in range(self.tile.cluster)]
        known = [self.received_statistics.load_vector(place * 2, 2) for place in places]
        sums = [self.received.load_vector(place * size + self.chunk * 4, 4) for place in places]
        return _combined([_Part(m, t, s) for (m, t), s in zip(known, sums, strict=True)])

    def send(self) -> None:
        """Every query of this block to the block that finishes it."""
        rows, size = self.tile.rows, self.shape.head_dim
        for row, inside in self.items(self.tile.queries):
            part = self.of_warps(row)
            owner, place = row // rows, self.rank * rows + row % rows
            own = owner.equals(self.rank)
            with guard(inside & own):
                self.received.store_vector(place * size + self.chunk * 4, part.sums)
                with guard(self.chunk.equals(0)):
                    self.received_statistics.store_vector(place * 2, [part.maximum, part.total])
            with guard(inside & ~own):
                counted = instructions.shared_of_block(self.barrier, owner)
                sums = instructions.shared_of_block(self.received, owner)
                mbarrier.send(sums, place * size + self.chunk * 4, part.sums, counted)
                with guard(self.chunk.equals(0)):
                    known = instructions.shared_of_block(self.received_statistics, owner)
                    mbarrier.send(known, place * 2, [part.maximum, part.total], counted)

    def store(self, row: Int, inside: Bool, part: _Part, position: list[Value]) -> None:
        """Normalise, add the position, and write a chunk."""
        shape, result = self.shape, self.kernel.arguments[-1]
        inverse = instructions.reciprocal(part.total)
        values = [fma(s, inverse, p) for s, p in zip(part.sums, position, strict=True)]
        if shape.round_result:
            values = [instructions.from_bits(round_to_tf32(v)) for v in values]
        query = self.first_finished + row
        if shape.tokens % self.tile.queries:
            inside = inside & (query < shape.tokens)
        pixel = self.kernel.block_z * shape.tokens + query
        channel = self.kernel.block_y * shape.head_dim + self.chunk * 4
        with guard(inside):
            offset = pixel * result.pitch_or_fail() + channel
            result.buffer.store_vector(offset, [narrow(v, shape.dtype) for v in values])

    # ---- the positional convolution

    def read_weights(self) -> list[Value]:
        """The taps and then the bias of this thread's 4 channels, where it finishes a query."""
        if self.shape.kernel is None:
            return []
        channels = self.shape.heads * self.shape.head_dim
        first = self.kernel.block_y * self.shape.head_dim + self.chunk * 4
        taps, bias = (self.kernel.arguments[i].buffer for i in (1, 2))
        count = self.shape.kernel[0] * self.shape.kernel[1]

        def read() -> list[Value]:
            loaded = [v for i in range(count) for v in taps.load_vector(first + i * channels, 4)]
            return [widen(v) for v in loaded] + bias.load_vector(first, 4)

        return values_where(self.items(self.tile.rows)[0][1], read, 4 * count + 4)

    def positions(self, weights: list[Value]) -> list[list[Value]]:
        """The depthwise convolution of the values at each query that this thread finishes."""
        return [
            values_where(inside, lambda row=row: self.position(row, weights), 4)  # type: ignore[misc]
            for row, inside in self.items(self.tile.rows)
        ]

    def position(self, row: Int, weights: list[Value]) -> list[Value]:
        """Of one query, this thread's chunk."""
        shape, source = self.shape, self.kernel.arguments[0]
        if shape.kernel is None:
            return [f32(0.0)] * 4
        last = shape.tokens - 1
        query = self.first_finished + row
        query = select(query < shape.tokens, query, last)
        y0, x0 = query // shape.width, query % shape.width
        bias = len(weights) - 4
        sums, zero = weights[bias:], f32(0.0)
        first = self.kernel.block_y * shape.depth + self.chunk * 4 + 2 * shape.key_dim
        for i in range(bias // 4):
            y = y0 + (i // shape.kernel[1] - shape.padding[0])
            x = x0 + (i % shape.kernel[1] - shape.padding[1])
            inside = (y < shape.height) & (x < shape.width)
            token = select(inside, y * shape.width + x, query)
            pixel = self.kernel.block_z * shape.tokens + token
            loaded = source.buffer.load_vector(pixel * source.pitch_or_fail() + first, 4)
            values = [select_float(inside, widen(v), zero) for v in loaded]
            tap = weights[4 * i : 4 * i + 4]
            sums = [fma(v, w, s) for v, w, s in zip(values, tap, sums, strict=True)]
        return sums


def _combined(parts: list[_Part]) -> _Part:
    """The sum of parts, in their order, relative to their common maximum."""
    maximum = fold(arith.maximumf, [part.maximum for part in parts])
    negated = arith.negf(maximum)
    total, sums = f32(0.0), [f32(0.0)] * 4
    for part in parts:
        weight = exp2(arith.addf(part.maximum, negated))
        total = fma(part.total, weight, total)
        sums = [fma(p, weight, s) for p, s in zip(part.sums, sums, strict=True)]
    return _Part(maximum, total, sums)


def values_where(condition: Bool, code: Callable[[], list[Value]], count: int) -> list[Value]:
    """The float32 that code gives on the threads where the condition holds, zeros elsewhere."""
    if condition.known is True:
        return code()
    op = scf.IfOp(condition.value, [ir.F32Type.get()] * count, has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_(code())
    with ir.InsertionPoint(op.else_block):
        scf.yield_([f32(0.0)] * count)
    return list(op.results_)


def fold(operation: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine values, from the first to the last."""
    result = values[0]
    for value in values[1:]:
        result = operation(result, value)
    return result


def across(value: Value, operation: Callable[[Value, Value], Value]) -> Value:
    """Combine over the four lanes t of a row."""
    for mask in (1, 2):
        value = operation(value, shuffle_xor(value, mask))
    return value


__all__ = ["AttentionEnd", "Rows", "across", "fold"]
