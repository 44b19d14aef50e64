"""Convolutions of an image: uint8, or float32 for products of float16; converted in registers.

Few channels make rows of K that no wide access fits. So a block copies the window of its rectangle
of outputs as bytes (`image_window.py`), in wide asynchronous copies, and each lane takes what it
multiplies from there, already in its place of the fragment: neighbours of a kernel row by words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from yolomlir.bindings import arith, ir, vector
from yolomlir.codegen.gpu import instructions, products
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Argument,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    i32_type,
    narrow,
    select,
    select_float,
    zero_of,
)
from yolomlir.codegen.gpu.chain_input import pick
from yolomlir.codegen.gpu.conv2d_kernel import ConvKernel
from yolomlir.codegen.gpu.conv2d_load import copy_in
from yolomlir.codegen.gpu.conv2d_store import OutputStore, Run
from yolomlir.codegen.gpu.conv2d_tile import ConvTile, image_weight_row
from yolomlir.codegen.gpu.conv_problem import ConvShape, Source
from yolomlir.codegen.gpu.element import FLOAT32
from yolomlir.codegen.gpu.image_window import (
    UNIT,
    WORD,
    WORDS,
    ImageWindow,
    Unit,
    image_window,
    used_slots,
)
from yolomlir.codegen.gpu.products import Fragments, Operand

_LANES = 4
_FLOAT = 0x4B000000
"""2^23: with a byte as its lowest, the float32 2^23 + byte."""
_HALVES = 0x64646464
"""With bytes in between, the float16 pairs 2^10 + byte."""
_NEIGHBOURS, _LEFT_LOW, _LEFT_HIGH = 0x3210, 0x0040, 0x0004
"""Bytes that `permute` takes for a half of a unit where its elements are the first of their words:
four neighbours; the first bytes of both words, or of the second."""
_NEXT = 0x1111
"""The same one byte further."""


class ImageKernel(ConvKernel):
    """The kernel of a convolution that reads an image. All of K is there before the first product;
    of the tile count block_m, block_n, warps_m, warps_n, staged and release_early."""

    @cached_property
    def window(self) -> ImageWindow:
        """The window of a block's rectangle of outputs."""
        source = self.problem.sources[0]
        bytes_ = 1 if source.dtype == "uint8" else FLOAT32.bytes
        return image_window(self.shape, self.tile.block_m, self.tile.threads, bytes_)

    @property
    def paired(self) -> bool:
        """Whether a lane has four neighbouring channels: of any type, since weights are not read
        by `ldmatrix`."""
        return not self.tile.is_staged and self.tile.warp_n % 16 == 0

    def _main_bytes(self) -> int:
        return self.tile.image_bytes(self.shape, self.window)

    def _grid(self) -> tuple[int, int, int]:
        shape, window = self.shape, self.window
        rectangles = -(-shape.out_h // window.rows) * -(-shape.out_w // window.columns)
        return shape.batch * rectangles, self.tile.grid(shape)[1], 1

    # ---- phases ---------------------------------------------------------------------------------

    def _place(self, k: KernelBuilder) -> None:
        t, shape, window = self.tile, self.shape, self.window
        self.first_channel = k.block_y * t.block_n
        self.lane, warp = k.thread % 32, k.thread // 32
        self.warp_row = (warp % t.warps_m) * t.warp_m
        self.warp_column = (warp // t.warps_m) * t.warp_n
        self.warp_slice = self.first_pixel = Int.of(0)  # pixels are counted in the rectangle
        across, down = -(-shape.out_w // window.columns), -(-shape.out_h // window.rows)
        self.image = k.block_x // (across * down) if shape.batch > 1 else Int.of(0)
        rectangle = k.block_x - self.image * (across * down)
        self.top = rectangle // across * window.rows
        self.left = rectangle % across * window.columns
        self.store = OutputStore(k, self.problem, t, self.first_channel, self._main_bytes())
        source = self.problem.sources[0]
        count = window.height * window.pitch
        self.pixels = WindowCopy(
            window, k.arguments[source.argument], k.shared(source.dtype, count),
            k.thread, t.threads, (self.image, self.top, self.left),
        )  # fmt: skip
        count = t.block_n * image_weight_row(shape, window)
        self.rows = k.shared(self.element.name, count, offset_bytes=window.size_bytes)
        weight = k.arguments[self.problem.weight].buffer
        self.kernels = WeightCopy(t, shape, window, weight, self.rows, k.thread, self.first_channel)
        words = k.shared("int32", window.size_bytes // WORD)
        reader = ByteReader if window.bytes == 1 else FloatReader
        self.reader = reader(window, source, self.element.name, words, self.lane)

    def _prologue(self) -> int:
        self.kernels.load()
        self.store.load_vectors()
        if self.overlap:
            instructions.wait_for_predecessors()
            if self.tile.release_early:
                instructions.release_dependents()
        self.pixels.load()
        instructions.copy_commit()
        self.kernels.store()
        return 1

    def _accumulate(self, ahead: int) -> Fragments:
        """The products, in the order in which fewer registers hold what is used again: the weights
        of all channels, or the inputs of all pixels."""
        del ahead
        t = self.tile
        rows, columns = t.warp_m // 16, t.warp_n // 8
        reads = [[self._reads(g, i) for i in range(rows)] for g in self.window.groups]
        instructions.copy_wait(0)
        instructions.barrier()
        accumulators = self._zero()
        for number, group in enumerate(self.window.groups):
            steps = -(-used_slots(group) // (2 * self.element.packed))
            if t.warp_n <= t.warp_m:
                weights = [self._weights(number, j, steps) for j in range(columns)]
                for i in range(rows):
                    inputs = self._inputs(reads[number][i], steps)
                    for j in range(columns):
                        _add_to(accumulators[i], j, inputs, weights[j])
                continue
            pixels = [self._inputs(reads[number][i], steps) for i in range(rows)]
            for j in range(columns):
                weight = self._weights(number, j, steps)
                for i in range(rows):
                    _add_to(accumulators[i], j, pixels[i], weight)
        return accumulators

    def _weights(self, group: int, column: int, steps: int) -> list[Operand]:
        """A fragment of 8 channels, an operand a step."""
        row = Int.of(self.lane // _LANES)
        if self.paired:  # as `paired_channel` orders the rows 8 column + l / 4
            row = row // 2 * 4 + row % 2 + (column // 2 * 16 + column % 2 * 2)
        else:
            row = row + 8 * column
        length = image_weight_row(self.shape, self.window)
        start = (self.warp_column + row) * length + (self.lane % _LANES) * UNIT
        start = start + group * _LANES * UNIT
        chunk = self.element.chunk
        values = [
            value
            for first in range(0, 2 * self.element.packed * steps, chunk)
            for value in self.rows.load_packed(start + first, chunk)
        ]
        return [self._split(values[2 * s : 2 * s + 2], rounded=True) for s in range(steps)]

    def _reads(self, group: list[Unit], number: int) -> list[Read]:
        """What a lane reads of a fragment of 16 pixels: of pixel l / 4, of pixel l / 4 + 8."""
        row, column = self._position(16 * number)
        start = row * (self.shape.stride_h * self.window.pitch)
        return [
            self.reader.read_at(group, start + (column + half) * self.window.step)
            for half in (0, 8)
        ]

    def _inputs(self, reads: list[Read], steps: int) -> list[Operand]:
        """The fragment, an operand a step."""
        low, high = (self.reader.values(read, 2 * steps) for read in reads)
        operands = []
        for s in range(steps):
            values = [part[2 * s + i] for i in (0, 1) for part in (low, high)]
            if self.reader.exact:
                to_bits = instructions.bits if self.element is FLOAT32 else (lambda v: v)
                operands.append(Operand([to_bits(v) for v in values], [], self.element))
            else:
                operands.append(self._split(values, rounded=False))
        return operands

    # ---- which pixel ----------------------------------------------------------------------------

    def _position(self, offset: int) -> tuple[Int, Int]:
        """Row and column in the rectangle of the warp's pixel `offset`, a multiple of 16."""
        columns, warp_m = self.window.columns, self.tile.warp_m
        if warp_m % columns == 0:
            return self.warp_row // columns + offset // columns, Int.of(offset % columns)
        if columns % warp_m == 0:
            return self.warp_row // columns, self.warp_row % columns + offset
        return (self.warp_row + offset) // columns, (self.warp_row + offset) % columns

    def _store_lane(self, first: Int, offset: int, runs: Sequence[Run]) -> None:
        del first
        row, column = self._position(offset // 16 * 16)
        self._store_pixel(row, column + self.lane // _LANES + offset % 16, runs)

    def _store_row(self, row: Int, runs: Sequence[Run]) -> None:
        self._store_pixel(row // self.window.columns, row % self.window.columns, runs)

    def _store_pixel(self, row: Int, column: Int, runs: Sequence[Run]) -> None:
        shape = self.shape
        inside = TRUE
        if shape.out_h % self.window.rows:
            inside = (self.top + row) < shape.out_h
        if shape.out_w % self.window.columns:
            inside = inside & ((self.left + column) < shape.out_w)
        first = (self.image * shape.out_h + self.top) * shape.out_w + self.left
        with guard(inside):
            self.store.store_row(first + row * shape.out_w + column, runs)


def _add_to(
    row: list[list[ir.Value]], column: int, inputs: list[Operand], weights: list[Operand]
) -> None:
    for a, b in zip(inputs, weights, strict=True):
        row[column] = products.multiply(a, b, row[column])


class WindowCopy:
    """Copies a window, zeros beyond the image. The image is dense: its pitch is its channels.

    corner: the image of the batch, the rectangle's first row and column.
    """

    def __init__(
        self, window: ImageWindow, argument: Argument, shared: Buffer, thread: Int, threads: int,
        corner: tuple[Int, Int, Int],
    ) -> None:  # fmt: skip
        self._window, self._argument, self._shared = window, argument, shared
        self._thread, self._threads = thread, threads
        shape = window.shape
        image, top, left = corner
        self._image = image * shape.height
        self._top = top * shape.stride_h - shape.pad_top
        before = shape.pad_left * shape.in_channels + window.shift
        self._first = left * window.step - before

    def load(self) -> None:
        """Issue the copies."""
        window, threads = self._window, self._threads
        for i in range(-(-window.copies // threads)):
            copy = self._thread + i * threads
            exists = copy < window.copies if (i + 1) * threads > window.copies else TRUE
            row, piece = copy // window.pieces, copy % window.pieces
            with guard(exists):
                self._copy(row, piece * window.piece)

    def _copy(self, row: Int, place: Int) -> None:
        window, shape = self._window, self._window.shape
        y, column = self._top + row, self._first + place
        live = (y < shape.height) & (column < window.row_length)
        copy_in(
            self._shared, row * window.pitch + place,
            self._argument.buffer, (self._image + y) * window.row_length + column,
            window.piece, live=live,
        )  # fmt: skip


class WeightCopy:
    """Weights O x K to rows of the block's channels, K in the order of the window's groups: of each
    its four units, eight slots each, zeros in those that hold nothing.

    Those of four bytes are copied asynchronously. Smaller ones go through registers: `load` starts
    them, `store` waits for them.
    """

    def __init__(
        self, tile: ConvTile, shape: ConvShape, window: ImageWindow, weights: Buffer,
        shared: Buffer, thread: Int, first_channel: Int,
    ) -> None:  # fmt: skip
        self._tile, self._shape, self._window = tile, shape, window
        self._weights, self._shared = weights, shared
        self._lane, self._warp = thread % 32, thread // 32
        self._first_channel = first_channel
        self._waiting: list[tuple[Int, ir.Value, Bool]] = []

    def load(self) -> None:
        """Start to load a warp a row."""
        warps = self._tile.threads // 32
        for number, group in enumerate(self._window.groups):
            k, filled = self._element(group)
            for i in range(-(-self._tile.block_n // warps)):
                row = self._warp + i * warps
                ragged = (i + 1) * warps > self._tile.block_n
                exists = row < self._tile.block_n if ragged else TRUE
                with guard(exists if self._asynchronous else TRUE):
                    self._load(row, k, filled, exists, number)

    def store(self) -> None:
        """Store what came through registers."""
        for target, value, exists in self._waiting:
            with guard(exists):
                self._shared.store(target, value)

    @property
    def _asynchronous(self) -> bool:
        return self._shared.element_bytes >= instructions.COPY_BYTES

    def _load(self, row: Int, k: Int, filled: Bool, exists: Bool, group: int) -> None:
        shape = self._shape
        channel = self._first_channel + row
        length = image_weight_row(shape, self._window)
        target = row * length + self._lane + group * _LANES * UNIT
        live = filled
        if shape.out_channels % self._tile.block_n or exists.known is None:
            live = live & (channel < shape.out_channels)
        source = channel * shape.k + k
        if self._asynchronous:
            copy_in(self._shared, target, self._weights, source, 1, live=live)
            return
        value = self._weights.load(select(live, source, 0))
        value = select_float(live, value, zero_of(self._shared.dtype))
        self._waiting.append((target, value, exists))

    def _element(self, group: list[Unit]) -> tuple[Int, Bool]:
        """The element of K that this lane copies of a group, and whether there is one."""
        unit, slot = self._lane // UNIT, self._lane % UNIT
        masks = [sum(1 << slot for slot in u.slots) for u in group]
        filled = ((_choose(unit, masks) >> slot) & 1).equals(1)
        number = slot
        if any(u.left for u in group):  # its slots are 0, 1 and 4
            left = _choose(unit, [int(u.left) for u in group]).equals(1) & slot.equals(4)
            number = select(left, 2, slot)
        k = _choose(unit, [u.first_k for u in group])
        return k + _choose(unit, [u.step_k for u in group]) * number, filled


@dataclass(frozen=True)
class Read:
    """Loads of a lane's unit of one pixel, and how `permute` orders their bytes, where they are."""

    places: list[Int]
    orders: list[ir.Value]


class ByteReader:
    """Elements of one byte: three words a pixel and unit, whose bytes are put in order, then into
    floats. exact: what it gives needs no rounding."""

    def __init__(
        self, window: ImageWindow, source: Source, dtype: str, words: Buffer, lane: Int
    ) -> None:
        self._window, self._source, self._dtype, self._words = window, source, dtype, words
        self._unit = lane % _LANES
        self._start = (lane // _LANES) * window.step + window.shift
        self.exact = source.scale == 1.0 or dtype == "float16"

    def read_at(self, group: list[Unit], start: Int) -> Read:
        """How to read this lane's unit of the pixel that lies `start` beyond the lane's.

        Rows of the window are whole words, so all loads of a unit are aligned alike.
        """
        pitch = self._window.pitch
        column = self._start + start + _choose(self._unit, [u.word(0, 0) for u in group])
        first, beyond = _quotient(column, WORD), _remainder(column, WORD) * _NEXT
        places = []
        for number in range(WORDS):
            rows = [(u.word(number, pitch) - u.word(0, 0)) // WORD for u in group]
            places.append(first + _choose(self._unit, rows))
        orders = [
            _choose(self._unit, [left if u.left else _NEIGHBOURS for u in group]) + beyond
            for left in (_LEFT_LOW, _LEFT_HIGH)
        ]
        return Read(places, [order.value for order in orders])

    def values(self, read: Read, count: int) -> list[ir.Value]:
        """The first `count` registers of a unit: a float32 each, or two float16."""
        slots = count * (2 if self._dtype == "float16" else 1)
        words = [self._words.load(place) for place in read.places]
        found = [
            instructions.permute(words[half], words[half + 1], read.orders[half])
            for half in range(-(-slots // WORD))
        ]
        if self._dtype == "float16" and self._source.scale == 1.0:
            return [self._pair(found[i // 2], i % 2) for i in range(count)]
        floats = [self._float(found[i // WORD], i % WORD) for i in range(slots)]
        return floats if self._dtype == "float32" else _pairs(floats)

    def _float(self, word: ir.Value, byte: int) -> ir.Value:
        """A byte as a float32, scaled."""
        base = Int.of(_FLOAT).value
        bits = instructions.permute(word, base, Int.of(0x7440 + byte).value)
        value = arith.addf(instructions.from_bits(bits), f32(-(2.0**23)))
        return value if self._source.scale == 1.0 else arith.mulf(value, f32(self._source.scale))

    def _pair(self, word: ir.Value, half: int) -> ir.Value:
        """Two neighbouring bytes of a word as float16."""
        order = 0x4140 + half * 0x0202
        bits = instructions.permute(word, Int.of(_HALVES).value, Int.of(order).value)
        single = vector.from_elements(ir.VectorType.get([1], i32_type()), [bits])
        type_ = ir.VectorType.get([2], ir.F16Type.get())
        base = ir.FloatAttr.get(ir.F16Type.get(), -1024.0)
        bias = arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, base))
        return arith.addf(vector.bitcast(type_, single), bias)


class FloatReader:
    """Elements of float32, a load each."""

    def __init__(
        self, window: ImageWindow, source: Source, dtype: str, words: Buffer, lane: Int
    ) -> None:
        self._window, self._source, self._dtype, self._words = window, source, dtype, words
        self._unit = lane % _LANES
        self._start = (lane // _LANES) * window.step + window.shift
        self.exact = dtype == "float16"

    def read_at(self, group: list[Unit], start: Int) -> Read:
        """As `ByteReader.read_at`."""
        pitch, place = self._window.pitch, self._start + start
        units = [[u.offset(slot, pitch) for u in group] for slot in range(UNIT)]
        return Read([place + _choose(self._unit, offsets) for offsets in units], [])

    def values(self, read: Read, count: int) -> list[ir.Value]:
        """As `ByteReader.values`."""
        floats = []
        for place in read.places[: count * (2 if self._dtype == "float16" else 1)]:
            value = instructions.from_bits(self._words.load(place))
            scale = self._source.scale
            floats.append(value if scale == 1.0 else arith.mulf(value, f32(scale)))
        return floats if self._dtype == "float32" else _pairs(floats)


def _pairs(floats: list[ir.Value]) -> list[ir.Value]:
    """Neighbours as registers of two float16."""
    type_ = ir.VectorType.get([2], ir.F16Type.get())
    halves = [narrow(value, "float16") for value in floats]
    return [vector.from_elements(type_, halves[i : i + 2]) for i in range(0, len(halves), 2)]


def _choose(index: Int, values: Sequence[int]) -> Int:
    """values[index]; never from an `Int` that is negative without its constant, which no quotient
    can be taken of."""
    if values[-1] >= values[0]:
        return pick(index, values)
    return pick(index ^ (_LANES - 1), values[::-1])


def _quotient(x: Int, size: int) -> Int:
    """x // size, what is known of it apart."""
    whole = x.addend // size * size
    return (x - whole) // size + whole // size


def _remainder(x: Int, size: int) -> Int:
    """x % size, without what is known to be a multiple."""
    return (x - x.addend // size * size) % size


__all__ = ["ImageKernel", "WeightCopy", "WindowCopy"]
