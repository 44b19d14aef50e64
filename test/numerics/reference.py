"""YOLO26 in float64 numpy, straight from a checkpoint's tensors: what other backends are held to.

It shares no code with the compiler or its frontend: the structure is read off the keys, each layer
is written out from its formula. Layers carry the names that the compiler's locations have
(`model.2.m.0.cv1.conv`, `.bn`, `.act`, `.add`, …).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EPSILON = 1e-3
HEAD = "model.23"
STRIDES = (8, 16, 32)


@dataclass
class Reference:
    """rows: [N, max_det, 6] of x1, y1, x2, y2, score, class. layers: by name, [N, C, H, W].

    There are no more rows than anchors.

    boxes: a level each, distances l, t, r, b in strides, [N, 4, H, W]; logits: [N, classes, H, W].
    """

    rows: Array
    boxes: list[Array]
    logits: list[Array]
    layers: dict[str, Array] = field(default_factory=dict)


def run_reference(
    tensors: Mapping[str, NDArray[Any]],
    images: NDArray[Any],
    *,
    max_det: int = 300,
    keep: Callable[[str], bool] = lambda name: True,
) -> Reference:
    """Run the network on images [N, 3, H, W]: uint8 0..255 (divided by 255) or floats 0..1.

    tensors: a checkpoint's, unfused or fused. keep: which layers' outputs to hand back.
    """
    x = images.astype(np.float64)
    if images.dtype == np.uint8:
        x = x / 255
    net = _Network(tensors, keep)
    boxes, logits = net.forward(x)
    return Reference(select(boxes, logits, max_det), boxes, logits, net.layers)


# ---- operations ---------------------------------------------------------------------------------


def conv2d(x: Array, w: Array, bias: Array | None, stride: int) -> Array:
    """Cross-correlation of [N, I, H, W] with [O, I, K, K] or depthwise [C, 1, K, K], pad K // 2.

    A tap at a time: y += w[:, :, i, j] @ x shifted by (i, j).
    """
    n, channels, height, width = x.shape
    outputs, per_group, kernel, _ = w.shape
    pad = kernel // 2
    oh = (height + 2 * pad - kernel) // stride + 1
    ow = (width + 2 * pad - kernel) // stride + 1
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    y = np.zeros((n, outputs, oh, ow))
    for i in range(kernel):
        for j in range(kernel):
            tap = padded[:, :, i : i + stride * oh : stride, j : j + stride * ow : stride]
            if per_group == channels:
                flat = np.ascontiguousarray(tap).reshape(n, channels, oh * ow)
                y += (w[:, :, i, j] @ flat).reshape(n, outputs, oh, ow)
            else:
                y += w[:, 0, i, j].reshape(1, -1, 1, 1) * tap
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def max_pool(x: Array, kernel: int) -> Array:
    """Maximum over kernel x kernel, stride 1, padded with minus infinity to the same size."""
    pad = kernel // 2
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=-np.inf)
    rows = padded[:, :, 0:height].copy()
    for i in range(1, kernel):
        np.maximum(rows, padded[:, :, i : i + height], out=rows)
    y = rows[..., 0:width].copy()
    for j in range(1, kernel):
        np.maximum(y, rows[..., j : j + width], out=y)
    return y


def attention(qkv: Array, heads: int) -> tuple[Array, Array]:
    """Attention of [N, heads * (q, k, v), H, W] with q, k half as wide as v: result and v."""
    n, channels, height, width = qkv.shape
    per_head = channels // heads
    key = per_head // 4
    x = qkv.reshape(n, heads, per_head, height * width)
    q, k, v = x[:, :, :key], x[:, :, key : 2 * key], x[:, :, 2 * key :]
    scores = np.einsum("bhdq,bhdk->bhqk", q, k, optimize=True) * key**-0.5
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    y = np.einsum("bhdk,bhqk->bhdq", v, scores, optimize=True)
    shape = (n, heads * (per_head - 2 * key), height, width)
    return y.reshape(shape), v.reshape(shape)


def select(boxes: list[Array], logits: list[Array], max_det: int) -> Array:
    """Decode and two-stage top-k; equal scores in the order of anchor, then class.

    Works on logits: the sigmoid is increasing, and in finite precision it makes ties of its own.
    """
    n, classes = logits[0].shape[:2]
    flat = np.concatenate([m.reshape(n, classes, -1) for m in logits], 2).transpose(0, 2, 1)
    xyxy = np.concatenate([decode(b, s) for b, s in zip(boxes, STRIDES, strict=True)], 1)
    max_det = min(max_det, xyxy.shape[1])
    rows = np.zeros((n, max_det, 6))
    for i in range(n):
        anchors = np.argsort(-flat[i].max(1), kind="stable")[:max_det]
        candidates = flat[i][anchors].reshape(-1)
        winners = np.argsort(-candidates, kind="stable")[:max_det]
        rows[i, :, :4] = xyxy[i][anchors[winners // classes]]
        rows[i, :, 4] = sigmoid(candidates[winners])
        rows[i, :, 5] = winners % classes
    return rows


def decode(box: Array, stride: int) -> Array:
    """Distances [N, 4, H, W] in strides to corners [N, H * W, 4] in pixels, rows first."""
    height, width = box.shape[2:]
    y, x = np.mgrid[0:height, 0:width] + 0.5
    left, top, right, bottom = box.transpose(1, 0, 2, 3)
    corners = np.stack([x - left, y - top, x + right, y + bottom], -1) * stride
    return corners.reshape(box.shape[0], height * width, 4)


# ---- the network --------------------------------------------------------------------------------


class _Network:
    def __init__(self, tensors: Mapping[str, NDArray[Any]], keep: Callable[[str], bool]) -> None:
        self.tensors = tensors
        self.keep = keep
        self.layers: dict[str, Array] = {}

    def get(self, key: str) -> Array:
        return self.tensors[key].astype(np.float64)

    def has(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in self.tensors)

    def save(self, name: str, x: Array) -> Array:
        if self.keep(name):
            self.layers[name] = x
        return x

    def conv(self, name: str, x: Array, stride: int = 1, act: bool = True) -> Array:
        fused = f"{name}.conv.bias" in self.tensors
        bias = self.get(f"{name}.conv.bias") if fused else None
        y = self.save(f"{name}.conv", conv2d(x, self.get(f"{name}.conv.weight"), bias, stride))
        if not fused:
            gamma, beta, mean, var = (
                self.get(f"{name}.bn.{part}").reshape(1, -1, 1, 1)
                for part in ("weight", "bias", "running_mean", "running_var")
            )
            y = self.save(f"{name}.bn", (y - mean) / np.sqrt(var + EPSILON) * gamma + beta)
        return self.save(f"{name}.act", silu(y)) if act else y

    def concat(self, name: str, xs: list[Array]) -> Array:
        return self.save(name, np.concatenate(xs, 1))

    def up(self, name: str, x: Array) -> Array:
        return self.save(name, x.repeat(2, 2).repeat(2, 3))

    def forward(self, x: Array) -> tuple[list[Array], list[Array]]:
        x = self.conv("model.0", x, 2)
        x = self.c3k2("model.2", self.conv("model.1", x, 2))
        p3 = self.c3k2("model.4", self.conv("model.3", x, 2))
        p4 = self.c3k2("model.6", self.conv("model.5", p3, 2))
        x = self.c3k2("model.8", self.conv("model.7", p4, 2))
        p5 = self.c2psa("model.10", self.sppf("model.9", x))
        x = self.concat("model.12", [self.up("model.11", p5), p4])
        n4 = self.c3k2("model.13", x)
        x = self.concat("model.15", [self.up("model.14", n4), p3])
        out3 = self.c3k2("model.16", x)
        x = self.concat("model.18", [self.conv("model.17", out3, 2), n4])
        out4 = self.c3k2("model.19", x)
        x = self.concat("model.21", [self.conv("model.20", out4, 2), p5])
        out5 = self.c3k2("model.22", x)
        return self.head([out3, out4, out5])

    def bottleneck(self, name: str, x: Array) -> Array:
        y = self.conv(f"{name}.cv2", self.conv(f"{name}.cv1", x))
        return self.save(f"{name}.add", x + y)

    def inner(self, name: str, x: Array) -> Array:
        """What a C3k2 repeats: bottleneck with attention, C3k or bottleneck, by the keys."""
        if self.has(f"{name}.0.cv1."):
            return self.psa_block(f"{name}.1", self.bottleneck(f"{name}.0", x))
        if not self.has(f"{name}.cv3."):
            return self.bottleneck(name, x)
        y = self.conv(f"{name}.cv1", x)
        y = self.bottleneck(f"{name}.m.1", self.bottleneck(f"{name}.m.0", y))
        joined = self.concat(f"{name}.concat", [y, self.conv(f"{name}.cv2", x)])
        return self.conv(f"{name}.cv3", joined)

    def c3k2(self, name: str, x: Array) -> Array:
        parts = np.split(self.conv(f"{name}.cv1", x), 2, 1)
        while self.has(f"{name}.m.{len(parts) - 2}."):
            parts.append(self.inner(f"{name}.m.{len(parts) - 2}", parts[-1]))
        return self.conv(f"{name}.cv2", self.concat(f"{name}.concat", parts))

    def sppf(self, name: str, x: Array) -> Array:
        parts = [self.conv(f"{name}.cv1", x, act=False)]
        for i in range(3):
            parts.append(self.save(f"{name}.m.{i}", max_pool(parts[-1], 5)))
        y = self.conv(f"{name}.cv2", self.concat(f"{name}.concat", parts))
        return self.save(f"{name}.add", y + x)

    def c2psa(self, name: str, x: Array) -> Array:
        first, y = np.split(self.conv(f"{name}.cv1", x), 2, 1)
        index = 0
        while self.has(f"{name}.m.{index}."):
            y = self.psa_block(f"{name}.m.{index}", y)
            index += 1
        return self.conv(f"{name}.cv2", self.concat(f"{name}.concat", [first, y]))

    def psa_block(self, name: str, x: Array) -> Array:
        y = self.save(f"{name}.add", x + self.attention(f"{name}.attn", x))
        hidden = self.conv(f"{name}.ffn.0", y)
        return self.save(f"{name}.ffn.add", y + self.conv(f"{name}.ffn.1", hidden, act=False))

    def attention(self, name: str, x: Array) -> Array:
        qkv = self.conv(f"{name}.qkv", x, act=False)
        attended, v = attention(qkv, heads=max(x.shape[1] // 64, 1))
        self.save(f"{name}.attention", attended)
        y = attended + self.conv(f"{name}.pe", self.save(f"{name}.v", v), act=False)
        return self.conv(f"{name}.proj", self.save(f"{name}.add", y), act=False)

    def last(self, name: str, x: Array) -> Array:
        w, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        return self.save(name, conv2d(x, w, bias, 1))

    def head(self, levels: list[Array]) -> tuple[list[Array], list[Array]]:
        boxes, logits = [], []
        for i, x in enumerate(levels):
            name = f"{HEAD}.one2one_cv2.{i}"
            y = self.conv(f"{name}.1", self.conv(f"{name}.0", x))
            boxes.append(self.last(f"{name}.2", y))
            name = f"{HEAD}.one2one_cv3.{i}"
            y = self.conv(f"{name}.0.1", self.conv(f"{name}.0.0", x))
            y = self.conv(f"{name}.1.1", self.conv(f"{name}.1.0", y))
            logits.append(self.last(f"{name}.2", y))
        return boxes, logits
