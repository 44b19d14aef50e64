"""The input of a rectangle of output pixels in shared memory: which pixels, and how they lie.

A k x k convolution reads every input pixel for up to k x k outputs. A block that computes a
rectangle loads the pixels under it once, with the border that its outermost outputs need (zeros
beyond the input), and all its taps read there.

A row of the window has its columns by their remainder modulo the stride: those of one output pixel
after the other at one tap are neighbours then, whatever the stride. Neighbours lie an odd number of
16-byte chunks apart, so that the eight rows of an `ldmatrix` meet eight different banks, and a tap
is a constant distance from the first: it costs no address arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from yolomlir.codegen.gpu.conv_problem import ConvShape

_BANK_CHUNKS = 8
"""Chunks that one wavefront of shared memory serves."""


@dataclass(frozen=True)
class Window:
    """The window of rows x columns output pixels; sizes and distances in elements.

    channels: of a pixel, of which the first ones are read. pitch: from one pixel to the next;
    row_pitch: from one row of the window to the next.
    """

    shape: ConvShape
    rows: int
    columns: int
    channels: int
    pitch: int
    row_pitch: int

    @property
    def height(self) -> int:
        """Rows of the input."""
        shape = self.shape
        return (self.rows - 1) * shape.stride_h + (shape.kernel_h - 1) * shape.dilation_h + 1

    @property
    def width(self) -> int:
        """Columns of the input."""
        shape = self.shape
        return (self.columns - 1) * shape.stride_w + (shape.kernel_w - 1) * shape.dilation_w + 1

    @property
    def loaded(self) -> int:
        """Elements that are copied."""
        return self.height * self.width * self.channels

    @property
    def size(self) -> int:
        """Elements of shared memory."""
        return self.height * self.row_pitch

    @property
    def phase(self) -> int:
        """Places for the columns of one remainder modulo the stride."""
        return -(-self.width // self.shape.stride_w)

    def place(self, column: int) -> int:
        """Where in its row a column lies."""
        return column % self.shape.stride_w * self.phase + column // self.shape.stride_w

    def tap(self, kh: int, kw: int) -> int:
        """Distance from an output pixel's first input to that of a tap."""
        row, column = kh * self.shape.dilation_h, kw * self.shape.dilation_w
        return row * self.row_pitch + self.place(column) * self.pitch

    def element(self, k: int) -> int:
        """Distance to element k of K (taps, then channels); beyond the end of K, that of the first:
        something finite, which a zero weight multiplies."""
        if k >= self.shape.k:
            return 0
        tap, channel = divmod(k, self.shape.in_channels)
        return self.tap(*divmod(tap, self.shape.kernel_w)) + channel

    def pixel(self, number: int) -> int:
        """Distance from the first input of output pixel 0 of the rectangle to that of another."""
        row, column = divmod(number, self.columns)
        return row * self.shape.stride_h * self.row_pitch + column * self.pitch

    def copies(self, threads: int) -> int:
        """Asynchronous copies of a thread, where one source has all channels."""
        items = self.width * self.channels // self.shape.source_vector
        team = team_of(items, self.height, threads)
        return -(-items // team) * -(-self.height // (threads // team))


@lru_cache(maxsize=4096)
def window_of(shape: ConvShape, rows: int, columns: int, channels: int, *, padded: bool) -> Window:
    """The layout of a window. padded: for `ldmatrix`; else channels are read one after another."""
    chunk = shape.element.chunk
    chunks = -(-channels // chunk)
    pitch = (chunks | 1 if padded else chunks) * chunk
    plain = Window(shape, rows, columns, channels, pitch, 0)
    tight = (max(map(plain.place, range(plain.width))) + 1) * pitch
    choices = [
        Window(shape, rows, columns, channels, pitch, tight + i * chunk)
        for i in range(_BANK_CHUNKS if padded else 1)
    ]
    return min(choices, key=lambda window: (_conflicts(window), window.row_pitch))


def _conflicts(window: Window) -> int:
    """How many of the eight pixels of a matrix share a bank with another, over all matrices."""
    chunk, pixels = window.shape.element.chunk, window.rows * window.columns
    conflicts = 0
    for first in range(0, pixels, _BANK_CHUNKS):
        matrix = range(first, min(first + _BANK_CHUNKS, pixels))
        conflicts += len(matrix) - len({window.pixel(i) // chunk % _BANK_CHUNKS for i in matrix})
    return conflicts


@lru_cache(maxsize=4096)
def team_of(items: int, rows: int, threads: int) -> int:
    """Threads that copy a row of so many items together, as many teams as there are threads for:
    the fewest copies of a thread, of which an item of a row costs half of one more."""

    def cost(team: int) -> float:
        own = -(-items // team)
        return own * -(-rows // (threads // team)) + own / 2

    return min(range(1, threads + 1), key=cost)


__all__ = ["Window", "team_of", "window_of"]
