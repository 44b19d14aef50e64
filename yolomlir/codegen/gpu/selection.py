"""Choosing and ordering the largest of many keys, by one block in shared memory.

Keys are unsigned 32-bit integers; an element's index breaks ties, the lower first, so what is
chosen and its order are functions of the values alone, whatever the threads' timing. The k-th
largest key is found by radix, eight bits a pass; then, only where more elements have that key
than are wanted, the index of the last of them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from yolomlir.bindings import arith, ir, llvm, memref, scf
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    f32,
    guard,
    i32_type,
    loop,
    select,
)
from yolomlir.codegen.gpu.instructions import (
    barrier,
    bits,
    from_bits,
    reciprocal,
    shuffle_xor,
)

_RADIX_BITS = 8
_BINS = 1 << _RADIX_BITS
_KEY_PASSES = 32 // _RADIX_BITS
_PAIR = 2
"""Words of an element in shared memory: its inverted index, its key."""
_SIGN_BIT = -(1 << 31)


# ---- single operations --------------------------------------------------------------------------


def atomic_add(buffer: Buffer, offset: Int | int, value: Int | int = 1) -> Int:
    """Add to a word of memory, indivisibly; its value before."""
    index = Int.of(offset).index()
    kind = arith.AtomicRMWKind.addi
    return Int(memref.atomic_rmw(kind, Int.of(value).value, buffer.memref, [index]))


def atomic_maximum(buffer: Buffer, offset: Int | int, value: Int) -> None:
    """Raise a word of memory to an unsigned value, indivisibly."""
    kind = arith.AtomicRMWKind.maxu
    memref.atomic_rmw(kind, value.value, buffer.memref, [Int.of(offset).index()])


def memory_fence() -> None:
    """Order this thread's accesses before and after, for every thread of the GPU."""
    llvm.fence(llvm.AtomicOrdering.acq_rel, syncscope="device")


def key_of(x: ir.Value) -> Int:
    """The unsigned key with the order of a float32: negatives inverted, others' sign bit set.

    -0 becomes 0 first, so that they are equal.
    """
    raw = bits(arith.addf(x, f32(0.0)))
    sign = arith.shrsi(raw, arith.constant(i32_type(), 31))
    mask = arith.ori(sign, arith.constant(i32_type(), _SIGN_BIT))
    return Int(arith.xori(raw, mask))


def value_of(key: Int) -> ir.Value:
    """The float32 of a key; the inverse of `key_of`."""
    inverted = arith.xori(key.value, arith.constant(i32_type(), -1))
    sign = arith.shrsi(inverted, arith.constant(i32_type(), 31))
    mask = arith.ori(sign, arith.constant(i32_type(), _SIGN_BIT))
    return from_bits(arith.xori(key.value, mask))


