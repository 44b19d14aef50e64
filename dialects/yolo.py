"""The `yolo` dialect in Python: loading, builders with shape inference, verification.

Every tensor's shape is logical: activations N, C, H, W; weights O, I, KH, KW. The physical order is
the type's encoding (`layout.py`); builders give a result the layout of its first operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from yolomlir.dialects.layout import Layout

from yolomlir.bindings import func, ir, irdl
from yolomlir.diagnostics import UserError

NAMESPACE = "yolo"
DISPATCH = "yolo.dispatch"
"""Unit attribute of a `func.call` that is one kernel launch."""
LEVELS = 3
"""Levels of the detection head: strides 8, 16 and 32."""
CANDIDATE_COLUMNS = 8
"""Of a candidate: x1, y1, x2, y2, score, class, logit, the largest logit of its anchor."""
_DEFINITION = Path(__file__).with_name("yolo.irdl.mlir")


def load(context: ir.Context) -> None:
    """Register the dialect in `context`; a second call does nothing."""
    if context.is_registered_operation("yolo.conv2d"):
        return  # irdl.load_dialects aborts the process when a dialect is loaded twice
    with context, ir.Location.unknown():
        irdl.load_dialects(ir.Module.parse(_DEFINITION.read_text(), context))


def new_context() -> ir.Context:
    """A context with the dialect loaded. Use it as `with new_context(): …`."""
    context = ir.Context()
    load(context)
    return context


# ---- reading ops --------------------------------------------------------------------------------


def shape_of(value: ir.Value) -> list[int]:
    """The logical shape of a tensor value."""
    return list(ir.RankedTensorType(value.type).shape)


def element_of(value: ir.Value) -> str:
    """The element type of a tensor value as MLIR prints it: `f32`, `f16`, `ui8`."""
    return str(ir.RankedTensorType(value.type).element_type)


def integers(op: ir.Operation, name: str) -> list[int]:
    """A dense array attribute of integers."""
    return [int(v) for v in ir.DenseI64ArrayAttr(op.attributes[name])]


def integer(op: ir.Operation, name: str) -> int:
    """An integer attribute."""
    return int(ir.IntegerAttr(op.attributes[name]).value)


def real(op: ir.Operation, name: str) -> float:
    """A float attribute."""
    return float(ir.FloatAttr(op.attributes[name]).value)


def string(op: ir.Operation, name: str) -> str:
    """A string attribute."""
    return str(ir.StringAttr(op.attributes[name]).value)


def callee(op: ir.Operation) -> str:
    """The name of the function that a dispatch calls."""
    return str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)


def is_dispatch(op: ir.Operation) -> bool:
    """Whether an op is one kernel launch."""
    return op.name == "func.call" and DISPATCH in op.attributes


def layer_of(location: ir.Location) -> str:
    """The layer a location names (`model.2.m.0.cv1.conv`), else the location as MLIR prints it."""
    if location.is_a_name():
        return str(location.name_str)
    if location.is_a_fused():
        for part in location.locations:
            layer = layer_of(part)
            if not layer.startswith("loc("):
                return layer
    return str(location)


def ops_in(module: ir.Module | ir.Operation, name: str = "yolo.") -> Iterator[ir.Operation]:
    """Every operation, in order, regions before what follows, whose name starts with `name`."""
    root = module.operation if isinstance(module, ir.Module) else module
    for region in root.regions:
        for block in region:
            for view in list(block.operations):
                op = view.operation
                if op.name.startswith(name):
                    yield op
                yield from ops_in(op, name)


# ---- building ops -------------------------------------------------------------------------------


def _i64(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _f64(value: float) -> ir.Attribute:
    return ir.FloatAttr.get(ir.F64Type.get(), value)


def _like(x: ir.Value, shape: Sequence[int], element: ir.Type | None = None) -> ir.Type:
    type_ = ir.RankedTensorType(x.type)
    return ir.RankedTensorType.get(list(shape), element or type_.element_type, type_.encoding)


def _build(
    name: str,
    operands: Sequence[ir.Value],
    result: ir.Type,
    attributes: dict[str, ir.Attribute] | None = None,
    loc: ir.Location | None = None,
) -> ir.Value:
    op = ir.Operation.create(
        f"{NAMESPACE}.{name}",
        results=[result],
        operands=list(operands),
        attributes=attributes or {},
        loc=loc,
    )
    verify_op(op)
    return op.results[0]


def weight(
    name: str,
    shape: Sequence[int],
    *,
    element: ir.Type | None = None,
    layout: Layout = Layout.LOGICAL,
    loc: ir.Location | None = None,
) -> ir.Value:
    """A tensor of the weight store, by name; `shape` is logical, element float32 unless given."""
    type_ = ir.RankedTensorType.get(list(shape), element or ir.F32Type.get(), layout.attribute)
    return _build("weight", [], type_, {"name": ir.StringAttr.get(name)}, loc)


def normalize(image: ir.Value, *, scale: float, loc: ir.Location | None = None) -> ir.Value:
    """float32(image) * scale, for an image of uint8 or float32."""
    type_ = _like(image, shape_of(image), ir.F32Type.get())
    return _build("normalize", [image], type_, {"scale": _f64(scale)}, loc)


def window_output(size: int, kernel: int, stride: int, before: int, after: int) -> int:
    """Outputs of a sliding window: floor((size + before + after - kernel) / stride) + 1."""
    return (size + before + after - kernel) // stride + 1


def conv2d(
    x: ir.Value,
    w: ir.Value,
    bias: ir.Value | None = None,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    groups: int = 1,
    element: ir.Type | None = None,
    loc: ir.Location | None = None,
) -> ir.Value:
    """Convolve x [N, I, H, W] with w [O, I/groups, KH, KW]; padding top, left, bottom, right.

    element: of the result; x's unless given.
    """
    n, _, height, width = shape_of(x)
    out, _, kh, kw = shape_of(w)
    top, left, bottom, right = padding
    shape = [
        n,
        out,
        window_output(height, kh, strides[0], top, bottom),
        window_output(width, kw, strides[1], left, right),
    ]
    attributes = {
        "strides": ir.DenseI64ArrayAttr.get(list(strides)),
        "padding": ir.DenseI64ArrayAttr.get(list(padding)),
        "groups": _i64(groups),
    }
    operands = [x, w] if bias is None else [x, w, bias]
    return _build("conv2d", operands, _like(x, shape, element), attributes, loc)


def batch_norm(
    x: ir.Value,
    gamma: ir.Value,
    beta: ir.Value,
    mean: ir.Value,
    variance: ir.Value,
    *,
    epsilon: float,
    loc: ir.Location | None = None,
) -> ir.Value:
    """Inference batch normalisation of x [N, C, H, W]; the four parameters are [C]."""
    operands = [x, gamma, beta, mean, variance]
    return _build("batch_norm", operands, x.type, {"epsilon": _f64(epsilon)}, loc)


def silu(x: ir.Value, *, loc: ir.Location | None = None) -> ir.Value:
    """x * sigmoid(x)."""
    return _build("silu", [x], x.type, None, loc)


def add(lhs: ir.Value, rhs: ir.Value, *, loc: ir.Location | None = None) -> ir.Value:
    """The sum of two tensors of equal type."""
    return _build("add", [lhs, rhs], lhs.type, None, loc)


def concat(xs: Sequence[ir.Value], *, loc: ir.Location | None = None) -> ir.Value:
    """Concatenation along channels of one or more tensors, as nested pairs."""
    result = xs[0]
    for x in xs[1:]:
        n, channels, height, width = shape_of(result)
        shape = [n, channels + shape_of(x)[1], height, width]
        result = _build("concat", [result, x], _like(result, shape), None, loc)
    return result


def slice_(x: ir.Value, *, offset: int, size: int, loc: ir.Location | None = None) -> ir.Value:
    """Channels [offset, offset + size) of x."""
    n, _, height, width = shape_of(x)
    attributes = {"offset": _i64(offset), "size": _i64(size)}
    return _build("slice", [x], _like(x, [n, size, height, width]), attributes, loc)


def max_pool2d(
    x: ir.Value,
    *,
    kernel: Sequence[int],
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    loc: ir.Location | None = None,
) -> ir.Value:
    """Maximum over windows; padding (top, left, bottom, right) counts as minus infinity."""
    n, channels, height, width = shape_of(x)
    top, left, bottom, right = padding
    shape = [
        n,
        channels,
        window_output(height, kernel[0], strides[0], top, bottom),
        window_output(width, kernel[1], strides[1], left, right),
    ]
    attributes = {
        "kernel": ir.DenseI64ArrayAttr.get(list(kernel)),
        "strides": ir.DenseI64ArrayAttr.get(list(strides)),
        "padding": ir.DenseI64ArrayAttr.get(list(padding)),
    }
    return _build("max_pool2d", [x], _like(x, shape), attributes, loc)


def upsample(x: ir.Value, *, factor: int = 2, loc: ir.Location | None = None) -> ir.Value:
    """Nearest-neighbour upsampling by a whole factor in both directions."""
    n, channels, height, width = shape_of(x)
    shape = [n, channels, height * factor, width * factor]
    return _build("upsample", [x], _like(x, shape), {"factor": _i64(factor)}, loc)


def attention(
    qkv: ir.Value,
    *,
    heads: int,
    key_dim: int,
    head_dim: int,
    scale: float,
    loc: ir.Location | None = None,
) -> ir.Value:
    """Attend over positions: qkv [N, heads*(2*key_dim+head_dim), H, W] to
    [N, heads*head_dim, H, W]."""
    n, _, height, width = shape_of(qkv)
    attributes = {
        "heads": _i64(heads),
        "key_dim": _i64(key_dim),
        "head_dim": _i64(head_dim),
        "scale": _f64(scale),
    }
    result = _like(qkv, [n, heads * head_dim, height, width])
    return _build("attention", [qkv], result, attributes, loc)


def detect(
    boxes: Sequence[ir.Value],
    classes: Sequence[ir.Value],
    *,
    strides: Sequence[int],
    max_det: int,
    loc: ir.Location | None = None,
) -> ir.Value:
    """Decode and two-stage top-k: box maps [N, 4, H, W] and class-logit maps [N, classes, H, W], a
    level each, to [N, max_det, 6] rows of x1, y1, x2, y2 (input pixels), score, class."""
    n = shape_of(boxes[0])[0]
    attributes = {
        "strides": ir.DenseI64ArrayAttr.get(list(strides)),
        "max_det": _i64(max_det),
    }
    result = ir.RankedTensorType.get([n, max_det, 6], ir.F32Type.get())
    return _build("detect", [*boxes, *classes], result, attributes, loc)


def candidates(
    boxes: Sequence[ir.Value],
    classes: Sequence[ir.Value],
    *,
    strides: Sequence[int],
    max_det: int,
    loc: ir.Location | None = None,
) -> ir.Value:
    """The first stage of a detection in two: of the two finer levels' maps (as `detect`'s) the rows
    [N, max_det, 8] that it would give, each followed by its logit and its anchor's largest."""
    n = shape_of(boxes[0])[0]
    attributes = {
        "strides": ir.DenseI64ArrayAttr.get(list(strides)),
        "max_det": _i64(max_det),
    }
    result = ir.RankedTensorType.get([n, max_det, CANDIDATE_COLUMNS], ir.F32Type.get())
    return _build("candidates", [*boxes, *classes], result, attributes, loc)


