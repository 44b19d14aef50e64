"""YOLO26 detection as a definition: layers, channels and repeats at every scale, and no weights.

`Network` walks the layers once and tells an `Operations` what it meets. What a value is (a channel
count, an MLIR value) is up to the `Operations`, so that the list of parameters that a checkpoint
must have and the module that is built from it cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

HEAD = "model.23"
STRIDES = (8, 16, 32)
BATCH_NORM_EPSILON = 1e-3
HEAD_DIM = 64
"""Channels of a value head of attention; keys and queries have half as many."""

V = TypeVar("V")


@dataclass(frozen=True)
class Scale:
    """One published size of the network.

    depth and width multiply repeats and channels; `max_channels` caps channels before the width.
    c3k: whether every C3k2 holds C3k modules, also where the smaller scales have bottlenecks.
    """

    name: str
    depth: float
    width: float
    max_channels: int
    c3k: bool

    def channels(self, nominal: int) -> int:
        """Channels of a layer: min(nominal, max) * width, rounded up to a multiple of 8."""
        return math.ceil(min(nominal, self.max_channels) * self.width / 8) * 8

    def repeats(self, nominal: int) -> int:
        """Repeats of an inner module: more than one become round(nominal * depth), at least 1."""
        return max(round(nominal * self.depth), 1) if nominal > 1 else nominal


SCALES: dict[str, Scale] = {
    s.name: s
    for s in (
        Scale("n", 0.5, 0.25, 1024, c3k=False),
        Scale("s", 0.5, 0.5, 1024, c3k=False),
        Scale("m", 0.5, 1.0, 512, c3k=True),
        Scale("l", 1.0, 1.0, 512, c3k=True),
        Scale("x", 1.0, 1.5, 512, c3k=True),
    )
}


@dataclass(frozen=True)
class Conv:
    """One convolution: square kernel, padding kernel // 2, no dilation.

    name: its weight is `{name}.weight`. norm: the name of the batch norm that follows, or None for
    a convolution that has a bias by nature. act: the name of the SiLU that follows, or None.
    """

    name: str
    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    norm: str | None = None
    act: str | None = None

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """O, I / groups, KH, KW."""
        return self.outputs, self.inputs // self.groups, self.kernel, self.kernel

    def parameters(self, *, fused: bool) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what a checkpoint holds for it; fused: batch norm is in the bias."""
        names: dict[str, tuple[int, ...]] = {f"{self.name}.weight": self.weight_shape}
        if self.norm is None or fused:
            return names | {f"{self.name}.bias": (self.outputs,)}
        parts = ("weight", "bias", "running_mean", "running_var")
        return names | {f"{self.norm}.{part}": (self.outputs,) for part in parts}


class Operations(Protocol[V]):
    """What `Network` calls; `name` is the layer, `x` a value, results are values."""

    def channels(self, x: V) -> int:
        """The channel count of a value."""

    def conv(self, conv: Conv, x: V) -> V:
        """Convolution with the batch norm and activation that it names."""

    def add(self, name: str, lhs: V, rhs: V) -> V:
        """Elementwise sum."""

    def concat(self, name: str, xs: Sequence[V]) -> V:
        """Concatenation along channels."""

    def slice(self, name: str, x: V, offset: int, size: int) -> V:
        """Channels [offset, offset + size)."""

    def max_pool(self, name: str, x: V, kernel: int) -> V:
        """Maximum over kernel x kernel, stride 1, same size."""

    def upsample(self, name: str, x: V) -> V:
        """Nearest neighbour, twice as large."""

    def attention(self, name: str, qkv: V, heads: int) -> V:
        """Self-attention over positions."""


@dataclass(frozen=True)
class Head(Generic[V]):
    """What is left for decoding: per level, 4 box distances and the class logits."""

    boxes: tuple[V, ...]
    classes: tuple[V, ...]


