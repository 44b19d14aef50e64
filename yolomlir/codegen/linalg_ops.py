"""Every `yolo` op of a dispatch's body in linalg, op by op, in physical shapes.

Elementwise ops are not written when met: they grow an `Epilogue`, which becomes one
`linalg.generic` when its value is needed. So conv, bias, SiLU and residual end as a contraction
and one generic. Its arithmetic is float32: float16 operands are widened where they are used, and
a result that is stored as float16 is rounded once, last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from yolomlir.bindings import ir
from yolomlir.codegen import linalg_detect
from yolomlir.codegen.linalg_text import Mapped, Tensor, Writer
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout, physical_shape

_NHWC = "n, h, w, c"
_SAME = {2: "a, b", 3: "a, b, c", 4: _NHWC}
_DIMS = {1: "c", 2: "ab", 3: "abc", 4: "nhwc"}


@dataclass(frozen=True)
class Epilogue:
    """An elementwise expression that has not been written yet.

    inputs: its operands, each of the result's shape or of the channels' (`map`). body: the lines
    of the generic's region; the value so far is `value`, a float32 once there are lines. location:
    where the first of its ops is. Without lines it is a float32 tensor (`inputs[0]`) of a value
    that is float16 when something wants it stored.
    """

    inputs: tuple[Mapped, ...]
    shape: tuple[int, ...]
    location: str
    body: tuple[str, ...] = ()
    value: str = "%in0"

    def apply(self, *lines: str) -> Epilogue:
        """The expression with `lines` appended; `{x}` is the value so far, `{0}`, `{1}`… these."""
        fresh = [f"%e{len(self.body) + i}" for i in range(len(lines))]
        done = [line.format(*fresh, x=self.value) for line in lines]
        body = tuple(f"{name} = {line}" for name, line in zip(fresh, done, strict=True))
        return replace(self, body=self.body + body, value=fresh[-1])

    def with_input(self, tensor: Tensor, map_: str) -> tuple[Epilogue, str]:
        """The expression with one more operand, and that operand's name in the region."""
        name = f"%in{len(self.inputs)}"
        return replace(self, inputs=(*self.inputs, Mapped(tensor, map_))), name


class FunctionLowering:
    """Writes one dispatch function at the linalg level. Raises UserError that names the layer."""

    def __init__(self, function: ir.Operation) -> None:
        self.function = function
        self.writer = Writer()
        self.values: dict[ir.Value, Tensor | Epilogue] = {}

    def text(self) -> str:
        """The whole `func.func` as text that parses, without its own attributes."""
        name = ir.FlatSymbolRefAttr.get(yolo.string(self.function, "sym_name"))
        block = self.function.regions[0].blocks[0]
        arguments = []
        for index, argument in enumerate(block.arguments):
            self.values[argument] = physical(argument, f"%arg{index}", self._where(argument))
            where = location_text(self.function.location)
            arguments.append(f"%arg{index}: {self.tensor(argument).type} {where}")
        results: list[Tensor] = []
        for view in block.operations:
            op = view.operation
            self.writer.location = location_text(op.location)
            if op.name == "func.return":
                results = [self._returned(v) for v in op.operands]
            else:
                self._rule(op)(self, op)
        types = ", ".join(r.type for r in results)
        names = ", ".join(r.name for r in results)
        self.writer.line(f"return {names} : {types}")
        head = f"func.func private {name}({', '.join(arguments)}) -> ({types}) {{"
        tail = f"}} {location_text(self.function.location)}"
        return "\n".join([head, *self.writer.lines, tail])

    def tensor(self, value: ir.Value) -> Tensor:
        """The tensor of a `yolo` value, its epilogue written if it has one."""
        known = self.values[value]
        if isinstance(known, Epilogue):
            known = self.values[value] = self._write(known, element_text(value.type))
        return known

    def residual(self, value: ir.Value) -> Tensor:
        """The tensor to add to an expression: before its rounding, where only that wants it."""
        known = self.values[value]
        if isinstance(known, Epilogue) and not known.body and len(list(value.uses)) == 1:
            return known.inputs[0].tensor
        return self.tensor(value)

    def epilogue(self, value: ir.Value) -> Epilogue:
        """The value as an expression to append to; a value with other users is written first."""
        known = self.values[value]
        if isinstance(known, Epilogue) and len(list(value.uses)) == 1:
            return known
        x = self.tensor(value)
        e = Epilogue((Mapped(x, _same(x)),), x.shape, self.writer.location)
        return e.apply("arith.extf {x} : f16 to f32") if x.element == "f16" else e

    def accumulated(self, value: ir.Value, tensor: Tensor) -> Tensor | Epilogue:
        """A float32 `tensor` as what `value` is: itself, or to be rounded when it is stored."""
        if element_text(value.type) == tensor.element:
            return tensor
        return Epilogue((Mapped(tensor, _same(tensor)),), tensor.shape, self.writer.location)

    def _rule(self, op: ir.Operation) -> Callable[[FunctionLowering, ir.Operation], None]:
        if op.name not in _RULES:
            raise UserError(
                f"'{op.name}' has no lowering to linalg", where=yolo.layer_of(op.location)
            )
        return _RULES[op.name]

    def _where(self, value: ir.Value) -> str:
        for use in value.uses:
            return yolo.layer_of(use.owner.location)
        return yolo.layer_of(self.function.location)

    def _returned(self, value: ir.Value) -> Tensor:
        x = self.tensor(value)
        if not x.name.startswith("%arg"):
            return x
        copied = Epilogue((Mapped(x, _same(x)),), x.shape, self.writer.location)
        return self._write(copied, x.element)

    def _write(self, e: Epilogue, element: str) -> Tensor:
        computed = "f32" if e.body else e.inputs[0].tensor.element
        if element != computed:
            e = e.apply(f"arith.truncf {{x}} : {computed} to {element}")
        out = self.writer.empty(e.shape, element)
        body = list(e.body) or [f"%y = {e.value}"]
        self.writer.location, current = e.location, self.writer.location
        result = self.writer.generic(_DIMS[len(e.shape)], e.inputs, Mapped(out, _same(out)), body)
        self.writer.location = current
        return result


