"""An interpreter of the `yolo` dialect in numpy, float64: what a module means, at any `yolo` level.

It shares no code with the lowering to linalg or with the frontend, so that a pass can be held
against it. Arrays keep their logical order (N, C, H, W) whatever a type's layout says, for a layout
changes no meaning; only weights are read in the physical order in which their store keeps them.

A float16 tensor is rounded where it is stored, and arithmetic on it is exact, as on any other. In
a dispatch's function what only an activation or a sum wants stays in registers and is not stored;
so forming dispatches leaves fewer roundings. Factors of a product with a float16 weight are
float16, whatever the input's type, and so are the weights of attention's softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout, physical_shape
from yolomlir.frontend.weights import WeightStore

Array = NDArray[Any]
_Rule = Callable[..., Array]
_RULES: dict[str, _Rule] = {}
FAMILY = "yolo.family"
"""Attribute of a function that is a dispatch's."""
_ELEMENTWISE = ("yolo.silu", "yolo.add", "yolo.batch_norm")
"""Ops that a kernel computes on accumulators before it stores them."""


def interpret(
    module: ir.Module,
    inputs: Sequence[Array],
    weights: WeightStore,
    *,
    function: str = "main",
    layers: dict[str, Array] | None = None,
) -> list[Array]:
    """Run a function of a module on arrays in logical order; the results in logical order.

    `layers`, when given, gains the result of every op of that function by the layer its location
    names; where several ops name one layer, the last one's. Raises UserError where an input or a
    weight has not the shape that its type states.
    """
    run = Interpreter(module, weights)
    return run.call(function, inputs, layers)


class Interpreter:
    """Runs the functions of one module; keeps the weights that it has read."""

    def __init__(self, module: ir.Module, weights: WeightStore) -> None:
        self._functions = {
            yolo.string(view.operation, "sym_name"): view.operation
            for view in module.body.operations
            if view.operation.name == "func.func"
        }
        self._weights = weights
        self._read: dict[tuple[str, Layout], Array] = {}

    def call(
        self, name: str, inputs: Sequence[Array], layers: dict[str, Array] | None = None
    ) -> list[Array]:
        """Run one function on arrays in logical order."""
        if name not in self._functions:
            raise UserError(f"the module has no function @{name}")
        function = self._functions[name]
        block, fused = function.regions[0].blocks[0], FAMILY in function.attributes
        if len(inputs) != len(block.arguments):
            raise UserError(
                f"@{name} has {len(block.arguments)} arguments; got {len(inputs)} arrays"
            )
        values: dict[ir.Value, Array] = {}
        for index, (argument, array) in enumerate(zip(block.arguments, inputs, strict=True)):
            if list(array.shape) != yolo.shape_of(argument):
                raise UserError(
                    f"argument {index} of @{name} is {list(array.shape)}; "
                    f"expected {yolo.shape_of(argument)}, in logical order"
                )
            values[argument] = array
        for view in block.operations:
            op = view.operation
            if op.name == "func.return":
                return [values[v] for v in op.operands]
            results = self._run(op, [values[v] for v in op.operands])
            results = [
                to_half(array) if _is_half(value) and not (fused and _is_kept(value)) else array
                for value, array in zip(op.results, results, strict=True)
            ]
            for result, array in zip(op.results, results, strict=True):
                if list(array.shape) != yolo.shape_of(result):
                    raise InternalError(
                        f"'{op.name}' gave {list(array.shape)}; its type says "
                        f"{yolo.shape_of(result)}",
                        where=yolo.layer_of(op.location),
                    )
                values[result] = array
            if layers is not None:
                layers[yolo.layer_of(op.location)] = results[0]
        raise UserError(f"@{name} does not return")

    def weight(self, name: str, type_: ir.Type) -> Array:
        """A weight of the store in logical order, float64."""
        layout = Layout.of(type_)
        if (name, layout) not in self._read:
            self._read[name, layout] = self._load(name, type_)
        return self._read[name, layout]

    def _load(self, name: str, type_: ir.Type) -> Array:
        if name not in self._weights:
            raise UserError("the weight store has no tensor of this name", where=name)
        stored = self._weights[name]
        expected = physical_shape(type_)
        if list(stored.shape) != expected:
            raise UserError(
                f"the weight store has shape {list(stored.shape)}; expected {expected}", where=name
            )
        wide = stored.astype(np.float64)
        if wide.ndim != 4:
            return wide
        return np.transpose(wide, np.argsort(Layout.of(type_).permutation))

    def _run(self, op: ir.Operation, operands: list[Array]) -> list[Array]:
        if op.name == "yolo.weight":
            return [self.weight(yolo.string(op, "name"), op.results[0].type)]
        if op.name == "func.call":
            return self.call(yolo.callee(op), operands)
        if op.name not in _RULES:
            raise UserError(
                f"'{op.name}' is not of the yolo level", where=yolo.layer_of(op.location)
            )
        return [_RULES[op.name](op, *operands)]


