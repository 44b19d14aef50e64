"""Decode and two-stage top-k in one launch: logits and boxes of three levels to detections.

Every block takes a few anchors and writes the key of each one's largest logit to the workspace;
the block of an image that finishes last goes on alone: the best `max_det` anchors, then the best
`max_det` of their logits (those below the last anchor's largest cannot be among them, and are
dropped first), ordered, decoded and written. The sigmoid keeps the order, so it is applied to what
is written only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, func, ir, vector
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Argument,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    loop,
    select,
)
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    barrier,
    release_dependents,
    shuffle_xor,
    sigmoid,
    wait_for_predecessors,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, SCRATCH, Kernel, Parameter
from yolomlir.codegen.gpu.selection import (
    Elements,
    Held,
    Selection,
    SelectionSize,
    Streamed,
    atomic_add,
    choose,
    key_of,
    memory_fence,
    value_of,
)
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo
from yolomlir.target import Target

_HELD = 12
"""Keys a thread keeps in registers; more are read from memory in every pass."""
_LOADS = 4
"""Logits (or groups of 4) that a lane reads side by side."""
_COLUMNS = 6

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

    vector, box_vector, row_vector: elements of one access to logits, boxes and the result.
    """

    batch: int
    classes: int
    max_det: int
    levels: tuple[Level, ...]
    vector: int
    box_vector: int
    row_vector: int

    @property
    def anchors(self) -> int:
        """Of one image."""
        return sum(level.anchors for level in self.levels)

    @property
    def candidates(self) -> int:
        """Logits of the anchors that stage one chooses."""
        return self.max_det * self.classes


@dataclass(frozen=True)
class DetectTile:
    """threads: of a block. lanes: neighbouring threads that share an anchor's logits."""

    threads: int
    lanes: int

    @property
    def anchors(self) -> int:
        """Anchors of a block."""
        return self.threads // self.lanes


def default_tile(shape: DetectShape, target: Target) -> DetectTile:
    """The largest block, for the last one works alone; lanes so that each has few loads."""
    del target
    groups, lanes = shape.classes // shape.vector, 1
    while lanes < 32 and lanes * _LOADS < groups:
        lanes *= 2
    return DetectTile(1024, lanes)


