"""The pass `yolo-concat-views`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.form_dispatches import outline_alone
from yolomlir.passes.outlining import (
    Outliner,
    clone_ops,
    entry_block,
    erase_unused_functions,
    family_of,
    functions,
    operations,
    producer,
    require_grouped,
    users,
    weight_index,
)
from yolomlir.passes.placement import Placement

from yolomlir.bindings import ir
from yolomlir.remarks import remark

_READS = ("yolo.concat", "yolo.upsample")
"""Ops that a convolution can read through."""


@dataclass(frozen=True)
class ConcatViews(Pass):
    """Turn concat, slice and nearest upsampling into addressing.

    A slice is a view of its operand's buffer. A concat whose operands can all be written straight
    into its buffer stays in `@main` as a view: each must be the result of a dispatch or a view,
    must not lie elsewhere already, and no two may need the same channels at the same time (C2PSA's
    result may take the half of its input that is no longer read). Any other concat, and every
    upsampling, goes into the body of the convolution that reads it, which then has several sources.
    Where something other than a convolution reads it, it becomes a dispatch that copies.

    Options:
        alignment: channels; a concat that a convolution can read as several sources is no view when
            an operand would start at something else than a multiple of it (4 are 16 bytes).

    Before:
        %u = "yolo.upsample"(%y)
        %c = "yolo.concat"(%u, %z)
        %r = call @conv2d_1x1s1_16x8x8_8_silu(%c, %w, %b) {yolo.dispatch}

    After:
        %r = call @conv2d_1x1s1_16x8x8_8_silu_from_8up2_8(%y, %z, %w, %b) {yolo.dispatch}

    Statistics:
        views: concats and slices that stay as views.
        multi_source_reads: dispatches that read several sources, or an enlarged one.
        copies: concats and upsamplings that are a kernel for want of anything better.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-concat-views | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK: %[[A:.*]] = call @producer(%arg0)
        // CHECK: %[[B:.*]] = call @producer(%[[A]])
        // CHECK: %[[C:.*]] = "yolo.concat"(%[[A]], %[[B]])
        // CHECK: return %[[C]]
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        !c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
        func.func @main(%x: !t) -> !c {
          %a = func.call @producer(%x) {yolo.dispatch} : (!t) -> !t
          %b = func.call @producer(%a) {yolo.dispatch} : (!t) -> !t
          %c = "yolo.concat"(%a, %b) : (!t, !t) -> !c
          return %c : !c
        }
        func.func private @producer(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
          %0 = "yolo.silu"(%x) : (!t) -> !t
          return %0 : !t
        }
    """

    name: ClassVar[str] = "yolo-concat-views"
    alignment: int = 4

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Leave only views between the dispatches of `@main`."""
        self.require_positive("alignment")
        block = entry_block(module)
        require_grouped(block, ("yolo.slice", *_READS))
        _move_slices_up(block)
        work = _Rewriter(module)
        work.materialise_upsamples()
        views = work.choose_views(self.alignment)
        work.read_through(views)
        context.count(self, "multi_source_reads", work.multi_source_reads)
        context.count(self, "copies", work.copies)
        kept = [op for op in operations(block) if op.name in ("yolo.concat", "yolo.slice")]
        context.count(self, "views", len(kept))
        erase_unused_functions(module)


def _move_slices_up(block: ir.Block) -> None:
    """Make every slice one of a dispatch's result, through slices, upsamplings and concats."""
    for op in operations(block):
        if op.name != "yolo.slice":
            continue
        moved = _slice_of(op.operands[0], yolo.integer(op, "offset"), yolo.integer(op, "size"), op)
        if moved is not None:
            op.results[0].replace_all_uses_with(moved)
            op.erase()
    for op in reversed(operations(block)):
        if op.name in ("yolo.slice", *_READS) and not users(op.results[0]):
            op.erase()


def _slice_of(x: ir.Value, offset: int, size: int, at: ir.Operation) -> ir.Value | None:
    """The same channels from further up, built before `at`; None where `at` is as good."""
    source = producer(x)
    if source is None or source.name not in ("yolo.slice", *_READS):
        return None
    with ir.InsertionPoint(at):
        if source.name == "yolo.slice":
            offset += yolo.integer(source, "offset")
            return yolo.slice_(source.operands[0], offset=offset, size=size, loc=at.location)
        if source.name == "yolo.upsample":
            inner = source.operands[0]
            part = _slice_of(inner, offset, size, at)
            if part is None:
                part = yolo.slice_(inner, offset=offset, size=size, loc=at.location)
            factor = yolo.integer(source, "factor")
            return yolo.upsample(part, factor=factor, loc=source.location)
    for operand in source.operands:
        channels = yolo.shape_of(operand)[1]
        if offset >= 0 and offset + size <= channels:
            if size == channels:
                return operand
            part = _slice_of(operand, offset, size, at)
            if part is not None:
                return part
            with ir.InsertionPoint(at):
                return yolo.slice_(operand, offset=offset, size=size, loc=at.location)
        offset -= channels
    return None


