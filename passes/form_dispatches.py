"""The pass `yolo-form-dispatches`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import (
    Outliner,
    entry_block,
    only_user,
    operations,
    producer,
    users,
)

from yolomlir.bindings import ir

VIEWS = ("yolo.slice", "yolo.concat", "yolo.upsample")
"""Ops that `yolo-concat-views` makes addressing; they are no kernels yet."""
_DETECTIONS = {
    "yolo.detect": naming.DETECT,
    "yolo.candidates": naming.DETECT,
    "yolo.merge_detections": naming.MERGE,
}
"""Families of the ops that choose detections."""


@dataclass(frozen=True)
class FormDispatches(Pass):
    """Group pooling, attention and detection into dispatches, and whatever is left alone.

    SPPF's pools, each of which reads the one before, become one dispatch whose result is the concat
    of the pooled maps; the concat with their input stays. Attention takes its positional encoding
    (a depthwise convolution of v, added to its result) along. Detection is one dispatch. An op that
    no pass grouped (an activation without a convolution, an addition of two maps that others want
    too) becomes a dispatch of its own of the family `elementwise`, so that the pass leaves nothing
    in `@main` but weights, dispatches, slices, concats and upsamples.

    Before:
        %p1 = "yolo.max_pool2d"(%x)
        %p2 = "yolo.max_pool2d"(%p1)
        %0 = "yolo.concat"(%x, %p1)
        %1 = "yolo.concat"(%0, %p2)

    After:
        %p = call @max_pool_5x5s1_8x8x8_chain2(%x) {yolo.dispatch}
        %1 = "yolo.concat"(%x, %p)

    Statistics:
        pool_chains: groups of pools.
        attentions: attention ops grouped.
        encodings: positional encodings that joined their attention.
        detections: detect ops grouped.
        elementwise: ops left alone.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-form-dispatches | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK: %[[P:.*]] = call @max_pool_5x5s1_8x8x8_chain2(%arg0) {yolo.dispatch}
        // CHECK: "yolo.concat"(%arg0, %[[P]])
        // CHECK: func.func private @max_pool_5x5s1_8x8x8_chain2
        // CHECK-SAME: yolo.family = "max_pool"
        // CHECK-COUNT-2: yolo.max_pool2d
        !t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
        !c2 = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
        !c3 = tensor<1x24x8x8xf32, #yolo.layout<"nhwc">>
        func.func @main(%x: !t) -> !c3 {
          %p1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
              padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
          %p2 = "yolo.max_pool2d"(%p1) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
              padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
          %0 = "yolo.concat"(%x, %p1) : (!t, !t) -> !c2
          %1 = "yolo.concat"(%0, %p2) : (!c2, !t) -> !c3
          return %1 : !c3
        }
    """

    name: ClassVar[str] = "yolo-form-dispatches"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Group what `yolo-conv-epilogue-fusion` left in `@main`."""
        block = entry_block(module)
        outliner = Outliner(module)
        for op in [op for op in operations(block) if op.name == "yolo.concat"]:
            if not _is_inner_concat(op):
                self._pools(op, outliner, context)
        for op in [op for op in operations(block) if op.name == "yolo.attention"]:
            self._attention(op, outliner, context)
        for op in operations(block):
            if op.name in _DETECTIONS:
                maps = list(op.operands)
                if len(set(maps)) == len(maps):
                    outliner.outline([op], maps, _DETECTIONS[op.name], naming.detect_name(op))
                    context.count(self, "detections")
        for op in operations(block):
            self._alone(op, outliner, context)

    def _pools(self, root: ir.Operation, outliner: Outliner, context: PassContext) -> None:
        tree = _concat_tree(root)
        leaves = _leaves(root, tree)
        chain = _pool_chain(leaves, tree)
        if not chain:
            return
        first = leaves.index(chain[0].results[0])
        with ir.InsertionPoint(root):
            pooled = yolo.concat([p.results[0] for p in chain], loc=chain[0].location)
            joined = [*leaves[:first], pooled, *leaves[first + len(chain) :]]
            whole = yolo.concat(joined, loc=root.location)
        root.results[0].replace_all_uses_with(whole)
        for op in reversed(tree):
            op.erase()
        ops = [*chain, *_concat_tree(pooled.owner.operation)]
        operands = [chain[0].operands[0]]
        outliner.outline(ops, operands, naming.MAX_POOL, naming.pool_name(chain))
        context.count(self, "pool_chains")

    def _attention(self, op: ir.Operation, outliner: Outliner, context: PassContext) -> None:
        ops = attention_group(op)
        operands = [op.operands[0]]
        encoding = next((o for o in ops if o.name == "yolo.conv2d"), None)
        if encoding is not None:
            operands += list(encoding.operands)[1:]
        name = naming.attention_name(op, encoding is not None)
        outliner.outline(ops, operands, naming.ATTENTION, name, loc=op.location)
        context.count(self, "attentions")
        context.count(self, "encodings", int(encoding is not None))

    def _alone(self, op: ir.Operation, outliner: Outliner, context: PassContext) -> None:
        if not op.name.startswith("yolo.") or op.name in (*VIEWS, "yolo.weight"):
            return
        operands = list(op.operands)
        if op.name == "yolo.conv2d":
            outliner.outline([op], operands, *naming.conv_name([op]))
        elif op.name == "yolo.max_pool2d":
            outliner.outline([op], operands, naming.MAX_POOL, naming.pool_name([op]))
        else:
            outline_alone(op, outliner)
            context.count(self, "elementwise")


