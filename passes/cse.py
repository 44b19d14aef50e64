"""The pass `yolo-cse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir

_VIEWS = "yolo.views"


@dataclass(frozen=True)
class Cse(Pass):
    """Compute what is computed twice once: equal ops on equal operands, weights of one name.

    Upstream's `cse` does not know that the ops of `yolo` are pure. Dispatches are, and they merge
    too, unless the memory plan has given their results a place: a tensor's life must not be
    lengthened after that. The first of two equal ops stays, with its location.

    Before:
        %0 = "yolo.silu"(%x)
        %1 = "yolo.silu"(%x)

    After:
        %0 = "yolo.silu"(%x)

    Statistics:
        merged: ops that an earlier one took the place of.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-cse | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NEXT: %[[Y:.*]] = "yolo.silu"(%arg0)
        // CHECK-NEXT: %[[Z:.*]] = "yolo.add"(%[[Y]], %[[Y]])
        // CHECK-NEXT: return %[[Z]]
        !t = tensor<1x8x6x6xf32>
        func.func @main(%x: !t) -> !t {
          %0 = "yolo.silu"(%x) : (!t) -> !t
          %1 = "yolo.silu"(%x) : (!t) -> !t
          %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
          return %2 : !t
        }
    """

    name: ClassVar[str] = "yolo-cse"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Merge equal ops within each function's body."""
        for block in rewriting.blocks(module):
            first: dict[object, ir.Operation] = {}
            for view in list(block.operations):
                op = view.operation
                if not _mergeable(op):
                    continue
                earlier = first.setdefault(_key(op), op)
                if earlier is op:
                    continue
                for old, new in zip(op.results, earlier.results, strict=True):
                    old.replace_all_uses_with(new)
                op.erase()
                context.count(self, "merged")


def _mergeable(op: ir.Operation) -> bool:
    if _VIEWS in op.attributes:
        return False
    return op.name.startswith(rewriting.PURE) or yolo.is_dispatch(op)


def _key(op: ir.Operation) -> object:
    """What two ops must have in common to compute the same."""
    attributes = tuple(sorted((name, str(op.attributes[name])) for name in op.attributes))
    types = tuple(str(result.type) for result in op.results)
    return op.name, tuple(op.operands), attributes, types
