"""The pass `yolo-narrow-activations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import entry_block, operations, producer

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import Array
from yolomlir.remarks import remark

PRECISION = "yolo.precision"
LARGEST = float(np.finfo(np.float16).max)
"""65504, the largest finite float16."""
_WIDE = ("yolo.detect", "yolo.candidates", "yolo.merge_detections", "func.return")
"""Ops whose tensors all stay float32."""


@dataclass(frozen=True)
class NarrowActivations(Pass):
    """Store activations and the weights of convolutions as float16, for `--precision fp16`.

    Products are of float16 then, sums and all other arithmetic stay float32, and a result is
    rounded once, when it is stored: inside a dispatch, what only the next elementwise op reads is
    never rounded, whatever its type says. Biases stay float32. Weights are rounded once, to
    nearest, and called `….weight:f16`; one that is beyond float16's range is an error.

    An op but `yolo.conv2d` has one element type for its tensors. So those that such ops tie to an
    argument of `@main`, to `yolo.normalize`, to an operand of `yolo.detect` or to a result of
    `@main` stay float32: the image is read as it is, and the head's last convolutions read float16
    and write float32. A convolution whose weight is not a `yolo.weight` stays float32 whole, with a
    remark.

    The module's `yolo.precision` becomes `fp16`.

    Before:
        %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
        %1 = "yolo.conv2d"(%0, %w) : (tensor<1x8x6x6xf32>, …) -> tensor<1x8x6x6xf32>

    After:
        %w = "yolo.weight"() {name = "w:f16"} : () -> tensor<8x8x1x1xf16>
        %1 = "yolo.conv2d"(%0, %w) : (tensor<1x8x6x6xf16>, …) -> tensor<1x8x6x6xf16>

    Statistics:
        activations: tensors that became float16.
        weights: weights that did.
        left: convolutions that stay float32.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-narrow-activations | FileCheck %s

        // CHECK: yolo.precision = "fp16"
        // CHECK-LABEL: func.func @main
        // CHECK-SAME: (%[[X:.*]]: tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32>
        // CHECK: %[[W:.*]] = "yolo.weight"() {name = "w:f16"} : () -> tensor<8x8x1x1xf16>
        // CHECK: %[[A:.*]] = "yolo.conv2d"(%[[X]], %[[W]])
        // CHECK-SAME: (tensor<1x8x4x4xf32>, tensor<8x8x1x1xf16>) -> tensor<1x8x4x4xf16>
        // CHECK: %[[B:.*]] = "yolo.silu"(%[[A]]) : (tensor<1x8x4x4xf16>) -> tensor<1x8x4x4xf16>
        // CHECK: "yolo.conv2d"(%[[B]], %[[W]])
        // CHECK-SAME: (tensor<1x8x4x4xf16>, tensor<8x8x1x1xf16>) -> tensor<1x8x4x4xf32>
        !t = tensor<1x8x4x4xf32>
        !w = tensor<8x8x1x1xf32>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "w"} : () -> !w
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
              groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.silu"(%0) : (!t) -> !t
          %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
              groups = 1 : i64} : (!t, !w) -> !t
          return %2 : !t
        }
    """

    name: ClassVar[str] = "yolo-narrow-activations"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Retype `@main`. Raises UserError after dispatches are formed, and for a large weight."""
        block = entry_block(module)
        _check(block)
        ties = _tied(block)
        for op in _unreadable(block):
            remark(op.location, "stays float32: its weight is not a yolo.weight")
            context.count(self, "left")
        weights = _Weights(module, context)
        for op in operations(block):
            if op.name == "yolo.weight" or not op.name.startswith(yolo.NAMESPACE + "."):
                continue
            if op.name == "yolo.conv2d" and _reads_store(op):
                op.operands[1] = weights.narrowed(op)
            for result in op.results:
                if yolo.element_of(result) == "f32" and not ties.is_wide(result):
                    result.set_type(_as_half(result.type))
                    context.count(self, "activations")
        context.count(self, "weights", weights.count)
        rewriting.erase_dead(rewriting.operations(module, "yolo.weight"))
        module.operation.attributes[PRECISION] = ir.StringAttr.get("fp16", module.context)


def _check(block: ir.Block) -> None:
    for op in operations(block):
        if op.name != "func.return" and not op.name.startswith(yolo.NAMESPACE + "."):
            raise UserError(
                f"'{op.name}' is no op of the dialect; element types are chosen before that",
                where=yolo.layer_of(op.location),
                hint="run yolo-narrow-activations before yolo-conv-epilogue-fusion",
            )


