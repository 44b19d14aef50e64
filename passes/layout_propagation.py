"""The pass `yolo-layout-propagation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout, with_layout
from yolomlir.dialects.layout_rules import Demand, Strength, demand_of
from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import Array

_DIRECTIONS = ("forward", "backward", "both")
_SWEEPS = 16
"""Backward, at most: each sweep moves conversions past at least one op; a network needs three."""
_WEIGHT_LAYOUTS = {"ohwi": Layout.OHWI, "hwio": Layout.HWIO, "logical": Layout.LOGICAL}


@dataclass(frozen=True)
class LayoutPropagation(Pass):
    r"""Give every tensor the physical order that its ops ask for, and convert where two differ.

    The rules stand beside the ops in `dialects/layout_rules.py`. Required: the op gets what it asks
    for. Preferred and transparent: all tensors of the op have one order. Forward, an op takes the
    order that its operands arrive in (the preferred one where they differ) and hands it on.
    Backward, an op whose result is converted takes the order that is wanted below, when that
    converts no more elements than before; a tie goes up only towards NHWC. Conversions are
    inserted, never removed: `yolo-transpose-elision` does that.

    A weight is not converted but laid out anew in the store, once, as `NAME:LAYOUT`. Types that a
    function's signature or an op of another dialect fixes stay.

    Options:
        direction: forward, backward or both.
        weights: ohwi (GPU), hwio (CPU), logical, or auto, which asks the target.

    Before:
        %1 = "yolo.conv2d"(%x, %w) : (tensor<1x8x6x6xf32>, tensor<8x8x1x1xf32>) -> …

    After:
        %0 = "yolo.convert_layout"(%x) : (tensor<1x8x6x6xf32>) -> tensor<…, #yolo.layout<"nhwc">>
        %1 = "yolo.conv2d"(%0, %w') : (…nhwc, …hwio) -> …nhwc

    Statistics:
        inserted: conversions put in.
        hoisted: ops that took the order wanted below them.
        relaid: weights laid out anew.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-layout-propagation=weights=ohwi \
        // RUN:   | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "w:ohwi"} : () -> {{.*}}"ohwi">>
        // CHECK-DAG: %[[X:.*]] = "yolo.convert_layout"(%arg0) : {{.*}} -> [[T:.*"nhwc">>]]
        // CHECK: %[[Y:.*]] = "yolo.conv2d"(%[[X]], %[[W]]) {{.*}} -> [[T]]
        // CHECK: %[[Z:.*]] = "yolo.silu"(%[[Y]]) : ([[T]]) -> [[T]]
        // CHECK: %[[R:.*]] = "yolo.convert_layout"(%[[Z]]) : ([[T]]) -> tensor<1x8x6x6xf32>
        // CHECK: return %[[R]]
        !t = tensor<1x8x6x6xf32>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
              groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
          %1 = "yolo.silu"(%0) : (!t) -> !t
          return %1 : !t
        }
    """

    name: ClassVar[str] = "yolo-layout-propagation"
    direction: str = "both"
    weights: str = "auto"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Propagate in every function. Raises UserError for an option that it does not know."""
        rewriter = _Rewriter(self, module, context, self._weight_layout(context))
        if self.direction not in _DIRECTIONS:
            raise UserError(
                f"pass '{self.name}': direction is '{self.direction}'",
                hint=f"one of: {', '.join(_DIRECTIONS)}",
            )
        for block in rewriting.blocks(module):
            if self.direction != "backward":
                rewriter.forward(block)
            if self.direction != "forward":
                rewriter.backward(block)
        rewriting.erase_dead(rewriting.operations(module, "yolo.weight"))

    def _weight_layout(self, context: PassContext) -> Layout:
        if self.weights == "auto":
            return Layout.OHWI if context.target.kind == "gpu" else Layout.HWIO
        if self.weights not in _WEIGHT_LAYOUTS:
            raise UserError(
                f"pass '{self.name}': weights is '{self.weights}'",
                hint=f"one of: auto, {', '.join(_WEIGHT_LAYOUTS)}",
            )
        return _WEIGHT_LAYOUTS[self.weights]