class _Rewriter:
    """The steps of the pass on one module, and what they counted."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._block = entry_block(module)
        self._outliner = Outliner(module)
        self._table = functions(module)
        self.multi_source_reads = 0
        self.copies = 0

    def _reads_through(self, value: ir.Value) -> bool:
        """Whether every use of a value is a convolution's input, through concats where need be."""
        for use in value.uses:
            op = use.owner.operation
            if op.name == "yolo.concat":
                if not self._reads_through(op.results[0]):
                    return False
            elif not self._is_source(op, use.operand_number):
                return False
        return True

    def _is_source(self, op: ir.Operation, index: int) -> bool:
        """Whether operand `index` of an op is a source of a convolution's dispatch."""
        if not yolo.is_dispatch(op) or family_of(op, self._table) != naming.CONV2D:
            return False
        body = self._table[yolo.callee(op)].regions[0].blocks[0]
        return index < weight_index(body)

    def materialise_upsamples(self) -> None:
        """Make a dispatch of each upsampling that something other than a convolution reads."""
        for op in operations(self._block):
            if op.name == "yolo.upsample" and not self._reads_through(op.results[0]):
                self._copy(op)

    def _copy(self, op: ir.Operation) -> None:
        outline_alone(op, self._outliner)
        self._table = functions(self._module)
        self.copies += 1

    def choose_views(self, alignment: int) -> set[ir.Value]:
        """The concats that stay, those first that no convolution can read through."""
        placement = Placement(self._block)
        slices = [op for op in operations(self._block) if op.name == "yolo.slice"]
        for op in slices:
            placement.try_views([op])
        concats = [op for op in operations(self._block) if op.name == "yolo.concat"]
        through = {op.results[0]: self._reads_through(op.results[0]) for op in concats}
        for op in sorted(concats, key=lambda c: through[c.results[0]]):
            reason = placement.try_views([op], alignment if through[op.results[0]] else 1)
            if reason is not None:
                remark(op.location, f"concat is no view: {reason}")
        return placement.views

    def read_through(self, views: set[ir.Value]) -> None:
        """Move what is no view into its readers, or make it a dispatch."""
        for op in self._no_views(views):
            if not self._reads_through(op.results[0]):
                self._copy(op)
        moved = self._no_views(views)
        for call in operations(self._block):
            if yolo.is_dispatch(call) and any(_made_by(v, moved) for v in call.operands):
                self._inline(call, moved)
        for op in reversed(moved):
            if not users(op.results[0]):
                op.erase()

    def _no_views(self, views: set[ir.Value]) -> list[ir.Operation]:
        ops = operations(self._block)
        return [op for op in ops if op.name in _READS and op.results[0] not in views]

    def _inline(self, call: ir.Operation, moved: Sequence[ir.Operation]) -> None:
        """Call a new function that computes the moved ops and then what the old one did."""
        inside = self._table[yolo.callee(call)].regions[0].blocks[0]
        old = list(call.operands)
        leaves = [_sources(value, moved) for value in old]
        operands = [leaf for group in leaves for leaf in group]

        def body(arguments: Sequence[ir.Value]) -> ir.Value:
            rest = iter(arguments)
            mapping: dict[ir.Value, ir.Value] = {}
            for argument, value in zip(inside.arguments, old, strict=True):
                mapping[argument] = _build(value, moved, rest)
            return clone_ops(operations(inside)[:-1], mapping)

        source = next(v for v in old if _made_by(v, moved))
        name = f"{yolo.callee(call)}_from_{naming.sources(moved, source)}"
        family = naming.CONV2D
        new = self._outliner.call(body, operands, family, name, loc=call.location, before=call)
        call.results[0].replace_all_uses_with(new.results[0])
        call.erase()
        self._table = functions(self._module)
        self.multi_source_reads += 1


def _made_by(value: ir.Value, ops: Sequence[ir.Operation]) -> bool:
    op = producer(value)
    return op is not None and op in ops


def _sources(value: ir.Value, moved: Sequence[ir.Operation]) -> list[ir.Value]:
    op = producer(value)
    if op is None or op not in moved:
        return [value]
    return [leaf for operand in op.operands for leaf in _sources(operand, moved)]


def _build(value: ir.Value, moved: Sequence[ir.Operation], rest: Iterator[ir.Value]) -> ir.Value:
    """The value from the next arguments, the moved ops copied on the way."""
    op = producer(value)
    if op is None or op not in moved:
        return next(rest)
    inputs = [_build(operand, moved, rest) for operand in op.operands]
    copy = op.clone().operation
    for index, operand in enumerate(inputs):
        copy.operands[index] = operand
    return copy.results[0]
