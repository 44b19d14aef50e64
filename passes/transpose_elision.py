"""The pass `yolo-transpose-elision`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects.layout import Layout
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir


@dataclass(frozen=True)
class TransposeElision(Pass):
    """Remove the `yolo.convert_layout`s that cancel, that repeat another, and that nothing reads.

    A conversion is rewritten to read the first tensor of its chain of conversions. It goes when
    that tensor has the wanted order already, or when an earlier conversion of the block gives the
    same. No conversion is ever added or moved: the pass only shortens.

    Before:
        %1 = "yolo.convert_layout"(%0) : (…nhwc) -> …logical
        %2 = "yolo.convert_layout"(%1) : (…logical) -> …nhwc

    After:
        %0, wherever %2 was used

    Statistics:
        elided: conversions removed.
        kept: conversions that are left.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-transpose-elision | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NOT: yolo.convert_layout
        // CHECK: %[[Y:.*]] = "yolo.silu"(%arg0)
        // CHECK-NEXT: return %[[Y]]
        !nhwc = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
        !nchw = tensor<1x8x6x6xf32>
        func.func @main(%x: !nhwc) -> !nhwc {
          %0 = "yolo.convert_layout"(%x) : (!nhwc) -> !nchw
          %1 = "yolo.convert_layout"(%0) : (!nchw) -> !nhwc
          %2 = "yolo.silu"(%1) : (!nhwc) -> !nhwc
          return %2 : !nhwc
        }
    """

    name: ClassVar[str] = "yolo-transpose-elision"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Shorten every chain of conversions, then drop those that nothing reads."""
        before = len(rewriting.operations(module, "yolo.convert_layout"))
        for block in rewriting.blocks(module):
            _shorten(block)
        rewriting.erase_dead(rewriting.operations(module, "yolo.convert_layout"))
        after = len(rewriting.operations(module, "yolo.convert_layout"))
        context.count(self, "elided", before - after)
        context.count(self, "kept", after)


def _shorten(block: ir.Block) -> None:
    available: dict[tuple[ir.Value, Layout], ir.Value] = {}
    for view in list(block.operations):
        op = view.operation
        if op.name != "yolo.convert_layout":
            continue
        source, result = _root(op.operands[0]), op.results[0]
        layout = Layout.of(result.type)
        if Layout.of(source.type) is layout:
            result.replace_all_uses_with(source)
            continue
        op.operands[0] = source
        earlier = available.setdefault((source, layout), result)
        if earlier != result:
            result.replace_all_uses_with(earlier)


def _root(value: ir.Value) -> ir.Value:
    """The tensor at the start of a chain of conversions."""
    conversion = rewriting.producer(value, "yolo.convert_layout")
    while conversion is not None:
        value = conversion.operands[0]
        conversion = rewriting.producer(value, "yolo.convert_layout")
    return value
