"""The image under a rectangle of output pixels in shared memory, and the order of its K.

Rows of the window lie as they do in memory, elements as they are there: a block copies them in
pieces of up to 16 bytes, aligned alike on both sides, and reads its products' operands from them.

A product of the tensor cores is a sum over K in any order, so K is ordered by what a lane can read
together. Of each pixel the four lanes that share it multiply a `Unit` each, up to eight elements:
neighbours of one kernel row, which three words hold however they are aligned, or what is left of up
to three rows, a word each. For 3x3 kernels of RGB that is K = 32 of 27 elements, as in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from yolomlir.codegen.gpu.conv_problem import ConvShape

UNIT = 8
"""Elements of K that a lane multiplies together: of two products of float16, or four of TF32."""
WORD = 4
"""Bytes of a load that holds elements of one byte."""
WORDS = 3
"""Such loads of a unit: eight bytes lie in three words."""
LEFT_SLOTS = (0, 1, 4)
"""Where in its unit what is left of a row goes: the halves of a unit come from its first two words
and its last two."""
_LANES = 4
_BANKS = 32
_ALIGNMENT = 16


@dataclass(frozen=True)
class Unit:
    """Elements first_k + i step_k of K for i < count, in the slots of `slots`, or nothing.

    row, column: of the first, relative to the pixel's window: a row of the image, an element of
    that row. rows: from one element to the next, of `left` ones; else they are neighbours.
    """

    first_k: int = 0
    step_k: int = 1
    count: int = 0
    row: int = 0
    column: int = 0
    rows: int = 0

    @property
    def left(self) -> bool:
        """Whether every element is of another row."""
        return self.rows > 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of its elements."""
        return LEFT_SLOTS[: self.count] if self.left else tuple(range(self.count))

    def offset(self, slot: int, pitch: int) -> int:
        """Distance of a slot's element from the pixel's window; the first one's where there is
        none: something finite, which a zero weight multiplies."""
        i = self.slots.index(slot) if slot in self.slots else 0
        return (self.row + i * self.rows) * pitch + self.column + (0 if self.left else i)

    def word(self, number: int, pitch: int) -> int:
        """Distance of the word that load `number` takes, before it is aligned."""
        if self.left:
            last = min(number, self.count - 1)
            return (self.row + last * self.rows) * pitch + self.column
        return self.row * pitch + self.column + number * WORD


def units_of(shape: ConvShape) -> list[list[Unit]]:
    """K in groups of a unit for each of the four lanes."""
    units: list[Unit] = []
    left: list[Unit] = []
    for kh in range(shape.kernel_h):
        for first_k, column, length in _runs(shape, kh):
            for i in range(0, length, UNIT):
                count = min(UNIT, length - i)
                unit = Unit(first_k + i, 1, count, kh * shape.dilation_h, column + i)
                (left if count == 1 else units).append(unit)
    units += _joined(left, shape)
    units += [Unit()] * (-len(units) % _LANES)
    return [units[i : i + _LANES] for i in range(0, len(units), _LANES)]


def _runs(shape: ConvShape, kh: int) -> list[tuple[int, int, int]]:
    """Neighbours of a kernel row: the first one's place in K and in the image's row; how many."""
    channels, first = shape.in_channels, kh * shape.kernel_w * shape.in_channels
    if shape.dilation_w == 1:
        return [(first, 0, shape.kernel_w * channels)]
    return [
        (first + kw * channels, kw * shape.dilation_w * channels, channels)
        for kw in range(shape.kernel_w)
    ]


def _joined(left: list[Unit], shape: ConvShape) -> list[Unit]:
    """Single elements as units of those of the same column."""
    joined = []
    per_row = shape.kernel_w * shape.in_channels
    for column in sorted({unit.column for unit in left}):
        own = [unit for unit in left if unit.column == column]
        for i in range(0, len(own), len(LEFT_SLOTS)):
            first, count = own[i], len(own[i : i + len(LEFT_SLOTS)])
            joined.append(Unit(first.first_k, per_row, count, first.row, column, shape.dilation_h))
    return joined


def used_slots(group: list[Unit]) -> int:
    """Slots of a group up to the last that holds something."""
    return max(max(unit.slots, default=0) for unit in group) + 1