def choose(
    condition: Bool, yes: Callable[[], ir.Value], no: Callable[[], ir.Value], type_: ir.Type
) -> ir.Value:
    """The result of one of two pieces of code, each lane running its own."""
    if condition.known is not None:
        return yes() if condition.known else no()
    op = scf.IfOp(condition.value, [type_], has_else=True)
    for block, code in ((op.then_block, yes), (op.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_([code()])
    return op.results_[0]


# ---- elements to choose from --------------------------------------------------------------------


Visitor = Callable[[Int, Int, Bool], None]
"""(index, key, whether there is such an element)"""


class Elements(Protocol):
    """A list of keys that the threads of a block go through, each its share."""

    def each(self, visit: Visitor) -> None:
        """Call `visit` for code that handles one element a thread, as often as it takes."""


@dataclass(frozen=True)
class Held:
    """Elements that each thread keeps in registers: (index, key, whether it exists)."""

    elements: Sequence[tuple[Int, Int, Bool]]

    def each(self, visit: Visitor) -> None:
        """See `Elements`."""
        for index, key, live in self.elements:
            visit(index, key, live)


@dataclass(frozen=True)
class Streamed:
    """Elements read from memory every time: `read(position)` gives index and key."""

    read: Callable[[Int], tuple[Int, Int]]
    count: Int
    thread: Int
    threads: int
    unroll: int = 1

    def each(self, visit: Visitor) -> None:
        """See `Elements`."""
        step = self.threads * self.unroll
        with loop(0, (self.count + (step - 1)) // step) as state:
            first = state.index * step + self.thread
            places = [first + i * self.threads for i in range(self.unroll)]
            lives = [place < self.count for place in places]
            loaded = [self.read(select(live, p, 0)) for live, p in zip(lives, places, strict=True)]
            for live, (index, key) in zip(lives, loaded, strict=True):
                visit(index, key, live)


# ---- selection ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionSize:
    """wanted: elements to choose. indices: a bound of the elements' indices."""

    wanted: int
    indices: int

    @property
    def index_passes(self) -> int:
        """Passes over the index."""
        return max(1, -(-(self.indices - 1).bit_length() // _RADIX_BITS))

    @property
    def index_mask(self) -> int:
        """What inverts an index within the bits of its passes."""
        return (1 << (_RADIX_BITS * self.index_passes)) - 1

    @property
    def cursors(self) -> int:
        """The word where the buckets begin, after the state and the histograms."""
        return _STATE_WORDS + _BINS * (_KEY_PASSES + self.index_passes)

    @property
    def chosen(self) -> int:
        """The word where the chosen elements begin, after the buckets and one that stays zero."""
        return self.cursors + _BUCKETS + 4

    @property
    def sorted(self) -> int:
        """The word where the elements in the order of their buckets begin."""
        return self.chosen + _PAIR * self.wanted

    @property
    def words(self) -> int:
        """Of shared memory, a multiple of 16 bytes."""
        return -(-(self.sorted + _PAIR * self.wanted) // 4) * 4


_BUCKETS = 512
_STATE_WORDS = 8
_PREFIX, _REMAINING, _EQUAL, _TIE, _FILLED, _LARGEST, _LONGEST = range(7)


@dataclass(frozen=True)
class _Digits:
    """A word of the elements to search by: its histograms, its digits, itself of (index, key), and
    which keys count."""

    histogram: int
    passes: int
    word: Callable[[Int, Int], Int]
    eligible: Callable[[Int], Bool]


class Selection:
    """The `wanted` largest elements of a list, found and ordered by a whole block.

    All threads of the block must call the methods together: they hold barriers.
    """

    def __init__(self, kernel: KernelBuilder, size: SelectionSize, *, offset_bytes: int) -> None:
        self.kernel, self.size = kernel, size
        self.thread, self.threads = kernel.thread, kernel.threads
        self.words = kernel.shared("int32", size.words, offset_bytes=offset_bytes)
        self.histograms = _STATE_WORDS
        self.last = Int.of(0)

    def clear(self) -> None:
        """Zero the shared memory; a barrier must follow before `find`."""
        zero, words = Int.of(0).value, self.size.words
        for first in range(0, words, 4 * self.threads):
            place = self.thread * 4 + first
            with guard(place < words if first + 4 * self.threads > words else TRUE):
                self.words.store_vector(place, [zero] * 4)

    def find(self, elements: Elements) -> Int:
        """Choose; the key of the last chosen. `order` may follow."""
        keys = _Digits(0, _KEY_PASSES, lambda _, key: key, lambda _: TRUE)
        self.last, remaining = self.search(elements, keys, Int.of(self.size.wanted))
        equal = Int(self.words.load(_EQUAL))
        with guard(remaining < equal):
            self.find_tie(elements, remaining)
        self.collect(elements)
        return self.last

    def find_tie(self, elements: Elements, remaining: Int) -> None:
        """Of the elements with the last key, the inverted index of the last that is chosen."""
        last = self.last
        indices = _Digits(
            _KEY_PASSES,
            self.size.index_passes,
            lambda index, _: self.inverted(index),
            lambda key: key.equals(last),
        )
        tie, _ = self.search(elements, indices, remaining)
        with guard(self.thread.equals(0)):
            self.words.store(_TIE, tie.value)
        barrier()

    def inverted(self, index: Int) -> Int:
        """An index so that a lower one is larger."""
        return index ^ self.size.index_mask

    def search(self, elements: Elements, digits: _Digits, remaining: Int) -> tuple[Int, Int]:
        """The `remaining`-th largest word, and how many are wanted of those that equal it.

        A pass counts the values of a digit among the elements with the digits found so far (the
        bits in `mask` of `prefix`).
        """
        zero = Int.of(0)
        with loop(0, digits.passes, carried=[zero, zero, remaining]) as state:
            mask, prefix, wanted = (Int.of(v) for v in state.carried)
            shift = Int.of(_RADIX_BITS * (digits.passes - 1)) - state.index * _RADIX_BITS
            base = (state.index + digits.histogram) * _BINS + self.histograms

            def visit(index: Int, key: Int, live: Bool) -> None:
                word = digits.word(index, key)
                live = live & ((word ^ prefix) & mask).equals(0) & digits.eligible(key)
                with guard(live):
                    atomic_add(self.words, ((word >> shift) & (_BINS - 1)) + base)

            elements.each(visit)
            barrier()
            with guard(self.thread < 32):
                self.narrow(base, prefix, shift, wanted)
            barrier()
            prefix, wanted = Int(self.words.load(_PREFIX)), Int(self.words.load(_REMAINING))
            state.advance([mask | (Int.of(_BINS - 1) << shift), prefix, wanted])
        return Int.of(state.results[1]), Int.of(state.results[2])

    def narrow(self, base: Int, prefix: Int, shift: Int, remaining: Int) -> None:
        """Find the digit in which the `remaining`-th largest lies; store what is known then.

        One warp adds the bins of a histogram up from the top, eight a lane.
        """
        first = self.thread * 8 + base
        bins = [Int(v) for part in (0, 4) for v in self.words.load_vector(first + part, 4)]
        total = bins[0]
        for count in bins[1:]:
            total = total + count
        running = self.sum_of_higher_lanes(total)
        digit, above, equal, found = Int.of(0), Int.of(0), Int.of(0), Bool(None, False)
        for i in reversed(range(8)):
            following = running + bins[i]
            hit = (running < remaining) & (following >= remaining)
            digit, above = select(hit, self.thread * 8 + i, digit), select(hit, running, above)
            equal, found = select(hit, bins[i], equal), found | hit
            running = following
        with guard(found):
            self.words.store(_PREFIX, (prefix | (digit << shift)).value)
            self.words.store(_REMAINING, (remaining - above).value)
            self.words.store(_EQUAL, equal.value)

    def sum_of_higher_lanes(self, total: Int) -> Int:
        """The sum of a value over the lanes above this one."""
        above = Int.of(0)
        for step in (1, 2, 4, 8, 16):
            other = Int(shuffle_xor(total.value, step))
            above = select((self.thread & step).equals(0), above + other, above)
            total = total + other
        return above

    def collect(self, elements: Elements) -> None:
        """The chosen elements to shared memory, in no order."""
        key, tie = self.last, Int(self.words.load(_TIE))

        def visit(index: Int, own: Int, live: Bool) -> None:
            inverted = self.inverted(index)
            among_ties = own.equals(key) & (inverted >= tie)
            with guard(live & ((key < own) | among_ties)):
                place = atomic_add(self.words, _FILLED)
                with guard(place < self.size.wanted):
                    pair = [inverted.value, own.value]
                    self.words.store_vector(place * _PAIR + self.size.chosen, pair)
                atomic_maximum(self.words, _LARGEST, own)

        elements.each(visit)
        barrier()

    def order(self, emit: Callable[[Int, Int, Int], None]) -> None:
        """Call `emit(rank, index, key)` for one chosen element a thread, until all had a turn.

        The elements are thrown into buckets of equal width in value between the smallest and the
        largest; an element's rank is the number of those in higher buckets and of those before it
        in its own, usually a handful.
        """
        items = [self.item(first) for first in range(0, self.size.wanted, self.threads)]
        for item in items:
            with guard(item.live):
                atomic_add(self.words, item.bucket + self.size.cursors)
        barrier()
        with guard(self.thread < 32):
            self.place_buckets()
        barrier()
        for item in items:
            with guard(item.live):
                place = atomic_add(self.words, item.bucket + self.size.cursors)
                pair = [item.inverted, item.key]
                self.words.store_vector(place * _PAIR + self.size.sorted, pair)
        barrier()
        for item in items:
            rank = self.rank(item)
            with guard(item.live):
                emit(rank, self.inverted(Int(item.inverted)), Int(item.key))

    def item(self, first: int) -> _Item:
        """One of the chosen elements, this thread's of those from `first` on."""
        element, wanted = self.thread + first, self.size.wanted
        live = element < wanted if first + self.threads > wanted else TRUE
        place = select(live, element, 0) * _PAIR + self.size.chosen
        inverted, key = self.words.load_vector(place, 2)
        return _Item(live, inverted, key, self.bucket(Int(key)))

    def bucket(self, key: Int) -> Int:
        """The bucket of a chosen key; it never falls as the key rises.

        Infinities count as 1e30; a span too small to divide makes one bucket of all.
        """
        low, high = _finite(self.last), _finite(Int(self.words.load(_LARGEST)))
        span = arith.subf(high, low)
        wide = arith.cmpf(arith.CmpFPredicate.OGT, span, f32(1.0e-30))
        scale = arith.select(wide, arith.mulf(f32(_BUCKETS - 1.0), reciprocal(span)), f32(0.0))
        place = arith.mulf(arith.subf(_finite(key), low), scale)
        place = arith.minnumf(arith.maxnumf(place, f32(0.0)), f32(_BUCKETS - 1.0))
        return Int(arith.fptosi(i32_type(), place))

    def place_buckets(self) -> None:
        """Counts of the buckets to the places where each begins, the highest first, by one warp."""
        each = _BUCKETS // 32
        first = self.thread * each + self.size.cursors
        words = [v for i in range(0, each, 4) for v in self.words.load_vector(first + i, 4)]
        counts = [Int(word) for word in words]
        total, longest = counts[0], counts[0]
        for count in counts[1:]:
            total = total + count
            longest = select(longest < count, count, longest)
        running = self.sum_of_higher_lanes(total)
        places: list[ir.Value] = []
        for count in reversed(counts):
            places.insert(0, running.value)
            running = running + count
        for i in range(0, each, 4):
            self.words.store_vector(first + i, places[i : i + 4])
        for step in (1, 2, 4, 8, 16):
            other = Int(shuffle_xor(longest.value, step))
            longest = select(longest < other, other, longest)
        with guard(self.thread.equals(0)):
            self.words.store(_LONGEST, longest.value)

    def rank(self, item: _Item) -> Int:
        """How many chosen elements come before one.

        When all are thrown, a bucket's cursor is its end, and where the next higher one ended is
        its beginning.
        """
        cursor = item.bucket + self.size.cursors
        begin, end = Int(self.words.load(cursor + 1)), Int(self.words.load(cursor))
        mine = _wide(item.key, item.inverted)
        with loop(0, Int(self.words.load(_LONGEST)), carried=[begin]) as state:
            place = begin + state.index
            inside = place < end
            place = select(inside, place, begin) * _PAIR + self.size.sorted
            low, high = self.words.load_vector(place, 2)
            before = arith.cmpi(arith.CmpIPredicate.ugt, _wide(high, low), mine)
            counted = arith.extui(i32_type(), (inside & Bool(before)).value)
            state.advance([Int.of(state.carried[0]) + Int(counted)])
        return Int.of(state.results[0])


@dataclass(frozen=True)
class _Item:
    """A chosen element of a thread, where it has one."""

    live: Bool
    inverted: ir.Value
    key: ir.Value
    bucket: Int


def _finite(key: Int) -> ir.Value:
    """A key's value, between -1e30 and 1e30."""
    return arith.minnumf(arith.maxnumf(value_of(key), f32(-1.0e30)), f32(1.0e30))


def _wide(high: ir.Value, low: ir.Value) -> ir.Value:
    """A 64-bit word from two."""
    i64 = ir.IntegerType.get_signless(64)
    shifted = arith.shli(arith.extui(i64, high), arith.constant(i64, 32))
    return arith.ori(shifted, arith.extui(i64, low))


__all__ = [
    "Elements",
    "Held",
    "Selection",
    "SelectionSize",
    "Streamed",
    "atomic_add",
    "key_of",
    "memory_fence",
    "value_of",
]
