"""How far a layer may be from the exact result: from K, element type, magnitudes, precision.

A first-order, probabilistic error analysis runs beside the exact (float64) values. Each rounding is
an independent error, uniform within the unit roundoff u, so of variance u²/3 relative to what is
rounded. Variances are carried through the network, element by element:

- Convolution, y = Σ_k w_k x_k + b, K terms. Inherited: Σ w² var(x). Products: both factors and the
  product are rounded to the precision of products u_p (2^-24 for fp32, 2^-11 for tf32), which gives
  2 u_p²/3 Σ (w x)². Accumulation in float32, u = 2^-24: every partial sum is rounded, which gives
  u²/3 Σ_j s_j². In the worst order (positive weights on one side of the kernel, a flat picture) the
  sum runs up to that of its positive terms, or down to that of its negative ones, M, and back, so
  Σ_j s_j² = K M² / 3, M = (Σ |w x| + |y|) / 2.
- SiLU, y = x s(x): (s (1 + x (1 - s)))² var(x), and for exponential, sum and quotient an error of
  (4 + |x|) u |y| + u |x|: s is near 0 for negative x, and libraries compute it to within u of 1.
  Near its minimum the slope vanishes and the curvature c = s (1 - s) (2 + x (1 - 2 s)) is what
  carries an error e on: c e² / 2. At e = D deviations of x that is (D² / 2) c var(x), which is D
  deviations of y if its variance has ((D / 2) c var(x))² more.
- Sum: both variances and the rounding. Concatenation, slice, upsampling: none of their own.
- Maximum: the largest variance in the window.
- Attention, p = softmax(scale qᵀk), y = Σ p v: logits as products; relative variance of p_i is
  var(l_i) + Σ_j p_j² var(l_j) + (4 + |l|)² u²/3; then as products, and 4 u y for the sum of the
  exponentials, whose error all share.

Precision `fp16` stores what it computes as float16, and weights as well. That is one rounding a
value, of unit roundoff u_p = 2^-11 and never less than half of float16's smallest step, 2^-25:
(u_p y)²/3 + (2^-25)²/3. It is counted where it is made: for a layer's result, unless the one layer
that reads it is the SiLU or the sum that its kernel computes on the accumulators, and not for the
head's maps, which are float32; other engines (`each_layer`) store every layer's. Products are then
of exact factors but for the weights, and exact themselves in float32: u_p²/3 Σ (w x)² +
(2^-25)²/3 Σ x². The first convolution rounds the image too, unless that is whole numbers; then its
weights hold their factor 1/255, and their step is 255 times as large. Both are allowed for.
Attention's weights are rounded before they multiply v.

A tolerance is `DEVIATIONS` standard deviations: 5.5 would be left once in 30 networks of 10^7
values if errors were independent and normal; what is left allows for those that are not.

Carried over many layers, the independence of errors is only nearly true. So the tolerance of a
layer, `local_errors`, needs none of it: the layer is computed in float64 *from the run's own inputs
to it*, and what the run may differ by is that layer's own rounding. An error is therefore found
where it is made and nowhere else. Only the tolerance of detections is of the whole network.

A kernel that computes several layers stores some of their results. Those that stay on the chip are
computed here and their variance is carried to the next one that is stored; where they are handed on
as TF32, that is the rounding of a factor, which the next convolution's products count already. As
float16 it is the rounding of a result, as if it were stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.evaluate.graph import IMAGE, STRIDES, Graph, Node

Array = NDArray[np.float64]
DEVIATIONS = 8.0
FLOAT32 = 2.0**-24
"""Unit roundoff of float32, to nearest."""
PRODUCTS = {"fp32": FLOAT32, "tf32": 2.0**-11, "fp16": 2.0**-11}
"""Unit roundoff of the factors of products, by precision."""
HALF = "fp16"
"""The precision at which tensors are stored as float16."""
_HALF_STEP = 2.0**-25
"""Half of float16's smallest step: what rounding to it errs by near zero."""
_COMPUTED = ("conv", "silu", "add", "attention")
"""Kinds of layers whose results are new numbers; the others choose and move."""
_PIXELS = 255