@dataclass(frozen=True)
class _Sizes:
    """Words of the workspace and of shared memory, and where their parts begin."""

    shape: DetectShape
    tile: DetectTile

    @property
    def stage_one(self) -> SelectionSize:
        return SelectionSize(self.shape.max_det, self.shape.anchors)

    @property
    def stage_two(self) -> SelectionSize:
        return SelectionSize(self.shape.max_det, self.shape.candidates)

    @property
    def counters(self) -> int:
        """Finished blocks, a word an image, filled up to a multiple of 16 bytes."""
        return -(-self.shape.batch // 4) * 4

    @property
    def keys(self) -> int:
        """Keys of one image's anchors, filled up to a multiple of 8 bytes."""
        return -(-self.shape.anchors // 2) * 2

    @property
    def image(self) -> int:
        """Words of one image: keys, then candidates, two words each."""
        return self.keys + 2 * self.shape.candidates

    @property
    def workspace_bytes(self) -> int:
        return 4 * (self.counters + self.shape.batch * self.image)

    @property
    def shared_bytes(self) -> int:
        """State, the ordered anchors, then the selection of either stage."""
        selection = max(self.stage_one.words, self.stage_two.words)
        return 4 * (_STATE_WORDS + self.ordered + selection)

    @property
    def ordered(self) -> int:
        """Words of stage one's anchors, filled up to a multiple of 16 bytes."""
        return -(-self.shape.max_det // 4) * 4


_STATE_WORDS = 4
_FINISHED, _CANDIDATES = range(2)


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> DetectShape:
    """The shape of a dispatch function. Raises UnsupportedError for another form."""
    arguments = list(function.regions[0].blocks[0].arguments)
    strides = yolo.integers(function, "yolo.strides")
    if len(arguments) != 2 * len(strides):
        match.refuse(function, f"has {len(arguments)} maps for strides {strides}")
    levels: list[Level] = []
    for value, stride in zip(arguments, strides, strict=False):
        _, height, width, _ = match.shape(value)
        first = levels[-1].first + levels[-1].anchors if levels else 0
        levels.append(Level(height, width, stride, first))
    batch, _, _, classes = match.shape(arguments[-1])
    count = len(levels)
    return DetectShape(
        batch,
        classes,
        yolo.integer(function, "yolo.max_det"),
        tuple(levels),
        vector=match.vector_width(function, classes, range(count, 2 * count)),
        box_vector=match.vector_width(function, 4, range(count)),
        row_vector=match.vector_width(function, _COLUMNS, [2 * count]),
    )


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("detect")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a detect dispatch; the same at every precision."""
    del precision
    shape = parse(function.operation)
    tile = tile_or(function.operation, DetectTile, lambda: default_tile(shape, target))
    return build(shape, tile, target, name, function.location)


def build(
    shape: DetectShape, tile: DetectTile, target: Target, name: str, location: ir.Location
) -> Kernel:
    """The kernel for this shape and tile. Raises UnsupportedError where max_det is too large.

    The workspace must be zero before the first launch and belong to this step alone; every launch
    leaves its counters at zero again.
    """
    sizes = _Sizes(shape, tile)
    if sizes.shared_bytes > target.shared_memory_bytes:
        raise UnsupportedError(
            f"max_det {shape.max_det} needs {sizes.shared_bytes} bytes of shared memory; "
            f"{target.name} has {target.shared_memory_bytes}",
            where=name,
            hint="compile with a smaller max_det",
        )
    levels = len(shape.levels)
    boxes = [Parameter(ACTIVATION, alignment_bytes=4 * shape.box_vector)] * levels
    logits = [Parameter(ACTIVATION, alignment_bytes=4 * shape.vector)] * levels
    result = Parameter(ACTIVATION, alignment_bytes=4 * shape.row_vector)
    scratch = Parameter(SCRATCH, "int32", alignment_bytes=16)
    kernel = KernelBuilder(
        name,
        [*boxes, *logits, result, scratch],
        threads=tile.threads,
        shared_bytes=sizes.shared_bytes,
        location=location,
    )
    blocks = -(-shape.anchors // tile.anchors)
    with kernel:
        _Body(kernel, shape, tile, blocks).emit(target.programmatic_launch)
    return kernel.finish(
        (blocks, shape.batch, 1),
        workspace_bytes=sizes.workspace_bytes,
        programmatic=target.programmatic_launch,
    )


class _Body:
    """The kernel's body."""

    def __init__(
        self, kernel: KernelBuilder, shape: DetectShape, tile: DetectTile, blocks: int
    ) -> None:
        self.kernel, self.shape, self.tile, self.blocks = kernel, shape, tile, blocks
        self.sizes = _Sizes(shape, tile)
        levels = len(shape.levels)
        self.boxes, self.logits = kernel.arguments[:levels], kernel.arguments[levels : 2 * levels]
        self.result, self.workspace = kernel.arguments[-2], kernel.arguments[-1].buffer
        self.image = kernel.block_y
        self.keys = self.image * self.sizes.image + self.sizes.counters
        self.candidates = self.keys + self.sizes.keys
        self.state = kernel.shared("int32", _STATE_WORDS)
        self.ordered = kernel.shared("int32", self.sizes.ordered, offset_bytes=4 * _STATE_WORDS)
        self.selection_bytes = 4 * (_STATE_WORDS + self.sizes.ordered)

    def emit(self, programmatic: bool) -> None:
        """The whole body."""
        if programmatic:
            wait_for_predecessors()
            release_dependents()
        self.best_logits()
        with guard(self.last_of_image()):
            last_anchor = self.choose_anchors()
            self.collect_candidates(last_anchor)
            self.write_detections()

    # ---- maps

    def level_of(self, anchor: Int) -> list[Bool]:
        """Whether the anchor lies below the end of each level but the last."""
        return [anchor < level.first + level.anchors for level in self.shape.levels[:-1]]

    def by_level(self, below: list[Bool], values: Sequence[Int | int]) -> Int:
        """The value of the anchor's level."""
        result = Int.of(values[-1])
        for condition, value in zip(reversed(below), reversed(values[:-1]), strict=True):
            result = select(condition, value, result)
        return result

    def pixel(self, anchor: Int, below: list[Bool]) -> Int:
        """The anchor's place in its level's map of the whole batch."""
        places = [self.image * level.anchors + anchor - level.first for level in self.shape.levels]
        return self.by_level(below, places)

    def read(self, maps: Sequence[Argument], anchor: Int, channel: Int, width: int) -> list[Value]:
        """Neighbouring channels of the anchor's level."""
        below = self.level_of(anchor)
        pitch = self.by_level(below, [m.pitch_or_fail() for m in maps])
        offset = self.pixel(anchor, below) * pitch + channel
        type_ = ir.VectorType.get([width], ir.F32Type.get()) if width > 1 else ir.F32Type.get()

        def load(level: int) -> Value:
            buffer = maps[level].buffer
            if level < len(below):
                return choose(
                    below[level],
                    lambda: _load(buffer, offset, width),
                    lambda: load(level + 1),
                    type_,
                )
            return _load(buffer, offset, width)

        loaded = load(0)
        return [loaded] if width == 1 else [vector.extract(loaded, [], [i]) for i in range(width)]

    # ---- every block

    def best_logits(self) -> None:
        """The key of each anchor's largest logit to the workspace."""
        shape, tile = self.shape, self.tile
        part = self.kernel.thread % tile.lanes
        anchor = self.kernel.block_x * tile.anchors + self.kernel.thread // tile.lanes
        live = anchor < shape.anchors
        safe = select(live, anchor, shape.anchors - 1)
        groups = shape.classes // shape.vector
        loads = -(-groups // tile.lanes)

        def best_of(first: Int, count: int) -> list[Value]:
            """Some loads; one beyond the last class reads the last again."""
            values: list[Value] = []
            for i in range(count):
                group = (first + i) * tile.lanes + part
                group = select(group < groups, group, groups - 1)
                values += self.read(self.logits, safe, group * shape.vector, shape.vector)
            return values

        if loads <= 2 * _LOADS:
            best = _largest(best_of(Int.of(0), loads))
        else:
            with loop(0, -(-loads // _LOADS), carried=[f32(float("-inf"))]) as state:
                values = best_of(state.index * _LOADS, _LOADS)
                state.advance([_largest([state.carried[0], *values])])
            best = state.results[0]
        mask = 1
        while mask < tile.lanes:
            best = arith.maximumf(best, shuffle_xor(best, mask))
            mask *= 2
        with guard(live & part.equals(0)):
            self.workspace.store(self.keys + anchor, key_of(best).value)

    def last_of_image(self) -> Bool:
        """Whether every other block of the image has written its keys, which are then visible.

        The counter goes back to zero for the next launch.
        """
        barrier()
        with guard(self.kernel.thread.equals(0)):
            memory_fence()
            finished = atomic_add(self.workspace, self.image)
            memory_fence()
            self.state.store(_FINISHED, finished.value)
            self.state.store(_CANDIDATES, Int.of(0).value)
            with guard(finished.equals(self.blocks - 1)):
                self.workspace.store(self.image, Int.of(0).value)
        barrier()
        return Int(self.state.load(_FINISHED)).equals(self.blocks - 1)

    # ---- the last block of an image

    def choose_anchors(self) -> Int:
        """Stage one: the best anchors, in order, to shared memory; the key of the last."""
        selection = Selection(self.kernel, self.sizes.stage_one, offset_bytes=self.selection_bytes)
        elements = self.anchor_keys()
        selection.clear()
        barrier()
        last = selection.find(elements)
        selection.order(lambda rank, anchor, _: self.ordered.store(rank, anchor.value))
        barrier()
        return last

    def anchor_keys(self) -> Elements:
        """Every anchor with its key."""
        count, threads, thread = self.shape.anchors, self.tile.threads, self.kernel.thread
        if count > _HELD * threads:
            return Streamed(
                lambda place: (place, Int(self.workspace.load(self.keys + place))),
                Int.of(count), thread, threads, unroll=4,
            )  # fmt: skip
        held = []
        for first in range(0, count, threads):
            anchor = thread + first
            live = anchor < count if first + threads > count else TRUE
            key = self.workspace.load(self.keys + select(live, anchor, 0))
            held.append((anchor, Int(key), live))
        return Held(held)

    def collect_candidates(self, lowest: Int) -> None:
        """The logits of the chosen anchors that reach the last anchor's best, to the workspace."""
        shape, threads = self.shape, self.tile.threads
        groups = shape.classes // shape.vector
        items = shape.max_det * groups
        rounds = -(-items // threads)
        batch, bound = min(rounds, 2 * _LOADS), value_of(lowest)
        with loop(0, -(-rounds // batch)) as state:
            first = state.index * (batch * threads) + self.kernel.thread
            found: list[tuple[Bool, Int, list[Value]]] = []
            for i in range(batch):
                item = first + i * threads
                live = item < items
                item = select(live, item, 0)
                rank, channel = item // groups, (item % groups) * shape.vector
                anchor = Int(self.ordered.load(rank))
                values = self.read(self.logits, anchor, channel, shape.vector)
                found.append((live, rank * shape.classes + channel, values))
            for live, index, values in found:
                with guard(live & _reaches(_largest(values), bound)):
                    for i, value in enumerate(values):
                        self.keep_candidate(index + i, value, bound)
        barrier()

    def keep_candidate(self, index: Int, value: Value, bound: Value) -> None:
        """Append a candidate, in no order, if it is high enough."""
        with guard(_reaches(value, bound)):
            place = atomic_add(self.state, _CANDIDATES)
            pair = [index.value, key_of(value).value]
            self.workspace.store_vector(self.candidates + place * 2, pair)

    def write_detections(self) -> None:
        """Stage two: the best candidates, decoded, in order."""
        selection = Selection(self.kernel, self.sizes.stage_two, offset_bytes=self.selection_bytes)

        def read(place: Int) -> tuple[Int, Int]:
            index, key = self.workspace.load_vector(self.candidates + place * 2, 2)
            return Int(index), Int(key)

        count = Int(self.state.load(_CANDIDATES))
        selection.clear()
        barrier()
        selection.find(Streamed(read, count, self.kernel.thread, self.tile.threads))
        selection.order(self.write_row)

    def write_row(self, rank: Int, index: Int, key: Int) -> None:
        """One detection: x1, y1, x2, y2 in input pixels, score, class."""
        shape = self.shape
        anchor = Int(self.ordered.load(index // shape.classes))
        below = self.level_of(anchor)
        step = shape.box_vector
        parts = [self.read(self.boxes, anchor, Int.of(i), step) for i in range(0, 4, step)]
        sides = [side for part in parts for side in part]
        local = anchor - self.by_level(below, [level.first for level in shape.levels])
        width = self.by_level(below, [level.width for level in shape.levels])
        stride = _real(self.by_level(below, [level.stride for level in shape.levels]))
        centres = [arith.addf(_real(place), f32(0.5)) for place in (local % width, local // width)]
        corners = [arith.subf(centres[i], sides[i]) for i in (0, 1)]
        corners += [arith.addf(centres[i], sides[i + 2]) for i in (0, 1)]
        row = [arith.mulf(corner, stride) for corner in corners]
        row += [sigmoid(value_of(key)), _real(index % shape.classes)]
        base = (self.image * shape.max_det + rank) * self.result.pitch_or_fail()
        for column in range(0, _COLUMNS, shape.row_vector):
            self.result.buffer.store_vector(base + column, row[column : column + shape.row_vector])


def _load(buffer: Buffer, offset: Int, width: int) -> Value:
    """Neighbours as one value: a vector, or the element where there is one."""
    if width == 1:
        return buffer.load(offset)
    type_ = ir.VectorType.get([width], ir.F32Type.get())
    return vector.load(type_, buffer.memref, [offset.index()], alignment=4 * width)


def _reaches(value: Value, bound: Value) -> Bool:
    """Whether a logit is at least the bound, or NaN, which the keys order last."""
    return Bool(arith.cmpf(arith.CmpFPredicate.UGE, value, bound))


def _largest(values: list[Value]) -> Value:
    """The maximum, by halves."""
    while len(values) > 1:
        pairs = [arith.maximumf(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def _real(x: Int) -> Value:
    """The float32 of a small integer."""
    return arith.sitofp(ir.F32Type.get(), x.value)


__all__ = ["DetectShape", "DetectTile", "Level", "build", "default_tile", "parse"]
