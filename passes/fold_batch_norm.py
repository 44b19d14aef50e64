"""The pass `yolo-fold-batch-norm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import Array
from yolomlir.remarks import remark


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Fold inference batch normalisation into the convolution before it.

    With s = gamma / sqrt(variance + epsilon): weight' = weight * s, a factor an output channel, and
    bias' = (bias - mean) * s + beta. Computed in float64 and rounded once. The old weights stay in
    the store; the new ones are called `….weight:bn` and `….bias:bn`.

    A batch norm is left, with a remark that says why, when it does not read a convolution, when
    something else reads that convolution too, or when one of the tensors is not a `yolo.weight`.

    Before:
        %0 = "yolo.conv2d"(%x, %w)
        %1 = "yolo.batch_norm"(%0, %gamma, %beta, %mean, %variance)

    After:
        %1 = "yolo.conv2d"(%x, %w', %bias')

    Statistics:
        folded: batch norms that became part of a convolution.
        left: batch norms that could not.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-fold-batch-norm | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "conv.weight:bn"}
        // CHECK-DAG: %[[B:.*]] = "yolo.weight"() {name = "conv.bias:bn"}
        // CHECK: %[[Y:.*]] = "yolo.conv2d"(%arg0, %[[W]], %[[B]])
        // CHECK-NOT: yolo.batch_norm
        // CHECK: return %[[Y]]
        !t = tensor<1x8x6x6xf32>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "conv.weight"} : () -> tensor<8x8x1x1xf32>
          %g = "yolo.weight"() {name = "bn.weight"} : () -> tensor<8xf32>
          %b = "yolo.weight"() {name = "bn.bias"} : () -> tensor<8xf32>
          %m = "yolo.weight"() {name = "bn.running_mean"} : () -> tensor<8xf32>
          %v = "yolo.weight"() {name = "bn.running_var"} : () -> tensor<8xf32>
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
              groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
          %1 = "yolo.batch_norm"(%0, %g, %b, %m, %v) {epsilon = 1.0e-3} : (!t, tensor<8xf32>,
              tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> !t
          return %1 : !t
        }
    """

    name: ClassVar[str] = "yolo-fold-batch-norm"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Fold every batch norm that can be, in program order, so that chains fold whole."""
        taken = rewriting.weight_names(module)
        for norm in rewriting.operations(module, "yolo.batch_norm"):
            obstacle = _obstacle(norm)
            if obstacle:
                remark(norm.location, f"batch norm is not folded: {obstacle}")
                context.count(self, "left")
                continue
            _fold(norm, context, taken)
            context.count(self, "folded")
        rewriting.erase_dead(rewriting.operations(module, "yolo.weight"))


def _obstacle(norm: ir.Operation) -> str | None:
    """Why a batch norm cannot be folded; None where it can."""
    conv = rewriting.producer(norm.operands[0], "yolo.conv2d")
    if conv is None:
        return "its input is not a convolution's result"
    others = len(rewriting.users(conv.results[0])) - 1
    if others:
        return f"its convolution's result has {others} more use{'s' if others > 1 else ''}"
    tensors = [*list(conv.operands)[1:], *list(norm.operands)[1:]]
    if any(rewriting.producer(value, "yolo.weight") is None for value in tensors):
        return "a weight or parameter is not a yolo.weight"
    return None


def _fold(norm: ir.Operation, context: PassContext, taken: set[str]) -> None:
    """Replace `norm` and its convolution by one convolution with a bias."""
    conv = norm.operands[0].owner.operation
    w, *bias = [value.owner.operation for value in list(conv.operands)[1:]]
    parameters = [value.owner.operation for value in list(norm.operands)[1:]]
    layer, epsilon = yolo.layer_of(norm.location), yolo.real(norm, "epsilon")
    weight_type = conv.operands[1].type
    axis = rewriting.output_axis(weight_type)

    def weight_of(weight: Array, gamma: Array, variance: Array) -> Array:
        scale = _scale(gamma, variance, epsilon, layer)
        wide = weight.astype(np.float64) * rewriting.along(scale, axis, weight.ndim)
        return wide.astype(weight.dtype)

    def bias_of(gamma: Array, beta: Array, mean: Array, variance: Array, *old: Array) -> Array:
        start = old[0].astype(np.float64) if old else 0.0
        scale = _scale(gamma, variance, epsilon, layer)
        return ((start - mean.astype(np.float64)) * scale + beta).astype(beta.dtype)

    gamma, beta, mean, variance = parameters
    name = yolo.string(w, "name")
    bias_name = yolo.string(bias[0], "name") if bias else _bias_name(name)
    with ir.InsertionPoint(conv):
        new_w = rewriting.derived_weight(
            context, taken, f"{name}:bn", [w, gamma, variance], weight_of, weight_type
        )
        sources = [gamma, beta, mean, variance, *bias]
        new_b = rewriting.derived_weight(
            context, taken, f"{bias_name}:bn", sources, bias_of, beta.results[0].type
        )
        folded = _conv_like(conv, [conv.operands[0], new_w, new_b])
    rewriting.replace(norm, folded)
    conv.erase()


def _bias_name(weight: str) -> str:
    """`model.0.conv.bias` for `model.0.conv.weight`."""
    return f"{weight.removesuffix('.weight')}.bias"


def _conv_like(conv: ir.Operation, operands: Sequence[ir.Value]) -> ir.Value:
    return yolo.conv2d(
        *operands,
        strides=yolo.integers(conv, "strides"),
        padding=yolo.integers(conv, "padding"),
        groups=yolo.integer(conv, "groups"),
        element=ir.RankedTensorType(conv.results[0].type).element_type,
        loc=conv.location,
    )


def _scale(gamma: Array, variance: Array, epsilon: float, layer: str) -> Array:
    """gamma / sqrt(variance + epsilon) in float64. Raises UserError where that is not a number."""
    total = variance.astype(np.float64) + epsilon
    bad = np.flatnonzero(~(total > 0))
    if bad.size:
        channel = int(bad[0])
        raise UserError(
            f"batch norm's variance is {variance[channel]} at channel {channel}; expected above "
            f"{-epsilon}",
            where=layer,
            hint="is the checkpoint damaged?",
        )
    return gamma.astype(np.float64) / np.sqrt(total)