@dataclass(frozen=True)
class ImageWindow:
    """The window of rows x columns output pixels; sizes and distances in elements of the image.

    bytes: of such an element. pitch: from one row of the window to the next.
    """

    shape: ConvShape
    rows: int
    columns: int
    bytes: int
    pitch: int = 0

    @property
    def height(self) -> int:
        """Rows of the image."""
        shape = self.shape
        return (self.rows - 1) * shape.stride_h + (shape.kernel_h - 1) * shape.dilation_h + 1

    @property
    def step(self) -> int:
        """From one output pixel's window to its neighbour's."""
        return self.shape.stride_w * self.shape.in_channels

    @property
    def row_length(self) -> int:
        """Of a row of the image."""
        return self.shape.width * self.shape.in_channels

    @property
    def piece(self) -> int:
        """Of a copy: what rows of the image are multiples of, one where that is too few bytes."""
        widest = min(self.row_length & -self.row_length, _ALIGNMENT // self.bytes)
        return widest if widest * self.bytes >= WORD else 1

    @property
    def lead(self) -> int:
        """Whole copies that the padding on the left takes."""
        return -(-self.shape.pad_left * self.shape.in_channels // self.piece) * self.piece

    @property
    def shift(self) -> int:
        """Where in a row of the window the first output pixel's begins: the same in all rectangles,
        since 16 columns are whole copies."""
        return (self.lead - self.shape.pad_left * self.shape.in_channels) % self.piece

    @property
    def pieces(self) -> int:
        """Copies of a row."""
        start = self.shift + (self.columns - 1) * self.step
        if self.bytes != 1:
            ends = [start + u.column + (1 if u.left else u.count) for g in self.groups for u in g]
        else:
            words = [(u.column, 1 if u.left else WORDS) for g in self.groups for u in g]
            ends = [(start + column) // WORD * WORD + n * WORD for column, n in words]
        return -(-max(ends) // self.piece)

    @cached_property
    def groups(self) -> list[list[Unit]]:
        """K in the order of the products."""
        return units_of(self.shape)

    @property
    def copies(self) -> int:
        """Of all rows."""
        return self.height * self.pieces

    @property
    def size_bytes(self) -> int:
        """Shared memory, a multiple of 16 bytes."""
        return self.height * self.pitch * self.bytes

    def wavefronts(self) -> int:
        """Of shared memory for one fragment's loads: more than there are loads by conflicts."""
        total = 0
        loads = WORDS if self.bytes == 1 else UNIT
        for group in self.groups:
            for number in range(loads):
                words = {self._word(group, number, lane) for lane in range(_BANKS)}
                banks = [word % _BANKS for word in words]
                total += max(banks.count(bank) for bank in set(banks))
        return total

    def _word(self, group: list[Unit], number: int, lane: int) -> int:
        unit, start = group[lane % _LANES], self.shift + lane // _LANES * self.step
        if self.bytes == 1:
            return (start + unit.word(number, self.pitch)) // WORD
        return start + unit.offset(number, self.pitch)


@lru_cache(maxsize=4096)
def image_window(shape: ConvShape, block_m: int, threads: int, bytes_: int) -> ImageWindow:
    """The rectangle of block_m output pixels that needs the fewest blocks, then the fewest copies a
    thread, then the longest rows; the pitch with the fewest conflicts of banks.

    bytes_: of an element of the image. Columns are multiples of 16: a fragment is of one row.
    """
    choices = [
        ImageWindow(shape, block_m // columns, columns, bytes_)
        for columns in range(16, block_m + 1, 16)
        if block_m % columns == 0
    ]

    def cost(window: ImageWindow) -> tuple[int, int, int]:
        blocks = -(-shape.out_h // window.rows) * -(-shape.out_w // window.columns)
        return blocks, -(-window.copies // threads), -window.columns

    best = min(choices, key=cost)
    aligned = _ALIGNMENT // bytes_
    tight = -(-best.pieces * best.piece // aligned) * aligned
    padded = [
        ImageWindow(shape, best.rows, best.columns, bytes_, tight + i * aligned) for i in range(8)
    ]
    return min(padded, key=lambda window: (window.wavefronts(), window.pitch))


__all__ = [
    "LEFT_SLOTS", "UNIT", "WORD", "WORDS", "ImageWindow", "Unit", "image_window", "units_of",
    "used_slots",
]  # fmt: skip
