"""The pass `yolo-merge-siblings`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import entry_block, only_user, operations, producer, users

from yolomlir.bindings import ir
from yolomlir.frontend.weights import Array


@dataclass(frozen=True)
class MergeSiblings(Pass):
    """Make one convolution of 1x1 convolutions that read the same tensor.

    Siblings have the same input, strides, padding and number of operands, and either all or none is
    followed by a `yolo.silu` that is its only use (C3k's cv1 and cv2). The merged convolution has
    their output channels one after the other; what each gave is a slice of its result. Weights and
    biases are joined in the weight store, the originals stay. A convolution whose result is only
    added to something is left alone, as the addition can then join it.

    Options:
        alignment: only channel counts that are multiples of it are merged, so that every slice
            starts at a multiple of it (4 are 16 bytes).

    Before:
        %0 = "yolo.conv2d"(%x, %w0, %b0) {…}
        %1 = "yolo.silu"(%0)
        %2 = "yolo.conv2d"(%x, %w1, %b1) {…}
        %3 = "yolo.silu"(%2)

    After:
        %0 = "yolo.conv2d"(%x, %w, %b) {…}
        %1 = "yolo.silu"(%0)
        %2 = "yolo.slice"(%1) {offset = 0, size = 8}
        %3 = "yolo.slice"(%1) {offset = 8, size = 8}

    Statistics:
        merged: convolutions that were made of several.
        removed: convolutions that are gone.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-merge-siblings | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK: yolo.weight{{.*}}name = "a.weight+b.weight"{{.*}}tensor<16x8x1x1xf32
        // CHECK: %[[C:.*]] = "yolo.conv2d"
        // CHECK-NOT: yolo.conv2d
        // CHECK: "yolo.slice"(%[[C]]) {offset = 0 : i64, size = 8 : i64}
        // CHECK: "yolo.slice"(%[[C]]) {offset = 8 : i64, size = 8 : i64}
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
        func.func @main(%x: !t) -> (!t, !t) {
          %w0 = "yolo.weight"() {name = "a.weight"} : () -> !w
          %w1 = "yolo.weight"() {name = "b.weight"} : () -> !w
          %0 = "yolo.conv2d"(%x, %w0) {strides = array<i64: 1, 1>,
              padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.conv2d"(%x, %w1) {strides = array<i64: 1, 1>,
              padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
          return %0, %1 : !t, !t
        }
    """

    name: ClassVar[str] = "yolo-merge-siblings"
    alignment: int = 4

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Merge the siblings of `@main`."""
        self.require_positive("alignment")
        families: dict[object, list[ir.Operation]] = defaultdict(list)
        taken = rewriting.weight_names(module)
        for op in operations(entry_block(module)):
            if op.name == "yolo.conv2d" and self._may_merge(op):
                families[_key(op)].append(op)
        for siblings in families.values():
            if len(siblings) > 1:
                _merge(siblings, context, taken)
                context.count(self, "merged")
                context.count(self, "removed", len(siblings) - 1)

    def _may_merge(self, op: ir.Operation) -> bool:
        out, _, kh, kw = yolo.shape_of(op.operands[1])
        weights = all(producer(v, "yolo.weight") for v in list(op.operands)[1:])
        if (kh, kw) != (1, 1) or yolo.integer(op, "groups") != 1 or out % self.alignment:
            return False
        return weights and only_user(_end(op).results[0], "yolo.add") is None


def _end(conv: ir.Operation) -> ir.Operation:
    """The activation that is the only use of a convolution, or the convolution."""
    return only_user(conv.results[0], "yolo.silu") or conv


def _key(conv: ir.Operation) -> object:
    """Equal for convolutions that can be one."""
    x, w = conv.operands[0], conv.operands[1]
    layout = Layout.of(w.type)
    elements = yolo.element_of(w), yolo.element_of(conv.results[0])
    geometry = (*yolo.integers(conv, "strides"), *yolo.integers(conv, "padding"))
    return x, geometry, len(conv.operands), _end(conv).name, layout, elements


def _merge(siblings: list[ir.Operation], context: PassContext, taken: set[str]) -> None:
    first = siblings[0]
    ends = [_end(conv) for conv in siblings]
    sizes = [yolo.shape_of(conv.results[0])[1] for conv in siblings]
    location = ir.Location.fused([conv.location for conv in siblings])
    with ir.InsertionPoint(first):
        operands = [
            _joined([conv.operands[i] for conv in siblings], context, taken, location)
            for i in range(1, len(first.operands))
        ]
        value = yolo.conv2d(
            first.operands[0],
            *operands,
            strides=yolo.integers(first, "strides"),
            padding=yolo.integers(first, "padding"),
            element=ir.RankedTensorType(first.results[0].type).element_type,
            loc=location,
        )
        if ends[0].name == "yolo.silu":
            value = yolo.silu(value, loc=ir.Location.fused([end.location for end in ends]))
        offset = 0
        for end, size in zip(ends, sizes, strict=True):
            part = yolo.slice_(value, offset=offset, size=size, loc=end.location)
            end.results[0].replace_all_uses_with(part)
            offset += size
    weights = [v for conv in siblings for v in list(conv.operands)[1:]]
    for conv, end in zip(siblings, ends, strict=True):
        if end != conv:
            end.erase()
        conv.erase()
    for weight in dict.fromkeys(weights):
        if not users(weight):
            weight.owner.operation.erase()


def _joined(
    parts: list[ir.Value], context: PassContext, taken: set[str], location: ir.Location
) -> ir.Value:
    """One weight of several, along their output channels."""
    sources = [part.owner.operation for part in parts]
    shape = yolo.shape_of(parts[0])
    axis = rewriting.output_axis(parts[0].type) if len(shape) == 4 else 0
    shape[0] = sum(yolo.shape_of(part)[0] for part in parts)
    first = ir.RankedTensorType(parts[0].type)
    type_ = ir.RankedTensorType.get(shape, first.element_type, first.encoding)

    def join(*tensors: Array) -> Array:
        return np.concatenate(tensors, axis=axis)

    name = "+".join(yolo.string(source, "name") for source in sources)
    return rewriting.derived_weight(context, taken, name, sources, join, type_, loc=location)
