"""Top-k by bins, for logits that spread over them, as a network's do: a chain of short steps.

The best `max_det` logits of the best `max_det` anchors are the best `max_det` of all logits, where
equal ones are ordered by their anchors' largest, then the anchor's number, then the class: each of
the chosen anchors has a logit that comes before every one of the others. So a bin suffices that
the best anchors' largest logits reach: whatever lies in it or higher is a candidate. The
candidates' histogram, added up from the top, says both which of them to keep and where each bin
begins; within a bin, usually of a few, an element's rank is the number of those before it.

Lists are in no order and their order has no influence on the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from yolomlir.bindings import arith, gpu, ir, scf
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    guard,
    i32_type,
    loop,
    select,
)
from yolomlir.codegen.gpu.detect_histogram import Bins, sum_of, where
from yolomlir.codegen.gpu.detect_layout import (
    ANCHORS,
    BIN_BITS,
    CROWDED,
    DONE,
    FIRST,
    GROUPS,
    KEPT,
    LAST,
    LISTED,
    Layout,
    bin_of,
)
from yolomlir.codegen.gpu.detect_maps import Maps
from yolomlir.codegen.gpu.instructions import barrier, population_count
from yolomlir.codegen.gpu.selection import atomic_add, choose, key_of, value_of

_HELD = 4
"""Accesses to the anchors' bins whose results a thread keeps in registers."""
_EIGHT = 8
"""Anchors whose bins one access reads."""
_TOP_BITS = -0x7FFF8000
"""The highest bit of each half of a word."""

Value: TypeAlias = ir.Value


