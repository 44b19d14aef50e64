"""The pass `yolo-conv-epilogue-fusion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.form_dispatches import attention_group
from yolomlir.passes.naming import conv_name
from yolomlir.passes.outlining import (
    Outliner,
    entry_block,
    only_user,
    operations,
    producer,
    users,
)

from yolomlir.bindings import ir


@dataclass(frozen=True)
class ConvEpilogueFusion(Pass):
    """Group a convolution with its bias, activation and residual into one dispatch.

    A group is a `yolo.conv2d`, the `yolo.silu` that is the only use of it, and the `yolo.add` that
    is the only use of either, with the residual as any of its operands. A `yolo.normalize` that
    feeds the convolution goes into the body, into each one's where several read it. Nothing is
    grouped across a value that something else wants too. The positional encoding inside attention
    is left to `yolo-form-dispatches`.

    Before:
        %0 = "yolo.conv2d"(%x, %w, %b) {…}
        %1 = "yolo.silu"(%0)
        %2 = "yolo.add"(%x, %1)

    After:
        %2 = call @conv2d_3x3s1_8x16x16_8_silu_add(%x, %w, %b, %x) {yolo.dispatch}

        func.func private @conv2d_3x3s1_8x16x16_8_silu_add(…) attributes {yolo.family = "conv2d"} {
          conv2d, silu, add
        }

    Statistics:
        dispatches: groups made.
        functions_shared: groups that call a function which an earlier group made.
        activations: silu ops grouped.
        residuals: add ops grouped.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-conv-epilogue-fusion | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NOT: yolo.silu
        // CHECK: call @conv2d_1x1s1_8x4x4_8_silu_add(%arg0, {{.*}}, %arg0) {yolo.dispatch}
        // CHECK: func.func private @conv2d_1x1s1_8x4x4_8_silu_add
        // CHECK-SAME: yolo.family = "conv2d"
        // CHECK: yolo.conv2d
        // CHECK-NEXT: yolo.silu
        // CHECK-NEXT: yolo.add
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "a.weight"} : () -> !w
          %b = "yolo.weight"() {name = "a.bias"} : () -> tensor<8xf32>
          %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 1, 1>,
              padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w, tensor<8xf32>) -> !t
          %1 = "yolo.silu"(%0) : (!t) -> !t
          %2 = "yolo.add"(%x, %1) : (!t, !t) -> !t
          return %2 : !t
        }
    """

    name: ClassVar[str] = "yolo-conv-epilogue-fusion"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Group every convolution of `@main`."""
        block = entry_block(module)
        ops = operations(block)
        attentions = [op for op in ops if op.name == "yolo.attention"]
        kept = [op for attention in attentions for op in attention_group(attention)]
        outliner = Outliner(module)
        made: set[str] = set()
        for group in _groups([op for op in ops if op not in kept]):
            for op in group:
                context.count(self, "activations", int(op.name == "yolo.silu"))
                context.count(self, "residuals", int(op.name == "yolo.add"))
            name = yolo.callee(_outline(group, outliner))
            context.count(self, "dispatches")
            context.count(self, "functions_shared", int(name in made))
            made.add(name)
        for op in operations(block):
            if op.name == "yolo.normalize" and not users(op.results[0]):
                op.erase()


def _groups(ops: list[ir.Operation]) -> list[list[ir.Operation]]:
    """Convolution, activation, addition of each group, in the order of the convolutions.

    The last convolution before an addition takes it, so that the other operand is there before.
    """
    groups = []
    taken: list[ir.Operation] = []
    for conv in reversed([op for op in ops if op.name == "yolo.conv2d"]):
        group = [conv]
        for name in ("yolo.silu", "yolo.add"):
            user = only_user(group[-1].results[0], name)
            if user is not None and user not in taken:
                group.append(user)
        taken += group
        groups.append(group)
    return groups[::-1]


def _outline(group: list[ir.Operation], outliner: Outliner) -> ir.Operation:
    conv, last = group[0], group[-1]
    residual = None
    if last.name == "yolo.add":
        inside = group[-2].results[0]
        residual = last.operands[1 if last.operands[0] == inside else 0]
        last.operands[0], last.operands[1] = inside, residual  # one order, so that more are equal
    operands = list(conv.operands)
    ops = list(group)
    source = producer(conv.operands[0], "yolo.normalize")
    if source is not None:
        with ir.InsertionPoint(conv):
            own = source.clone().operation
        conv.operands[0] = own.results[0]
        operands[0] = source.operands[0]
        ops.insert(0, own)
    family, name = conv_name(ops)
    return outliner.outline(ops, operands, family, name, residual=residual, loc=conv.location)