# ---- float16 ------------------------------------------------------------------------------------


def to_half(x: Array) -> Array:
    """float64 rounded to the nearest float16, or to infinity beyond its range."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _is_half(value: ir.Value) -> bool:
    return yolo.element_of(value) == "f16"


def _is_kept(value: ir.Value) -> bool:
    """Whether a kernel keeps a value on its accumulators, for the op that alone wants it."""
    users = [use.owner.operation for use in value.uses]
    return len(users) == 1 and users[0].name in _ELEMENTWISE


# ---- what each op means -------------------------------------------------------------------------


def _rule(name: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES[f"yolo.{name}"] = rule
        return rule

    return register


@_rule("normalize")
def _(op: ir.Operation, image: Array) -> Array:
    return image.astype(np.float64) * yolo.real(op, "scale")


@_rule("convert_layout")
def _(op: ir.Operation, x: Array) -> Array:
    return x


@_rule("add")
def _(op: ir.Operation, a: Array, b: Array) -> Array:
    return a + b


@_rule("silu")
def _(op: ir.Operation, x: Array) -> Array:
    return x * sigmoid(x)


@_rule("concat")
def _(op: ir.Operation, a: Array, b: Array) -> Array:
    return np.concatenate([a, b], axis=1)


@_rule("slice")
def _(op: ir.Operation, x: Array) -> Array:
    offset = yolo.integer(op, "offset")
    return x[:, offset : offset + yolo.integer(op, "size")]


@_rule("upsample")
def _(op: ir.Operation, x: Array) -> Array:
    factor = yolo.integer(op, "factor")
    return x.repeat(factor, axis=2).repeat(factor, axis=3)


@_rule("batch_norm")
def _(op: ir.Operation, x: Array, gamma: Array, beta: Array, mean: Array, var: Array) -> Array:
    gamma, beta, mean, var = (v[:, None, None] for v in (gamma, beta, mean, var))
    return (x - mean) / np.sqrt(var + yolo.real(op, "epsilon")) * gamma + beta


@_rule("conv2d")
def _(op: ir.Operation, x: Array, w: Array, bias: Array | None = None) -> Array:
    groups = yolo.integer(op, "groups")
    x = to_half(x) if _is_half(op.operands[1]) else x
    n, _, out_h, out_w = yolo.shape_of(op.results[0])
    out, per_group, kh, kw = w.shape
    padded = _pad(x, yolo.integers(op, "padding"), 0.0)
    weights = w.reshape(groups, out // groups, per_group, kh, kw)
    y = np.zeros((n, groups, out // groups, out_h * out_w))
    for i, j in np.ndindex(kh, kw):
        tap = _tap(padded, i, j, yolo.integers(op, "strides"), (out_h, out_w))
        y += weights[..., i, j] @ tap.reshape(n, groups, per_group, out_h * out_w)
    y = y.reshape(n, out, out_h, out_w)
    return y if bias is None else y + bias[:, None, None]


@_rule("max_pool2d")
def _(op: ir.Operation, x: Array) -> Array:
    kernel, strides = yolo.integers(op, "kernel"), yolo.integers(op, "strides")
    size = yolo.shape_of(op.results[0])[2:]
    padded = _pad(x, yolo.integers(op, "padding"), -np.inf)
    taps = (_tap(padded, i, j, strides, size) for i, j in np.ndindex(*kernel))
    y = next(taps)
    for tap in taps:
        y = np.maximum(y, tap)
    return y


@_rule("attention")
def _(op: ir.Operation, qkv: Array) -> Array:
    heads, key_dim, head_dim = (yolo.integer(op, a) for a in ("heads", "key_dim", "head_dim"))
    n, _, height, width = qkv.shape
    split = qkv.reshape(n, heads, 2 * key_dim + head_dim, height * width)
    q, k, v = np.split(split, [key_dim, 2 * key_dim], axis=2)
    logits = np.swapaxes(q, 2, 3) @ k * yolo.real(op, "scale")
    weights = np.exp(logits - logits.max(axis=3, keepdims=True))
    total = weights.sum(axis=3)[:, :, None]
    weights = to_half(weights) if _is_half(op.operands[0]) else weights
    y: Array = v @ np.swapaxes(weights, 2, 3) / total
    return y.reshape(n, heads * head_dim, height, width)


@_rule("detect")
def _(op: ir.Operation, *maps: Array) -> Array:
    return _best(maps, yolo.integers(op, "strides"), yolo.integer(op, "max_det"))[..., :6]


@_rule("candidates")
def _(op: ir.Operation, *maps: Array) -> Array:
    return _best(maps, yolo.integers(op, "strides"), yolo.integer(op, "max_det"))


@_rule("merge_detections")
def _(op: ir.Operation, rows: Array, *maps: Array) -> Array:
    count = rows.shape[1]
    both = np.concatenate([rows, _best(maps, [yolo.integer(op, "stride")], count)], axis=1)
    logit, largest = -both[..., 6], -both[..., 7]
    chosen = [np.lexsort(keys)[:count] for keys in zip(largest, logit, strict=True)]
    return np.stack([image[order, :6] for image, order in zip(both, chosen, strict=True)])


def _best(maps: Sequence[Array], strides: Sequence[int], count: int) -> Array:
    """Detections [N, count, 8] of some levels' box maps and class maps, with their logits and
    their anchors' largest."""
    boxes, classes = maps[: len(strides)], maps[len(strides) :]
    corners = np.concatenate(
        [_decode(box, stride) for box, stride in zip(boxes, strides, strict=True)], axis=1
    )
    logits = np.concatenate([_rows(m) for m in classes], axis=1)
    return np.stack([_select(c, s, count) for c, s in zip(corners, logits, strict=True)])


