"""Two-stage top-k by radix, for logits that crowd into few bins: any values, in bounded time."""

from __future__ import annotations

from typing import TypeAlias

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu.builder import Bool, Buffer, Int, KernelBuilder, guard, loop, select
from yolomlir.codegen.gpu.detect_layout import CANDIDATES, STATE_WORDS, Layout
from yolomlir.codegen.gpu.detect_maps import Maps
from yolomlir.codegen.gpu.instructions import barrier
from yolomlir.codegen.gpu.selection import Selection, Streamed, atomic_add, key_of, value_of

_LOADS = 8
"""Groups of logits that a thread reads side by side."""

Value: TypeAlias = ir.Value


class ExactSelection:
    """What the last block of an image does where bins do not tell enough values apart.

    The best `max_det` anchors, then the best `max_det` of their logits (those below the last
    anchor's largest cannot be among them, and are dropped first), ordered, decoded and written.
    """

    def __init__(
        self, kernel: KernelBuilder, layout: Layout, maps: Maps, workspace: Buffer, image: Int
    ) -> None:
        self.kernel, self.layout, self.maps, self.workspace = kernel, layout, maps, workspace
        self.shape, self.thread, self.threads = layout.shape, kernel.thread, kernel.threads
        self.keys = image + layout.keys
        self.candidates = image + layout.candidates
        self.state = kernel.shared("int32", STATE_WORDS)
        self.ordered = kernel.shared("int32", self.shape.max_det, offset_bytes=4 * STATE_WORDS)

    def emit(self) -> None:
        """All of it. Every thread of the block must take part."""
        last_anchor = self.choose_anchors()
        self.collect_candidates(last_anchor)
        self.write_detections()

    def choose_anchors(self) -> Int:
        """Stage one: the best anchors, in order, to shared memory; the key of the last."""
        offset = 4 * self.layout.selection
        selection = Selection(self.kernel, self.layout.stage_one, offset_bytes=offset)
        elements = Streamed(
            lambda place: (place, Int(self.workspace.load(self.keys + place))),
            Int.of(self.shape.anchors), self.thread, self.threads, unroll=4,
        )  # fmt: skip
        with guard(self.thread.equals(0)):
            self.state.store(CANDIDATES, Int.of(0).value)
        selection.clear()
        barrier()
        last = selection.find(elements)
        selection.order(lambda rank, anchor, _: self.ordered.store(rank, anchor.value))
        barrier()
        return last

    def collect_candidates(self, lowest: Int) -> None:
        """The logits of the chosen anchors that reach the last anchor's best, to the workspace."""
        shape, threads, groups = self.shape, self.threads, self.shape.groups
        items = shape.max_det * groups
        rounds = -(-items // threads)
        batch, bound = min(rounds, _LOADS), value_of(lowest)
        with loop(0, -(-rounds // batch)) as state:
            first = state.index * (batch * threads) + self.thread
            found: list[tuple[Bool, Int, list[Value]]] = []
            for i in range(batch):
                item = first + i * threads
                live = item < items
                item = select(live, item, 0)
                rank, channel = item // groups, (item % groups) * shape.vector
                row = self.maps.row_pointer(self.maps.logits, Int(self.ordered.load(rank)))
                values = self.maps.read(row, channel, shape.vector)
                found.append((live, rank * shape.classes + channel, values))
            for live, index, values in found:
                with guard(live & _reaches(largest(values), bound)):
                    for i, value in enumerate(values):
                        self.keep_candidate(index + i, value, bound)
        barrier()

    def keep_candidate(self, index: Int, value: Value, bound: Value) -> None:
        """Append a candidate, in no order, if it is high enough."""
        with guard(_reaches(value, bound)):
            place = atomic_add(self.state, CANDIDATES)
            pair = [index.value, key_of(value).value]
            self.workspace.store_vector(self.candidates + place * 2, pair)

    def write_detections(self) -> None:
        """Stage two: the best candidates, decoded, in order."""
        offset = 4 * self.layout.selection
        selection = Selection(self.kernel, self.layout.stage_two, offset_bytes=offset)

        def read(place: Int) -> tuple[Int, Int]:
            index, key = self.workspace.load_vector(self.candidates + place * 2, 2)
            return Int(index), Int(key)

        def write(rank: Int, index: Int, key: Int) -> None:
            anchor = Int(self.ordered.load(index // self.shape.classes))
            self.write(rank, anchor, index % self.shape.classes, key)

        count = Int(self.state.load(CANDIDATES))
        selection.clear()
        barrier()
        selection.find(Streamed(read, count, self.thread, self.threads))
        selection.order(write)

    def write(self, rank: Int, anchor: Int, category: Int, key: Int) -> None:
        """One detection, by its anchor, class and key, to where it belongs."""
        largest = value_of(Int(self.workspace.load(self.keys + anchor)))
        sides = self.maps.read_sides(anchor)
        self.maps.write_row(rank, anchor, category, value_of(key), largest, sides)


def _reaches(value: Value, bound: Value) -> Bool:
    """Whether a logit is at least the bound, or NaN, which the keys order last."""
    return Bool(arith.cmpf(arith.CmpFPredicate.UGE, value, bound))


def largest(values: list[Value]) -> Value:
    """The maximum, by halves."""
    while len(values) > 1:
        pairs = [arith.maximumf(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


__all__ = ["ExactSelection", "largest"]