def merge_detections(
    rows: ir.Value,
    box: ir.Value,
    classes: ir.Value,
    *,
    stride: int,
    loc: ir.Location | None = None,
) -> ir.Value:
    """The second stage: `candidates` [N, max_det, 8] and the last level's maps [N, 4, H, W] and
    [N, classes, H, W] to what `detect` gives of all levels, [N, max_det, 6]."""
    n, max_det, _ = shape_of(rows)
    result = ir.RankedTensorType.get([n, max_det, 6], ir.F32Type.get())
    operands = [rows, box, classes]
    return _build("merge_detections", operands, result, {"stride": _i64(stride)}, loc)


def convert_layout(x: ir.Value, layout: Layout, *, loc: ir.Location | None = None) -> ir.Value:
    """The same logical tensor in another physical order."""
    type_ = ir.RankedTensorType(x.type)
    result = ir.RankedTensorType.get(type_.shape, type_.element_type, layout.attribute)
    return _build("convert_layout", [x], result, None, loc)


def dispatch(
    function: str,
    inputs: Sequence[ir.Value],
    results: Sequence[ir.Type],
    *,
    loc: ir.Location | None = None,
) -> ir.Operation:
    """One kernel launch: a `func.call` of the private `function`, marked `yolo.dispatch`."""
    call = func.CallOp(list(results), function, list(inputs), loc=loc)
    call.operation.attributes[DISPATCH] = ir.UnitAttr.get()
    return call.operation


