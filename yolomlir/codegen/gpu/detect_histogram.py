"""A histogram of logits' bins in shared memory: the bin that the wanted ones reach, and ranks.

Added up from the top, the histogram says which elements to keep and where each bin begins; within a
bin, usually of a few, an element's rank is the number of those before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from yolomlir.bindings import arith, ir, scf
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
from yolomlir.codegen.gpu.detect_layout import BINS, CROWDED, LAST, BinPlaces, bin_of
from yolomlir.codegen.gpu.instructions import barrier, shuffle_xor
from yolomlir.codegen.gpu.selection import value_of

_SCANNERS = 256
"""Threads that add up a histogram."""
_LONGEST = 128
"""Elements of one bin that are ranked by comparing each with each."""

Value: TypeAlias = ir.Value


class Bins(ABC):
    """The histogram at `places` of a block's shared `words`, and the kept elements by bins.

    Every thread of the block must take part: there are barriers.
    """

    def __init__(self, kernel: KernelBuilder, words: Buffer, places: BinPlaces) -> None:
        self.kernel, self.words, self.places = kernel, words, places
        self.thread, self.threads = kernel.thread, kernel.threads
        self.scanners = min(_SCANNERS, self.threads)
        self.each = BINS // self.scanners

    @abstractmethod
    def precedes(self, index: Int, other: Int) -> Bool:
        """Whether the first of two equal logits comes first, by what the kept hold of them."""

    def clear_histogram(self) -> None:
        """Zero the histogram and the word behind; a barrier must follow."""
        zero, words = Int.of(0).value, BINS + 4
        for first in range(0, words, 4 * self.threads):
            place = self.thread * 4 + first
            with guard(place < words if first + 4 * self.threads > words else TRUE):
                self.words.store_vector(place + self.places.cursors, [zero] * 4)

    def scan(self, code: Callable[[], Sequence[Int]], count: int) -> list[Int]:
        """What code gives on the threads that add up a histogram; zeros on the others."""
        return where(self.thread < self.scanners, code, count)

    def read_counts(self) -> list[Int]:
        """This thread's bins of the candidates' histogram."""

        def read() -> list[Int]:
            first, steps = self.thread * self.each + self.places.cursors, range(0, self.each, 4)
            return [Int(v) for i in steps for v in self.words.load_vector(first + i, 4)]

        return self.scan(read, self.each)

    def find_bin(self, counts: list[Int], bin_word: int, count_word: int) -> tuple[Int, Int]:
        """The highest bin so that `max_det` elements are in it or higher; how many these are.

        For the candidates, where each bin begins, the highest first, replaces their histogram.
        """
        totals = self.places.totals

        def within_warp() -> list[Int]:
            above, total = self.scan_warp(sum_of(counts))
            with guard((self.thread % 32).equals(0)):
                self.words.store(self.thread // 32 + totals, total.value)
            return [above]

        above = self.scan(within_warp, 1)[0]
        barrier()
        with guard(self.thread < self.scanners):
            running = above
            warps = range(self.scanners // 32)
            width = min(4, len(warps))
            shares = [v for i in warps[::4] for v in self.words.load_vector(totals + i, width)]
            for warp in warps[1:]:
                running = running + select(self.thread < 32 * warp, Int(shares[warp]), 0)
            begins = self.note_bin(counts, running, bin_word, count_word)
            if bin_word == LAST:
                first = self.thread * self.each + self.places.cursors
                for i in range(0, self.each, 4):
                    self.words.store_vector(first + i, begins[i : i + 4])
        barrier()
        return Int(self.words.load(bin_word)), Int(self.words.load(count_word))

    def note_bin(
        self, counts: list[Int], running: Int, bin_word: int, count_word: int
    ) -> list[Value]:
        """Where this thread's bins begin, `running` elements being in higher ones; to the state
        what was looked for, by the thread that has it."""
        wanted, begins = self.places.wanted, list[Value]()
        found, crowded = Bool(None, False), Bool(None, False)
        place, reached = Int.of(0), Int.of(0)
        for i in reversed(range(self.each)):
            begins.insert(0, running.value)
            following, open_ = running + counts[i], running < wanted
            hit = open_ & ~(following < wanted)
            crowded = crowded | (open_ & ~(counts[i] < _LONGEST + 1))
            place = select(hit, self.thread * self.each + i, place)
            reached = select(hit, following, reached)
            found, running = found | hit, following
        with guard(found):
            self.words.store(bin_word, place.value)
            self.words.store(count_word, reached.value)
        if bin_word == LAST:
            with guard(crowded):
                self.words.store(CROWDED, Int.of(1).value)
        return begins

    def scan_warp(self, value: Int) -> tuple[Int, Int]:
        """The sum of a value over the lanes above this one, and over all."""
        above, total = Int.of(0), value
        for step in (1, 2, 4, 8, 16):
            other = Int(shuffle_xor(total.value, step))
            above = above + select((self.thread & step).equals(0), other, 0)
            total = total + other
        return above, total

    def rank(self, item: Int, index: Int, key: Int) -> Int:
        """How many kept candidates come before one.

        When all are placed, a bin's cursor is its end, and where the next higher one ended is its
        beginning.
        """
        cursor = bin_of(value_of(key)) + self.places.cursors
        begin, end = Int(self.words.load(cursor + 1)), Int(self.words.load(cursor))
        kept = self.places.kept
        with loop(begin, end, carried=[begin, Int.of(0)]) as state:
            rank, equal = (Int.of(v) for v in state.carried)
            other = Int(self.words.load(state.index * 2 + kept + 1))
            state.advance([rank + count_of([key < other]), equal + count_of([other.equals(key)])])
        rank, equal = (Int.of(v) for v in state.results)

        def break_ties() -> list[Int]:
            with loop(begin, end, carried=[rank]) as state:
                other, others_key = self.words.load_vector(state.index * 2 + kept, 2)
                tied = Int(others_key).equals(key) & ~state.index.equals(item)
                earlier = tied & self.precedes(Int(other), index)
                state.advance([Int.of(state.carried[0]) + count_of([earlier])])
            return [Int.of(state.results[0])]

        return where(Int.of(1) < equal, break_ties, 1, [rank])[0]  # one is itself


def count_of(conditions: Sequence[Bool]) -> Int:
    """How many hold."""
    total = Int.of(0)
    for condition in conditions:
        total = total + Int(arith.extui(i32_type(), condition.value))
    return total


def sum_of(counts: Sequence[Int]) -> Int:
    """The sum of integers."""
    total = Int.of(0)
    for count in counts:
        total = total + count
    return total


def where(
    condition: Bool, code: Callable[[], Sequence[Int]], count: int, other: Sequence[Int] = ()
) -> list[Int]:
    """The integers that code gives on the threads where the condition holds; `other`, or zeros,
    elsewhere."""
    if condition.known is True:
        return list(code())
    op = scf.IfOp(condition.value, [i32_type()] * count, has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_([v.value for v in code()])
    with ir.InsertionPoint(op.else_block):
        scf.yield_([v.value for v in other] or [Int.of(0).value] * count)
    return [Int(v) for v in op.results_]


__all__ = ["Bins", "count_of", "sum_of", "where"]