@dataclass(frozen=True)
class Reference:
    """The exact values of a network and how far a run may be from them.

    values, deviations: by layer, [N, C, H, W] float64. rows: [N, max_det, 6]. box_deviation,
    score_deviation: the largest standard deviations of a corner (pixels) and of a score.
    """

    values: Mapping[str, Array]
    deviations: Mapping[str, Array]
    rows: Array
    box_deviation: float
    score_deviation: float


def exact_reference(
    graph: Graph,
    image: NDArray[Any],
    precision: str,
    *,
    max_det: int = 300,
    each_layer: bool = False,
) -> Reference:
    """Run the network in float64 with its error analysis.

    image: [N, 3, H, W], uint8 (divided by 255) or floats in 0..1. precision: a key of `PRODUCTS`.
    each_layer: whether a run at `fp16` rounds the result of every layer, the head's maps too.
    """
    run = _Run(graph, precision, image, each_layer=each_layer)
    for node in graph.nodes:
        run.step(node)
    deviations = {name: np.sqrt(v) for name, v in run.variances.items()}
    boxes = [run.values[n] for n in graph.boxes]
    logits = [run.values[n] for n in graph.classes]
    box = max(s * deviations[n].max() for n, s in zip(graph.boxes, STRIDES, strict=True))
    score = max(
        float((_slope(run.values[n]) * deviations[n] + FLOAT32).max()) for n in graph.classes
    )
    return Reference(
        run.values, deviations, select(boxes, logits, max_det), float(box), float(score)
    )


@dataclass(frozen=True)
class LocalError:
    """What a layer of a run differs by from float64 on the run's own inputs, and its deviation."""

    error: Array
    deviation: Array


def local_errors(
    graph: Graph, image: NDArray[Any], precision: str, observed: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[Node, LocalError]]:
    """For each layer with a value in `observed` ([N, C, H, W]), in order, the error made there.

    A layer without a value is computed, and its rounding counts for the next one with a value.
    """
    run = _Run(graph, precision, image)
    for node in graph.nodes:
        run.step(node, stored=node.name in observed)
        if node.name not in observed:
            continue
        value = observed[node.name].astype(np.float64)
        yield (
            node,
            LocalError(value - run.values[node.name], np.sqrt(run.variances[node.name])),
        )
        run.values[node.name] = value
        run.variances[node.name] = np.zeros_like(value)


def _slope(logits: Array) -> Array:
    """The derivative of the sigmoid."""
    s = sigmoid(logits)
    return s * (1 - s)


class _Run:
    def __init__(
        self, graph: Graph, precision: str, image: NDArray[Any], *, each_layer: bool = False
    ) -> None:
        x = np.asarray(image, np.float64) / (_PIXELS if image.dtype == np.uint8 else 1)
        self.graph = graph
        self.half = precision == HALF
        self.each_layer = each_layer
        self.factor_variance = PRODUCTS[precision] ** 2 / 3
        self.values: dict[str, Array] = {IMAGE: x}
        # 1/255 and the product by it, or the caller's own rounding of the pixels.
        self.variances: dict[str, Array] = {IMAGE: x**2 * _ROUNDING}

    def step(self, node: Node, *, stored: bool = False) -> None:
        """Compute a node; `stored` where it is in memory whatever reads it."""
        value, variance = _RULES[node.kind](self, node)
        if self._is_half(node) and (stored or self.each_layer or not self._is_kept(node)):
            variance = variance + self.half_variance(value)
        self.values[node.name], self.variances[node.name] = value, variance

    def half_variance(self, x: Array, step: float = _HALF_STEP) -> Array:
        """Variance from rounding to float16."""
        return x**2 * self.factor_variance + step**2 / 3

    def _is_half(self, node: Node) -> bool:
        """Whether a layer's result is rounded to float16 when it is stored."""
        if not self.half or node.kind not in _COMPUTED:
            return False
        return self.each_layer or node.name not in (*self.graph.boxes, *self.graph.classes)

    def _is_kept(self, node: Node) -> bool:
        """Whether the kernel that computes a layer computes the only one that reads it."""
        users = self.graph.users(node.name)
        return len(users) == 1 and users[0].kind in ("silu", "add")

    def inputs(self, node: Node) -> list[tuple[Array, Array]]:
        """Value and variance of each input."""
        return [(self.values[name], self.variances[name]) for name in node.inputs]

    def sum_variance(self, sizes: Array, result: Array, terms: int) -> Array:
        """Variance from rounding partial sums; sizes: Σ |w x|."""
        farthest = (sizes + np.abs(result)) / 2
        return terms * farthest**2 / 3 * _ROUNDING

    def product_variance(self, squares: Array) -> Array | float:
        """Variance from rounding both factors; squares: Σ (w x)². float16 ones are exact."""
        return 0.0 if self.half else 2 * self.factor_variance * squares


