"""The last stage of detection: the candidates of finer levels, and the last level's maps.

A cluster of blocks shares the last level's anchors. The last candidate is a bound: a logit of the
last level that does not come before it is none of the best. Each lane that finds logits beyond the
bound sends their rows to the first block, which has the candidates' already, orders all by bins and
writes the best. It waits for global memory once, and then for what is sent: each block says how
many rows it has sent, and barriers in the first block's memory count what arrives (`mbarrier`). A
barrier of the cluster would first wait until all writes are visible to the whole GPU.

The first block has room for a number of rows from each. Where one finds more, the first block takes
the level's best exactly (`detect_exact`) instead of what was sent, and merges these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, func, ir
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu import mbarrier
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    loop,
    select,
)
from yolomlir.codegen.gpu.detect_exact import ExactSelection, largest
from yolomlir.codegen.gpu.detect_histogram import Bins, count_of, sum_of, where
from yolomlir.codegen.gpu.detect_layout import (
    KEPT,
    LAST,
    bin_of,
)
from yolomlir.codegen.gpu.detect_maps import COLUMNS, WITH_KEYS, DetectShape, Level, Maps, real
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    barrier,
    bits,
    cluster_barrier,
    from_bits,
    release_dependents,
    shared_of_block,
    shuffle_xor,
    sigmoid,
    wait_for_predecessors,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, SCRATCH, Kernel, Parameter
from yolomlir.codegen.gpu.merge_layout import (
    BLOCKS,
    LANES,
    LOADS,
    RECORD,
    MergeLayout,
    MergeShape,
    MergeTile,
    default_tile,
    tiles,
)
from yolomlir.codegen.gpu.selection import atomic_add, key_of, value_of
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo
from yolomlir.target import Target

_HELD = 32
"""Logits of a lane that stay in registers from their maximum to the bound."""
_PLACE, _CLASS, _KEY, _TOP = range(4, RECORD)
_FOUND = 0
"""The word of a block's state that counts the rows it has found."""