def _layout(value: ir.Value) -> Layout | None:
    """A value's physical order; None for what has none."""
    return Layout.of(value.type) if rewriting.is_four_dimensional(value) else None


def _elements(value: ir.Value) -> int:
    return prod(yolo.shape_of(value))


# ---- analysis: which order an op takes ----------------------------------------------------------


def _arriving(op: ir.Operation, demand: Demand) -> Layout | None:
    """The order of all tensors of a transparent or preferring op, from its operands."""
    found = [layout for layout in map(_layout, op.operands) if layout is not None]
    if not found:
        return None
    if len(set(found)) > 1 and demand.preferred is not None:
        return demand.preferred
    return max(found, key=found.count)  # a tie goes to the first operand's


def _wanted_below(op: ir.Operation, demand: Demand) -> Layout | None:
    """The order that a transparent or preferring op should take for its readers; None: as is."""
    result = op.results[0]
    now = _layout(result)
    for layout in Layout:
        if layout is now or layout not in _converted_to(result):
            continue
        before, after = _cost(op, result, now), _cost(op, result, layout)
        if demand.preferred is not None and layout is not demand.preferred:
            continue
        if after < before or (after == before and layout is Layout.NHWC):
            return layout
    return None


def _converted_to(value: ir.Value) -> set[Layout | None]:
    """The orders that a value is converted to."""
    conversions = [u for u in rewriting.users(value) if u.name == "yolo.convert_layout"]
    return {_layout(op.results[0]) for op in conversions}


def _cost(op: ir.Operation, result: ir.Value, layout: Layout | None) -> int:
    """Elements converted around `op` if its tensors had `layout`: into it, and for its readers."""
    into = sum(
        _share(op, value)
        for value in set(op.operands)
        if _layout(value) is not None and not _free(value, layout)
    )
    readers = rewriting.users(result)
    wanted = _converted_to(result)
    if any(user.name != "yolo.convert_layout" for user in readers):
        wanted.add(_layout(result))
    return into + _elements(result) * len(wanted - {layout})


def _share(op: ir.Operation, value: ir.Value) -> int:
    """What converting an operand costs this op: where slices alone read it, each pays its part."""
    if all(user.name == "yolo.slice" for user in rewriting.users(value)):
        return _elements(op.results[0])
    return _elements(value)


def _free(value: ir.Value, layout: Layout | None) -> bool:
    """Whether a value can be had in an order for nothing: it, or a conversion of it, exists."""
    conversion = rewriting.producer(value, "yolo.convert_layout")
    if conversion is not None and _layout(conversion.operands[0]) is layout:
        return True
    return _layout(value) is layout or layout in _converted_to(value)


# ---- rewriting ----------------------------------------------------------------------------------