def _as_half(type_: ir.Type) -> ir.Type:
    tensor = ir.RankedTensorType(type_)
    return ir.RankedTensorType.get(tensor.shape, ir.F16Type.get(), tensor.encoding)


def _reads_store(conv: ir.Operation) -> bool:
    """Whether a convolution's weight lies in the store."""
    return producer(conv.operands[1], "yolo.weight") is not None


def _unreadable(block: ir.Block) -> list[ir.Operation]:
    return [op for op in operations(block) if op.name == "yolo.conv2d" and not _reads_store(op)]


# ---- which tensors have one element type --------------------------------------------------------


class _Ties:
    """Sets of tensors that have one element type, and which of the sets stay float32."""

    def __init__(self) -> None:
        self._parent: dict[ir.Value, ir.Value] = {}
        self._wide: set[ir.Value] = set()

    def _root(self, value: ir.Value) -> ir.Value:
        while value in self._parent:
            value = self._parent[value]
        return value

    def tie(self, a: ir.Value, b: ir.Value) -> None:
        """Give two tensors one type."""
        first, second = self._root(a), self._root(b)
        if first == second:
            return
        self._parent[second] = first
        if second in self._wide:
            self._wide.add(first)

    def widen(self, value: ir.Value) -> None:
        """Keep a tensor, and those tied to it, float32."""
        self._wide.add(self._root(value))

    def is_wide(self, value: ir.Value) -> bool:
        """Whether a tensor stays float32."""
        return self._root(value) in self._wide


def _tied(block: ir.Block) -> _Ties:
    ties = _Ties()
    for argument in block.arguments:
        ties.widen(argument)
    for op in operations(block):
        if op.name == "yolo.weight":  # the store's tensors stay; a convolution's is derived anew
            ties.widen(op.results[0])
        elif op.name in _WIDE:
            for value in [*op.operands, *op.results]:
                ties.widen(value)
        elif op.name == "yolo.normalize":
            ties.widen(op.results[0])
        elif op.name == "yolo.conv2d":
            if not _reads_store(op):
                for value in (op.operands[0], op.operands[1], op.results[0]):
                    ties.widen(value)
            for bias in list(op.operands)[2:]:
                ties.widen(bias)
        elif op.name == "yolo.batch_norm":
            ties.tie(op.operands[0], op.results[0])
            for parameter in list(op.operands)[1:]:
                ties.widen(parameter)
        else:
            for operand in op.operands:
                ties.tie(operand, op.results[0])
    return ties


# ---- weights ------------------------------------------------------------------------------------


class _Weights:
    """The weights of a module as float16, each derived once."""

    def __init__(self, module: ir.Module, context: PassContext) -> None:
        self._context = context
        self._taken = rewriting.weight_names(module)
        self._made: dict[ir.Value, ir.Value] = {}

    @property
    def count(self) -> int:
        """How many weights there are as float16 that were not."""
        return len(self._made)

    def narrowed(self, conv: ir.Operation) -> ir.Value:
        """The weight of a convolution as float16; itself where it is."""
        weight = conv.operands[1]
        if yolo.element_of(weight) != "f32":
            return weight
        if weight not in self._made:
            self._made[weight] = self._derive(weight, yolo.layer_of(conv.location))
        return self._made[weight]

    def _derive(self, weight: ir.Value, layer: str) -> ir.Value:
        source = weight.owner.operation
        name = yolo.string(source, "name")

        def rounded(tensor: Array) -> Array:
            return to_half(tensor, layer, name)

        with ir.InsertionPoint(source):
            return rewriting.derived_weight(
                self._context, self._taken, f"{name}:f16", [source], rounded, _as_half(weight.type)
            )


def to_half(tensor: Array, layer: str, name: str) -> Array:
    """A tensor rounded to float16. Raises UserError where an element is out of its range."""
    with np.errstate(over="ignore"):
        half = tensor.astype(np.float16)
    bad = np.flatnonzero(~np.isfinite(half))
    if bad.size:
        value = tensor.reshape(-1)[bad[0]]
        raise UserError(
            f"weight '{name}' holds {value:.6g}; float16 ends at {LARGEST:.0f}",
            where=layer,
            hint="compile with --precision tf32 or fp32",
        )
    return half


__all__ = ["NarrowActivations", "to_half"]
