"""The pass `yolo-canonicalize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir

_VIEWS = ("yolo.concat", "yolo.slice", "yolo.upsample", "yolo.convert_layout", "yolo.max_pool2d")


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Simplify slices, concats, upsamples and conversions until nothing changes.

    Upstream's `canonicalize` knows no fold of this dialect. The folds:

    - a slice of all channels is its operand; a slice of a slice is one slice;
    - a slice that lies in one operand of a concat is a slice of that operand;
    - a concat of neighbouring slices of one tensor is a wider slice (or the tensor), also where the
      first of them ends a nested concat;
    - an upsample by 1 and a 1x1 pool of stride 1 are their operands; an upsample of an upsample is
      one upsample;
    - a conversion of a conversion is one conversion, and none where the layout is the same.

    Before:
        %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 4 : i64}
        %1 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64}
        %2 = "yolo.concat"(%0, %1)

    After:
        %x, wherever %2 was used

    Statistics:
        folded: ops replaced by something simpler.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-canonicalize | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NOT: yolo.concat
        // CHECK: %[[Y:.*]] = "yolo.silu"(%arg0)
        // CHECK-NEXT: return %[[Y]]
        !half = tensor<1x4x6x6xf32>
        !t = tensor<1x8x6x6xf32>
        func.func @main(%x: !t) -> !t {
          %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 4 : i64} : (!t) -> !half
          %1 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!t) -> !half
          %2 = "yolo.concat"(%0, %1) : (!half, !half) -> !t
          %3 = "yolo.silu"(%2) : (!t) -> !t
          return %3 : !t
        }
    """

    name: ClassVar[str] = "yolo-canonicalize"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Fold until nothing changes; ops that only the folded ones read go too."""
        while self._sweep(module, context):
            pass
        rewriting.erase_dead([op for op in rewriting.operations(module) if op.name in _VIEWS])

    def _sweep(self, module: ir.Module, context: PassContext) -> bool:
        changed = False
        for op in rewriting.operations(module):
            if op.name not in _FOLDS:
                continue
            with ir.InsertionPoint(op):
                value = _FOLDS[op.name](op)
            if value is None:
                continue
            rewriting.replace(op, value)
            context.count(self, "folded")
            changed = True
        return changed


# ---- the folds: the simpler value, or None where the op stays ------------------------------------


def _slice(x: ir.Value, offset: int, size: int, loc: ir.Location) -> ir.Value:
    """Channels [offset, offset + size) of x; x itself where that is all."""
    if size == yolo.shape_of(x)[1]:
        return x
    return yolo.slice_(x, offset=offset, size=size, loc=loc)


def _range(op: ir.Operation) -> tuple[ir.Value, int, int]:
    """What a slice reads: the tensor, the first channel, the number of channels."""
    return op.operands[0], yolo.integer(op, "offset"), yolo.integer(op, "size")


def _fold_slice(op: ir.Operation) -> ir.Value | None:
    x, offset, size = _range(op)
    if size == yolo.shape_of(x)[1]:
        return x
    outer = rewriting.producer(x, "yolo.slice")
    if outer is not None:
        source, start, _ = _range(outer)
        return _slice(source, start + offset, size, op.location)
    concat = rewriting.producer(x, "yolo.concat")
    if concat is None:
        return None
    first, second = concat.operands
    split = yolo.shape_of(first)[1]
    if offset + size <= split:
        return _slice(first, offset, size, op.location)
    return _slice(second, offset - split, size, op.location) if offset >= split else None


def _fold_concat(op: ir.Operation) -> ir.Value | None:
    first, second = op.operands
    joined = _joined(first, second, op.location)
    if joined is not None:
        return joined
    nested = rewriting.producer(first, "yolo.concat")
    if nested is None:
        return None
    joined = _joined(nested.operands[1], second, op.location)
    return None if joined is None else yolo.concat([nested.operands[0], joined], loc=op.location)


def _joined(first: ir.Value, second: ir.Value, loc: ir.Location) -> ir.Value | None:
    """One slice for two that are neighbours in one tensor."""
    left, right = (rewriting.producer(value, "yolo.slice") for value in (first, second))
    if left is None or right is None:
        return None
    source, start, size = _range(left)
    other, after, rest = _range(right)
    if source != other or after != start + size:
        return None
    return _slice(source, start, size + rest, loc)


def _fold_upsample(op: ir.Operation) -> ir.Value | None:
    x, factor = op.operands[0], yolo.integer(op, "factor")
    if factor == 1:
        return x
    inner = rewriting.producer(x, "yolo.upsample")
    if inner is None:
        return None
    whole = factor * yolo.integer(inner, "factor")
    return yolo.upsample(inner.operands[0], factor=whole, loc=op.location)


def _fold_max_pool(op: ir.Operation) -> ir.Value | None:
    window = yolo.integers(op, "kernel") + yolo.integers(op, "strides")
    trivial = set(window) == {1} and not any(yolo.integers(op, "padding"))
    return op.operands[0] if trivial else None


def _fold_conversion(op: ir.Operation) -> ir.Value | None:
    x, layout = op.operands[0], Layout.of(op.results[0].type)
    if Layout.of(x.type) is layout:
        return x
    inner = rewriting.producer(x, "yolo.convert_layout")
    if inner is None:
        return None
    source = inner.operands[0]
    if Layout.of(source.type) is layout:
        return source
    return yolo.convert_layout(source, layout, loc=op.location)


_FOLDS: dict[str, Callable[[ir.Operation], ir.Value | None]] = {
    "yolo.slice": _fold_slice,
    "yolo.concat": _fold_concat,
    "yolo.upsample": _fold_upsample,
    "yolo.max_pool2d": _fold_max_pool,
    "yolo.convert_layout": _fold_conversion,
}