class BinSelection(Bins):
    """What the last block of an image does first. `emit` leaves DONE set where that sufficed.

    Every thread of the block must take part: there are barriers.
    """

    def __init__(
        self, kernel: KernelBuilder, layout: Layout, maps: Maps, workspace: Buffer, image: Int
    ) -> None:
        super().__init__(kernel, kernel.shared("int32", layout.fast_words), layout.places)
        self.layout, self.maps, self.workspace = layout, maps, workspace
        self.shape, self.image = layout.shape, image
        boxes = 4 * layout.anchor_limit
        self.boxes = kernel.shared("float32", boxes, offset_bytes=4 * layout.boxes)

    def emit(self) -> None:
        """All steps, as far as the lists' limits allow."""
        layout = self.layout
        counts = self.take_histogram()
        held = [self.read_bins(i) for i in range(self.rounds)] if self.rounds <= _HELD else None
        self.clear_histogram()
        first, listed = self.find_bin(counts, FIRST, LISTED)
        with guard(listed < layout.anchor_limit + 1):
            self.list_anchors(first, held)
            barrier()
            self.list_groups(first, listed)
            barrier()
            groups = Int(self.words.load(GROUPS))
            with guard(groups < layout.group_limit + 1):
                self.read_logits(first, groups)
                self.read_anchors(listed)
                barrier()
                self.finish(groups)

    def finish(self, groups: Int) -> None:
        """From the candidates to the detections, unless a bin is crowded."""
        last, kept = self.find_bin(self.read_counts(), LAST, KEPT)
        crowded = Int(self.words.load(CROWDED))
        with guard((kept < self.layout.anchor_limit + 1) & crowded.equals(0)):
            self.keep(groups, last)
            barrier()
            self.write_detections(kept)
            with guard(self.thread.equals(0)):
                self.words.store(DONE, Int.of(1).value)

    # ---- histograms

    def take_histogram(self) -> list[Int]:
        """This thread's bins of the anchors' histogram, which goes back to zero."""

        def take() -> list[Int]:
            first, zero = self.image + self.thread * self.each, [Int.of(0).value] * 4
            steps = range(0, self.each, 4)
            counts = [v for i in steps for v in self.workspace.load_vector(first + i, 4)]
            for i in steps:
                self.workspace.store_vector(first + i, zero)
            return [Int(v) for v in counts]

        return self.scan(take, self.each)

    # ---- lists

    def append(self, count: Int, end_word: int) -> Int:
        """The place of this lane's first of `count` elements of a list, which grows by those of
        the whole warp; all its lanes must call."""
        above, total = self.scan_warp(count)
        end = choose(
            (self.thread % 32).equals(0),
            lambda: atomic_add(self.words, end_word, total).value,
            lambda: Int.of(0).value,
            i32_type(),
        )
        lane_zero, width = arith.constant(i32_type(), 0), arith.constant(i32_type(), 32)
        return above + Int(gpu.shuffle(end, lane_zero, width, gpu.ShuffleMode.IDX)[0])

    def warp_below(self, first: Int, count: Int | int) -> Bool:
        """Whether a warp whose thread 0 would have element `first` has any below count."""
        return first - self.thread % 32 < count

    @property
    def rounds(self) -> int:
        """Accesses of a thread that read all anchors' bins."""
        return -(-self.layout.pair_words // (4 * self.threads))

    def read_bins(self, round_: Int | int) -> list[Int]:
        """The bins, plus one, of eight anchors, two a word; zeros beyond the last."""
        place = Int.of(round_) * self.threads + self.thread

        def read() -> list[Int]:
            pairs = self.image + self.layout.pairs + place * 4
            return [Int(v) for v in self.workspace.load_vector(pairs, 4)]

        return where(place < self.layout.pair_words // 4, read, 4)

    def list_anchors(self, first: Int, held: list[list[Int]] | None) -> None:
        """Every anchor whose largest logit is in the first bin or higher."""
        if held is not None:
            self.list_eights([(Int.of(i), words) for i, words in enumerate(held)], first)
            return
        with loop(0, self.rounds) as state:
            self.list_eights([(state.index, self.read_bins(state.index))], first)

    def list_eights(self, rounds: list[tuple[Int, list[Int]]], first: Int) -> None:
        """Those of some rounds' anchors, eight each. Adding 2^15 less the first bin sets a half's
        highest bit."""
        addend = (Int.of(0x8000 - 1) - first) * 0x10001
        found = []
        for _, words in rounds:
            hits = Int.of(0)
            for i, word in enumerate(words):
                hits = hits | (((word + addend) & _TOP_BITS) >> i)
            found.append((hits, population_count(hits)))
        place = self.append(sum_of([count for _, count in found]), ANCHORS) + self.layout.anchors
        for (round_, _), (hits, count) in zip(rounds, found, strict=True):
            eight = (round_ * self.threads + self.thread) * _EIGHT

            def store(bit: Int, place: Int, eight: Int = eight) -> None:
                anchor = eight + (Int.of(30) - (bit & 15) * 2) + (bit >> 4)
                self.words.store(place, anchor.value)

            _each_bit(hits, place, store)
            place = place + count

    def list_groups(self, first: Int, listed: Int) -> None:
        """The groups of the listed anchors' logits whose largest may reach the bin."""
        layout, each = self.layout, self.layout.words_each
        parts = layout.tile.lanes // each
        items = listed * parts
        with loop(0, (items + (self.threads - 1)) // self.threads) as state:
            item = state.index * self.threads + self.thread
            with guard(self.warp_below(item, items)):
                live = item < items
                slot, part = select(live, item, 0) // parts, item % parts
                anchor = Int(self.words.load(slot + layout.anchors))
                place = self.image + layout.words + anchor * layout.tile.lanes + part * each
                words = [Int(v) for v in self.workspace.load_vector(place, each)]
                self.list_fields(first, slot, part * each, words, live)

    def list_fields(
        self, first: Int, slot: Int, first_lane: Int, words: list[Int], live: Bool
    ) -> None:
        """The groups of some lanes."""
        layout, bits, lanes = self.layout, self.layout.field_bits, self.layout.tile.lanes
        bound, groups, each = first >> (BIN_BITS - bits), self.shape.groups, len(words)
        base = slot * groups + first_lane
        if layout.fields < layout.loads:
            self.list_lane(base, first_lane, live & ~(words[0] < bound))
            return
        hits = Int.of(0)
        for i in range(layout.loads):
            for w, word in enumerate(words):
                group = first_lane + (w + i * lanes)
                exists = group < groups if (i + 1) * lanes > groups else TRUE
                reached = ~(((word >> (bits * i)) & ((1 << bits) - 1)) < bound)
                hits = hits | select(reached & exists, 1 << (i * each + w), 0)
        hits = select(live, hits, 0)
        place = self.append(population_count(hits), GROUPS)

        def store(bit: Int, place: Int) -> None:
            with guard(place < layout.group_limit):
                code = base + bit % each + (bit // each) * lanes
                self.words.store(place + layout.groups, code.value)

        _each_bit(hits, place, store)

    def list_lane(self, base: Int, lane: Int, hit: Bool) -> None:
        """All groups of one lane, of which only the largest logit is known."""
        layout, lanes = self.layout, self.layout.tile.lanes
        count = select(hit, (Int.of(self.shape.groups + lanes - 1) - lane) // lanes, 0)
        place = self.append(count, GROUPS)
        with loop(0, count) as state, guard(place + state.index < layout.group_limit):
            code = base + state.index * lanes
            self.words.store(place + state.index + layout.groups, code.value)

    def read_anchors(self, listed: Int) -> None:
        """The listed anchors' keys and boxes: by the last threads, while the first read logits."""
        layout = self.layout
        with loop(0, (listed + (self.threads - 1)) // self.threads) as state:
            slot = (state.index + 1) * self.threads - 1 - self.thread
            with guard(slot < listed):
                anchor = Int(self.words.load(slot + layout.anchors))
                key = self.workspace.load(self.image + layout.keys + anchor)
                sides = self.maps.read_sides(anchor)
                self.words.store(slot + layout.anchor_keys, key)
                self.boxes.store_vector(slot * 4, sides)

    def read_logits(self, first: Int, groups: Int) -> None:
        """The keys of the listed groups' logits that reach the bin, 0 for those that do not, and
        their histogram."""
        layout, shape = self.layout, self.shape
        with loop(0, (groups + (self.threads - 1)) // self.threads) as state:
            item = state.index * self.threads + self.thread
            with guard(item < groups):
                code = Int(self.words.load(item + layout.groups))
                anchor = Int(self.words.load(code // shape.groups + layout.anchors))
                row = self.maps.row_pointer(self.maps.logits, anchor)
                channel = (code % shape.groups) * shape.vector
                keys: list[Value] = []
                for value in self.maps.read(row, channel, shape.vector):
                    bin_ = bin_of(value)
                    reached = ~(bin_ < first)
                    keys.append(select(reached, key_of(value), 0).value)
                    with guard(reached):
                        atomic_add(self.words, bin_ + layout.cursors)
                self.words.store_vector(item * shape.vector + layout.logits, keys)

    # ---- the end

    def keep(self, groups: Int, last: Int) -> None:
        """The candidates in the last bin or higher, to where their bins begin."""
        layout, shape = self.layout, self.shape
        with loop(0, (groups + (self.threads - 1)) // self.threads) as state:
            item = state.index * self.threads + self.thread
            with guard(item < groups):
                index = Int(self.words.load(item + layout.groups)) * shape.vector
                keys = self.words.load_vector(item * shape.vector + layout.logits, shape.vector)
                for i, key in enumerate(keys):
                    bin_ = bin_of(value_of(Int(key)))
                    with guard(~(bin_ < last) & ~Int(key).equals(0)):
                        place = atomic_add(self.words, bin_ + layout.cursors)
                        pair = [(index + i).value, key]
                        self.words.store_vector(place * 2 + layout.kept, pair)

    def write_detections(self, kept: Int) -> None:
        """The kept candidates that are not beyond the wanted, each to its rank's row."""
        layout, shape = self.layout, self.shape
        with loop(0, (kept + (self.threads - 1)) // self.threads) as state:
            item = state.index * self.threads + self.thread
            with guard(item < kept):
                index, key = (Int(v) for v in self.words.load_vector(item * 2 + layout.kept, 2))
                slot, category = index // shape.classes, index % shape.classes
                anchor = Int(self.words.load(slot + layout.anchors))
                rank = self.rank(item, index, key)
                with guard(rank < shape.max_det):
                    sides = self.boxes.load_vector(slot * 4, 4)
                    largest = value_of(Int(self.words.load(slot + layout.anchor_keys)))
                    self.maps.write_row(rank, anchor, category, value_of(key), largest, sides)

    def precedes(self, index: Int, other: Int) -> Bool:
        """Whether the first of two equal logits comes first: by their anchors' largest, then by
        the anchor, then by the class."""
        layout, classes = self.layout, self.shape.classes
        slots = index // classes, other // classes
        keys = [Int(self.words.load(slot + layout.anchor_keys)) for slot in slots]
        anchors = [Int(self.words.load(slot + layout.anchors)) for slot in slots]
        places = [a * classes + i % classes for a, i in zip(anchors, (index, other), strict=True)]
        return (keys[1] < keys[0]) | (keys[0].equals(keys[1]) & (places[0] < places[1]))


def _each_bit(bits: Int, place: Int, visit: Callable[[Int, Int], None]) -> None:
    """Call `visit(bit, place)` for every bit set, from the lowest up, at a place after the other.

    (A counted loop would be unrolled, for a bit or two.)
    """
    types = [i32_type()] * 2
    op = scf.WhileOp(types, [bits.value, place.value])
    test, body = op.before.blocks.append(*types), op.after.blocks.append(*types)
    with ir.InsertionPoint(test):
        state = list(test.arguments)
        scf.condition((~Int(state[0]).equals(0)).value, state)
    with ir.InsertionPoint(body):
        left, at = (Int(v) for v in body.arguments)
        below = left - 1
        visit(population_count(below & (left ^ -1)), at)
        scf.yield_([(left & below).value, (at + 1).value])


__all__ = ["BinSelection"]
