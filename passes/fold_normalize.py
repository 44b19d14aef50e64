"""The pass `yolo-fold-normalize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir
from yolomlir.frontend.weights import Array
from yolomlir.remarks import remark


@dataclass(frozen=True)
class FoldNormalize(Pass):
    """Move the factor of `yolo.normalize` into the weights of the convolutions that read it.

    conv(s * x, w) = conv(x, s * w): a convolution is linear and its padding is zero, which the
    factor leaves zero. The image is then used as it is, 0 to 255, exact in float32 and in tf32
    alike, and the first kernel saves a multiplication an element. The products are computed in
    float64 and rounded once; the new weights are called `….weight:scale`.

    A normalize is left, with a remark, when anything but a convolution reads it (conversions
    between layouts are looked through), or a convolution whose weight is not a `yolo.weight`.

    Before:
        %0 = "yolo.normalize"(%image) {scale = 0.0039 : f64}
        %1 = "yolo.conv2d"(%0, %w)

    After:
        %0 = "yolo.normalize"(%image) {scale = 1.0 : f64}
        %1 = "yolo.conv2d"(%0, %w')

    Statistics:
        folded: normalizes whose factor became 1.
        left: normalizes that could not.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-fold-normalize | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "conv.weight:scale"}
        // CHECK-DAG: %[[X:.*]] = "yolo.normalize"(%arg0) {scale = 1.000000e+00 : f64}
        // CHECK: "yolo.conv2d"(%[[X]], %[[W]])
        !image = tensor<1x3x6x6xui8, #yolo.layout<"nhwc">>
        !x = tensor<1x3x6x6xf32, #yolo.layout<"nhwc">>
        !y = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x3x3x3xf32>
        func.func @main(%image: !image) -> !y {
          %w = "yolo.weight"() {name = "conv.weight"} : () -> !w
          %0 = "yolo.normalize"(%image) {scale = 0.00392156862 : f64} : (!image) -> !x
          %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
              groups = 1 : i64} : (!x, !w) -> !y
          return %1 : !y
        }
    """

    name: ClassVar[str] = "yolo-fold-normalize"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Fold every normalize that can be; one whose factor is 1 is done already."""
        taken = rewriting.weight_names(module)
        for normalize in rewriting.operations(module, "yolo.normalize"):
            if yolo.real(normalize, "scale") == 1.0:
                continue
            readers = _readers(normalize.results[0])
            obstacle = _obstacle(readers)
            if obstacle:
                remark(normalize.location, f"the image's scale is not folded: {obstacle}")
                context.count(self, "left")
                continue
            _fold(normalize, [op for op, _ in readers], context, taken)
            context.count(self, "folded")
        rewriting.erase_dead(rewriting.operations(module, "yolo.weight"))


def _readers(value: ir.Value) -> list[tuple[ir.Operation, int]]:
    """The ops that read a value, and as which operand, conversions looked through."""
    found = []
    for use in value.uses:
        op = use.owner.operation
        if op.name == "yolo.convert_layout":
            found += _readers(op.results[0])
        else:
            found.append((op, use.operand_number))
    return found


def _obstacle(readers: list[tuple[ir.Operation, int]]) -> str | None:
    """Why the factor cannot move to the readers; None where it can."""
    if not readers:
        return "nothing reads it"
    for op, index in readers:
        if op.name != "yolo.conv2d" or index != 0:
            return f"'{op.name}' reads it too"
        if rewriting.producer(op.operands[1], "yolo.weight") is None:
            return "the weight of the convolution that reads it is not a yolo.weight"
    return None


def _fold(
    normalize: ir.Operation, convs: list[ir.Operation], context: PassContext, taken: set[str]
) -> None:
    scale = yolo.real(normalize, "scale")

    def scaled(weight: Array) -> Array:
        return (weight.astype(np.float64) * scale).astype(weight.dtype)

    for conv in convs:
        weight = conv.operands[1].owner.operation
        name = f"{yolo.string(weight, 'name')}:scale"
        with ir.InsertionPoint(conv):
            conv.operands[1] = rewriting.derived_weight(
                context, taken, name, [weight], scaled, weight.results[0].type
            )
    normalize.attributes["scale"] = ir.FloatAttr.get(ir.F64Type.get(), 1.0)