_ROUNDING = FLOAT32**2 / 3
_Rule = Callable[[_Run, Node], tuple[Array, Array]]


def _conv(run: _Run, node: Node) -> tuple[Array, Array]:
    if node.conv is None:
        raise ValueError(node.name)
    (x, variance), stride = run.inputs(node)[0], node.conv.stride
    weight, bias = (a.astype(np.float64) for a in run.graph.weights[node.name])
    shift = bias.reshape(1, -1, 1, 1)
    y = convolve(x, weight, stride) + shift
    squares = convolve(x**2, weight**2, stride) + shift**2
    sizes = convolve(np.abs(x), np.abs(weight), stride) + np.abs(shift)
    inherited = convolve(variance, weight**2, stride) if variance.any() else 0.0
    terms = int(np.prod(weight.shape[1:])) + 1
    own = run.product_variance(squares) + run.sum_variance(sizes, y, terms)
    return y, inherited + own + (_half_factors(run, node, x, weight) if run.half else 0.0)


def _half_factors(run: _Run, node: Node, x: Array, weight: Array) -> Array:
    """Variance from rounding a convolution's weights to float16, and the image."""
    stride = node.conv.stride if node.conv else 1
    if node.inputs[0] != IMAGE:
        return convolve(x**2, run.half_variance(weight), stride)
    weights = convolve(x**2, run.half_variance(weight, _PIXELS * _HALF_STEP), stride)
    return weights + convolve(run.half_variance(x), weight**2, stride)


def _silu(run: _Run, node: Node) -> tuple[Array, Array]:
    x, variance = run.inputs(node)[0]
    s = sigmoid(x)
    slope = s * (1 + x * (1 - s))
    y = x * s
    curvature = s * (1 - s) * (2 + x * (1 - 2 * s))
    inherited = slope**2 * variance + (DEVIATIONS / 2 * curvature * variance) ** 2
    own = (4 + np.abs(x)) * np.abs(y) + np.abs(x)
    return y, inherited + own**2 * _ROUNDING


def _add(run: _Run, node: Node) -> tuple[Array, Array]:
    (a, var_a), (b, var_b) = run.inputs(node)
    y = a + b
    return y, var_a + var_b + y**2 * _ROUNDING


def _concat(run: _Run, node: Node) -> tuple[Array, Array]:
    values, variances = zip(*run.inputs(node), strict=True)
    return np.concatenate(values, axis=1), np.concatenate(variances, axis=1)


def _slice(run: _Run, node: Node) -> tuple[Array, Array]:
    x, variance = run.inputs(node)[0]
    part = np.s_[:, node.options["offset"] : node.options["offset"] + node.channels]
    return x[part], variance[part]


def _max_pool(run: _Run, node: Node) -> tuple[Array, Array]:
    x, variance = run.inputs(node)[0]
    kernel = node.options["kernel"]
    return _window_maximum(x, kernel), _window_maximum(variance, kernel)


def _window_maximum(x: Array, kernel: int) -> Array:
    pad = kernel // 2
    height, width = x.shape[2:]
    edges = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    padded = np.pad(x, edges, constant_values=-np.inf)
    rows = np.maximum.reduce([padded[:, :, i : i + height] for i in range(kernel)])
    return np.asarray(np.maximum.reduce([rows[..., j : j + width] for j in range(kernel)]))


def _upsample(run: _Run, node: Node) -> tuple[Array, Array]:
    x, variance = (a.repeat(2, 2).repeat(2, 3) for a in run.inputs(node)[0])
    return x, variance


