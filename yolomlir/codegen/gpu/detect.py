"""Decode and two-stage top-k in one launch: logits and boxes of three levels to detections.

Every block takes a few anchors and writes to the workspace what the selection needs of each: the
key of its largest logit, that one's bin, and leading bits of its groups' largest; it also counts
the bins. The block of an image that finishes last goes on alone, by bins (`detect_bins`) or, where
they are crowded, exactly (`detect_exact`). The sigmoid keeps the order, so it is applied to what
is written only.
"""

from __future__ import annotations

from typing import TypeAlias

from yolomlir.bindings import arith, func, ir
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.builder import Bool, Int, KernelBuilder, f32, guard, loop, select
from yolomlir.codegen.gpu.detect_bins import BinSelection
from yolomlir.codegen.gpu.detect_exact import ExactSelection, largest
from yolomlir.codegen.gpu.detect_layout import (
    BIN_BITS,
    DONE,
    FINISHED,
    STATE_WORDS,
    DetectTile,
    Layout,
    bin_of,
)
from yolomlir.codegen.gpu.detect_maps import COLUMNS, WITH_KEYS, DetectShape, Level, Maps
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    barrier,
    release_dependents,
    shuffle_xor,
    wait_for_predecessors,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, SCRATCH, Kernel, Parameter
from yolomlir.codegen.gpu.selection import atomic_add, key_of, memory_fence
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo
from yolomlir.target import Target

_LOADS = 4
"""Logits (or groups of 4) that a lane reads side by side, where it has many."""
_FEW = 5
"""Of them, as many as a lane reads by default."""
_LANES = 16
"""Lanes of an anchor at most: its neighbour's are in the same warp."""

Value: TypeAlias = ir.Value