class Network(Generic[V]):
    """The walk over YOLO26's layers. Layer numbers are those of the checkpoint's keys."""

    def __init__(self, ops: Operations[V], scale: Scale, classes: int) -> None:
        self.ops = ops
        self.scale = scale
        self.classes = classes

    def forward(self, image: V) -> Head[V]:
        """From the normalised image (3 channels) to the head's maps."""
        ch, c3k2 = self.scale.channels, self.c3k2
        x = self.conv("model.0", image, ch(64), 3, 2)
        x = self.conv("model.1", x, ch(128), 3, 2)
        x = c3k2("model.2", x, ch(256), c3k=False, ratio=0.25)
        x = self.conv("model.3", x, ch(256), 3, 2)
        p3 = c3k2("model.4", x, ch(512), c3k=False, ratio=0.25)
        x = self.conv("model.5", p3, ch(512), 3, 2)
        p4 = c3k2("model.6", x, ch(512))
        x = self.conv("model.7", p4, ch(1024), 3, 2)
        x = c3k2("model.8", x, ch(1024))
        x = self.sppf("model.9", x, ch(1024))
        p5 = self.c2psa("model.10", x)

        x = self.ops.concat("model.12", [self.ops.upsample("model.11", p5), p4])
        up4 = c3k2("model.13", x, ch(512))
        x = self.ops.concat("model.15", [self.ops.upsample("model.14", up4), p3])
        out3 = c3k2("model.16", x, ch(256))
        x = self.conv("model.17", out3, ch(256), 3, 2)
        out4 = c3k2("model.19", self.ops.concat("model.18", [x, up4]), ch(512))
        x = self.conv("model.20", out4, ch(512), 3, 2)
        out5 = self.c3k2_attention("model.22", self.ops.concat("model.21", [x, p5]), ch(1024))
        return self.head(HEAD, [out3, out4, out5])

    # ---- blocks ---------------------------------------------------------------------------------

    def conv(
        self,
        name: str,
        x: V,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        depthwise: bool = False,
        act: bool = True,
    ) -> V:
        """The network's standard block: convolution without bias, batch norm, SiLU if `act`."""
        inputs = self.ops.channels(x)
        conv = Conv(
            f"{name}.conv",
            inputs,
            outputs,
            kernel,
            stride,
            groups=inputs if depthwise else 1,
            norm=f"{name}.bn",
            act=f"{name}.act" if act else None,
        )
        return self.ops.conv(conv, x)

    def chunk(self, name: str, x: V) -> tuple[V, V]:
        """Both halves of the channels."""
        half = self.ops.channels(x) // 2
        return (
            self.ops.slice(f"{name}.chunk.0", x, 0, half),
            self.ops.slice(f"{name}.chunk.1", x, half, half),
        )

    def bottleneck(self, name: str, x: V, ratio: float) -> V:
        """x + conv(conv(x)), 3x3 both, the inner width `ratio` times the outer."""
        channels = self.ops.channels(x)
        y = self.conv(f"{name}.cv1", x, int(channels * ratio), 3)
        y = self.conv(f"{name}.cv2", y, channels, 3)
        return self.ops.add(f"{name}.add", x, y)

    def c3k(self, name: str, x: V) -> V:
        """cv3(concat(two bottlenecks of cv1(x), cv2(x))), the inner width half the outer."""
        channels = self.ops.channels(x)
        y = self.conv(f"{name}.cv1", x, channels // 2)
        for i in range(2):
            y = self.bottleneck(f"{name}.m.{i}", y, 1.0)
        other = self.conv(f"{name}.cv2", x, channels // 2)
        return self.conv(f"{name}.cv3", self.ops.concat(f"{name}.concat", [y, other]), channels)

    def c3k2(self, name: str, x: V, outputs: int, *, c3k: bool = True, ratio: float = 0.5) -> V:
        """cv2(concat(a, b, m0(b), m1(m0(b)), …)) of the halves a, b of cv1(x)."""
        y = self.conv(f"{name}.cv1", x, 2 * int(outputs * ratio))
        parts = list(self.chunk(name, y))
        for i in range(self.scale.repeats(2)):
            inner = f"{name}.m.{i}"
            if c3k or self.scale.c3k:
                parts.append(self.c3k(inner, parts[-1]))
            else:
                parts.append(self.bottleneck(inner, parts[-1], 0.5))
        return self.conv(f"{name}.cv2", self.ops.concat(f"{name}.concat", parts), outputs)

    def c3k2_attention(self, name: str, x: V, outputs: int) -> V:
        """C3k2 whose one inner module is a bottleneck followed by an attention block."""
        first, second = self.chunk(name, self.conv(f"{name}.cv1", x, outputs))
        y = self.bottleneck(f"{name}.m.0.0", second, 0.5)
        y = self.psa_block(f"{name}.m.0.1", y)
        joined = self.ops.concat(f"{name}.concat", [first, second, y])
        return self.conv(f"{name}.cv2", joined, outputs)

    def sppf(self, name: str, x: V, outputs: int) -> V:
        """x + cv2(concat(y, pool(y), pool(pool(y)), …)) of y = cv1(x), which has no activation."""
        parts = [self.conv(f"{name}.cv1", x, self.ops.channels(x) // 2, act=False)]
        for i in range(3):
            parts.append(self.ops.max_pool(f"{name}.m.{i}", parts[-1], 5))
        y = self.conv(f"{name}.cv2", self.ops.concat(f"{name}.concat", parts), outputs)
        return self.ops.add(f"{name}.add", y, x)

    def c2psa(self, name: str, x: V) -> V:
        """cv2(concat(a, blocks(b))) of the halves a, b of cv1(x); blocks are attention blocks."""
        channels = self.ops.channels(x)
        first, y = self.chunk(name, self.conv(f"{name}.cv1", x, channels))
        for i in range(self.scale.repeats(2)):
            y = self.psa_block(f"{name}.m.{i}", y)
        return self.conv(f"{name}.cv2", self.ops.concat(f"{name}.concat", [first, y]), channels)

    def psa_block(self, name: str, x: V) -> V:
        """y = x + attention(x); y + ffn(y)."""
        channels = self.ops.channels(x)
        y = self.ops.add(f"{name}.add", x, self.attention(f"{name}.attn", x))
        hidden = self.conv(f"{name}.ffn.0", y, 2 * channels)
        return self.ops.add(
            f"{name}.ffn.add", y, self.conv(f"{name}.ffn.1", hidden, channels, act=False)
        )

    def attention(self, name: str, x: V) -> V:
        """proj(attention(qkv) + pe(v)); qkv holds q, k and v of a head, then those of the next."""
        channels = self.ops.channels(x)
        heads = attention_heads(channels)
        per_head = 2 * key_dim(channels) + channels // heads
        qkv = self.conv(f"{name}.qkv", x, heads * per_head, act=False)
        values = [
            self.ops.slice(
                f"{name}.v.{head}",
                qkv,
                head * per_head + 2 * key_dim(channels),
                channels // heads,
            )
            for head in range(heads)
        ]
        v = self.ops.concat(f"{name}.v", values) if heads > 1 else values[0]
        pe = self.conv(f"{name}.pe", v, channels, 3, depthwise=True, act=False)
        attended = self.ops.attention(f"{name}.attention", qkv, heads)
        y = self.ops.add(f"{name}.add", attended, pe)
        return self.conv(f"{name}.proj", y, channels, act=False)

    def head(self, name: str, levels: Sequence[V]) -> Head[V]:
        """The end-to-end (one-to-one) head: box distances and class logits, a pair a level."""
        narrowest = self.ops.channels(levels[0])
        box_width = max(16, narrowest // 4)
        class_width = max(narrowest, min(self.classes, 100))
        boxes, classes = [], []
        for i, x in enumerate(levels):
            box = f"{name}.one2one_cv2.{i}"
            y = self.conv(f"{box}.0", x, box_width, 3)
            y = self.conv(f"{box}.1", y, box_width, 3)
            boxes.append(self.ops.conv(Conv(f"{box}.2", box_width, 4), y))
            cls = f"{name}.one2one_cv3.{i}"
            y = self.conv(f"{cls}.0.0", x, self.ops.channels(x), 3, depthwise=True)
            y = self.conv(f"{cls}.0.1", y, class_width)
            y = self.conv(f"{cls}.1.0", y, class_width, 3, depthwise=True)
            y = self.conv(f"{cls}.1.1", y, class_width)
            classes.append(self.ops.conv(Conv(f"{cls}.2", class_width, self.classes), y))
        return Head(tuple(boxes), tuple(classes))


def attention_heads(channels: int) -> int:
    """Heads of an attention block over that many channels: one for every 64, at least one."""
    return max(channels // HEAD_DIM, 1)


def key_dim(channels: int) -> int:
    """Channels of a query or key of one head: half those of a value."""
    return channels // attention_heads(channels) // 2


class _ChannelCounts:
    """`Operations` whose values are channel counts and which records the convolutions."""

    def __init__(self) -> None:
        self.convs: list[Conv] = []

    def channels(self, x: int) -> int:
        return x

    def conv(self, conv: Conv, x: int) -> int:
        self.convs.append(conv)
        return conv.outputs

    def add(self, name: str, lhs: int, rhs: int) -> int:
        return lhs

    def concat(self, name: str, xs: Sequence[int]) -> int:
        return sum(xs)

    def slice(self, name: str, x: int, offset: int, size: int) -> int:
        return size

    def max_pool(self, name: str, x: int, kernel: int) -> int:
        return x

    def upsample(self, name: str, x: int) -> int:
        return x

    def attention(self, name: str, qkv: int, heads: int) -> int:
        return qkv // 2  # per head: half of it queries and keys, half values


def convolutions(scale: Scale, classes: int) -> list[Conv]:
    """Every convolution of the network with its end-to-end head, in order of computation."""
    ops = _ChannelCounts()
    Network[int](ops, scale, classes).forward(3)
    return ops.convs


def parameters(scale: Scale, classes: int, *, fused: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for conv in convolutions(scale, classes):
        shapes |= conv.parameters(fused=fused)
    return shapes
