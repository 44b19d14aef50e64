"""What every op of the `yolo` dialect must hold: shapes, layouts, element types, attributes.

The definition (`yolo.irdl.mlir`) checks kinds alone. Every message names the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from yolomlir.dialects.layout import Layout
from yolomlir.dialects.reading import (
    callee,
    element_of,
    integer,
    integers,
    is_dispatch,
    layer_of,
    ops_in,
    real,
    shape_of,
    string,
)
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
_VERIFIERS: dict[str, tuple[_Verifier, tuple[str, ...]]] = {}
"""Of each op: what checks it, and the names of its attributes."""
_ELEMENTS = ("f32", "f16", "ui8")
"""Element types of the dialect; `ui8` is an image's."""
_MOST_DIMENSIONS = 4
_PRECISIONS = ("fp32", "tf32", "fp16")


def _verifier(name: str, *attributes: str) -> Callable[[_Verifier], _Verifier]:
    def register(function: _Verifier) -> _Verifier:
        _VERIFIERS[f"yolo.{name}"] = function, attributes
        return function

    return register


def _fail(op: ir.Operation, message: str, hint: str | None = None) -> None:
    raise UserError(f"'{op.name}' {message}", where=layer_of(op.location), hint=hint)


def _expect(op: ir.Operation, what: str, expected: Any, got: Any, hint: str | None = None) -> None:
    if expected != got:
        _fail(op, f"{what} is {got}; expected {expected}", hint)


def verify_op(op: ir.Operation) -> None:
    """Check one `yolo` op. Raises UserError that names the layer."""
    if op.name not in _VERIFIERS:
        return
    check, attributes = _VERIFIERS[op.name]
    try:
        _tensors(op)
        _no_other_attributes(op, attributes)
        check(op)
    except ValueError as error:  # an encoding or an array of another kind than this dialect's
        _fail(op, f"is malformed: {error}")


def faults(module: ir.Module | ir.Operation) -> Iterator[tuple[ir.Operation, UserError]]:
    """Every op that breaks a rule of the dialect, in order, with the first rule that it breaks.

    Besides what `verify_op` checks: all `yolo.weight`s of one name have one type, which says in
    which order the store keeps the tensor; a dispatch calls a function with a body; a function with
    a family has a body and results; `@main` is public; the module's precision is one that there is.
    """
    root = module.operation if isinstance(module, ir.Module) else module
    bodies = {string(op, "sym_name"): len(op.regions[0].blocks) for op in ops_in(root, "func.func")}
    weights: dict[str, ir.Type] = {}
    for op in (root, *ops_in(root, "")):
        try:
            verify_op(op)
            if op.name == "yolo.weight":
                name, type_ = string(op, "name"), op.results[0].type
                _expect(op, f"type of '{name}'", weights.setdefault(name, type_), type_)
            elif op.name == "builtin.module":
                _module(op)
            elif op.name == "func.func":
                _function(op)
            elif is_dispatch(op):
                _dispatch(op, bodies)
        except UserError as error:
            yield op, error


def verify(module: ir.Module | ir.Operation) -> None:
    """Check every `yolo` op of a module, as `faults` does. Raises UserError for the first fault."""
    for _, error in faults(module):
        raise error


def _module(op: ir.Operation) -> None:
    if "yolo.precision" not in op.attributes:
        return
    given = op.attributes["yolo.precision"]
    if not isinstance(given, ir.StringAttr) or given.value not in _PRECISIONS:
        _fail(op, f"has yolo.precision = {given}; expected one of {', '.join(_PRECISIONS)}")


def _function(op: ir.Operation) -> None:
    """`@main` is public: it is what the module is for. A function with a family is a kernel."""
    name = string(op, "sym_name")
    if name == "main" and "sym_visibility" in op.attributes and len(op.regions[0].blocks):
        _expect(op, "visibility of @main", "public", string(op, "sym_visibility"))
    if "yolo.family" not in op.attributes:
        return
    family = op.attributes["yolo.family"]
    if not isinstance(family, ir.StringAttr):
        _fail(op, f"@{name} has yolo.family = {family}; expected a string")
    if not len(op.regions[0].blocks):
        _fail(op, f"@{name} has a family and no body")
    if not ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value).results:
        _fail(op, f"@{name} has a family and no result: there is nothing for a kernel to compute")


def _dispatch(op: ir.Operation, bodies: Mapping[str, int]) -> None:
    if not bodies.get(callee(op)):
        _fail(op, f"is a dispatch of @{callee(op)}, which has no body")


