"""What every op of the `yolo` dialect must hold: shapes, layouts, element types, attributes.

The definition (`yolo.irdl.mlir`) checks kinds alone. Every message names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from yolomlir.dialects.layout import Layout
from yolomlir.dialects.reading import element_of, integer, integers, layer_of, ops_in, shape_of
from yolomlir.dialects.shapes import (
    CANDIDATE_COLUMNS,
    DETECTION_COLUMNS,
    LEVELS,
    enlarged,
    window_shape,
    with_channels,
)

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError

_Verifier = Callable[[ir.Operation], None]
_VERIFIERS: dict[str, _Verifier] = {}


def _verifier(name: str) -> Callable[[_Verifier], _Verifier]:
    def register(function: _Verifier) -> _Verifier:
        _VERIFIERS[f"yolo.{name}"] = function
        return function

    return register


def _fail(op: ir.Operation, message: str, hint: str | None = None) -> None:
    raise UserError(f"'{op.name}' {message}", where=layer_of(op.location), hint=hint)


def _expect(op: ir.Operation, what: str, expected: Any, got: Any, hint: str | None = None) -> None:
    if expected != got:
        _fail(op, f"{what} is {got}; expected {expected}", hint)


def verify_op(op: ir.Operation) -> None:
    """Check the shapes of one `yolo` op. Raises UserError that names the layer."""
    check = _VERIFIERS.get(op.name)
    if check is None:
        return
    _static_tensors(op)
    try:
        check(op)
    except ValueError as error:  # an encoding or an array of another kind than this dialect's
        _fail(op, f"is malformed: {error}")


def verify(module: ir.Module | ir.Operation) -> None:
    """Check the shapes of every `yolo` op of a module. Raises UserError that names the layer."""
    for op in ops_in(module):
        verify_op(op)


def _static_tensors(op: ir.Operation) -> None:
    for what, values in (("operand", op.operands), ("result", op.results)):
        for index, value in enumerate(values):
            type_ = value.type
            if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
                _fail(op, f"{what} {index} is {type_}; expected a tensor of static shape")


def _four_dimensional(op: ir.Operation, operands: Sequence[ir.Value]) -> None:
    for index, value in enumerate(operands):
        rank = len(shape_of(value))
        if rank != 4:
            _fail(op, f"operand {index} has rank {rank}; expected 4 (N, C, H, W)")


def _same_layout(op: ir.Operation, values: Sequence[ir.Value]) -> None:
    layouts = {Layout.of(v.type) for v in values}
    if len(layouts) > 1:
        names = ", ".join(sorted(layout.keyword or "logical" for layout in layouts))
        _fail(op, f"mixes layouts {names}", "insert yolo.convert_layout")


def _same_element(op: ir.Operation, values: Sequence[ir.Value]) -> None:
    elements = list(dict.fromkeys(element_of(v) for v in values))
    if len(elements) > 1:
        _fail(op, f"mixes element types {', '.join(elements)}; only conv2d and normalize convert")


def _conv_elements(op: ir.Operation) -> None:
    """One element type for all, or float16 weights.

    Those multiply a float16 tensor or the image; sums and the bias are float32, and the result is
    stored as either.
    """
    source, weight = element_of(op.operands[0]), element_of(op.operands[1])
    result = element_of(op.results[0])
    wide = "f32" if weight == "f16" else weight
    if len(op.operands) > 2:
        _expect(op, "bias element type", wide, element_of(op.operands[2]))
    if weight != "f16":
        _expect(op, "input element type", weight, source, "narrow the weight as well")
        _expect(op, "result element type", weight, result, "narrow the weight as well")
        return
    if source not in ("f16", "f32", "ui8"):
        _fail(op, f"input element type is {source}; a float16 weight takes f16, f32 or ui8")
    if result not in ("f16", "f32"):
        _fail(op, f"result element type is {result}; a float16 weight gives f16 or f32")


@_verifier("normalize")
def _(op: ir.Operation) -> None:
    _expect(op, "result shape", shape_of(op.operands[0]), shape_of(op.results[0]))
    _expect(op, "result element type", "f32", element_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])


@_verifier("conv2d")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0], op.operands[1], op.results[0]])
    x = shape_of(op.operands[0])
    channels = x[1]
    out, per_group, *kernel = shape_of(op.operands[1])
    for name, count in (("strides", 2), ("padding", 4)):
        _expect(op, f"number of {name}", count, len(integers(op, name)))
    strides, padding = integers(op, "strides"), integers(op, "padding")
    groups = integer(op, "groups")
    if min(strides) < 1:
        _fail(op, f"strides are {strides}; each must be at least 1")
    if min(padding) < 0:
        _fail(op, f"padding is {padding}; none may be negative")
    if groups < 1 or channels % groups or out % groups:
        _fail(op, f"groups is {groups}; it must divide {channels} input and {out} output channels")
    if per_group * groups != channels:
        _fail(
            op,
            f"input has {channels} channels; the weight expects {per_group * groups}",
            "was the checkpoint trained at another scale or class count?",
        )
    expected = window_shape(x, out, kernel, strides, padding)
    if min(expected[2:]) < 1:
        window, size = ("x".join(map(str, sides)) for sides in (kernel, x[2:]))
        _fail(op, f"a {window} kernel does not fit the padded {size} input")
    _expect(op, "result shape", expected, shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    if len(op.operands) > 2:
        _expect(op, "bias shape", [out], shape_of(op.operands[2]))
    _conv_elements(op)


@_verifier("batch_norm")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    channels = shape_of(op.operands[0])[1]
    for name, value in zip(
        ("gamma", "beta", "mean", "variance"), list(op.operands)[1:], strict=True
    ):
        _expect(op, f"{name} shape", [channels], shape_of(value))
    _expect(op, "result type", op.operands[0].type, op.results[0].type)


@_verifier("silu")
def _(op: ir.Operation) -> None:
    _expect(op, "result type", op.operands[0].type, op.results[0].type)


@_verifier("add")
def _(op: ir.Operation) -> None:
    _expect(op, "second operand's type", op.operands[0].type, op.operands[1].type)
    _expect(op, "result type", op.operands[0].type, op.results[0].type)


@_verifier("concat")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, op.operands)
    x = shape_of(op.operands[0])
    n, channels, height, width = shape_of(op.operands[1])
    _expect(op, "second operand's N, H, W", [x[0], *x[2:]], [n, height, width])
    _expect(op, "result shape", with_channels(x, x[1] + channels), shape_of(op.results[0]))
    _same_layout(op, [*op.operands, op.results[0]])
    _same_element(op, [*op.operands, op.results[0]])


@_verifier("slice")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    x = shape_of(op.operands[0])
    offset, size = integer(op, "offset"), integer(op, "size")
    if offset < 0 or size < 1 or offset + size > x[1]:
        _fail(op, f"channels [{offset}, {offset + size}) leave the input's {x[1]}")
    _expect(op, "result shape", with_channels(x, size), shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("max_pool2d")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    x = shape_of(op.operands[0])
    for name, count in (("kernel", 2), ("strides", 2), ("padding", 4)):
        _expect(op, f"number of {name}", count, len(integers(op, name)))
    kernel, strides = integers(op, "kernel"), integers(op, "strides")
    if min(kernel + strides) < 1:
        _fail(op, f"kernel is {kernel} and strides are {strides}; each must be at least 1")
    expected = window_shape(x, x[1], kernel, strides, integers(op, "padding"))
    _expect(op, "result shape", expected, shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("upsample")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    factor = integer(op, "factor")
    if factor < 1:
        _fail(op, f"factor is {factor}; it must be at least 1")
    _expect(op, "result shape", enlarged(shape_of(op.operands[0]), factor), shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("attention")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    x = shape_of(op.operands[0])
    heads, key_dim, head_dim = (integer(op, a) for a in ("heads", "key_dim", "head_dim"))
    _expect(op, "input channels", heads * (2 * key_dim + head_dim), x[1])
    _expect(op, "result shape", with_channels(x, heads * head_dim), shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


def _detection_maps(op: ir.Operation, maps: Sequence[ir.Value]) -> int:
    """Box maps, then class maps, a level each; how many anchors they have."""
    _four_dimensional(op, maps)
    for value in maps:
        _expect(op, "element type of a map", "f32", element_of(value))
    levels = len(maps) // 2
    images, classes = shape_of(maps[0])[0], shape_of(maps[levels])[1]
    anchors = 0
    for box, logits in zip(maps[:levels], maps[levels:], strict=True):
        n, four, height, width = shape_of(box)
        _expect(op, "images of a map", images, n)
        _expect(op, "box channels", 4, four)
        _expect(op, "class map shape", [n, classes, height, width], shape_of(logits))
        anchors += height * width
    return anchors


def _detected(op: ir.Operation) -> None:
    """The maps of a whole choice: they have max_det anchors."""
    max_det, anchors = integer(op, "max_det"), _detection_maps(op, list(op.operands))
    if not 1 <= max_det <= anchors:
        _fail(op, f"max_det is {max_det}; it must be in [1, {anchors}], the number of anchors")


@_verifier("detect")
def _(op: ir.Operation) -> None:
    _expect(op, "number of strides", LEVELS, len(integers(op, "strides")))
    _detected(op)
    images, max_det = shape_of(op.operands[0])[0], integer(op, "max_det")
    _expect(op, "result shape", [images, max_det, DETECTION_COLUMNS], shape_of(op.results[0]))


@_verifier("candidates")
def _(op: ir.Operation) -> None:
    _expect(op, "number of strides", LEVELS - 1, len(integers(op, "strides")))
    _detected(op)
    shape = [shape_of(op.operands[0])[0], integer(op, "max_det"), CANDIDATE_COLUMNS]
    _expect(op, "result shape", shape, shape_of(op.results[0]))


@_verifier("merge_detections")
def _(op: ir.Operation) -> None:
    rows, maps = op.operands[0], list(op.operands)[1:]
    if len(shape_of(rows)) != 3:
        _fail(op, f"operand 0 has rank {len(shape_of(rows))}; expected 3 (N, rows, columns)")
    _expect(op, "element type of the candidates", "f32", element_of(rows))
    images, max_det, columns = shape_of(rows)
    _expect(op, "columns of the candidates", CANDIDATE_COLUMNS, columns)
    _detection_maps(op, maps)
    _expect(op, "images of the candidates", shape_of(maps[0])[0], images)
    _expect(op, "result shape", [images, max_det, DETECTION_COLUMNS], shape_of(op.results[0]))


@_verifier("convert_layout")
def _(op: ir.Operation) -> None:
    _expect(op, "result shape", shape_of(op.operands[0]), shape_of(op.results[0]))
    _same_element(op, [op.operands[0], op.results[0]])
