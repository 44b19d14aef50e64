"""The pass `yolo-plan-memory`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import (
    ENTRY,
    entry_block,
    functions,
    is_weight,
    operations,
    producer,
)
from yolomlir.passes.placement import Buffer, Placement, channels_of

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError

VIEWS = "yolo.views"
ARENA = "yolo.arena_bytes"
ALIGNMENTS = "yolo.alignments"
REUSE = ("sequential", "concurrent", "none")
_ATTEMPTS = 64
_NOISE = 0.6
_VECTOR = 16
"""Bytes of the widest load; no alignment beyond it is of use."""


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Give every tensor of `@main` a place in one arena, fixed for all inferences.

    The tensors that views tie together are one buffer; a slice or an operand of a concat is a part
    of it. Buffers that are never wanted at the same time share memory: the largest is placed first,
    each in the smallest gap that holds it. The arguments and results of `@main` keep their places
    for the whole inference, so that a caller may fill and read them in place.

    Options:
        reuse: `sequential` when dispatches run in program order (CPU); `concurrent` when whatever
            does not depend on one another may run side by side (a CUDA graph): buffers then share
            memory only where the dependencies already order all of their users. `none`: no two
            buffers share memory.
        alignment: bytes; every buffer starts at a multiple of it.

    Before:
        %1 = call @a(%0, %w) {yolo.dispatch}
        %2 = call @b(%1, %w) {yolo.dispatch}

    After:
        %1 = call @a(%0, %w) {yolo.dispatch, yolo.views = [array<i64: 0, 8>, array<i64>,
                                                           array<i64: 512, 8>]}
        %2 = call @b(%1, %w) {yolo.dispatch, yolo.views = […]}

    Statistics:
        buffers: pieces of memory.
        arena_bytes: size of the arena.
        live_bytes: the largest sum of the tensors alive at one time in program order.
        no_reuse_bytes: what the arena would be if no two buffers shared memory.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-plan-memory | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-SAME: yolo.arena_bytes = 1536
        // CHECK-SAME: yolo.views = [array<i64: [[A:[0-9]+]], 8>, array<i64: [[Z:[0-9]+]], 8>]
        // CHECK: yolo.views = [array<i64: [[A]], 8>, array<i64: [[B:[0-9]+]], 8>]
        // CHECK: yolo.views = [array<i64: [[B]], 8>, array<i64: [[Z]], 8>]
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        func.func @main(%x: !t) -> !t {
          %a = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
          %b = func.call @f(%a) {yolo.dispatch} : (!t) -> !t
          return %b : !t
        }
        func.func private @f(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
          %0 = "yolo.silu"(%x) : (!t) -> !t
          return %0 : !t
        }
    """

    name: ClassVar[str] = "yolo-plan-memory"
    reuse: str = "sequential"
    alignment: int = 256

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Set `yolo.views` on every dispatch and on `@main`, and `yolo.arena_bytes`."""
        if self.reuse not in REUSE:
            known = ", ".join(REUSE)
            raise UserError(f"'{self.name}': reuse is '{self.reuse}'; expected {known}")
        if self.alignment < 16 or self.alignment & (self.alignment - 1):
            raise UserError(
                f"'{self.name}': alignment is {self.alignment}; expected a power of 2 from 16 on"
            )
        block = entry_block(module)
        _check(block)
        placement = Placement(block)
        views = [op for op in operations(block) if op.name in ("yolo.slice", "yolo.concat")]
        reason = placement.try_views(views)
        if reason is not None:
            raise UserError(f"a view of @main cannot be: {reason}", hint="run yolo-concat-views")
        lives = _lives(placement)
        bound = largest_live_sum(placement)
        offsets, size = _assign(lives, self.reuse, self.alignment, bound)
        context.count(self, "buffers", len(lives))
        context.count(self, "arena_bytes", size)
        context.count(self, "no_reuse_bytes", sum(_rounded(b.size, self.alignment) for b in lives))
        context.count(self, "live_bytes", bound)
        _annotate(module, block, placement, lives, offsets, size)


# ---- what is alive when -------------------------------------------------------------------------


@dataclass
class _Life:
    """A buffer, its size in bytes, and when it is wanted.

    first, last: indices of the first op that writes it and the last that touches it. users: all
    that touch it, as a bit mask. waits: what every op that writes it needs.
    """

    buffer: Buffer
    size: int
    first: int
    last: int
    users: int
    waits: int
    pinned: bool


def _check(block: ir.Block) -> None:
    for op in operations(block):
        if op.name in ("yolo.weight", "yolo.slice", "yolo.concat", "func.return"):
            continue
        if not yolo.is_dispatch(op):
            raise UserError(
                f"'{op.name}' is neither a dispatch nor a view",
                where=yolo.layer_of(op.location),
                hint="run yolo-form-dispatches and yolo-concat-views first",
            )
    values = [*block.arguments, *(r for op in operations(block) for r in op.results)]
    for value in values:
        four = len(yolo.shape_of(value)) == 4 and not is_weight(value)
        if four and Layout.of(value.type) is not Layout.NHWC:
            op = producer(value)
            raise UserError(
                "a tensor of @main is not in NHWC",
                where=ENTRY if op is None else yolo.layer_of(op.location),
                hint="run yolo-layout-propagation and yolo-transpose-elision first",
            )


def element_bytes(value: ir.Value) -> int:
    """Bytes of one element of a tensor. Raises UserError for an element that is not whole bytes."""
    type_ = ir.RankedTensorType(value.type).element_type
    width = getattr(type_, "width", 0)
    if not width or width % 8:
        raise UserError(f"elements of type {type_} have no place in the arena")
    return int(width) // 8


def _positions(value: ir.Value) -> int:
    """Elements of a tensor but for channels: N x H x W."""
    shape = yolo.shape_of(value)
    count = 1
    for size in [shape[0], *shape[2:]] if len(shape) == 4 else shape[:-1]:
        count *= size
    return count


def _lives(placement: Placement) -> list[_Life]:
    dependencies = placement.dependencies
    end = len(dependencies.ops) - 1
    lives = []
    for buffer in placement.buffers():
        writers, readers = placement.accesses(buffer)
        outside = [v for v in buffer.offsets if producer(v) is None]
        if any(is_weight(v) for v in buffer.offsets):
            raise UserError("a weight is sliced or concatenated in @main")
        start = [dependencies.index[op] for op in writers]
        touched = start + [dependencies.index[op] for op in readers]
        waits = -1
        for index in start:
            waits &= dependencies.ancestors[index]
        value = next(iter(buffer.offsets))
        low, high = buffer.extent
        lives.append(
            _Life(
                buffer,
                _positions(value) * (high - low) * element_bytes(value),
                -1 if outside else min(start),
                max([-1, *touched]),
                sum(1 << index for index in set(touched)),
                0 if outside else waits,
                bool(outside) or end in touched,
            )
        )
    return lives


def largest_live_sum(placement: Placement) -> int:
    """Bytes of the tensors alive at one op, at the op where they are most, in program order.

    A lower bound of any arena: a result counts from the op that writes it to the last that reads
    it, arguments and results of `@main` always, and views not at all: they are parts of others.
    """
    index = placement.dependencies.index
    end = len(index) - 1
    change = [0] * (end + 2)
    for buffer in placement.buffers():
        for value, last in placement.last_reads(buffer).items():
            size = _positions(value) * (buffer.span(value)[1] - buffer.span(value)[0])
            op = producer(value)
            pinned = op is None or last == end
            first = 0 if op is None or pinned else index[op]
            change[first] += size * element_bytes(value)
            change[(end if pinned else max(last, first)) + 1] -= size * element_bytes(value)
    live = best = 0
    for step in change:
        live += step
        best = max(best, live)
    return best


def _conflict(a: _Life, b: _Life, reuse: str) -> bool:
    """Whether two buffers may not share memory."""
    if a.pinned or b.pinned or reuse == "none":
        return True
    if reuse == "sequential":
        return a.first <= b.last and b.first <= a.last
    a_before_b = not a.users & ~b.waits
    b_before_a = not b.users & ~a.waits
    return not (a_before_b or b_before_a)


# ---- offsets ------------------------------------------------------------------------------------


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _assign(lives: list[_Life], reuse: str, alignment: int, bound: int) -> tuple[list[int], int]:
    """Offsets of the buffers and the arena's size.

    Pinned ones first, then the largest, each in the smallest gap that holds it. Further attempts
    disturb the order of sizes, the same way every time, until the arena is no larger than `bound`
    with its alignment, the least there can be; the best attempt counts.
    """
    sizes = [_rounded(life.size, alignment) for life in lives]
    conflicts = [
        [other for other, b in enumerate(lives) if other != index and _conflict(a, b, reuse)]
        for index, a in enumerate(lives)
    ]
    best: tuple[list[int], int] = ([], 0)
    disturb = random.Random(0)
    for attempt in range(_ATTEMPTS):
        noise = _NOISE if attempt else 0.0
        weights = [size * (1 + noise * disturb.uniform(-1, 1)) for size in sizes]
        keys = [(not life.pinned, -w) for life, w in zip(lives, weights, strict=True)]
        offsets = _place(sorted(range(len(lives)), key=keys.__getitem__), sizes, conflicts)
        ends = (offset + size for offset, size in zip(offsets, sizes, strict=True))
        size = max(ends, default=0)
        if not attempt or size < best[1]:
            best = offsets, size
        if best[1] <= _rounded(bound, alignment):
            break
    return best


def _place(order: list[int], sizes: list[int], conflicts: list[list[int]]) -> list[int]:
    offsets = [-1] * len(sizes)
    for index in order:
        placed = [other for other in conflicts[index] if offsets[other] >= 0]
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in placed)
        offsets[index] = _best_gap(taken, sizes[index])
    return offsets


def _best_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap of at least `size` between sorted spans, else past them all."""
    best: tuple[int, int] | None = None
    end = 0
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, stop)
    return end if best is None else best[1]