# ---- verification -------------------------------------------------------------------------------

_Verifier = Callable[[ir.Operation], None]
_VERIFIERS: dict[str, _Verifier] = {}


def _verifier(name: str) -> Callable[[_Verifier], _Verifier]:
    def register(function: _Verifier) -> _Verifier:
        _VERIFIERS[f"{NAMESPACE}.{name}"] = function
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
    n, channels, height, width = shape_of(op.operands[0])
    out, per_group, kh, kw = shape_of(op.operands[1])
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
    top, left, bottom, right = padding
    oh = window_output(height, kh, strides[0], top, bottom)
    ow = window_output(width, kw, strides[1], left, right)
    if oh < 1 or ow < 1:
        _fail(op, f"a {kh}x{kw} kernel does not fit the padded {height}x{width} input")
    _expect(op, "result shape", [n, out, oh, ow], shape_of(op.results[0]))
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
    n, channels, height, width = shape_of(op.operands[0])
    rn, rc, rh, rw = shape_of(op.operands[1])
    _expect(op, "second operand's N, H, W", [n, height, width], [rn, rh, rw])
    _expect(op, "result shape", [n, channels + rc, height, width], shape_of(op.results[0]))
    _same_layout(op, [*op.operands, op.results[0]])
    _same_element(op, [*op.operands, op.results[0]])