def _rows(x: Array) -> Array:
    """[N, C, H, W] to [N, H * W, C]."""
    return np.moveaxis(x, 1, 3).reshape(x.shape[0], -1, x.shape[1])


def _decode(box: Array, stride: int) -> Array:
    """Distances to the sides, in strides, of one level to corners in pixels: [N, H * W, 4]."""
    height, width = box.shape[2:]
    ys, xs = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
    centres = np.stack([xs, ys], axis=-1).reshape(-1, 2)
    left_top, right_bottom = np.split(_rows(box), 2, axis=2)
    return np.concatenate([centres - left_top, centres + right_bottom], axis=2) * stride


def _select(corners: Array, logits: Array, count: int) -> Array:
    """The two-stage top-k of one image: [count, 8]. Of equal scores the earlier one comes first."""
    largest = logits.max(axis=1)
    anchors = np.argsort(-largest, kind="stable")[:count]
    flat = logits[anchors].reshape(-1)
    winners = np.argsort(-flat, kind="stable")[:count]
    which, label = np.divmod(winners, logits.shape[1])
    found, logit = anchors[which], flat[winners]
    columns = [corners[found], sigmoid(logit), label.astype(np.float64), logit, largest[found]]
    return np.column_stack(columns)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with no overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _pad(x: Array, padding: Sequence[int], value: float) -> Array:
    top, left, bottom, right = padding
    return np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=value)


def _tap(x: Array, i: int, j: int, strides: Sequence[int], size: Sequence[int]) -> Array:
    """What one position (i, j) of a window sees, an output pixel after the other."""
    rows = slice(i, i + (size[0] - 1) * strides[0] + 1, strides[0])
    columns = slice(j, j + (size[1] - 1) * strides[1] + 1, strides[1])
    return x[:, :, rows, columns]


__all__ = ["Interpreter", "interpret", "sigmoid"]