Value: TypeAlias = ir.Value


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> MergeShape:
    """The shape of a dispatch function. Raises UnsupportedError for another form."""
    arguments = list(function.regions[0].blocks[0].arguments)
    if len(arguments) != 3:
        match.refuse(function, f"has {len(arguments)} arguments; expected rows and two maps")
    batch, wanted, columns = match.shape(arguments[0])
    if columns != WITH_KEYS:
        match.refuse(function, f"reads rows of {columns} columns")
    _, height, width, classes = match.shape(arguments[2])
    level = Level(height, width, yolo.integer(function, "yolo.stride"), 0)
    late = DetectShape(
        batch,
        classes,
        wanted,
        (level,),
        vector=match.vector_width(function, classes, [2]),
        box_vector=match.vector_width(function, 4, [1]),
        row_vector=match.vector_width(function, COLUMNS, [3]),
    )
    return MergeShape(late, match.vector_width(function, WITH_KEYS, [0]))


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("merge_detections")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a merge; the same at every precision."""
    del precision
    shape = parse(function.operation)
    tile = tile_or(function.operation, MergeTile, lambda: default_tile(shape, target))
    return build(shape, tile, target, name, function.location)


def build(
    shape: MergeShape, tile: MergeTile, target: Target, name: str, location: ir.Location
) -> Kernel:
    """The kernel for this shape and tile. Raises UnsupportedError for more rows than fit, and for
    another tile."""
    layout, late = MergeLayout(shape, tile), shape.late
    if 4 * layout.words > target.shared_memory_bytes:
        raise UnsupportedError(
            f"max_det {late.max_det} needs {4 * layout.words} bytes of shared memory; "
            f"{target.name} has {target.shared_memory_bytes}",
            where=name,
            hint="compile with a smaller max_det",
        )
    _check(tile, target, name)
    widths = [shape.vector, late.box_vector, late.vector, late.row_vector]
    parameters = [Parameter(ACTIVATION, alignment_bytes=4 * width) for width in widths]
    cluster = ir.Attribute.parse(f"array<i32: {tile.blocks}, 1, 1>")
    kernel = KernelBuilder(
        name,
        [*parameters, Parameter(SCRATCH, "int32", alignment_bytes=16)],
        threads=tile.threads,
        shared_bytes=4 * layout.words,
        location=location,
        attributes={"nvvm.cluster_dim": cluster} if tile.blocks > 1 else {},
    )
    with kernel:
        _Body(kernel, layout).emit(target.programmatic_launch)
    return kernel.finish(
        (tile.blocks, late.batch, 1),
        cluster=(tile.blocks, 1, 1),
        workspace_bytes=layout.late.workspace_bytes,
        programmatic=target.programmatic_launch,
    )


def _check(tile: MergeTile, target: Target, name: str) -> None:
    powers = all(n & (n - 1) == 0 for n in (tile.lanes, tile.blocks))
    most = BLOCKS if target.clusters else 1
    if not powers or tile.lanes > LANES or tile.blocks > most or tile.threads % 64:
        raise UnsupportedError(
            f"{tile}; expected powers of two of at most {LANES} lanes and {most} blocks, and a "
            "multiple of 64 threads",
            where=name,
        )


@dataclass(frozen=True)
class _Read:
    """A lane's part of an anchor. groups: the accesses that are in registers; None where they are
    too many."""

    anchor: Int
    live: Bool
    part: Int
    row: Value
    sides: list[Value]
    groups: list[tuple[Int, list[Value]]] | None


class _Body(Bins):
    """The kernel's body."""

    def __init__(self, kernel: KernelBuilder, layout: MergeLayout) -> None:
        super().__init__(kernel, kernel.shared("int32", layout.words), layout.places)
        self.layout, self.tile, self.shape = layout, layout.tile, layout.shape.late
        self.maps = Maps(kernel, self.shape, kernel.block_y, first=1)
        self.rows = kernel.arguments[0]
        self.rank_in_cluster = kernel.block_x if self.tile.blocks > 1 else Int.of(0)
        at = 4 * layout.barriers
        self.counts_come = kernel.shared("float32", 2, offset_bytes=at)
        self.rows_come = kernel.shared("float32", 2, offset_bytes=at + 8)

    def emit(self, programmatic: bool) -> None:
        """The whole body."""
        self.open()
        if programmatic:
            wait_for_predecessors()
            release_dependents()
        self.scan_level()
        barrier()
        if self.tile.blocks > 1:
            self.send_count()
        with guard(self.rank_in_cluster.equals(0)):
            with guard(self.receive()):
                self.take_level_exactly()
            self.choose()

    def open(self) -> None:
        """No row has been found, no bin holds any; every block of the cluster runs."""
        several = self.tile.blocks > 1
        self.clear_histogram()
        with guard(self.thread.equals(0)):
            self.words.store(_FOUND, Int.of(0).value)
            with guard(self.rank_in_cluster.equals(0) if several else Bool(None, False)):
                mbarrier.expect_bytes(self.counts_come, 4 * self.tile.blocks)
                mbarrier.make_barrier(self.rows_come)
                mbarrier.publish_barriers()
        if several:
            cluster_barrier()
        else:
            barrier()

    def record(self, number: Int) -> Int:
        """Where a row begins."""
        return number * RECORD + self.layout.records

    # ---- every block

    def scan_level(self) -> None:
        """The last level's rows beyond the bound, and in the first block the candidates."""
        tile, anchors = self.tile, self.shape.anchors
        each = tile.threads // tile.lanes
        rounds = -(-anchors // (each * tile.blocks))
        if rounds == 1:
            bound = self.read_bound()
            read = self.read_anchor(Int.of(0))
            self.take_candidates()  # while the logits are on their way
            self.send(read, bound)
            return
        bound = self.read_bound()
        self.take_candidates()
        with loop(0, rounds) as state:
            self.send(self.read_anchor(state.index * each), bound)

    def read_row(self, row: Int, first: int, count: int) -> list[Value]:
        """Some columns of a candidate."""
        width = min(self.layout.shape.vector, count)
        place = (self.kernel.block_y * self.shape.max_det + row) * self.rows.pitch_or_fail() + first
        steps = range(0, count, width)
        return [v for i in steps for v in self.rows.buffer.load_vector(place + i, width)]

    def read_bound(self) -> tuple[Int, Int]:
        """The last candidate's key, and its anchor's."""
        last = self.read_row(Int.of(self.shape.max_det - 1), COLUMNS, 2)
        return key_of(last[0]), key_of(last[1])

    def take_candidates(self) -> None:
        """The candidates' rows and bins to the first block's memory."""
        wanted = self.shape.max_det
        with guard(self.rank_in_cluster.equals(0)):
            for first in range(0, wanted, self.threads):
                row = self.thread + first
                with guard(row < wanted if first + self.threads > wanted else TRUE):
                    x1, y1, x2, y2, _, category, logit, top = self.read_row(row, 0, WITH_KEYS)
                    box, keys = [bits(v) for v in (x1, y1, x2, y2)], (key_of(logit), key_of(top))
                    self.store_record(row, box, row, bits(category), keys)
                    atomic_add(self.words, bin_of(logit) + self.places.cursors)

    def store_record(
        self, number: Int, box: Sequence[Value], place: Int, category: Value, keys: tuple[Int, Int]
    ) -> None:
        """A row to this block's memory: bits of the box and the class, keys of logit and anchor."""
        at = self.record(number)
        self.words.store_vector(at, list(box))
        self.words.store_vector(at + 4, [place.value, category, keys[0].value, keys[1].value])

    def send_record(
        self, number: Int, box: Sequence[Value], place: Int, category: Value, keys: tuple[Int, Int]
    ) -> None:
        """The same to the first block's memory."""
        if self.tile.blocks == 1:
            self.store_record(number, box, place, category, keys)
            return
        words, come = (shared_of_block(b, 0) for b in (self.words, self.rows_come))
        at = self.record(number)
        mbarrier.send(words, at, list(box), come)
        rest = [place.value, category, keys[0].value, keys[1].value]
        mbarrier.send(words, at + 4, rest, come)

    def read_anchor(self, first: Int) -> _Read:
        """An anchor's box, and this lane's logits where registers hold them."""
        tile, shape = self.tile, self.shape
        part = self.thread % tile.lanes
        anchor = (first + self.thread // tile.lanes) * tile.blocks + self.rank_in_cluster
        live = anchor < shape.anchors
        anchor = select(live, anchor, 0)
        row = self.maps.row_pointer(self.maps.logits, anchor)
        groups = None
        if self.layout.late.loads * shape.vector <= _HELD:
            loads = [Int.of(i) for i in range(self.layout.late.loads)]
            groups = [self.read_group(row, part, load) for load in loads]
        return _Read(anchor, live, part, row, self.maps.read_sides(anchor), groups)

    def read_group(self, row: Value, part: Int, load: Int) -> tuple[Int, list[Value]]:
        """The number of a lane's group of logits and they; beyond the last group, that again."""
        groups, width = self.shape.groups, self.shape.vector
        group = load * self.tile.lanes + part
        safe = group
        if load.known is None or (load.known + 1) * self.tile.lanes > groups:
            safe = select(group < groups, group, groups - 1)
        return group, self.maps.read(row, safe * width, width)

    def send(self, read: _Read, bound: tuple[Int, Int]) -> None:
        """A lane's rows beyond the bound to the first block."""
        top = key_of(self.largest_of(read))
        with guard(read.live & ~(top < bound[0])):
            box = [bits(v) for v in self.maps.corners(read.anchor, read.sides)]
            if read.groups is not None:
                self.send_groups(read.anchor, read.groups, box, top, bound)
                return
            with loop(0, self.layout.late.loads) as state:
                group = self.read_group(read.row, read.part, state.index)
                self.send_groups(read.anchor, [group], box, top, bound)

    def largest_of(self, read: _Read) -> Value:
        """The anchor's largest logit, by all of its lanes."""
        if read.groups is not None:
            best = largest([value for _, values in read.groups for value in values])
        else:
            rounds = -(-self.layout.late.loads // LOADS)
            with loop(0, rounds, carried=[f32(float("-inf"))]) as state:
                loads = [state.index * LOADS + i for i in range(LOADS)]
                groups = [self.read_group(read.row, read.part, load)[1] for load in loads]
                values = [value for group in groups for value in group]
                state.advance([largest([state.carried[0], *values])])
            best = state.results[0]
        mask = 1
        while mask < self.tile.lanes:
            best = arith.maximumf(best, shuffle_xor(best, mask))
            mask *= 2
        return best

    def send_groups(
        self,
        anchor: Int,
        groups: list[tuple[Int, list[Value]]],
        box: Sequence[Value],
        top: Int,
        bound: tuple[Int, Int],
    ) -> None:
        """The rows of some groups' logits that are beyond the bound, as far as there is room."""
        shape, room = self.shape, self.layout.room_each
        found: list[tuple[Bool, Int, Int]] = []
        for group, values in groups:
            for i, key in enumerate(key_of(value) for value in values):
                beyond = (group < shape.groups) & _comes_before((key, top), bound)
                found.append((beyond, group * shape.vector + i, key))
        with guard(_any([beyond for beyond, _, _ in found])):
            slot = atomic_add(self.words, _FOUND, count_of([beyond for beyond, _, _ in found]))
            for beyond, category, key in found:
                with guard(beyond & (slot < room)):
                    number = self.rank_in_cluster * room + slot + shape.max_det
                    place = anchor * shape.classes + category + shape.max_det
                    self.send_record(number, box, place, bits(real(category)), (key, top))
                slot = slot + count_of([beyond])

    def send_count(self) -> None:
        """Behind a barrier of the block: how many rows it found, of which it sent what has room."""
        with guard(self.thread.equals(0)):
            words, come = (shared_of_block(b, 0) for b in (self.words, self.counts_come))
            place = self.rank_in_cluster + self.layout.counts
            mbarrier.send(words, place, [self.words.load(_FOUND)], come)

    # ---- the first block

    @property
    def counts(self) -> int:
        """Where the numbers of rows are that the blocks found."""
        return self.layout.counts if self.tile.blocks > 1 else _FOUND

    def receive(self) -> Bool:
        """Wait for all rows; whether some block found more than there is room for."""
        room, blocks = self.layout.room_each, self.tile.blocks
        if blocks > 1:
            mbarrier.wait_for_bytes(self.counts_come)
        width = min(4, blocks)
        places = range(self.counts, self.counts + blocks, width)
        counts = [Int(v) for place in places for v in self.words.load_vector(place, width)]
        over = [~(count < room + 1) for count in counts]
        if blocks > 1:
            fitting = [select(more, room, n) for more, n in zip(over, counts, strict=True)]
            with guard(self.thread.equals(0)):
                mbarrier.expect_sent(self.rows_come, sum_of(fitting) * (4 * RECORD))
            mbarrier.wait_for_bytes(self.rows_come)
        return _any(over)

    def key_where(self, live: Bool, number: Int) -> Int:
        """The key of a row where there is one, else 0."""
        return where(live, lambda: [Int(self.words.load(self.record(number) + _KEY))], 1)[0]

    def choose(self) -> None:
        """The best of all rows, in order, to the result."""
        wanted, total = self.shape.max_det, self.layout.rows
        found: list[tuple[Int, Int, Bool]] = []
        for first in range(0, total, self.threads):
            number = self.thread + first
            live = number < total if first + self.threads > total else TRUE
            if first + self.threads > wanted:
                live = live & self.is_row(number)
            key = self.key_where(live, number)
            found.append((number, key, live))
            if first + self.threads > wanted:
                with guard(live & (number >= wanted)):
                    atomic_add(self.words, bin_of(value_of(key)) + self.places.cursors)
        barrier()
        last, kept = self.find_bin(self.read_counts(), LAST, KEPT)
        for number, key, live in found:
            bin_ = bin_of(value_of(key))
            with guard(live & ~(bin_ < last)):
                slot = atomic_add(self.words, bin_ + self.places.cursors)
                self.words.store_vector(slot * 2 + self.places.kept, [number.value, key.value])
        barrier()
        self.write_rows(kept)

    def is_row(self, number: Int) -> Bool:
        """Whether there is a row: a candidate, or one of those that a block has found."""
        wanted, room = self.shape.max_det, self.layout.room_each
        early = number < wanted
        slot = select(early, 0, select(number < self.layout.rows, number - wanted, 0))
        count = Int(self.words.load(slot // room + self.counts))
        return early | (slot % room < count)

    def write_rows(self, kept: Int) -> None:
        """The kept rows that are not beyond the wanted, each to its rank."""
        with loop(0, (kept + (self.threads - 1)) // self.threads) as state:
            item = state.index * self.threads + self.thread
            with guard(item < kept):
                number, key = (
                    Int(v) for v in self.words.load_vector(item * 2 + self.places.kept, 2)
                )
                at = self.record(number)
                box = [from_bits(v) for v in self.words.load_vector(at, 4)]
                category = from_bits(self.words.load(at + _CLASS))
                rank = self.rank(item, number, key)
                with guard(rank < self.shape.max_det):
                    self.maps.write_columns(rank, [*box, sigmoid(value_of(key)), category])

    def precedes(self, index: Int, other: Int) -> Bool:
        """By the anchors' largest, then the place among equals."""
        (place, _, _, top), (others, _, _, others_top) = (
            [Int(v) for v in self.words.load_vector(self.record(number) + 4, 4)]
            for number in (index, other)
        )
        return (others_top < top) | (top.equals(others_top) & (place < others))

    def take_level_exactly(self) -> None:
        """The best rows of the last level, instead of what has been sent."""
        late, workspace = self.layout.late, self.kernel.arguments[-1].buffer
        image = self.kernel.block_y * late.image + late.counters
        rounds = -(-self.shape.anchors // self.threads)
        with loop(0, rounds) as state:
            anchor = state.index * self.threads + self.thread
            with guard(anchor < self.shape.anchors):
                key = key_of(self.largest_alone(anchor))
                workspace.store(image + late.keys + anchor, key.value)
        barrier()
        _LevelSelection(self, workspace, image).emit()
        rest = late.stage_two.wanted
        with guard(self.thread.equals(0)):
            for block in range(self.tile.blocks):
                count = min(rest, self.layout.room_each)
                self.words.store(self.counts + block, Int.of(count).value)
                rest -= count
        barrier()

    def largest_alone(self, anchor: Int) -> Value:
        """An anchor's largest logit, by one thread."""
        row, width = self.maps.row_pointer(self.maps.logits, anchor), self.shape.vector
        with loop(0, self.shape.groups, carried=[f32(float("-inf"))]) as state:
            values = self.maps.read(row, state.index * width, width)
            state.advance([largest([state.carried[0], *values])])
        return state.results[0]


class _LevelSelection(ExactSelection):
    """The best of the last level, to the rows of shared memory that are for it."""

    def __init__(self, body: _Body, workspace: Buffer, image: Int) -> None:
        super().__init__(body.kernel, body.layout.late, body.maps, workspace, image)
        self.body = body

    def collect_candidates(self, lowest: Int) -> None:
        """See `ExactSelection`; all logits where there are no more anchors than are wanted."""
        few = self.shape.anchors < self.body.shape.max_det
        super().collect_candidates(key_of(f32(float("-inf"))) if few else lowest)

    def write(self, rank: Int, anchor: Int, category: Int, key: Int) -> None:
        """See `ExactSelection`."""
        shape, body = self.body.shape, self.body
        top = Int(self.workspace.load(self.keys + anchor))
        box = [bits(v) for v in self.maps.corners(anchor, self.maps.read_sides(anchor))]
        place = anchor * shape.classes + category + shape.max_det
        number = rank + shape.max_det
        body.store_record(number, box, place, bits(real(category)), (key, top))


def _comes_before(keys: tuple[Int, Int], others: tuple[Int, Int]) -> Bool:
    """Whether a logit comes before one of a finer level: it, or else its anchor's, is larger."""
    same = keys[0].equals(others[0])
    return (others[0] < keys[0]) | (same & (others[1] < keys[1]))


def _any(conditions: Sequence[Bool]) -> Bool:
    found = Bool(None, False)
    for condition in conditions:
        found = found | condition
    return found


__all__ = ["MergeShape", "MergeTile", "build", "default_tile", "parse", "tiles"]
