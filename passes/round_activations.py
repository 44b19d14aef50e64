"""The pass `yolo-round-activations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import dispatches, family_of, functions, is_weight, producer

from yolomlir.bindings import ir

ROUND_RESULT = "yolo.round_result"
"""Unit attribute of a function whose kernel rounds what it stores to TF32."""
ROUNDED_OPERANDS = "yolo.tf32_rounded"
"""The arguments of a function whose values are TF32 already."""
_ROUNDS = (naming.CONV2D, naming.DEPTHWISE, naming.ATTENTION)
"""Families whose kernels can round what they store."""
_ADDRESSING = ("yolo.slice", "yolo.concat", "yolo.upsample")


@dataclass(frozen=True)
class RoundActivations(Pass):
    """Round to TF32 where a tensor is written, once, instead of wherever it is read.

    A convolution on tensor cores rounds its input to nearest TF32 each time that a warp loads it: a
    pixel once a tap, and once for each warp that shares it. Here the kernels that compute such
    inputs round their results, and the convolutions are told that they are rounded. A maximum of
    rounded values is rounded. A function rounds when one of its calls feeds a convolution or
    attention, so equal shapes still share a kernel. Does nothing for `fp32` and on a CPU.

    Before:
        %0 = call @a(%x, %w) {yolo.dispatch}
        %1 = call @b(%0, %w) {yolo.dispatch}
        func.func private @a(…) attributes {yolo.family = "conv2d"}
        func.func private @b(…) attributes {yolo.family = "conv2d"}

    After:
        func.func private @a(…) attributes {yolo.family = "conv2d", yolo.round_result}
        func.func private @b(…) attributes {yolo.family = "conv2d",
                                            yolo.tf32_rounded = array<i64: 0>}

    Statistics:
        results: functions that round what they store.
        operands: arguments of functions that no longer need rounding.

    Example:
        // RUN: yolomlir-opt %s --target=sm_90 --yolo-round-activations | FileCheck %s

        // CHECK: func.func private @a
        // CHECK-SAME: yolo.round_result
        // CHECK: func.func private @b
        // CHECK-NOT: yolo.round_result
        // CHECK-SAME: yolo.tf32_rounded = array<i64: 0>
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
        module attributes {yolo.precision = "tf32"} {
          func.func @main(%x: !t) -> !t {
            %w = "yolo.weight"() {name = "w"} : () -> !w
            %0 = func.call @a(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
            %1 = func.call @b(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
            return %1 : !t
          }
          func.func private @a(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
            %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
                padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
            return %0 : !t
          }
          func.func private @b(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
            %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
                padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
            %1 = "yolo.silu"(%0) : (!t) -> !t
            return %1 : !t
          }
        }
    """

    name: ClassVar[str] = "yolo-round-activations"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Set the attributes of the functions that dispatches call."""
        root = module.operation
        tf32 = "yolo.precision" in root.attributes and yolo.string(root, "yolo.precision") == "tf32"
        if context.target.kind != "gpu" or not tf32:
            return
        table = functions(module)
        calls = dispatches(module)
        rounding = _functions_that_round(calls, table)
        for name in sorted(rounding):
            table[name].attributes[ROUND_RESULT] = ir.UnitAttr.get(module.context)
            context.count(self, "results")
        for name, operands in _rounded_operands(calls, table, rounding).items():
            if operands:
                table[name].attributes[ROUNDED_OPERANDS] = ir.DenseI64ArrayAttr.get(
                    sorted(operands), module.context
                )
                context.count(self, "operands", len(operands))


def tensor_core_reads(call: ir.Operation, table: dict[str, ir.Operation]) -> list[int]:
    """The float32 operands of a dispatch that its kernel multiplies on tensor cores."""
    family = family_of(call, table)
    if family == naming.ATTENTION:
        return [0]
    if family != naming.CONV2D:
        return []
    sources = []
    for i, operand in enumerate(call.operands):
        if is_weight(operand):
            break
        if isinstance(ir.RankedTensorType(operand.type).element_type, ir.F32Type):
            sources.append(i)
    return sources


def _origins(value: ir.Value) -> list[ir.Operation | None]:
    """The ops that compute a tensor, views looked through; None for an argument of `@main`."""
    op = producer(value)
    if op is None or op.name not in _ADDRESSING:
        return [op]
    return [origin for operand in op.operands for origin in _origins(operand)]


def _functions_that_round(calls: list[ir.Operation], table: dict[str, ir.Operation]) -> set[str]:
    """The functions with a result that some call multiplies on tensor cores."""
    found: set[str] = set()
    read = [call.operands[i] for call in calls for i in tensor_core_reads(call, table)]
    while read:
        for op in _origins(read.pop()):
            if op is None or not yolo.is_dispatch(op):
                continue
            if family_of(op, table) == naming.MAX_POOL:
                read.append(op.operands[0])
            elif family_of(op, table) in _ROUNDS:
                found.add(yolo.callee(op))
    return found


def _rounded_operands(
    calls: list[ir.Operation], table: dict[str, ir.Operation], rounding: set[str]
) -> dict[str, set[int]]:
    """For each function, the operands that are rounded at every one of its calls."""

    def is_rounded(value: ir.Value) -> bool:
        for op in _origins(value):
            if op is None or not yolo.is_dispatch(op):
                return False
            pools = family_of(op, table) == naming.MAX_POOL
            if not (is_rounded(op.operands[0]) if pools else yolo.callee(op) in rounding):
                return False
        return True

    found: dict[str, set[int]] = {}
    for call in calls:
        rounded = {i for i in tensor_core_reads(call, table) if is_rounded(call.operands[i])}
        name = yolo.callee(call)
        found[name] = found[name] & rounded if name in found else rounded
    return found
