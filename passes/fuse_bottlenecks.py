"""The pass `yolo-fuse-bottlenecks`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.fuse_pointwise import VIEWS, tile_objection
from yolomlir.passes.outlining import (
    Outliner,
    convolution,
    dispatches,
    entry_block,
    erase_unused_functions,
    family_of,
    functions,
    is_weight,
    operations,
    precision_of,
    producer,
    require_grouped,
    users,
)
from yolomlir.passes.placement import Placement, overlap

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.remarks import remark
from yolomlir.target import Target

if TYPE_CHECKING:
    from yolomlir.codegen.gpu.chain_tile import ChainShape

_ABSORBED = ("yolo.conv2d", "yolo.silu", "yolo.add", "yolo.concat", "yolo.slice", "yolo.upsample")
_INPUT = r"\d+x\d+x\d+(:\d+)?"
_INPUTS = re.compile(rf"{_INPUT}(\+{_INPUT})*")


@dataclass(frozen=True)
class FuseBottlenecks(Pass):
    """Put a 3x3 convolution into the dispatch of the 3x3 convolution that alone reads it, on a GPU.

    Bottlenecks have such pairs, of stride 1 both. One kernel computes the first convolution for the
    pixels that a tile of the second reads, which are those of the tile and a border of one pixel,
    and keeps them on chip. Borders are computed by both tiles that they lie between; that costs
    less than the launch and the trip through memory where pixels or channels are few. The second
    convolution may begin a chain that `yolo-fuse-pointwise` made: the whole chain is one dispatch
    then.

    Tiles have to fit every GPU that the compiler knows, as those of chains have (`portable` there).

    Options:
        max-pixels: pixels of the result.
        max-channels: channels that either convolution reads.
        inputs: what the first convolution of a pair reads, as CxHxW, several joined by `+`; other
            pairs are left alone. CxHxW:N are those that become a chain of N convolutions. Empty:
            any.
        portable: whether a tile has to fit all GPUs.

    Before:
        %1 = call @conv2d_3x3s1_16x16x16_8_silu(%x, %w, %b) {yolo.dispatch}
        %2 = call @conv2d_3x3s1_8x16x16_16_silu_add(%1, %v, %c, %x) {yolo.dispatch}

    After:
        %2 = call @chain_3x3s1_16x16x16_8_silu_then_3x3s1_16_silu_add(%x, %w, %b, %v, %c, %x)
            {yolo.dispatch}

    Statistics:
        pairs: dispatches that went into another.
        kept_apart: pairs refused, each with a remark.

    Example:
        // RUN: yolomlir-opt %s --target=sm_90 --split-input-file --yolo-fuse-bottlenecks \\
        // RUN:   | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NOT: @conv2d
        // CHECK: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add(%arg0, {{.*}}, %arg0)
        // CHECK-NOT: @conv2d
        // CHECK: func.func private @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add
        // CHECK-SAME: yolo.family = "chain"
        // CHECK: yolo.conv2d
        // CHECK-NEXT: yolo.silu
        // CHECK-NEXT: yolo.conv2d
        // CHECK-NEXT: yolo.add
        !t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "a.weight"} : () -> !w
          %0 = func.call @conv2d_3x3s1_8x8x8_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
          %1 = func.call @conv2d_3x3s1_8x8x8_8_add(%0, %w, %x) {yolo.dispatch}
              : (!t, !w, !t) -> !t
          return %1 : !t
        }
        func.func private @conv2d_3x3s1_8x8x8_8_silu(%x: !t, %w: !w) -> !t
            attributes {yolo.family = "conv2d"} {
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
              padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.silu"(%0) : (!t) -> !t
          return %1 : !t
        }
        func.func private @conv2d_3x3s1_8x8x8_8_add(%x: !t, %w: !w, %r: !t) -> !t
            attributes {yolo.family = "conv2d"} {
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
              padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
          return %1 : !t
        }
    """

    name: ClassVar[str] = "yolo-fuse-bottlenecks"
    max_pixels: int = 1 << 16
    max_channels: int = 128
    inputs: str = ""
    portable: bool = True

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Fuse the pairs of `@main`; does nothing for a CPU."""
        self.require_positive("max_pixels", "max_channels")
        if self.inputs and not _INPUTS.fullmatch(self.inputs):
            raise UserError(
                f"'{self.name}': inputs is '{self.inputs}'; expected CxHxW or CxHxW:N, joined by "
                "'+'",
                hint="such as inputs=16x160x160+32x80x80:3",
            )
        if context.target.kind != "gpu":
            return
        require_grouped(entry_block(module), (*VIEWS, "yolo.upsample"))
        table = functions(module)
        pairs: list[tuple[ir.Operation, ir.Operation]] = []
        placement = Placement(entry_block(module))
        placement.try_views([op for op in operations(entry_block(module)) if op.name in VIEWS])
        for call in dispatches(module):
            first = _pair_of(call, table)
            if first is None or not self._is_asked_for(first, call, table) or _is_in(first, pairs):
                continue
            reason = self._objection(first, call, table, context.target, precision_of(module))
            reason = reason or _hazard(first, call, placement)
            if reason is None:
                pairs.append((first, call))
                continue
            remark(first.location, f"not fused with what reads it: {reason}")
            context.count(self, "kept_apart")
        del placement
        outliner = Outliner(module)
        for first, second in pairs:
            _outline(first, second, table, outliner)
            context.count(self, "pairs")
        erase_unused_functions(module)

    def _is_asked_for(
        self, first: ir.Operation, second: ir.Operation, table: dict[str, ir.Operation]
    ) -> bool:
        channels = sum(yolo.shape_of(v)[1] for v in _read(first))
        size = "x".join(str(n) for n in (channels, *yolo.shape_of(first.results[0])[2:]))
        rest = table[yolo.callee(second)].regions[0].blocks[0]
        length = 1 + sum(op.name == "yolo.conv2d" for op in operations(rest))
        return not self.inputs or not {size, f"{size}:{length}"}.isdisjoint(self.inputs.split("+"))

    def _objection(
        self, first: ir.Operation, second: ir.Operation, table: dict[str, ir.Operation],
        target: Target, precision: str,
    ) -> str | None:  # fmt: skip
        """Why two dispatches are not to be one; None where they are."""
        if len(users(first.results[0])) > 1:
            return "its result is read elsewhere as well"
        shape = _shape(table[yolo.callee(first)], table[yolo.callee(second)])
        if shape.first.pixels > self.max_pixels:
            return f"it has {shape.first.pixels} pixels; at most {self.max_pixels}"
        channels = max(shape.first.in_channels, shape.last.in_channels)
        if channels > self.max_channels:
            return f"a convolution reads {channels} channels; at most {self.max_channels}"
        return tile_objection(shape, target, precision, portable=self.portable)