def default_tile(shape: DetectShape, target: Target) -> DetectTile:
    """What made YOLO26n's fastest on an H200. The last block of an image works alone, and more
    threads would take part in its short steps, unless there are more blocks than multiprocessors:
    fewer and larger ones take less time then. Lanes so that each has few loads."""
    lanes = 1
    while lanes < _LANES and lanes * _FEW < shape.groups:
        lanes *= 2
    few = DetectTile(640, lanes)
    blocks = -(-shape.anchors // few.anchors) * shape.batch
    return few if blocks <= target.multiprocessors else DetectTile(1024, lanes)


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
    count, columns = len(levels), match.shape(match.only(function, "func.return").operands[0])[-1]
    if columns not in (COLUMNS, WITH_KEYS):
        match.refuse(function, f"gives rows of {columns} columns")
    return DetectShape(
        batch,
        classes,
        yolo.integer(function, "yolo.max_det"),
        tuple(levels),
        vector=match.vector_width(function, classes, range(count, 2 * count)),
        box_vector=match.vector_width(function, 4, range(count)),
        row_vector=match.vector_width(function, columns, [2 * count]),
        columns=columns,
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
    layout = Layout(shape, tile)
    if layout.shared_bytes > target.shared_memory_bytes:
        raise UnsupportedError(
            f"max_det {shape.max_det} needs {layout.shared_bytes} bytes of shared memory; "
            f"{target.name} has {target.shared_memory_bytes}",
            where=name,
            hint="compile with a smaller max_det",
        )
    if tile.lanes > _LANES or tile.lanes & (tile.lanes - 1) or tile.threads % 64:
        raise UnsupportedError(
            f"{tile}; expected a power of two of at most {_LANES} lanes, and a multiple of 64 "
            "threads",
            where=name,
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
        shared_bytes=layout.shared_bytes,
        location=location,
    )
    blocks = -(-shape.anchors // tile.anchors)
    with kernel:
        _Body(kernel, layout, blocks).emit(target.programmatic_launch)
    return kernel.finish(
        (blocks, shape.batch, 1),
        workspace_bytes=layout.workspace_bytes,
        programmatic=target.programmatic_launch,
    )


class _Body:
    """The kernel's body."""

    def __init__(self, kernel: KernelBuilder, layout: Layout, blocks: int) -> None:
        self.kernel, self.layout, self.blocks = kernel, layout, blocks
        self.shape, self.tile = layout.shape, layout.tile
        self.maps = Maps(kernel, layout.shape, kernel.block_y)
        self.workspace = kernel.arguments[-1].buffer
        self.image = kernel.block_y * layout.image + layout.counters
        self.state = kernel.shared("int32", STATE_WORDS)

    def emit(self, programmatic: bool) -> None:
        """The whole body."""
        part = self.kernel.thread % self.tile.lanes
        anchor = self.kernel.block_x * self.tile.anchors + self.kernel.thread // self.tile.lanes
        safe = select(anchor < self.shape.anchors, anchor, self.shape.anchors - 1)
        row = self.maps.row_pointer(self.maps.logits, safe)
        if programmatic:
            wait_for_predecessors()
            release_dependents()
        self.best_logits(anchor, part, row)
        parts = (self.kernel, self.layout, self.maps, self.workspace, self.image)
        with guard(self.last_of_image()):
            if not self.layout.fast:
                ExactSelection(*parts).emit()
                return
            BinSelection(*parts).emit()
            barrier()
            with guard(Int(self.state.load(DONE)).equals(0)):
                barrier()
                ExactSelection(*parts).emit()

    # ---- every block

    def best_logits(self, anchor: Int, part: Int, row: Value) -> None:
        """What is known of the anchor's logits, those that this lane reads, to the workspace."""
        tile, layout = self.tile, self.layout
        live = anchor < self.shape.anchors
        word, best = self.lane_maxima(row, part)
        mask = 1
        while mask < tile.lanes:
            best = arith.maximumf(best, shuffle_xor(best, mask))
            mask *= 2
        bin_ = bin_of(best)
        number = select(live, bin_ + 1, 0)
        neighbour = Int(shuffle_xor(number.value, tile.lanes))
        with guard(live):
            place = self.image + layout.words + anchor * tile.lanes + part
            self.workspace.store(place, word.value)
            with guard(part.equals(0)):
                self.workspace.store(self.image + layout.keys + anchor, key_of(best).value)
                atomic_add(self.workspace, self.image + bin_)
                with guard((anchor & 1).equals(0)):
                    pair = number | (neighbour << 16)
                    self.workspace.store(self.image + layout.pairs + anchor // 2, pair.value)

    def lane_maxima(self, row: Value, part: Int) -> tuple[Int, Value]:
        """A lane's word: the leading bits of its groups' largest logits' bins; and the largest."""
        layout = self.layout
        if layout.loads == layout.fields:
            maxima = [largest(self.read_group(row, part, Int.of(i))) for i in range(layout.loads)]
            word = Int.of(0)
            for i, value in enumerate(maxima):
                leading = bin_of(value) >> (BIN_BITS - layout.field_bits)
                word = word | (leading << (i * layout.field_bits))
            return word, largest(maxima)
        with loop(0, -(-layout.loads // _LOADS), carried=[f32(float("-inf"))]) as state:
            groups = [state.index * _LOADS + i for i in range(_LOADS)]
            values = [v for group in groups for v in self.read_group(row, part, group)]
            state.advance([largest([state.carried[0], *values])])
        return bin_of(state.results[0]), state.results[0]

    def read_group(self, row: Value, part: Int, load: Int) -> list[Value]:
        """A lane's logits of one load; beyond the last class, the last again."""
        groups, width = self.shape.groups, self.shape.vector
        group = load * self.tile.lanes + part
        if load.known is None or (load.known + 1) * self.tile.lanes > groups:
            group = select(group < groups, group, groups - 1)
        return self.maps.read(row, group * width, width)

    def last_of_image(self) -> Bool:
        """Whether every other block of the image has written its part, which is then visible.

        The counter goes back to zero for the next launch.
        """
        barrier()
        with guard(self.kernel.thread.equals(0)):
            memory_fence()
            finished = atomic_add(self.workspace, self.kernel.block_y)
            memory_fence()
            rest = [Int.of(0).value] * (STATE_WORDS - 1)
            for first, words in (
                (FINISHED, [finished.value, *rest[:3]]),
                (4, rest[:4]),
                (8, rest[:4]),
            ):
                self.state.store_vector(first, words)
            with guard(finished.equals(self.blocks - 1)):
                self.workspace.store(self.kernel.block_y, Int.of(0).value)
        barrier()
        return Int(self.state.load(FINISHED)).equals(self.blocks - 1)


__all__ = ["DetectShape", "DetectTile", "Level", "build", "default_tile", "parse"]