def _tensors(op: ir.Operation) -> None:
    """Every value is a tensor of the dialect: static, not empty, of its ranks and elements."""
    for what, values in (("operand", op.operands), ("result", op.results)):
        for index, value in enumerate(values):
            type_ = value.type
            if not isinstance(type_, ir.RankedTensorType) or not type_.has_static_shape:
                _fail(op, f"{what} {index} is {type_}; expected a tensor of static shape")
            shape = list(type_.shape)
            if not 1 <= len(shape) <= _MOST_DIMENSIONS or min(shape) < 1:
                _fail(op, f"{what} {index} has shape {shape}; expected 1 to 4 sizes of at least 1")
            if element_of(value) not in _ELEMENTS:
                known = ", ".join(_ELEMENTS)
                _fail(op, f"{what} {index} has elements of {element_of(value)}; expected {known}")
            if Layout.of(type_) is not Layout.LOGICAL and len(shape) != 4:
                _fail(op, f"{what} {index} has a layout and rank {len(shape)}; expected rank 4")


def _no_other_attributes(op: ir.Operation, known: Sequence[str]) -> None:
    """An attribute that the op does not know would change nothing (`dilations`, say).

    Those with a dialect's prefix (`foo.note`) are anybody's.
    """
    for item in op.attributes:
        name = item if isinstance(item, str) else item.name
        if name not in known and "." not in name:
            _fail(op, f"has no attribute '{name}'; it has {', '.join(known) or 'none'}")


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


def _finite(op: ir.Operation, name: str) -> None:
    if not math.isfinite(real(op, name)):
        _fail(op, f"{name} is {real(op, name)}; expected a number")


def _floating(op: ir.Operation, value: ir.Value) -> None:
    if element_of(value) not in ("f32", "f16"):
        _fail(op, f"computes on {element_of(value)}; expected f32 or f16")


def _window(
    op: ir.Operation,
    channels: int,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
) -> None:
    """A window of this kernel fits the padded input, and the result is of its places."""
    x = shape_of(op.operands[0])
    if min(padding) < 0:
        _fail(op, f"padding is {padding}; none may be negative")
    expected = window_shape(x, channels, kernel, strides, padding)
    if min(expected[2:]) < 1:
        window, size = ("x".join(map(str, sides)) for sides in (kernel, x[2:]))
        _fail(op, f"a {window} kernel does not fit the padded {size} input")
    _expect(op, "result shape", expected, shape_of(op.results[0]))


def _conv_elements(op: ir.Operation) -> None:
    """One element type for all, or float16 weights.

    Those multiply a float16 tensor or the image; sums and the bias are float32, and the result is
    stored as either.
    """
    _floating(op, op.operands[1])
    source, weight = element_of(op.operands[0]), element_of(op.operands[1])
    result = element_of(op.results[0])
    wide = "f32" if weight == "f16" else weight
    if len(op.operands) > 2:
        _expect(op, "bias element type", wide, element_of(op.operands[2]))
    if weight != "f16":
        _expect(op, "input element type", weight, source, "narrow the weight as well")
        _expect(op, "result element type", weight, result, "narrow the weight as well")
        return
    if result not in ("f16", "f32"):
        _fail(op, f"result element type is {result}; a float16 weight gives f16 or f32")


@_verifier("weight", "name")
def _(op: ir.Operation) -> None:
    """Any tensor of the dialect may be in the store."""


@_verifier("normalize", "scale")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    _finite(op, "scale")
    if element_of(op.operands[0]) not in ("ui8", "f32"):
        _fail(op, f"image has elements of {element_of(op.operands[0])}; expected ui8 or f32")
    _expect(op, "result shape", shape_of(op.operands[0]), shape_of(op.results[0]))
    _expect(op, "result element type", "f32", element_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])


@_verifier("conv2d", "strides", "padding", "groups")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0], op.operands[1], op.results[0]])
    channels = shape_of(op.operands[0])[1]
    out, per_group, *kernel = shape_of(op.operands[1])
    for name, count in (("strides", 2), ("padding", 4)):
        _expect(op, f"number of {name}", count, len(integers(op, name)))
    strides, padding = integers(op, "strides"), integers(op, "padding")
    groups = integer(op, "groups")
    if min(strides) < 1:
        _fail(op, f"strides are {strides}; each must be at least 1")
    if groups < 1 or channels % groups or out % groups:
        _fail(op, f"groups is {groups}; it must divide {channels} input and {out} output channels")
    if per_group * groups != channels:
        _fail(
            op,
            f"input has {channels} channels; the weight expects {per_group * groups}",
            "was the checkpoint trained at another scale or class count?",
        )
    _window(op, out, kernel, strides, padding)
    _same_layout(op, [op.operands[0], op.results[0]])
    if len(op.operands) > 2:
        _expect(op, "bias shape", [out], shape_of(op.operands[2]))
    _conv_elements(op)


