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

from yolomlir.bindings import arith, ir, memref, nvvm, scf
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
from yolomlir.codegen.gpu.instructions import barrier, bits, from_bits, shuffle_xor

_RADIX_BITS = 8
_BINS = 1 << _RADIX_BITS
_KEY_PASSES = 32 // _RADIX_BITS
_PAIR = 2
"""Words of an element in shared memory: its inverted index, its key."""
_SIGN_BIT = -(1 << 31)
_UNROLL = 4


# ---- single operations --------------------------------------------------------------------------


def atomic_add(buffer: Buffer, offset: Int | int, value: int = 1) -> Int:
    """Add to a word of memory, indivisibly; its value before."""
    index = Int.of(offset).index()
    kind = arith.AtomicRMWKind.addi
    return Int(memref.atomic_rmw(kind, Int.of(value).value, buffer.memref, [index]))


def memory_fence() -> None:
    """Order this thread's accesses before and after, for every thread of the GPU."""
    nvvm.memory_barrier(ir.Attribute.parse("#nvvm.mem_scope<gpu>"))


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
    """wanted: elements to choose. indices: a bound of the elements' indices. threads: of the
    block."""

    wanted: int
    indices: int
    threads: int

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share the comparisons of one element."""
        lanes = 1
        while lanes < 32 and lanes * 2 * self.wanted <= self.threads:
            lanes *= 2
        return lanes

    @property
    def round(self) -> int:
        """Elements that those threads compare with in one round."""
        return 2 * self.lanes * _UNROLL

    @property
    def index_passes(self) -> int:
        """Passes over the index."""
        return max(1, -(-(self.indices - 1).bit_length() // _RADIX_BITS))

    @property
    def index_mask(self) -> int:
        """What inverts an index within the bits of its passes."""
        return (1 << (_RADIX_BITS * self.index_passes)) - 1

    @property
    def slots(self) -> int:
        """Chosen elements with what fills up the last round of the ordering."""
        return -(-self.wanted // self.round) * self.round

    @property
    def words(self) -> int:
        """Of shared memory: state, histograms, and the chosen elements."""
        return _STATE_WORDS + _BINS * (_KEY_PASSES + self.index_passes) + _PAIR * self.slots


_STATE_WORDS = 8
_PREFIX, _REMAINING, _EQUAL, _TIE, _FILLED = range(5)


class Selection:
    """The `wanted` largest elements of a list, found and ordered by a whole block.

    All threads of the block must call the methods together: they hold barriers.
    """

    def __init__(self, kernel: KernelBuilder, size: SelectionSize, *, offset_bytes: int) -> None:
        self.kernel, self.size = kernel, size
        self.thread, self.threads = kernel.thread, kernel.threads
        self.words = kernel.shared("int32", size.words, offset_bytes=offset_bytes)
        self.histograms = _STATE_WORDS
        self.chosen = _STATE_WORDS + _BINS * (_KEY_PASSES + size.index_passes)

    def clear(self) -> None:
        """Zero the shared memory; a barrier must follow before `find`."""
        zero, words = Int.of(0).value, self.size.words
        for first in range(0, words, 4 * self.threads):
            place = self.thread * 4 + first
            with guard(place < words if first + 4 * self.threads > words else TRUE):
                self.words.store_vector(place, [zero] * 4)

    def find(self, elements: Elements) -> Int:
        """Choose; the key of the last chosen. `order` may follow."""
        prefix, remaining = Int.of(0), Int.of(self.size.wanted)
        for number in range(_KEY_PASSES):
            shift = 32 - _RADIX_BITS * (number + 1)
            self.count_digits(elements, number, lambda _, key: key, prefix, shift, lambda _: TRUE)
            prefix, remaining = self.narrow(number, prefix, shift, remaining)
        equal = Int(self.words.load(_EQUAL))
        with guard(remaining < equal):
            self.find_tie(elements, prefix, remaining)
        self.collect(elements, prefix)
        return prefix

    def find_tie(self, elements: Elements, key: Int, remaining: Int) -> None:
        """Of the elements with the last key, the inverted index of the last that is chosen."""
        prefix = Int.of(0)
        for i in range(self.size.index_passes):
            number, shift = _KEY_PASSES + i, _RADIX_BITS * (self.size.index_passes - 1 - i)
            self.count_digits(
                elements,
                number,
                lambda index, _: self.inverted(index),
                prefix,
                shift,
                lambda other: other.equals(key),
                top=i == 0,
            )
            prefix, remaining = self.narrow(number, prefix, shift, remaining)
        with guard(self.thread.equals(0)):
            self.words.store(_TIE, prefix.value)
        barrier()

    def inverted(self, index: Int) -> Int:
        """An index so that a lower one is larger."""
        return index ^ self.size.index_mask

    def count_digits(
        self,
        elements: Elements,
        number: int,
        word: Callable[[Int, Int], Int],
        prefix: Int,
        shift: int,
        eligible: Callable[[Int], Bool],
        *,
        top: bool = False,
    ) -> None:
        """Histogram `number` of the digit at `shift` of elements with the digits found so far."""
        base = self.histograms + _BINS * number
        top = top or number == 0

        def visit(index: Int, key: Int, live: Bool) -> None:
            value = word(index, key)
            if not top:
                live = live & ((value ^ prefix) >> (shift + _RADIX_BITS)).equals(0)
            with guard(live & eligible(key)):
                atomic_add(self.words, ((value >> shift) & (_BINS - 1)) + base)

        elements.each(visit)
        barrier()

    def narrow(self, number: int, prefix: Int, shift: int, remaining: Int) -> tuple[Int, Int]:
        """Find the digit in which the `remaining`-th largest lies; the new prefix and remainder.

        One warp adds the bins up from the top, eight a lane.
        """
        base = self.histograms + _BINS * number
        with guard(self.thread < 32):
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
        barrier()
        return Int(self.words.load(_PREFIX)), Int(self.words.load(_REMAINING))

    def sum_of_higher_lanes(self, total: Int) -> Int:
        """The sum of a value over the lanes above this one."""
        above = Int.of(0)
        for step in (1, 2, 4, 8, 16):
            other = Int(shuffle_xor(total.value, step))
            above = select((self.thread & step).equals(0), above + other, above)
            total = total + other
        return above

    def collect(self, elements: Elements, key: Int) -> None:
        """The chosen elements to shared memory, in no order."""
        tie = Int(self.words.load(_TIE))

        def visit(index: Int, own: Int, live: Bool) -> None:
            inverted = self.inverted(index)
            among_ties = own.equals(key) & (inverted >= tie)
            with guard(live & ((key < own) | among_ties)):
                place = atomic_add(self.words, _FILLED)
                with guard(place < self.size.wanted):
                    pair = [inverted.value, own.value]
                    self.words.store_vector(place * _PAIR + self.chosen, pair)

        elements.each(visit)
        barrier()

    def order(self, emit: Callable[[Int, Int, Int], None]) -> None:
        """Call `emit(rank, index, key)` for one chosen element a thread, until all had a turn.

        An element's rank is the number of those before it; a few lanes share the comparisons.
        """
        wanted, lanes = self.size.wanted, self.size.lanes
        part, own, each = self.thread % lanes, self.thread // lanes, self.threads // lanes
        for first in range(0, wanted, each):
            element = own + first
            live = element < wanted if first + each > wanted else TRUE
            place = select(live, element, 0) * _PAIR + self.chosen
            inverted, key = self.words.load_vector(place, 2)
            rank = self.count_before(_wide(key, inverted), part)
            mask = 1
            while mask < lanes:
                rank = rank + Int(shuffle_xor(rank.value, mask))
                mask *= 2
            with guard(live & part.equals(0)):
                emit(rank, self.inverted(Int(inverted)), Int(key))

    def count_before(self, mine: ir.Value, part: Int) -> Int:
        """How many of this thread's share of the chosen elements come before one."""
        round_, lanes = self.size.round, self.size.lanes
        greater = arith.CmpIPredicate.ugt
        with loop(0, self.size.slots // round_, carried=[Int.of(0)]) as state:
            count = Int.of(state.carried[0])
            for i in range(_UNROLL):
                place = state.index * round_ + (part + lanes * i) * 2
                words = self.words.load_vector(place * _PAIR + self.chosen, 4)
                for low, high in (words[:2], words[2:]):
                    before = arith.cmpi(greater, _wide(high, low), mine)
                    count = count + Int(arith.extui(i32_type(), before))
            state.advance([count])
        return Int.of(state.results[0])


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
