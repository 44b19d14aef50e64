"""Layout rules: what each op of `yolo` asks of the physical order of its tensors.

A rule stands for one op and gives a `Demand`. `yolo-layout-propagation` knows no op by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from yolomlir.dialects.layout import Layout
from yolomlir.dialects.reading import integer, shape_of

from yolomlir.bindings import ir


class Strength(Enum):
    """How strongly an op asks."""

    REQUIRED = "required"
    """There is no kernel for anything else."""
    PREFERRED = "preferred"
    """All its tensors have one order, any will do, and this one is best."""
    TRANSPARENT = "transparent"
    """All its tensors have one order; which one is all the same."""
    FIXED = "fixed"
    """Its types stay as they are written."""


@dataclass(frozen=True)
class Demand:
    """What one op asks for.

    operands, results: a layout each, None for a tensor without one (not four-dimensional). Filled
    for REQUIRED alone. preferred: the order of all tensors of a PREFERRED op.
    """

    strength: Strength
    operands: tuple[Layout | None, ...] = ()
    results: tuple[Layout | None, ...] = ()
    preferred: Layout | None = None


Rule = Callable[[ir.Operation, Layout], Demand]
"""From an op and the layout that convolution weights shall have to a demand."""
RULES: dict[str, Rule] = {}
FIXED = Demand(Strength.FIXED)
TRANSPARENT = Demand(Strength.TRANSPARENT)


def layout_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the ops named."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def demand_of(op: ir.Operation, weights: Layout) -> Demand:
    """What an op asks for; an op without a rule keeps its types."""
    rule = RULES.get(op.name)
    return FIXED if rule is None else rule(op, weights)


@layout_rule("yolo.conv2d")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """Channels last makes a pixel's channels, the GEMM's inner dimension, contiguous.

    A depthwise weight has no inner dimension: its channels lie together, as its input's do.
    """
    if weights is Layout.OHWI and integer(op, "groups") == shape_of(op.operands[0])[1] > 1:
        weights = Layout.HWIO
    bias = (None,) * (len(op.operands) - 2)
    return Demand(Strength.REQUIRED, (Layout.NHWC, weights, *bias), (Layout.NHWC,))


@layout_rule("yolo.attention")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """A position's q, k and v are contiguous."""
    return Demand(Strength.REQUIRED, (Layout.NHWC,), (Layout.NHWC,))


@layout_rule("yolo.detect", "yolo.candidates")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """An anchor's logits are contiguous; the rows that come out have no spatial order."""
    return Demand(Strength.REQUIRED, (Layout.NHWC,) * len(op.operands), (None,))


@layout_rule("yolo.merge_detections")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """As for detection; the candidates are rows."""
    return Demand(Strength.REQUIRED, (None, Layout.NHWC, Layout.NHWC), (None,))


@layout_rule("yolo.max_pool2d", "yolo.concat", "yolo.slice", "yolo.upsample")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """Channels last: pooling is vectorised over them, and the others become addressing."""
    return Demand(Strength.PREFERRED, preferred=Layout.NHWC)


@layout_rule("yolo.normalize", "yolo.batch_norm", "yolo.silu", "yolo.add")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """Elementwise."""
    return TRANSPARENT


@layout_rule("yolo.weight", "yolo.convert_layout")
def _(op: ir.Operation, weights: Layout) -> Demand:
    """Sources of a layout: an op that wants another asks for a conversion."""
    return FIXED
