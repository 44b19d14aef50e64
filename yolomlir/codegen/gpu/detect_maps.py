"""What a detect kernel reads and writes: the levels' maps by anchor, and a detection's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, ir, llvm, memref, vector
from yolomlir.codegen.gpu.builder import Argument, Bool, Int, KernelBuilder, f32, i32_type, select
from yolomlir.codegen.gpu.instructions import sigmoid

COLUMNS = 6
"""Of a detection: x1, y1, x2, y2, score, class."""
WITH_KEYS = 8
"""Of a candidate: besides, its logit and the largest of its anchor."""
_GLOBAL = 1
"""Address space of global memory."""

Value: TypeAlias = ir.Value


@dataclass(frozen=True)
class Level:
    """One level's map: its size, the input pixels between anchors, its first anchor's number."""

    height: int
    width: int
    stride: int
    first: int

    @property
    def anchors(self) -> int:
        """Positions of the map."""
        return self.height * self.width


@dataclass(frozen=True)
class DetectShape:
    """Levels in the order of the operands: all box maps, then all class maps.

    vector, box_vector, row_vector: elements of one access to logits, boxes and the result, whose
    rows have so many columns: a detection's, or `WITH_KEYS`.
    """

    batch: int
    classes: int
    max_det: int
    levels: tuple[Level, ...]
    vector: int
    box_vector: int
    row_vector: int
    columns: int = COLUMNS

    @property
    def with_keys(self) -> bool:
        """Whether a row has its logit and its anchor's largest, for what merges rows."""
        return self.columns == WITH_KEYS

    @property
    def anchors(self) -> int:
        """Of one image."""
        return sum(level.anchors for level in self.levels)

    @property
    def candidates(self) -> int:
        """Logits of the anchors that stage one chooses."""
        return self.max_det * self.classes

    @property
    def groups(self) -> int:
        """Accesses that an anchor's logits take."""
        return self.classes // self.vector


class Maps:
    """The maps of one image, by anchor: threads of a warp may be on different levels, so a level
    is chosen by selecting its address and not by branching. They are the kernel's arguments from
    the `first` on, and the result follows."""

    def __init__(
        self, kernel: KernelBuilder, shape: DetectShape, image: Int, *, first: int = 0
    ) -> None:
        self.shape, self.image = shape, image
        levels, arguments = len(shape.levels), kernel.arguments[first:]
        self.boxes, self.logits = arguments[:levels], arguments[levels : 2 * levels]
        self.result = arguments[2 * levels]

    def level_of(self, anchor: Int) -> list[Bool]:
        """Whether the anchor lies below the end of each level but the last."""
        return [anchor < level.first + level.anchors for level in self.shape.levels[:-1]]

    def by_level(self, below: list[Bool], values: Sequence[Int | int]) -> Int:
        """The value of the anchor's level."""
        result = Int.of(values[-1])
        for condition, value in zip(reversed(below), reversed(values[:-1]), strict=True):
            result = select(condition, value, result)
        return result

    def row_pointer(self, maps: Sequence[Argument], anchor: Int) -> Value:
        """Where an anchor's channels begin in its level's map."""
        below = self.level_of(anchor)
        pitch = self.by_level(below, [m.pitch_or_fail() for m in maps])
        places = [self.image * level.anchors + anchor - level.first for level in self.shape.levels]
        offset = self.by_level(below, places) * pitch
        addresses = [memref.extract_aligned_pointer_as_index(m.buffer.memref) for m in maps]
        address = addresses[-1]
        for condition, other in zip(reversed(below), reversed(addresses[:-1]), strict=True):
            address = arith.select(condition.value, other, address)
        integer = arith.index_cast(ir.IntegerType.get_signless(64), address)
        return _element(llvm.inttoptr(llvm.PointerType.get(_GLOBAL), integer), offset)

    def read(self, row: Value, channel: Int | int, width: int) -> list[Value]:
        """Neighbouring channels of a row."""
        pointer = _element(row, Int.of(channel))
        if width == 1:
            return [llvm.load(ir.F32Type.get(), pointer, alignment=4)]
        type_ = ir.VectorType.get([width], ir.F32Type.get())
        loaded = llvm.load(type_, pointer, alignment=4 * width)
        return [vector.extract(loaded, [], [i]) for i in range(width)]

    def read_sides(self, anchor: Int) -> list[Value]:
        """An anchor's distances to the left, upper, right and lower side of its box."""
        row, step = self.row_pointer(self.boxes, anchor), self.shape.box_vector
        return [side for i in range(0, 4, step) for side in self.read(row, i, step)]

    def write_row(
        self,
        rank: Int,
        anchor: Int,
        category: Int,
        logit: Value,
        largest: Value,
        sides: Sequence[Value],
    ) -> None:
        """One detection: x1, y1, x2, y2 in input pixels, score, class; and, where rows have them,
        the logit and the anchor's largest."""
        row = [*self.corners(anchor, sides), sigmoid(logit), real(category)]
        self.write_columns(rank, [*row, logit, largest] if self.shape.with_keys else row)

    def write_columns(self, rank: Int, row: Sequence[Value]) -> None:
        """A row of the result."""
        shape = self.shape
        base = (self.image * shape.max_det + rank) * self.result.pitch_or_fail()
        for column in range(0, shape.columns, shape.row_vector):
            self.result.buffer.store_vector(base + column, row[column : column + shape.row_vector])

    def corners(self, anchor: Int, sides: Sequence[Value]) -> list[Value]:
        """x1, y1, x2, y2 in input pixels of an anchor's box."""
        shape, below = self.shape, self.level_of(anchor)
        local = anchor - self.by_level(below, [level.first for level in shape.levels])
        width = self.by_level(below, [level.width for level in shape.levels])
        stride = real(self.by_level(below, [level.stride for level in shape.levels]))
        centres = [arith.addf(real(place), f32(0.5)) for place in (local % width, local // width)]
        corners = [arith.subf(centres[i], sides[i]) for i in (0, 1)]
        corners += [arith.addf(centres[i], sides[i + 2]) for i in (0, 1)]
        return [arith.mulf(corner, stride) for corner in corners]


def _element(pointer: Value, offset: Int) -> Value:
    """The address of a float32 some elements on."""
    dynamic = ir.DenseI32ArrayAttr.get([-(2**31)])  # the index is an operand
    wraps = ir.IntegerAttr.get(i32_type(), 0)  # no flags
    type_, element = llvm.PointerType.get(_GLOBAL), ir.F32Type.get()
    return llvm.getelementptr(type_, pointer, [offset.value], dynamic, element, wraps)


def real(x: Int) -> Value:
    """The float32 of a small integer."""
    return arith.sitofp(ir.F32Type.get(), x.value)


__all__ = ["COLUMNS", "WITH_KEYS", "DetectShape", "Level", "Maps", "real"]