class _Rewriter:
    """Applies decisions to one module: retypes ops, inserts conversions, lays weights out anew."""

    def __init__(
        self, pass_: LayoutPropagation, module: ir.Module, context: PassContext, weights: Layout
    ) -> None:
        self._pass, self._context, self._weights = pass_, context, weights
        self._taken = rewriting.weight_names(module)
        self._relaid: dict[tuple[str, Layout], ir.Value] = {}

    def forward(self, block: ir.Block) -> None:
        """Operands to results. What an op of fixed types read before, it reads afterwards."""
        self._relaid.clear()  # values of one function are of no use in another
        ops = [view.operation for view in block.operations]
        written = [[_layout(value) for value in op.operands] for op in ops]
        for op, before in zip(ops, written, strict=True):
            demand = demand_of(op, self._weights)
            if demand.strength is Strength.FIXED:
                if op.name != "yolo.convert_layout":
                    self._convert_operands(op, before)
                continue
            operands, results = self._decide_forward(op, demand)
            self._convert_operands(op, operands)
            for value, layout in zip(op.results, results, strict=True):
                if layout is not None:
                    value.set_type(with_layout(value.type, layout))

    def _decide_forward(
        self, op: ir.Operation, demand: Demand
    ) -> tuple[Sequence[Layout | None], Sequence[Layout | None]]:
        if demand.strength is Strength.REQUIRED:
            return demand.operands, demand.results
        layout = _arriving(op, demand)
        return _everywhere(op.operands, layout), _everywhere(op.results, layout)

    def backward(self, block: ir.Block) -> None:
        """Results to operands. What reads an op's result in its old order gets it converted.

        Sweeps until nothing moves: what an op above asks for can make a conversion cheaper below.
        """
        self._relaid.clear()
        for _ in range(_SWEEPS):
            if not self._sweep_backward(block):
                return

    def _sweep_backward(self, block: ir.Block) -> bool:
        hoisted = False
        for op in reversed([view.operation for view in block.operations]):
            demand = demand_of(op, self._weights)
            if demand.strength is Strength.FIXED:
                continue
            if demand.strength is Strength.REQUIRED:
                self._retype(op, demand.operands, demand.results)
                continue
            layout = _wanted_below(op, demand)
            if layout is not None:
                both = _everywhere(op.operands, layout), _everywhere(op.results, layout)
                self._retype(op, *both)
                self._context.count(self._pass, "hoisted")
                hoisted = True
        return hoisted

    def _retype(
        self,
        op: ir.Operation,
        operands: Sequence[Layout | None],
        results: Sequence[Layout | None],
    ) -> None:
        self._convert_operands(op, operands)
        for value, layout in zip(op.results, results, strict=True):
            before = _layout(value)
            if layout is None or before is None or layout is before:
                continue
            value.set_type(with_layout(value.type, layout))
            readers = rewriting.users(value)
            content = [user for user in readers if user.name == "yolo.convert_layout"]
            if len(content) < len(readers):
                with ir.InsertionPoint.after(op):
                    back = self._convert(value, before, op.location)
                value.replace_all_uses_except(back, [back.owner.operation, *content])

    def _convert_operands(self, op: ir.Operation, layouts: Sequence[Layout | None]) -> None:
        for index, (value, layout) in enumerate(zip(op.operands, layouts, strict=True)):
            if layout is None or _layout(value) is layout:
                continue
            with ir.InsertionPoint(op):
                op.operands[index] = self._in_layout(value, layout, op.location)

    def _in_layout(self, value: ir.Value, layout: Layout, loc: ir.Location) -> ir.Value:
        weight = rewriting.producer(value, "yolo.weight")
        if weight is None:
            return self._convert(value, layout, loc)
        key = (yolo.string(weight, "name"), layout)
        if key not in self._relaid:
            with ir.InsertionPoint(weight):  # where it dominates every other reader too
                self._relaid[key] = self._relay(weight, layout)
        return self._relaid[key]

    def _convert(self, value: ir.Value, layout: Layout, loc: ir.Location) -> ir.Value:
        self._context.count(self._pass, "inserted")
        return yolo.convert_layout(value, layout, loc=loc)

    def _relay(self, weight: ir.Operation, layout: Layout) -> ir.Value:
        old = Layout.of(weight.results[0].type)

        def permuted(tensor: Array) -> Array:
            logical = np.transpose(tensor, np.argsort(old.permutation))
            return np.transpose(logical, layout.permutation)

        self._context.count(self._pass, "relaid")
        name = f"{yolo.string(weight, 'name')}:{layout.keyword or 'logical'}"
        type_ = with_layout(weight.results[0].type, layout)
        return rewriting.derived_weight(self._context, self._taken, name, [weight], permuted, type_)


def _everywhere(values: Sequence[ir.Value], layout: Layout | None) -> list[Layout | None]:
    return [None if _layout(value) is None else layout for value in values]
