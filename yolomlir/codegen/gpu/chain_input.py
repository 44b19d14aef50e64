"""How a block of a chain brings a window of its input into shared memory, and reads it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from yolomlir.codegen.gpu.builder import TRUE, Argument, Bool, Buffer, Int, guard, select
from yolomlir.codegen.gpu.chain_pixels import PixelMap, Region
from yolomlir.codegen.gpu.chain_window import Window, team_of
from yolomlir.codegen.gpu.conv2d_load import copy_in
from yolomlir.codegen.gpu.conv_problem import ConvProblem, Source
from yolomlir.codegen.gpu.instructions import from_bits, round_to_tf32


@dataclass(frozen=True)
class _Item:
    """A copy that a thread makes in each of its rows: where from and to, relative to the row."""

    offset: Int
    target: Int
    live: Bool
    exists: Bool


@dataclass(frozen=True)
class _Row:
    """A row of the window that a thread copies a part of."""

    number: Int
    start: Int
    live: Bool
    exists: Bool


class WindowLoader:
    """Copies a window, zeros beyond the input, all of it at once. Offsets are worked out when it is
    made: before the wait for earlier kernels.

    first_channel: of the window's channels, for a source that is read from there on.
    """

    def __init__(
        self, window: Window, problem: ConvProblem, arguments: list[Argument], shared: Buffer,
        thread: Int, threads: int, pixels: PixelMap | Region, first_channel: Int | int = 0,
    ) -> None:  # fmt: skip
        self._window, self._shape = window, problem.shape
        self._arguments, self._shared = arguments, shared
        self._image = pixels.image
        self._top = pixels.top * problem.shape.stride_h - problem.shape.pad_top
        self._left = pixels.left * problem.shape.stride_w - problem.shape.pad_left
        self._first_channel = Int.of(first_channel)
        self._work = [
            (source, *self._share(source, len(problem.sources) > 1, thread, threads))
            for source in problem.sources
        ]

    def load(self) -> None:
        """Issue the copies."""
        for source, row, item in self._copies():
            with guard(row.exists & item.exists):
                copy_in(
                    self._shared, self._target(row, item),
                    self._arguments[source.argument].buffer, row.start + item.offset,
                    self._shape.source_vector, live=row.live & item.live,
                )  # fmt: skip

    def round(self) -> None:
        """Round what this thread has copied, once it has arrived, to TF32: every value is read for
        several taps and by several warps, each of which would round it."""
        width = self._shape.source_vector
        for _, row, item in self._copies():
            with guard(row.exists & item.exists):
                values = self._shared.load_vector(self._target(row, item), width)
                rounded = [from_bits(round_to_tf32(value)) for value in values]
                self._shared.store_vector(self._target(row, item), rounded)

    def _copies(self) -> Iterator[tuple[Source, _Row, _Item]]:
        for source, rows, items in self._work:
            for row, item in product(rows, items):
                yield source, row, item

    def _target(self, row: _Row, item: _Item) -> Int:
        return row.number * self._window.row_pitch + item.target

    def _share(
        self, source: Source, part: bool, thread: Int, threads: int
    ) -> tuple[list[_Row], list[_Item]]:
        """What of a source falls to a thread: rows, and the same items of each of them."""
        window = self._window
        channels = source.channels if part else window.channels
        count = window.width * (channels // self._shape.source_vector)
        team = team_of(count, window.height, threads)
        teams = threads // team
        member = thread < teams * team if threads % team else TRUE
        rows = [
            self._row(source, thread // team + i * teams, member, (i + 1) * teams <= window.height)
            for i in range(-(-window.height // teams))
        ]
        items = [
            self._item(source, channels, thread % team + i * team, (i + 1) * team <= count)
            for i in range(-(-count // team))
        ]
        return rows, items

    def _row(self, source: Source, number: Int, member: Bool, whole: bool) -> _Row:
        y = self._top + number
        pitch = self._arguments[source.argument].pitch_or_fail()
        start = (self._image * source.height + y // source.upsample) * source.width * pitch
        exists = member if whole else member & (number < self._window.height)
        return _Row(number, start, y < self._shape.height, exists)

    def _item(self, source: Source, channels: int, number: Int, whole: bool) -> _Item:
        window, shape = self._window, self._shape
        per_pixel = channels // shape.source_vector
        column, channel = number // per_pixel, (number % per_pixel) * shape.source_vector
        x = self._left + column
        pitch = self._arguments[source.argument].pitch_or_fail()
        offset = (x // source.upsample) * pitch + (channel + self._first_channel)
        place = (column % shape.stride_w) * window.phase + column // shape.stride_w
        live = x < shape.width
        if self._first_channel.known is None or channels > source.channels:
            live = live & ((channel + self._first_channel) < source.channels)
        exists = TRUE if whole else number < window.width * per_pixel
        return _Item(offset, place * window.pitch + (channel + source.first), live, exists)


class WindowReader:
    """Offsets of the fragments of the input in a window, for one warp.

    first_row: of the warp's pixels in the tile, a multiple of 16 times `fragments`, how many it
    has. lane: of the warp; slice_: of the products of a step that this warp multiplies.
    """

    def __init__(
        self, window: Window, first_row: Int, fragments: int, lane: Int, slice_: Int
    ) -> None:
        self._window, self._slice = window, slice_
        row = first_row + lane % 16
        self._half = lane // 16
        self._fragments = fragments
        self._starts: list[Int] = []
        if window.columns & (window.columns - 1) == 0:  # fragments are a constant distance apart
            self._starts = [self._pixel(row)]
        else:
            count = window.rows * window.columns
            rows = [row + 16 * i for i in range(fragments)]
            # Rows beyond the last pixel read that one, which is there.
            self._starts = [self._pixel(select(r < count, r, count - 1)) for r in rows]
        self._bases: dict[tuple[tuple[int, ...], ...], list[Int]] = {}

    def _pixel(self, row: Int) -> Int:
        window = self._window
        start = (row // window.columns) * window.pixel(window.columns)
        return start + (row % window.columns) * window.pitch

    def offsets(self, firsts: Sequence[int]) -> list[Int]:
        """Of a lane's row of 16 bytes in a product, for each fragment. firsts: elements of K where
        the product begins, for each slice."""
        chunk = self._window.shape.element.chunk
        places = [
            tuple(self._window.element(first + half * chunk) for half in (0, 1)) for first in firsts
        ]
        least = places[0][0]
        pattern = tuple(tuple(place - least for place in pair) for pair in places)
        if pattern not in self._bases:
            chosen = self._choose(pattern)
            self._bases[pattern] = [start + chosen for start in self._starts]
        bases = [base + least for base in self._bases[pattern]]
        if len(bases) == self._fragments:
            return bases
        return [bases[0] + self._window.pixel(16 * i) for i in range(self._fragments)]

    def _choose(self, pattern: tuple[tuple[int, ...], ...]) -> Int:
        """What a lane adds: by its slice of K and by which half of a product it reads."""
        gaps = {pair[1] - pair[0] for pair in pattern}
        if len(gaps) == 1:
            return pick(self._slice, [p[0] for p in pattern]) + self._half * gaps.pop()
        return pick(self._slice * 2 + self._half, [v for pair in pattern for v in pair])


def pick(index: Int, values: Sequence[int]) -> Int:
    """values[index]: by a product where they are evenly spaced, else by selections."""
    steps = {b - a for a, b in pairwise(values)}
    if len(steps) <= 1:
        return index * next(iter(steps), 0) + values[0]
    found = Int.of(values[0])
    for i, value in enumerate(values[1:], 1):
        found = select(index.equals(i), value, found)
    return found


__all__ = ["WindowLoader", "WindowReader", "pick"]