# ---- what a pair is -----------------------------------------------------------------------------


def _pair_of(call: ir.Operation, table: dict[str, ir.Operation]) -> ir.Operation | None:
    """The 3x3 convolution's dispatch that a 3x3 convolution's dispatch, or chain, reads; None."""
    if family_of(call, table) not in (naming.CONV2D, naming.CHAIN):
        return None
    body = table[yolo.callee(call)].regions[0].blocks[0]
    conv = convolution(body)
    if not _is_plain(conv) or conv.operands[0] != body.arguments[0]:
        return None
    first = producer(call.operands[0])
    if first is None or not yolo.is_dispatch(first) or family_of(first, table) != naming.CONV2D:
        return None
    inner = table[yolo.callee(first)].regions[0].blocks[0]
    known = all(op.name in _ABSORBED for op in operations(inner)[:-1])
    before = convolution(inner)
    multiplied = _element(before.operands[1])
    alike = multiplied == _element(conv.operands[1])
    alike = alike and all(_element(v) == multiplied for v in (first.results[0], *_read(first)))
    return first if known and alike and _is_plain(before) else None


def _is_plain(conv: ir.Operation) -> bool:
    """Whether a convolution is 3x3, of stride 1 and one group."""
    return (
        yolo.shape_of(conv.operands[1])[2:] == [3, 3]
        and list(yolo.integers(conv, "strides")) == [1, 1]
        and yolo.integer(conv, "groups") == 1
    )


