"""The network in ncnn's own format, up to the head's maps: ncnn cannot select detections.

A `.param` text of layers and blobs, and a `.bin` of weights. A blob has one consumer: values that
are read more often go through `Split`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from yolomlir.evaluate.graph import IMAGE, Graph, Node

_MAGIC = 7767517
_FLOAT32_TAG = bytes(4)
"""What precedes a convolution's weights in the `.bin`: not compressed."""


def build_ncnn(graph: Graph, *, height: int, width: int) -> tuple[str, bytes]:
    """The contents of the `.param` and the `.bin`. graph: with weights. Batch is 1."""
    writer = _Writer(graph, height, width)
    writer.layer("Input", IMAGE, [], [IMAGE], f"0={width} 1={height} 2=3")
    writer.fan_out(IMAGE)
    for node in graph.nodes:
        _EMIT[node.kind](writer, node)
        writer.fan_out(node.name)
    blobs = {blob for line in writer.lines for blob in line.outputs}
    head = f"{_MAGIC}\n{len(writer.lines)} {len(blobs)}\n"
    return head + "".join(f"{line}\n" for line in writer.lines), b"".join(writer.weights)


@dataclass(frozen=True)
class _Line:
    kind: str
    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    options: str

    def __str__(self) -> str:
        counts = f"{len(self.inputs)} {len(self.outputs)}"
        return " ".join(
            [self.kind, self.name, counts, *self.inputs, *self.outputs, self.options]
        ).rstrip()


@dataclass
class _Writer:
    graph: Graph
    height: int
    width: int
    lines: list[_Line] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)
    _copies: dict[str, list[str]] = field(default_factory=dict)

    def layer(
        self, kind: str, name: str, inputs: Sequence[str], outputs: Sequence[str], options: str = ""
    ) -> None:
        """Append a layer; an input that was split is replaced by its next copy."""
        taken = [self._copies[x].pop(0) if x in self._copies else x for x in inputs]
        self.lines.append(_Line(kind, name, taken, outputs, options))

    def fan_out(self, name: str) -> None:
        """Split a value that several nodes read, or one more than once."""
        uses = sum(Counter(user.inputs)[name] for user in self.graph.users(name))
        if uses < 2:
            return
        copies = [f"{name}.copy{i}" for i in range(uses)]
        self.lines.append(_Line("Split", f"{name}.split", [name], copies, ""))
        self._copies[name] = list(copies)

    def conv(self, node: Node) -> None:
        conv = node.conv
        if conv is None:
            raise ValueError(node.name)
        weight, bias = self.graph.weights[node.name]
        options = (
            f"0={conv.outputs} 1={conv.kernel} 3={conv.stride} 4={conv.kernel // 2} 5=1 "
            f"6={weight.size}"
        )
        kind = "Convolution"
        if conv.groups > 1:
            kind, options = "ConvolutionDepthWise", f"{options} 7={conv.groups}"
        self.layer(kind, node.name, node.inputs, [node.name], options)
        self.weights += [_FLOAT32_TAG, weight.tobytes(), bias.astype(np.float32).tobytes()]

    def silu(self, node: Node) -> None:
        self.layer("Swish", node.name, node.inputs, [node.name])

    def add(self, node: Node) -> None:
        self.layer("BinaryOp", node.name, node.inputs, [node.name], "0=0")

    def concat(self, node: Node) -> None:
        self.layer("Concat", node.name, node.inputs, [node.name], "0=0")

    def slice(self, node: Node) -> None:
        start = node.options["offset"]
        options = f"-23309=1,{start} -23310=1,{start + node.channels} -23311=1,0"
        self.layer("Crop", node.name, node.inputs, [node.name], options)

    def max_pool(self, node: Node) -> None:
        kernel = node.options["kernel"]
        options = f"0=0 1={kernel} 2=1 3={kernel // 2} 5=1"
        self.layer("Pooling", node.name, node.inputs, [node.name], options)

    def upsample(self, node: Node) -> None:
        self.layer("Interp", node.name, node.inputs, [node.name], "0=1 1=2.0 2=2.0")

    def attention(self, node: Node) -> None:
        name, heads = node.name, node.options["heads"]
        value = node.channels // heads
        key = value // 2
        height, width = self.height // 32, self.width // 32
        per_head = 2 * key + value
        layer = self.layer
        shape = f"0={height * width} 1={per_head} 2={heads}"
        layer("Reshape", f"{name}.r", node.inputs, [f"{name}.qkv"], shape)
        parts = [f"{name}.q", f"{name}.k", f"{name}.v"]
        layer("Slice", f"{name}.s", [f"{name}.qkv"], parts, f"-23300=3,{key},{key},{value} 1=1")
        layer("Permute", f"{name}.p", parts[:1], [f"{name}.qt"], "0=1")
        layer("MatMul", f"{name}.m", [f"{name}.qt", parts[1]], [f"{name}.l"])
        layer("BinaryOp", f"{name}.x", [f"{name}.l"], [f"{name}.ls"], f"0=2 1=1 2={key**-0.5}")
        layer("Softmax", f"{name}.f", [f"{name}.ls"], [f"{name}.w"], "0=2 1=1")
        layer("MatMul", f"{name}.n", [parts[2], f"{name}.w"], [f"{name}.y"], "0=1")
        final = f"0={width} 1={height} 2={node.channels}"
        layer("Reshape", name, [f"{name}.y"], [name], final)


_EMIT: dict[str, Callable[[_Writer, Node], None]] = {
    "conv": _Writer.conv,
    "silu": _Writer.silu,
    "add": _Writer.add,
    "concat": _Writer.concat,
    "slice": _Writer.slice,
    "max_pool": _Writer.max_pool,
    "upsample": _Writer.upsample,
    "attention": _Writer.attention,
}