def _attention(run: _Run, node: Node) -> tuple[Array, Array]:
    value, variance = run.inputs(node)[0]
    n, channels, height, width = value.shape
    heads = node.options["heads"]
    per_head = channels // heads
    key = per_head // 4
    cuts = [key, 2 * key]
    shape = (n, heads, per_head, height * width)
    q, k, v = np.split(value.reshape(shape), cuts, axis=2)
    var_q, var_k, var_v = np.split(variance.reshape(shape), cuts, axis=2)
    qt, var_qt = np.swapaxes(q, 2, 3), np.swapaxes(var_q, 2, 3)
    raw = qt @ k
    sizes = np.abs(qt) @ np.abs(k)
    var_logits = qt**2 @ var_k + var_qt @ k**2
    var_logits += run.product_variance(qt**2 @ k**2) + run.sum_variance(sizes, raw, key)
    logits, var_logits = raw * key**-0.5, var_logits / key
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    relative = var_logits + (p**2 * var_logits).sum(-1, keepdims=True)
    var_p = p**2 * (relative + (4 + np.abs(logits)) ** 2 * _ROUNDING)
    pt, var_pt = np.swapaxes(p, 2, 3), np.swapaxes(var_p, 2, 3)
    y = v @ pt
    var_y = var_v @ pt**2 + v**2 @ var_pt + (4 * y) ** 2 * _ROUNDING
    var_y += run.product_variance(v**2 @ pt**2)
    var_y += run.sum_variance(np.abs(v) @ pt, y, height * width)
    if run.half:  # the exponentials are at most 1 and at least one of them is
        var_y += v**2 @ run.half_variance(pt)
    result = (n, heads * (per_head - 2 * key), height, width)
    return y.reshape(result), var_y.reshape(result)


_RULES: dict[str, _Rule] = {
    "conv": _conv,
    "silu": _silu,
    "add": _add,
    "concat": _concat,
    "slice": _slice,
    "max_pool": _max_pool,
    "upsample": _upsample,
    "attention": _attention,
}


def convolve(x: Array, weight: Array, stride: int) -> Array:
    """Cross-correlation of [N, I, H, W] with [O, I, K, K] or depthwise [C, 1, K, K], pad K // 2."""
    n, channels, height, width = x.shape
    outputs, per_group, kernel, _ = weight.shape
    pad = kernel // 2
    out_h, out_w = ((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    y = np.zeros((n, outputs, out_h, out_w))
    for i, j in np.ndindex(kernel, kernel):
        tap = padded[:, :, i : i + stride * out_h : stride, j : j + stride * out_w : stride]
        if per_group == channels:
            flat = np.ascontiguousarray(tap).reshape(n, channels, -1)
            y += (weight[:, :, i, j] @ flat).reshape(y.shape)
        else:
            y += weight[:, 0, i, j].reshape(1, -1, 1, 1) * tap
    return y


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with no overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))


def select(boxes: list[Array], logits: list[Array], max_det: int) -> Array:
    """Decoding and the two-stage top-k: [N, rows, 6]; of equal scores the first comes first."""
    n, classes = logits[0].shape[:2]
    scores = np.concatenate([m.reshape(n, classes, -1) for m in logits], 2).transpose(0, 2, 1)
    corners = np.concatenate([_decode(b, s) for b, s in zip(boxes, STRIDES, strict=True)], 1)
    count = min(max_det, corners.shape[1])
    rows = np.zeros((n, count, 6))
    for image in range(n):
        anchors = np.argsort(-scores[image].max(1), kind="stable")[:count]
        flat = scores[image][anchors].reshape(-1)
        winners = np.argsort(-flat, kind="stable")[:count]
        rows[image, :, :4] = corners[image][anchors[winners // classes]]
        rows[image, :, 4] = sigmoid(flat[winners])
        rows[image, :, 5] = winners % classes
    return rows


def _decode(box: Array, stride: int) -> Array:
    """Distances [N, 4, H, W] in strides to corners [N, H * W, 4] in pixels."""
    n, _, height, width = box.shape
    y, x = np.mgrid[0:height, 0:width] + 0.5
    left, top, right, bottom = box.transpose(1, 0, 2, 3)
    corners = np.stack([x - left, y - top, x + right, y + bottom], -1) * stride
    return np.asarray(corners.reshape(n, height * width, 4))