def _annotate(
    module: ir.Module,
    block: ir.Block,
    placement: Placement,
    lives: list[_Life],
    offsets: list[int],
    size: int,
) -> None:
    base = {id(life.buffer): offset for life, offset in zip(lives, offsets, strict=True)}

    def view(value: ir.Value) -> ir.Attribute:
        if is_weight(value):
            return ir.DenseI64ArrayAttr.get([])
        buffer = placement.buffer_of(value)
        low, high = buffer.extent
        start = (buffer.offsets[value] - low) * element_bytes(value)
        return ir.DenseI64ArrayAttr.get([base[id(buffer)] + start, high - low])

    for op in operations(block):
        if yolo.is_dispatch(op):
            op.attributes[VIEWS] = ir.ArrayAttr.get([view(v) for v in (*op.operands, *op.results)])
    _state_alignments(module, block)
    returned = list(operations(block)[-1].operands)
    main = functions(module)[ENTRY]
    main.attributes[VIEWS] = ir.ArrayAttr.get([view(v) for v in (*block.arguments, *returned)])
    wide = ir.IntegerType.get_signless(64)
    main.attributes[ARENA] = ir.IntegerAttr.get(wide, size)


def _state_alignments(module: ir.Module, block: ir.Block) -> None:
    """Say where a view starts less aligned than its channel count lets a kernel expect.

    `yolo.alignments` of a private function: bytes for each argument and then each result, 0 where
    there is nothing to say. Rows of a tensor of 8 channels are expected at multiples of 16 bytes;
    as channels 2 to 10 of a buffer they are not.
    """
    table = functions(module)
    found: dict[str, list[int]] = {}
    for op in operations(block):
        if not yolo.is_dispatch(op):
            continue
        values = [*op.operands, *op.results]
        places = [list(ir.DenseI64ArrayAttr(a)) for a in ir.ArrayAttr(op.attributes[VIEWS])]
        given = [_alignment(v, p) for v, p in zip(values, places, strict=True)]
        least = found.setdefault(yolo.callee(op), [_VECTOR] * len(given))
        least[:] = [min(pair) for pair in zip(least, given, strict=True)]
    for name, bytes_ in found.items():
        if ALIGNMENTS in table[name].attributes:
            del table[name].attributes[ALIGNMENTS]
        stated = [b if b < _VECTOR else 0 for b in bytes_]
        if any(stated):
            table[name].attributes[ALIGNMENTS] = ir.DenseI64ArrayAttr.get(stated)


def _alignment(value: ir.Value, place: list[int]) -> int:
    """Bytes that every row of a view is aligned to, at most 16; 16 where its shape says as much."""
    if not place:
        return _VECTOR
    item = element_bytes(value)
    natural = _power_of_two(channels_of(value) * item)
    actual = _power_of_two(place[0] | place[1] * item)
    return _VECTOR if actual >= natural else actual


def _power_of_two(count: int) -> int:
    """The largest power of 2, at most 16, that divides a count of bytes."""
    return min(count & -count, _VECTOR) if count else _VECTOR
