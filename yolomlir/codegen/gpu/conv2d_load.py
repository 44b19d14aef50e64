"""How a block of a convolution brings one step of K into shared memory.

A stage holds the input's tile, block_m rows (pixels) of block_k, then the weights' tile, block_n
rows (channels) of block_k. Rows lie in 16-byte chunks, permuted within a row so that the eight rows
of an `ldmatrix` meet eight different banks.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.codegen.gpu.builder import (
    TRUE,
    Argument,
    Bool,
    Buffer,
    Int,
    guard,
    select,
    select_float,
    zero_of,
)
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvProblem, ConvShape, Source
from yolomlir.codegen.gpu.element import Element
from yolomlir.codegen.gpu.instructions import COPY_BYTES, copy_async

_MASK_BITS = 32


def swizzle(row: Int, chunk: Int | int, chunks: int) -> Int:
    """The chunk's place in its row of `chunks`: rows of one 128-byte line share a permutation."""
    rows_per_line = max(1, 8 // chunks)
    return Int.of(chunk) ^ ((row // rows_per_line) % min(chunks, 8))


@dataclass(frozen=True)
class Slot:
    """One copy a thread does a step: its row of the tile (`shift` below the thread's first), where
    it goes, whether it exists."""

    row: Int
    shift: int
    target: Int
    exists: Bool


def share_rows(
    thread: Int, threads: int, rows: int, block_k: int, vector: int, element: Element
) -> list[Slot]:
    """The copies of a tile of `rows` that fall to a thread, all in the same columns.

    Copy c of row r is elements [c vector, (c + 1) vector).
    """
    columns = block_k // vector
    step = threads // columns
    column, first = thread % columns, thread // columns
    permuted_alike = step % 8 == 0
    slots = []
    for i in range(-(-rows // step)):
        row = first + i * step
        if permuted_alike:  # the permutation repeats every 8 rows
            target = _place(first, column, vector, block_k, element) + i * step * block_k
        else:
            target = _place(row, column, vector, block_k, element)
        exists = row < rows if (i + 1) * step > rows else TRUE
        slots.append(Slot(row, i * step, target, exists))
    return slots


def _place(row: Int, column: Int, vector: int, block_k: int, element: Element) -> Int:
    size, chunks = element.chunk, block_k // element.chunk
    if vector == size:
        return row * block_k + swizzle(row, column, chunks) * size
    per_chunk = size // vector
    inside = (column % per_chunk) * vector
    return row * block_k + swizzle(row, column // per_chunk, chunks) * size + inside


def copy_in(
    target: Buffer,
    target_offset: Int,
    source: Buffer,
    source_offset: Int,
    elements: int,
    *,
    live: Bool,
    through_l1: bool = False,
) -> None:
    """`copy_async`, or a load and a store where the elements are less than it can copy."""
    if elements * target.element_bytes >= COPY_BYTES:
        copy_async(
            target, target_offset, source, source_offset, elements, live=live, through_l1=through_l1
        )
        return
    value = source.load(select(live, source_offset, 0))
    target.store(target_offset, select_float(live, value, zero_of(target.dtype)))


def paired_channel(row: Int | int) -> Int:
    """The channel that a row of the weights' tile holds so that lanes have four neighbours.

    A lane has columns 2 t and 2 t + 1 of a fragment of 8 channels. Of the two fragments of rows
    16 i to 16 i + 15 those are channels 16 i + 4 t and 4 t + 1, 4 t + 2 and 4 t + 3.
    """
    row = Int.of(row)
    return row // 16 * 16 + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2


class WeightLoader:
    """Weights O x K, K contiguous. They are there from the start: no need to wait for them.

    paired: rows hold `paired_channel`s.
    """

    def __init__(
        self, tile: ConvTile, shape: ConvShape, weights: Buffer, shared: Buffer,
        thread: Int, first_channel: Int, *, paired: bool = False,
    ) -> None:  # fmt: skip
        self._tile, self._shape = tile, shape
        self._weights, self._shared = weights, shared
        self._vector = shape.weight_vector
        self._column = (thread % (tile.block_k // self._vector)) * self._vector
        self._slots = share_rows(
            thread, tile.threads, tile.block_n, tile.block_k, self._vector, shape.element
        )
        row = self._slots[0].row
        first = first_channel + (paired_channel(row) if paired else row)
        self._shifts = self._paired_shifts() if paired else [Int.of(s.shift) for s in self._slots]
        self._first_channel = first
        self._row_offset = first * shape.k + self._column

    def load(self, k_tile: Int, stage: Int) -> None:
        """Issue the copies of a step; zeros beyond the last channel and the end of K."""
        tile, shape = self._tile, self._shape
        k = k_tile * tile.block_k
        inside = (k + self._column) < shape.k if tile.padded_k(shape) > shape.k else TRUE
        base = tile.block_m * tile.block_k
        start = self._row_offset + k
        for slot, shift in zip(self._slots, self._shifts, strict=True):
            live = inside
            if shape.out_channels % tile.block_n:
                live = live & ((self._first_channel + shift) < shape.out_channels)
            with guard(slot.exists):
                copy_in(
                    self._shared, stage + slot.target + base,
                    self._weights, start + shift * shape.k,
                    self._vector, live=live,
                )  # fmt: skip

    def _paired_shifts(self) -> list[Int]:
        """Of each slot's channel from the first one's. The order is one of a row's bits, so those
        of a multiple of a power of two that is greater than the first row go their own way."""
        step = self._tile.threads // (self._tile.block_k // self._vector)
        if step % 16 == 0 or step & (step - 1) == 0:
            return [paired_channel(slot.shift) for slot in self._slots]
        first = paired_channel(self._slots[0].row)
        return [paired_channel(slot.row) - first for slot in self._slots]


@dataclass(frozen=True)
class Pixel:
    """Where the window of an output pixel begins, for one row of the input's tile.

    top, left: its first row and column in the input, negative in the padding. image: of the batch.
    inside: the pixel exists. mask: bit t is set where tap t lies in the input; None when that is
    computed a tap (`inside` alone where no tap can be outside).
    """

    image: Int
    top: Int
    left: Int
    inside: Bool
    mask: Int | None


def pixel_at(m: Int, shape: ConvShape, together: int, *, use_mask: bool) -> Pixel:
    """The window of flat output pixel `m`, in [0, M) or beyond where `together`, the pixels of a
    cluster, do not divide M."""
    plane = shape.out_h * shape.out_w
    image = m // plane if shape.batch > 1 else Int.of(0)
    in_plane = m - image * plane
    row, column = in_plane // shape.out_w, in_plane % shape.out_w
    top = row * shape.stride_h - shape.pad_top
    left = column * shape.stride_w - shape.pad_left
    inside = m < shape.pixels if shape.pixels % together else TRUE
    mask = None
    if use_mask:
        columns = Int.of(0)
        for kw in range(shape.kernel_w):
            valid = (left + kw * shape.dilation_w) < shape.width
            columns = columns | select(valid, 1 << kw, 0)
        mask = Int.of(0)
        for kh in range(shape.kernel_h):
            valid = inside & ((top + kh * shape.dilation_h) < shape.height)
            mask = mask | select(valid, columns << (kh * shape.kernel_w), 0)
    return Pixel(image, top, left, inside, mask)


class InputLoader:
    """Inputs of the products' own type, by copies of 16 bytes or less, from one or more sources."""

    def __init__(
        self, tile: ConvTile, problem: ConvProblem, arguments: list[Argument], shared: Buffer,
        thread: Int, first_pixel: Int,
    ) -> None:  # fmt: skip
        self._tile, self._shape = tile, problem.shape
        self._sources = problem.sources
        self._arguments = arguments
        self._shared = shared
        shape = problem.shape
        self._vector = shape.source_vector
        self._column = (thread % (tile.block_k // self._vector)) * self._vector
        last_tap = (tile.padded_k(shape) - 1) // shape.in_channels
        use_mask = not shape.in_bounds and last_tap < _MASK_BITS
        self._slots = share_rows(
            thread, tile.threads, tile.block_m, tile.block_k, self._vector, shape.element
        )
        self._pixels = [
            pixel_at(first_pixel + slot.row, shape, tile.block_m * tile.sharers, use_mask=use_mask)
            for slot in self._slots
        ]
        self._starts = [
            [self._start(source, pixel) for pixel in self._pixels] for source in self._sources
        ]

    def _start(self, source: Source, pixel: Pixel) -> Int:
        """Element offset of the window's first pixel in a source."""
        return self._offset(source, pixel, pixel.top, pixel.left)

    def _offset(self, source: Source, pixel: Pixel, row: Int, column: Int) -> Int:
        pitch = self._arguments[source.argument].pitch_or_fail()
        row, column = row // source.upsample, column // source.upsample
        return ((pixel.image * source.height + row) * source.width + column) * pitch

    def load(self, k_tile: Int, stage: Int) -> None:
        """Issue the copies of a step; zeros in the padding and beyond M and K."""
        tile, shape = self._tile, self._shape
        tap, channel = self._tap(k_tile)
        kh, kw = tap // shape.kernel_w, tap % shape.kernel_w
        k = k_tile * tile.block_k + self._column
        inside = k < shape.k if tile.padded_k(shape) > shape.k else TRUE
        bit = Int.of(1) << tap if self._pixels[0].mask is not None else Int.of(0)
        alive = [self._live(pixel, bit, kh, kw, inside) for pixel in self._pixels]
        for number, source in enumerate(self._sources):
            with guard(self._belongs(source, channel)):
                within = channel - source.first
                self._copy(number, source, kh, kw, within, stage, alive)

    def _tap(self, k_tile: Int) -> tuple[Int, Int]:
        """The tap and the channel (of all sources together) of this thread's columns."""
        tile, shape = self._tile, self._shape
        if shape.taps == 1:
            return Int.of(0), k_tile * tile.block_k + self._column
        if shape.in_channels % tile.block_k == 0:  # the same tap for the whole block
            per_tap = shape.in_channels // tile.block_k
            return k_tile // per_tap, (k_tile % per_tap) * tile.block_k + self._column
        k = k_tile * tile.block_k + self._column
        return k // shape.in_channels, k % shape.in_channels

    def _belongs(self, source: Source, channel: Int) -> Bool:
        if len(self._sources) == 1:
            return TRUE
        if source is self._sources[-1]:  # it also fills the zeros beyond the end of K
            return channel >= source.first
        return (channel - source.first) < source.channels

    def _live(self, pixel: Pixel, bit: Int, kh: Int, kw: Int, inside: Bool) -> Bool:
        """Whether this thread's columns of a row are in the input."""
        shape = self._shape
        if shape.in_bounds:
            return pixel.inside & inside
        if pixel.mask is not None:  # no bit is set beyond the last tap, so not beyond K
            return ~(pixel.mask & bit).equals(0)
        row = (pixel.top + kh * shape.dilation_h) < shape.height
        column = (pixel.left + kw * shape.dilation_w) < shape.width
        return pixel.inside & inside & row & column

    def _copy(
        self, number: int, source: Source, kh: Int, kw: Int, channel: Int, stage: Int,
        alive: list[Bool],
    ) -> None:  # fmt: skip
        shape = self._shape
        argument = self._arguments[source.argument]
        row, column = kh * shape.dilation_h, kw * shape.dilation_w
        shift = (row * source.width + column) * argument.pitch_or_fail() + channel
        for slot, pixel, start, live in zip(
            self._slots, self._pixels, self._starts[number], alive, strict=True
        ):
            offset = start + shift
            if source.upsample > 1 and shape.taps > 1:
                top, left = pixel.top + row, pixel.left + column
                offset = self._offset(source, pixel, top, left) + channel
            with guard(slot.exists):
                copy_in(
                    self._shared, stage + slot.target, argument.buffer, offset, self._vector,
                    live=live, through_l1=self._tile.through_l1,
                )  # fmt: skip