@_verifier("slice")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    n, channels, height, width = shape_of(op.operands[0])
    offset, size = integer(op, "offset"), integer(op, "size")
    if offset < 0 or size < 1 or offset + size > channels:
        _fail(op, f"channels [{offset}, {offset + size}) leave the input's {channels}")
    _expect(op, "result shape", [n, size, height, width], shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("max_pool2d")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    n, channels, height, width = shape_of(op.operands[0])
    for name, count in (("kernel", 2), ("strides", 2), ("padding", 4)):
        _expect(op, f"number of {name}", count, len(integers(op, name)))
    kernel, strides = integers(op, "kernel"), integers(op, "strides")
    if min(kernel + strides) < 1:
        _fail(op, f"kernel is {kernel} and strides are {strides}; each must be at least 1")
    top, left, bottom, right = integers(op, "padding")
    oh = window_output(height, kernel[0], strides[0], top, bottom)
    ow = window_output(width, kernel[1], strides[1], left, right)
    _expect(op, "result shape", [n, channels, oh, ow], shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("upsample")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    n, channels, height, width = shape_of(op.operands[0])
    factor = integer(op, "factor")
    if factor < 1:
        _fail(op, f"factor is {factor}; it must be at least 1")
    expected = [n, channels, height * factor, width * factor]
    _expect(op, "result shape", expected, shape_of(op.results[0]))
    _same_layout(op, [op.operands[0], op.results[0]])
    _same_element(op, [op.operands[0], op.results[0]])


@_verifier("attention")
def _(op: ir.Operation) -> None:
    _four_dimensional(op, [op.operands[0]])
    n, channels, height, width = shape_of(op.operands[0])
    heads, key_dim, head_dim = (integer(op, a) for a in ("heads", "key_dim", "head_dim"))
    _expect(op, "input channels", heads * (2 * key_dim + head_dim), channels)
    _expect(op, "result shape", [n, heads * head_dim, height, width], shape_of(op.results[0]))
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
    _expect(op, "result shape", [images, max_det, 6], shape_of(op.results[0]))


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
    _expect(op, "result shape", [images, max_det, 6], shape_of(op.results[0]))


@_verifier("convert_layout")
def _(op: ir.Operation) -> None:
    _expect(op, "result shape", shape_of(op.operands[0]), shape_of(op.results[0]))
    _same_element(op, [op.operands[0], op.results[0]])
