"""The `yolo` dialect in Python: loading, and builders that infer shapes and verify.

Every tensor's shape is logical: activations N, C, H, W; weights O, I, KH, KW. The physical order is
the type's encoding (`layout.py`); builders give a result the layout of its first operand. How ops
are read (`reading.py`) and verified (`verification.py`) is imported from here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from yolomlir.dialects.layout import Layout
from yolomlir.dialects.reading import (
    DISPATCH,
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
from yolomlir.dialects.verification import faults, verify, verify_op

from yolomlir.bindings import func, ir, irdl

__all__ = [
    "DISPATCH",
    "LEVELS",
    "NAMESPACE",
    "add",
    "attention",
    "batch_norm",
    "callee",
    "candidates",
    "concat",
    "conv2d",
    "convert_layout",
    "detect",
    "dispatch",
    "element_of",
    "faults",
    "integer",
    "integers",
    "is_dispatch",
    "layer_of",
    "load",
    "max_pool2d",
    "merge_detections",
    "new_context",
    "normalize",
    "ops_in",
    "real",
    "shape_of",
    "silu",
    "slice_",
    "string",
    "upsample",
    "verify",
    "verify_op",
    "weight",
]

NAMESPACE = "yolo"
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
    out, _, *kernel = shape_of(w)
    shape = window_shape(shape_of(x), out, kernel, strides, padding)
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
        shape = with_channels(shape_of(result), shape_of(result)[1] + shape_of(x)[1])
        result = _build("concat", [result, x], _like(result, shape), None, loc)
    return result


def slice_(x: ir.Value, *, offset: int, size: int, loc: ir.Location | None = None) -> ir.Value:
    """Channels [offset, offset + size) of x."""
    attributes = {"offset": _i64(offset), "size": _i64(size)}
    return _build("slice", [x], _like(x, with_channels(shape_of(x), size)), attributes, loc)


def max_pool2d(
    x: ir.Value,
    *,
    kernel: Sequence[int],
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    loc: ir.Location | None = None,
) -> ir.Value:
    """Maximum over windows; padding (top, left, bottom, right) counts as minus infinity."""
    shape = window_shape(shape_of(x), shape_of(x)[1], kernel, strides, padding)
    attributes = {
        "kernel": ir.DenseI64ArrayAttr.get(list(kernel)),
        "strides": ir.DenseI64ArrayAttr.get(list(strides)),
        "padding": ir.DenseI64ArrayAttr.get(list(padding)),
    }
    return _build("max_pool2d", [x], _like(x, shape), attributes, loc)


def upsample(x: ir.Value, *, factor: int = 2, loc: ir.Location | None = None) -> ir.Value:
    """Nearest-neighbour upsampling by a whole factor in both directions."""
    result = _like(x, enlarged(shape_of(x), factor))
    return _build("upsample", [x], result, {"factor": _i64(factor)}, loc)


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
    attributes = {
        "heads": _i64(heads),
        "key_dim": _i64(key_dim),
        "head_dim": _i64(head_dim),
        "scale": _f64(scale),
    }
    result = _like(qkv, with_channels(shape_of(qkv), heads * head_dim))
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
    result = ir.RankedTensorType.get([n, max_det, DETECTION_COLUMNS], ir.F32Type.get())
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
    result = ir.RankedTensorType.get([n, max_det, DETECTION_COLUMNS], ir.F32Type.get())
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