@_verifier("batch_norm", "epsilon")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    channels = shape_of(op.operands[0])[1]
    for name, value in zip(
        ("gamma", "beta", "mean", "variance"), list(op.operands)[1:], strict=True
    ):
        _expect(op, f"{name} shape", [channels], shape_of(value))
        _expect(op, f"{name} element type", "f32", element_of(value))
    _finite(op, "epsilon")
    _floating(op, op.operands[0])
    _expect(op, "result type", op.operands[0].type, op.results[0].type)


@_verifier("silu")
def _(op: ir.Operation) -> None:
    _floating(op, op.operands[0])
    _expect(op, "result type", op.operands[0].type, op.results[0].type)


@_verifier("add")
def _(op: ir.Operation) -> None:
    _floating(op, op.operands[0])
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


@_verifier("slice", "offset", "size")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    x = shape_of(op.operands[0])
    offset, size = integer(op, "offset"), integer(op, "size")
    if offset < 0 or size < 1 or offset + size > x[1]:
        _fail(op, f"channels [{offset}, {offset + size}) leave the input's {x[1]}")
    _expect(op, "result shape", with_channels(x, size), shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("max_pool2d", "kernel", "strides", "padding")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    _floating(op, op.operands[0])
    for name, count in (("kernel", 2), ("strides", 2), ("padding", 4)):
        _expect(op, f"number of {name}", count, len(integers(op, name)))
    kernel, strides = integers(op, "kernel"), integers(op, "strides")
    if min(kernel + strides) < 1:
        _fail(op, f"kernel is {kernel} and strides are {strides}; each must be at least 1")
    _window(op, shape_of(op.operands[0])[1], kernel, strides, integers(op, "padding"))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("upsample", "factor")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    factor = integer(op, "factor")
    if factor < 1:
        _fail(op, f"factor is {factor}; it must be at least 1")
    _expect(op, "result shape", enlarged(shape_of(op.operands[0]), factor), shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("attention", "heads", "key_dim", "head_dim", "scale")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    _floating(op, op.operands[0])
    x = shape_of(op.operands[0])
    heads, key_dim, head_dim = (integer(op, a) for a in ("heads", "key_dim", "head_dim"))
    _finite(op, "scale")
    if min(heads, key_dim, head_dim) < 1:
        _fail(op, f"heads, key_dim, head_dim are {heads}, {key_dim}, {head_dim}; at least 1 each")
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


def _positive_strides(op: ir.Operation, strides: Sequence[int]) -> None:
    if min(strides) < 1:
        _fail(op, f"strides are {list(strides)}; each must be at least 1")


def _rows(op: ir.Operation, images: int, max_det: int, columns: int) -> None:
    """The result: float32 rows, which have no layout."""
    _expect(op, "result shape", [images, max_det, columns], shape_of(op.results[0]))
    _expect(op, "result element type", "f32", element_of(op.results[0]))


def _detected(op: ir.Operation, columns: int) -> None:
    """The maps of a whole choice: they have max_det anchors."""
    _positive_strides(op, integers(op, "strides"))
    max_det, anchors = integer(op, "max_det"), _detection_maps(op, list(op.operands))
    if not 1 <= max_det <= anchors:
        _fail(op, f"max_det is {max_det}; it must be in [1, {anchors}], the number of anchors")
    _rows(op, shape_of(op.operands[0])[0], max_det, columns)


@_verifier("detect", "strides", "max_det")
def _(op: ir.Operation) -> None:
    _expect(op, "number of strides", LEVELS, len(integers(op, "strides")))
    _detected(op, DETECTION_COLUMNS)


@_verifier("candidates", "strides", "max_det")
def _(op: ir.Operation) -> None:
    _expect(op, "number of strides", LEVELS - 1, len(integers(op, "strides")))
    _detected(op, CANDIDATE_COLUMNS)


@_verifier("merge_detections", "stride")
def _(op: ir.Operation) -> None:
    rows, maps = op.operands[0], list(op.operands)[1:]
    if len(shape_of(rows)) != 3:
        _fail(op, f"operand 0 has rank {len(shape_of(rows))}; expected 3 (N, rows, columns)")
    _expect(op, "element type of the candidates", "f32", element_of(rows))
    images, max_det, columns = shape_of(rows)
    _expect(op, "columns of the candidates", CANDIDATE_COLUMNS, columns)
    _detection_maps(op, maps)
    _expect(op, "images of the candidates", shape_of(maps[0])[0], images)
    _positive_strides(op, [integer(op, "stride")])
    _rows(op, images, max_det, DETECTION_COLUMNS)


@_verifier("convert_layout")
def _(op: ir.Operation) -> None:
    _expect(op, "result shape", shape_of(op.operands[0]), shape_of(op.results[0]))
    _same_element(op, [op.operands[0], op.results[0]])