def _element(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type


def _read(call: ir.Operation) -> list[ir.Value]:
    """What the convolution of a `conv2d` dispatch reads: the operands before its weight."""
    operands = list(call.operands)
    weight = next((i for i, v in enumerate(operands) if is_weight(v)), len(operands))
    return operands[:weight]


def _is_in(call: ir.Operation, pairs: Sequence[tuple[ir.Operation, ir.Operation]]) -> bool:
    return any(call in pair for pair in pairs)


def _shape(first: ir.Operation, second: ir.Operation) -> ChainShape:
    """What the tile of the two functions as one depends on."""
    from yolomlir.passes.assign_tiles import chain_shape, conv_shape, inner_shape

    rest = chain_shape(second)
    inner = inner_shape(convolution(second.regions[0].blocks[0]))
    return replace(
        rest,
        first=conv_shape(first),
        later=((inner.k, inner.out_channels), *rest.later),
        kept=tuple(index + 1 for index in rest.kept),
        inner=(inner, *rest.inner),
    )


def _hazard(first: ir.Operation, second: ir.Operation, placement: Placement) -> str | None:
    """Whether what the two read and what they store share memory: views let a result take the place
    of a tensor that is no longer read when it is written."""
    operands = [*first.operands, *second.operands]
    read = [v for v in operands if not is_weight(v) and v != first.results[0]]
    for value in second.results:
        buffer = placement.buffer_of(value)
        for other in read:
            same = placement.buffer_of(other) is buffer
            if same and overlap(buffer.span(value), buffer.span(other)):
                return "the other would write where this one reads"
    return None


# ---- rewriting ----------------------------------------------------------------------------------


def _outline(
    first: ir.Operation, second: ir.Operation, table: dict[str, ir.Operation], outliner: Outliner
) -> None:
    """Replace two dispatches by one, where the second one stands."""
    inner = first.results[0]
    bodies = [table[yolo.callee(call)].regions[0].blocks[0] for call in (first, second)]
    own = len(first.operands)

    def body(arguments: Sequence[ir.Value]) -> list[ir.Value]:
        (value,) = _copy_body(bodies[0], arguments[:own])
        return _copy_body(bodies[1], [value, *arguments[own:]])

    operands = [*first.operands, *list(second.operands)[1:]]
    name = _name(yolo.callee(first), yolo.callee(second))
    made = outliner.call(body, operands, naming.CHAIN, name, loc=first.location, before=second)
    for old, new in zip(second.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    second.erase()
    if users(inner):
        raise InternalError("the result of a pair's first convolution is still read")
    first.erase()


def _copy_body(block: ir.Block, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Copy a function's body to the insertion point; its results."""
    mapping = dict(zip(block.arguments, inputs, strict=True))
    ops = operations(block)
    for op in ops[:-1]:
        copy = op.clone().operation
        for index, operand in enumerate(op.operands):
            copy.operands[index] = mapping[operand]
        mapping.update(zip(op.results, copy.results, strict=True))
    return [mapping[value] for value in ops[-1].operands]


def _name(first: str, second: str) -> str:
    """`chain_3x3s1_16x16x16_8_silu_then_3x3s1_16_silu_add`: the first function's name, then the
    second's without its family and the shape of its input."""
    before = first.removeprefix(f"{naming.CONV2D}_")
    _, window, _, *rest = second.split("_")
    return "_".join([naming.CHAIN, before, "then", window, *rest])


__all__ = ["FuseBottlenecks"]