def _same(x: Tensor) -> str:
    return ", ".join(_DIMS[len(x.shape)])


def location_text(location: ir.Location) -> str:
    """`loc("model.3.conv")` for a location that names a layer, else as MLIR prints it."""
    layer = yolo.layer_of(location)
    if layer.startswith("loc("):
        return layer
    return str(ir.Location.name(layer, context=location.context))


def element_text(type_: ir.Type) -> str:
    """The element type at the linalg level: signless, as `arith` wants it."""
    element = str(ir.RankedTensorType(type_).element_type)
    return element[1:] if element[:2] in ("ui", "si") else element


def physical(value: ir.Value, name: str, where: str) -> Tensor:
    """The tensor that holds `value` in memory order. Raises UserError for a logical activation."""
    type_ = value.type
    if not isinstance(type_, ir.RankedTensorType):
        raise UserError(f"{type_} is not a ranked tensor", where=where)
    return Tensor(name, tuple(physical_shape(type_)), element_text(type_))


# ---- rules --------------------------------------------------------------------------------------

_Rule = Callable[[FunctionLowering, ir.Operation], None]
_RULES: dict[str, _Rule] = {}


def _rule(name: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES[f"{yolo.NAMESPACE}.{name}"] = function
        return function

    return register


def _require_nhwc(op: ir.Operation, *values: ir.Value) -> None:
    for value in values:
        if Layout.of(value.type) is not Layout.NHWC:
            raise UserError(
                f"'{op.name}' on {value.type}; the linalg level is NHWC",
                where=yolo.layer_of(op.location),
                hint="run yolo-layout-propagation first",
            )


@_rule("normalize")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    """A signless i8 holds the uint8, so the conversion is the unsigned one."""
    scale, e = yolo.real(op, "scale"), f.epilogue(op.operands[0])
    if e.inputs[0].tensor.element != "f32":
        e = e.apply(f"arith.uitofp {{x}} : {e.inputs[0].tensor.element} to f32")
    if scale != 1.0:
        constant = f.writer.constant(scale)
        e = e.apply(f"arith.mulf {{x}}, {constant} : f32")
    f.values[op.results[0]] = e if e.body else f.tensor(op.operands[0])


@_rule("conv2d")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    x, y = op.operands[0], op.results[0]
    _require_nhwc(op, x, y)
    w = f.writer
    source = w.pad(f.tensor(x), yolo.integers(op, "padding"), 0.0)
    groups = yolo.integer(op, "groups")
    channels, out_channels = yolo.shape_of(x)[1], yolo.shape_of(y)[1]
    depthwise = groups > 1 and groups == channels == out_channels
    if groups != 1 and not depthwise:
        raise UnsupportedError(
            f"a convolution of {groups} groups over {channels} channels to {out_channels}",
            where=yolo.layer_of(op.location),
            hint="groups = 1 and depthwise convolutions are supported",
        )
    weight = _depthwise_weight(f, op) if depthwise else f.tensor(op.operands[1])
    kind = "depthwise_conv_2d_nhwc_hwc" if depthwise else _dense_form(op)
    accumulator = w.filled(physical_shape(y.type), 0.0)
    strides = ", ".join(map(str, yolo.integers(op, "strides")))
    text = (
        f"linalg.{kind} {{dilations = dense<1> : tensor<2xi64>, "
        f"strides = dense<[{strides}]> : tensor<2xi64>}} "
        f"ins({source.name}, {weight.name} : {source.type}, {weight.type}) "
        f"outs({accumulator.name} : {accumulator.type}) -> {accumulator.type}"
    )
    result = w.tensor(text, accumulator.shape)
    if len(op.operands) == 2:
        f.values[y] = f.accumulated(y, result)
        return
    e = Epilogue((Mapped(result, _NHWC),), result.shape, w.location)
    e, bias = e.with_input(f.tensor(op.operands[2]), "c")
    f.values[y] = e.apply(f"arith.addf {{x}}, {bias} : f32")


def _dense_form(op: ir.Operation) -> str:
    layout = Layout.of(op.operands[1].type)
    forms = {Layout.OHWI: "conv_2d_nhwc_fhwc", Layout.HWIO: "conv_2d_nhwc_hwcf"}
    if layout not in forms:
        raise UserError(
            f"'{op.name}' has a weight of type {op.operands[1].type}; expected ohwi or hwio",
            where=yolo.layer_of(op.location),
            hint="run yolo-layout-propagation first",
        )
    return forms[layout]


def _depthwise_weight(f: FunctionLowering, op: ir.Operation) -> Tensor:
    """The weight as KH x KW x C; only HWIO needs no transpose."""
    value = op.operands[1]
    channels, _, kh, kw = yolo.shape_of(value)
    weight, w = f.tensor(value), f.writer
    if Layout.of(value.type) is Layout.HWIO:
        return w.reshape(weight, (kh, kw, channels), [[0], [1], [2, 3]])
    flat_groups = [[0], [1], [2, 3]] if Layout.of(value.type) is Layout.OHWI else [[0, 1], [2], [3]]
    flat = w.reshape(weight, (channels, kh, kw), flat_groups)
    out = w.empty((kh, kw, channels), weight.element)
    text = (
        f"linalg.transpose ins({flat.name} : {flat.type}) outs({out.name} : {out.type}) "
        "permutation = [1, 2, 0]"
    )
    return w.tensor(text, out.shape, out.element)


@_rule("batch_norm")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta."""
    _require_nhwc(op, op.operands[0])
    e = f.epilogue(op.operands[0])
    names = []
    for value in list(op.operands)[1:]:
        e, name = e.with_input(f.tensor(value), "c")
        names.append(name)
    gamma, beta, mean, variance = names
    epsilon = f.writer.constant(yolo.real(op, "epsilon"))
    f.values[op.results[0]] = e.apply(
        f"arith.subf {{x}}, {mean} : f32",
        f"arith.addf {variance}, {epsilon} : f32",
        "math.sqrt {1} : f32",
        "arith.divf {0}, {2} : f32",
        f"arith.mulf {{3}}, {gamma} : f32",
        f"arith.addf {{4}}, {beta} : f32",
    )


@_rule("silu")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    one = f.writer.constant(1.0)
    f.values[op.results[0]] = f.epilogue(op.operands[0]).apply(
        "arith.negf {x} : f32",
        "math.exp {0} : f32",
        f"arith.addf {{1}}, {one} : f32",
        "arith.divf {x}, {2} : f32",
    )


@_rule("add")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    """Grows the operand that still is an expression; the other is the residual."""
    lhs, rhs = op.operands
    if _grown(f.values[rhs]) > _grown(f.values[lhs]):
        lhs, rhs = rhs, lhs
    residual = f.residual(rhs)
    e, name = f.epilogue(lhs).with_input(residual, _same(residual))
    lines = [f"arith.addf {{x}}, {name} : f32"]
    if residual.element == "f16":
        lines = [f"arith.extf {name} : f16 to f32", "arith.addf {x}, {0} : f32"]
    f.values[op.results[0]] = e.apply(*lines)


def _grown(known: Tensor | Epilogue) -> int:
    """How far a value is from being a tensor."""
    return 1 + bool(known.body) if isinstance(known, Epilogue) else 0


@_rule("concat")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    """Nested pairs become one `tensor.concat`: a concat that only feeds another is not written."""
    _require_nhwc(op, *op.operands)
    y = op.results[0]
    users = [use.owner.operation for use in y.uses]
    if len(users) == 1 and users[0].name == op.name:
        return
    f.values[y] = f.writer.concat([f.tensor(v) for v in _leaves(f, op)], dim=3)


def _leaves(f: FunctionLowering, op: ir.Operation) -> list[ir.Value]:
    leaves: list[ir.Value] = []
    for value in op.operands:
        if value in f.values:
            leaves.append(value)
        else:
            leaves.extend(_leaves(f, value.owner))
    return leaves


@_rule("slice")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, op.operands[0])
    x = f.tensor(op.operands[0])
    offset, size = yolo.integer(op, "offset"), yolo.integer(op, "size")
    f.values[op.results[0]] = f.writer.extract_slice(x, [0, 0, 0, offset], [*x.shape[:3], size])


@_rule("max_pool2d")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, op.operands[0])
    w, lowest = f.writer, float("-inf")
    x = w.pad(f.tensor(op.operands[0]), yolo.integers(op, "padding"), lowest)
    window = w.empty(yolo.integers(op, "kernel"), x.element)
    out = w.filled(physical_shape(op.results[0].type), lowest, x.element)
    strides = ", ".join(map(str, yolo.integers(op, "strides")))
    text = (
        "linalg.pooling_nhwc_max {dilations = dense<1> : tensor<2xi64>, "
        f"strides = dense<[{strides}]> : tensor<2xi64>}} "
        f"ins({x.name}, {window.name} : {x.type}, {window.type}) "
        f"outs({out.name} : {out.type}) -> {out.type}"
    )
    f.values[op.results[0]] = w.tensor(text, out.shape, out.element)


@_rule("upsample")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, op.operands[0])
    factor = yolo.integer(op, "factor")
    x = f.tensor(op.operands[0])
    out = f.writer.empty(physical_shape(op.results[0].type), x.element)
    source = f"n, h floordiv {factor}, w floordiv {factor}, c"
    f.values[op.results[0]] = f.writer.generic(
        "nhwc", [Mapped(x, source)], Mapped(out, _NHWC), ["%y = %in0"]
    )


@_rule("attention")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    """y = v softmax(q k^T * scale)^T, normalised after the second contraction.

    Loops: n batch, a head, q and k positions, d one channel of a head. Channels of qkv: a head
    after the other, key_dim of q, key_dim of k, head_dim of v. Of a float16 qkv the sums and the
    softmax are float32; its weights are rounded to float16 for the product with v.
    """
    _require_nhwc(op, op.operands[0])
    w, x = f.writer, f.tensor(op.operands[0])
    heads, key_dim, head_dim = (yolo.integer(op, k) for k in ("heads", "key_dim", "head_dim"))
    n, height, width, channels = x.shape
    tokens, depth = height * width, 2 * key_dim + head_dim
    flat = w.reshape(x, (n, tokens, channels), [[0], [1, 2], [3]])
    by_head = w.reshape(flat, (n, tokens, heads, depth), [[0], [1], [2, 3]])
    q = w.extract_slice(by_head, [0, 0, 0, 0], [n, tokens, heads, key_dim])
    k = w.extract_slice(by_head, [0, 0, 0, key_dim], [n, tokens, heads, key_dim])
    v = w.extract_slice(by_head, [0, 0, 0, 2 * key_dim], [n, tokens, heads, head_dim])
    scores = w.generic(
        "naqkd",
        [Mapped(q, "n, q, a, d"), Mapped(k, "n, k, a, d")],
        Mapped(w.filled((n, heads, tokens, tokens), 0.0), "n, a, q, k"),
        _contraction(x.element),
        reduced="d",
    )
    scale = w.constant(yolo.real(op, "scale"))
    scaled = w.generic(
        "naqk",
        [Mapped(scores, "n, a, q, k")],
        Mapped(w.empty(scores.shape), "n, a, q, k"),
        [f"%y = arith.mulf %in0, {scale} : f32"],
    )
    largest = w.generic(
        "naqk",
        [Mapped(scaled, "n, a, q, k")],
        Mapped(w.filled((n, heads, tokens), float("-inf")), "n, a, q"),
        ["%y = arith.maximumf %out, %in0 : f32"],
        reduced="k",
    )
    weights = w.generic(
        "naqk",
        [Mapped(scaled, "n, a, q, k"), Mapped(largest, "n, a, q")],
        Mapped(w.empty(scores.shape), "n, a, q, k"),
        ["%d = arith.subf %in0, %in1 : f32", "%y = math.exp %d : f32"],
    )
    total = w.generic(
        "naqk",
        [Mapped(weights, "n, a, q, k")],
        Mapped(w.filled((n, heads, tokens), 0.0), "n, a, q"),
        ["%y = arith.addf %out, %in0 : f32"],
        reduced="k",
    )
    mixed = w.generic(
        "naqdk",
        [Mapped(_stored(w, weights, x.element), "n, a, q, k"), Mapped(v, "n, k, a, d")],
        Mapped(w.filled((n, heads, tokens, head_dim), 0.0), "n, a, q, d"),
        _contraction(x.element),
        reduced="k",
    )
    normalized = w.generic(
        "nqad",
        [Mapped(mixed, "n, a, q, d"), Mapped(total, "n, a, q")],
        Mapped(w.empty((n, tokens, heads, head_dim)), "n, q, a, d"),
        ["%y = arith.divf %in0, %in1 : f32"],
    )
    merged = w.reshape(normalized, (n, tokens, heads * head_dim), [[0], [1], [2, 3]])
    shape = (n, height, width, heads * head_dim)
    result = w.reshape(merged, shape, [[0], [1, 2], [3]])
    f.values[op.results[0]] = f.accumulated(op.results[0], result)


def _contraction(element: str) -> list[str]:
    """The region of a contraction into float32; products of float16 are exact in it."""
    if element == "f32":
        return ["%p = arith.mulf %in0, %in1 : f32", "%y = arith.addf %out, %p : f32"]
    return [
        f"%a = arith.extf %in0 : {element} to f32",
        f"%b = arith.extf %in1 : {element} to f32",
        "%p = arith.mulf %a, %b : f32",
        "%y = arith.addf %out, %p : f32",
    ]


def _stored(w: Writer, x: Tensor, element: str) -> Tensor:
    """A float32 tensor of rank 4 rounded to `element`; x itself where it is of that."""
    if x.element == element:
        return x
    out = Mapped(w.empty(x.shape, element), _NHWC)
    return w.generic(
        "nhwc", [Mapped(x, _NHWC)], out, [f"%y = arith.truncf %in0 : f32 to {element}"]
    )


@_rule("detect")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, *op.operands)
    maps = [f.tensor(v) for v in op.operands]
    f.values[op.results[0]] = linalg_detect.write(
        f.writer,
        maps[: yolo.LEVELS],
        maps[yolo.LEVELS :],
        strides=yolo.integers(op, "strides"),
        max_det=yolo.integer(op, "max_det"),
    )


@_rule("candidates")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, *op.operands)
    maps, strides = [f.tensor(v) for v in op.operands], yolo.integers(op, "strides")
    f.values[op.results[0]] = linalg_detect.write_candidates(
        f.writer,
        maps[: len(strides)],
        maps[len(strides) :],
        strides=strides,
        max_det=yolo.integer(op, "max_det"),
    )


@_rule("merge_detections")
def _(f: FunctionLowering, op: ir.Operation) -> None:
    _require_nhwc(op, *list(op.operands)[1:])
    rows, box, logits = (f.tensor(v) for v in op.operands)
    stride = yolo.integer(op, "stride")
    f.values[op.results[0]] = linalg_detect.write_merge(f.writer, rows, box, logits, stride=stride)


__all__ = ["Epilogue", "FunctionLowering", "element_text", "location_text"]