def outline_alone(op: ir.Operation, outliner: Outliner) -> ir.Operation:
    """Make one op a dispatch of the family `elementwise`."""
    operands = list(dict.fromkeys(op.operands))
    return outliner.outline([op], operands, naming.ELEMENTWISE, naming.op_name(op))


# ---- pools --------------------------------------------------------------------------------------


def _is_inner_concat(op: ir.Operation) -> bool:
    return only_user(op.results[0], "yolo.concat") is not None


def _concat_tree(root: ir.Operation) -> list[ir.Operation]:
    """A concat and the concats that only it reads, operands before users."""
    tree: list[ir.Operation] = []
    for operand in root.operands:
        inner = producer(operand, "yolo.concat")
        if inner is not None and len(users(operand)) == 1:
            tree += _concat_tree(inner)
    return [*tree, root]


def _leaves(root: ir.Operation, tree: list[ir.Operation]) -> list[ir.Value]:
    leaves: list[ir.Value] = []
    for operand in root.operands:
        inner = producer(operand, "yolo.concat")
        leaves += _leaves(inner, tree) if inner is not None and inner in tree else [operand]
    return leaves


def _pool_chain(leaves: list[ir.Value], tree: list[ir.Operation]) -> list[ir.Operation]:
    """The longest run of leaves that are pools, each the only other use of the one before."""
    best: list[ir.Operation] = []
    chain: list[ir.Operation] = []
    for leaf in leaves:
        pool = producer(leaf, "yolo.max_pool2d")
        follows = bool(chain) and pool is not None and pool.operands[0] == chain[-1].results[0]
        if not follows:
            chain = []
        if pool is not None and _same_size(pool):
            chain = [*chain, pool]
        closed = [p for p in chain if _only_used_by(p, [*tree, *chain])]
        if len(closed) == len(chain) > max(1, len(best)):
            best = chain
    return best


def _same_size(pool: ir.Operation) -> bool:
    return yolo.shape_of(pool.operands[0]) == yolo.shape_of(pool.results[0])


def _only_used_by(op: ir.Operation, allowed: list[ir.Operation]) -> bool:
    found = users(op.results[0])
    concats = [u for u in found if u.name == "yolo.concat"]
    return all(u in allowed for u in found) and len(concats) == 1


# ---- attention ----------------------------------------------------------------------------------


def attention_group(attention: ir.Operation) -> list[ir.Operation]:
    """The ops of attention's dispatch in program order: it alone, or with its positional encoding.

    The encoding is a depthwise convolution of v (the v channels of qkv, head after head) of which
    the addition to attention's result is the only use.
    """
    alone = [attention]
    add = only_user(attention.results[0], "yolo.add")
    if add is None:
        return alone
    other = [v for v in add.operands if v != attention.results[0]]
    encoding = producer(other[0], "yolo.conv2d") if len(other) == 1 else None
    if encoding is None or len(users(encoding.results[0])) != 1:
        return alone
    channels = yolo.shape_of(encoding.operands[0])[1]
    if yolo.integer(encoding, "groups") != channels:
        return alone
    values = _value_ops(attention, encoding.operands[0], encoding)
    return [*values, attention, encoding, add] if values else alone


def _value_ops(
    attention: ir.Operation, v: ir.Value, reader: ir.Operation
) -> list[ir.Operation] | None:
    """The slices and concats that make v of qkv, when only `reader` reads them; else None."""
    heads, key_dim, head_dim = (
        yolo.integer(attention, a) for a in ("heads", "key_dim", "head_dim")
    )
    if len(users(v)) != 1:
        return None
    root = producer(v, "yolo.concat")
    tree = _concat_tree(root) if root is not None else []
    leaves = _leaves(root, tree) if root is not None else [v]
    ops: list[ir.Operation] = []
    for head, leaf in enumerate(leaves):
        part = producer(leaf, "yolo.slice")
        start = head * (2 * key_dim + head_dim) + 2 * key_dim
        if part is None or part.operands[0] != attention.operands[0] or len(users(leaf)) != 1:
            return None
        if (yolo.integer(part, "offset"), yolo.integer(part, "size")) != (start, head_dim):
            return None
        ops.append(part)
    return [*ops, *tree] if len(leaves) == heads else None
