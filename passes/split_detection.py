"""The pass `yolo-split-detection`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import entry_block, operations, producer

from yolomlir.bindings import ir

MOST_ROWS = 512
"""The largest max_det: the rows of both stages fit into every GPU's shared memory."""


@dataclass(frozen=True)
class SplitDetection(Pass):
    """Detect in two stages, of which the first does not wait for the coarsest level.

    The finer levels have 20 of 21 anchors, and their maps are finished long before the last: the
    coarsest level's head comes at the end of the network. So `yolo.candidates` takes the best
    `max_det` of the two finer levels while the network goes on, and `yolo.merge_detections` merges
    them with the best of the last. The result is the same: the best of all are among the best of
    either part, and rows carry what their order goes by.

    `yolo.candidates` stands as early as its operands allow. A detection whose finer levels have
    fewer anchors than `max_det`, or whose `max_det` is over 512, stays whole.

    Before:
        %y = "yolo.detect"(%b3, %b4, %b5, %c3, %c4, %c5) {max_det = 300, …}

    After:
        %0 = "yolo.candidates"(%b3, %b4, %c3, %c4) {max_det = 300, …}
        %y = "yolo.merge_detections"(%0, %b5, %c5) {stride = 32}

    Statistics:
        split: detections in two stages now.
        left: detections that stay whole.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-split-detection | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK: %[[C:.*]] = "yolo.candidates"(%arg0, %arg1, %arg3, %arg4)
        // CHECK-SAME: max_det = 3 : i64, strides = array<i64: 8, 16>
        // CHECK: %[[Y:.*]] = "yolo.merge_detections"(%[[C]], %arg2, %arg5) {stride = 32 : i64}
        // CHECK: return %[[Y]]
        !b3 = tensor<1x4x4x4xf32>
        !b4 = tensor<1x4x3x3xf32>
        !b5 = tensor<1x4x2x2xf32>
        !c3 = tensor<1x2x4x4xf32>
        !c4 = tensor<1x2x3x3xf32>
        !c5 = tensor<1x2x2x2xf32>
        func.func @main(%0: !b3, %1: !b4, %2: !b5, %3: !c3, %4: !c4, %5: !c5) -> tensor<1x3x6xf32> {
          %y = "yolo.detect"(%0, %1, %2, %3, %4, %5) {strides = array<i64: 8, 16, 32>,
              max_det = 3 : i64} : (!b3, !b4, !b5, !c3, !c4, !c5) -> tensor<1x3x6xf32>
          return %y : tensor<1x3x6xf32>
        }
    """

    name: ClassVar[str] = "yolo-split-detection"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Rewrite every `yolo.detect` of `@main` that can be."""
        block = entry_block(module)
        for op in [op for op in operations(block) if op.name == "yolo.detect"]:
            if _can_split(op):
                _split(op, block)
                context.count(self, "split")
            else:
                context.count(self, "left")


def _can_split(op: ir.Operation) -> bool:
    """Whether the finer levels have enough anchors, and no map is read twice."""
    maps = list(op.operands)
    finer = sum(prod(yolo.shape_of(v)[2:]) for v in maps[: yolo.LEVELS - 1])
    wanted = yolo.integer(op, "max_det")
    return wanted <= min(finer, MOST_ROWS) and len(set(maps)) == len(maps)


def _split(op: ir.Operation, block: ir.Block) -> None:
    boxes, classes = list(op.operands)[: yolo.LEVELS], list(op.operands)[yolo.LEVELS :]
    strides, wanted = yolo.integers(op, "strides"), yolo.integer(op, "max_det")
    layer, where = yolo.layer_of(op.location), op.location
    if not layer.startswith("loc("):
        where = ir.Location.name(f"{layer}.candidates")
    finer = boxes[:-1], classes[:-1]
    with _behind([*finer[0], *finer[1]], block):
        rows = yolo.candidates(*finer, strides=strides[:-1], max_det=wanted, loc=where)
    with ir.InsertionPoint(op):
        merged = yolo.merge_detections(
            rows, boxes[-1], classes[-1], stride=strides[-1], loc=op.location
        )
    op.results[0].replace_all_uses_with(merged)
    op.erase()


def _behind(values: list[ir.Value], block: ir.Block) -> ir.InsertionPoint:
    """The first place of a block where all of these values are."""
    makers = [made for value in values if (made := producer(value)) is not None]
    last = None
    for op in operations(block):
        if op in makers:
            last = op
    if last is None:
        return ir.InsertionPoint.at_block_begin(block)
    return ir.InsertionPoint.after(last)


__all__ = ["SplitDetection"]
