"""The pass `yolo-dce`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir, passmanager


@dataclass(frozen=True)
class Dce(Pass):
    """Erase what nothing uses: ops of `yolo`, dispatches, weights, private functions.

    Upstream's canonicaliser does not know that the ops of `yolo` are pure. The weight store is left
    as it is: another module may share it.

    Before:
        %w = "yolo.weight"() {name = "unused"}
        %0 = "yolo.silu"(%x)
        return %x

    After:
        return %x

    Statistics:
        ops: ops erased, weights not counted.
        weights: `yolo.weight`s erased.
        functions: private functions erased.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-dce | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NEXT: return %arg0
        // CHECK-NOT: @unused
        !t = tensor<1x8x6x6xf32>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
          %0 = "yolo.silu"(%x) : (!t) -> !t
          %1 = "yolo.add"(%0, %x) : (!t, !t) -> !t
          return %x : !t
        }
        func.func private @unused(%x: !t) -> !t {
          return %x : !t
        }
    """

    name: ClassVar[str] = "yolo-dce"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Erase dead ops bottom-up, then private functions that nobody calls."""
        for statistic, count in _erase_ops(module).items():
            context.count(self, statistic, count)
        before = _functions(module)
        # Symbols are upstream's business, and its pass knows every way of using one.
        passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)
        context.count(self, "functions", before - _functions(module))


def _erase_ops(module: ir.Module) -> dict[str, int]:
    counts = {"ops": 0, "weights": 0}
    for op in reversed(rewriting.operations(module)):
        pure = op.name.startswith(rewriting.PURE) or yolo.is_dispatch(op)
        if not pure or any(list(result.uses) for result in op.results):
            continue
        counts["weights" if op.name == "yolo.weight" else "ops"] += 1
        op.erase()
    return counts


def _functions(module: ir.Module) -> int:
    return sum(view.operation.name == "func.func" for view in module.body.operations)
