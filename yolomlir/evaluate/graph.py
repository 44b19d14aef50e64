"""YOLO26 as a flat list of nodes with weights: what peers are built from and errors are traced on.

It comes from the same definition as the compiler's module (`yolomlir.frontend.network`), with batch
norms folded, and needs neither MLIR nor a framework. A node is named as the layer is in the
compiler's locations: `model.2.cv1.conv`, `model.2.cv1.act`, `model.2.concat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.matching import check_weights, infer_architecture
from yolomlir.frontend.network import (
    BATCH_NORM_EPSILON,
    HEAD,
    SCALES,
    STRIDES,
    Conv,
    Network,
    parameters,
)

Array = NDArray[Any]
IMAGE = "images"
"""The name of the network's input, [N, 3, H, W] in 0..1."""


@dataclass(frozen=True)
class Node:
    """One operation on values [N, C, H, W] in logical order.

    kind: `conv` (biased), `silu`, `add`, `concat`, `slice`, `max_pool`, `upsample`, `attention`.
    inputs: names of nodes, or `IMAGE`. channels: of the result. options: `offset` of a slice,
    `kernel` of a pool, `heads` of an attention.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    channels: int
    conv: Conv | None = None
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """The network: nodes in order of computation, and the head's maps, a level each.

    weights: by convolution, [O, I / groups, KH, KW] and bias [O], float32, batch norm folded in
    float64 and rounded once.
    """

    nodes: tuple[Node, ...]
    boxes: tuple[str, ...]
    classes: tuple[str, ...]
    scale: str
    class_count: int
    weights: Mapping[str, tuple[Array, Array]] = field(default_factory=dict, repr=False)

    def node(self, name: str) -> Node:
        """The node of that name. Raises KeyError."""
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def users(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a node's result."""
        return tuple(self._users.get(name, ()))

    def __post_init__(self) -> None:
        users: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users.setdefault(name, []).append(node)
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})
        object.__setattr__(self, "_users", users)

    _by_name: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    _users: Mapping[str, list[Node]] = field(init=False, repr=False, compare=False)


def network_graph(scale: str, classes: int) -> Graph:
    """The network at a scale, without weights. Raises UserError for an unknown scale."""
    if scale not in SCALES:
        raise UserError(f"unknown scale '{scale}'", hint=f"one of: {', '.join(SCALES)}")
    recorder = _Recorder()
    head = Network[_Value](recorder, SCALES[scale], classes).forward(_Value(IMAGE, 3))
    boxes = tuple(v.name for v in head.boxes)
    return Graph(tuple(recorder.nodes), boxes, tuple(v.name for v in head.classes), scale, classes)


def graph_of(checkpoint: Checkpoint) -> Graph:
    """The network of a checkpoint with its weights. Raises UserError where it is not YOLO26."""
    architecture = infer_architecture(checkpoint, None)
    size = SCALES[architecture.scale]
    expected = parameters(size, architecture.classes, fused=architecture.fused)
    check_weights(checkpoint, expected, architecture)
    graph = network_graph(architecture.scale, architecture.classes)
    weights = {
        node.name: _folded(checkpoint.tensors, node.conv)
        for node in graph.nodes
        if node.conv is not None
    }
    return Graph(graph.nodes, graph.boxes, graph.classes, graph.scale, graph.class_count, weights)


def _folded(tensors: Mapping[str, Array], conv: Conv) -> tuple[Array, Array]:
    """Weight and bias of a convolution with its batch norm in them."""
    weight = tensors[f"{conv.name}.weight"].astype(np.float64)
    if f"{conv.name}.bias" in tensors:
        return _round(weight), _round(tensors[f"{conv.name}.bias"])
    gamma, beta, mean, variance = (
        tensors[f"{conv.norm}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    factor = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
    return _round(weight * factor[:, None, None, None]), _round(beta - mean * factor)


def _round(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32)


@dataclass(frozen=True)
class _Value:
    name: str
    channels: int


class _Recorder:
    """`Operations` that write down what they are told."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _add(
        self,
        name: str,
        kind: str,
        xs: Sequence[_Value],
        channels: int,
        conv: Conv | None = None,
        **options: int,
    ) -> _Value:
        names = {node.name for node in self.nodes}
        if name in names:
            raise ValueError(f"two nodes named {name}")
        inputs = tuple(x.name for x in xs)
        self.nodes.append(Node(name, kind, inputs, channels, conv, options))
        return _Value(name, channels)

    def channels(self, x: _Value) -> int:
        return x.channels

    def conv(self, conv: Conv, x: _Value) -> _Value:
        y = self._add(conv.name, "conv", [x], conv.outputs, conv)
        return y if conv.act is None else self._add(conv.act, "silu", [y], y.channels)

    def add(self, name: str, lhs: _Value, rhs: _Value) -> _Value:
        return self._add(name, "add", [lhs, rhs], lhs.channels)

    def concat(self, name: str, xs: Sequence[_Value]) -> _Value:
        return self._add(name, "concat", xs, sum(x.channels for x in xs))

    def slice(self, name: str, x: _Value, offset: int, size: int) -> _Value:
        return self._add(name, "slice", [x], size, offset=offset)

    def max_pool(self, name: str, x: _Value, kernel: int) -> _Value:
        return self._add(name, "max_pool", [x], x.channels, kernel=kernel)

    def upsample(self, name: str, x: _Value) -> _Value:
        return self._add(name, "upsample", [x], x.channels)

    def attention(self, name: str, qkv: _Value, heads: int) -> _Value:
        return self._add(name, "attention", [qkv], qkv.channels // 2, heads=heads)


__all__ = ["HEAD", "IMAGE", "STRIDES", "Graph", "Node", "graph_of", "network_graph"]
