"""The network as an ONNX graph, made straight from its definition: what ONNX runtimes are given.

`images` [N, 3, H, W] float32 RGB in 0..1 to `output0` [N, rows, 6]: x1, y1, x2, y2 in pixels,
score, class. Convolutions are fused with their batch norms, values are named after their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE, STRIDES, Graph, Node

try:
    from onnx import TensorProto, checker, helper, numpy_helper
except ImportError as error:
    raise UserError("onnx is not installed", hint="pip install 'yolomlir[bench]'") from error

Array = NDArray[Any]
OUTPUT = "output0"
OPSET = 17
_F32 = TensorProto.FLOAT


def build_onnx(
    graph: Graph,
    *,
    batch: int,
    height: int,
    width: int,
    max_det: int = 300,
    layers: bool = False,
    head_only: bool = False,
) -> bytes:
    """The serialised model. graph: with weights. max_det: rows, lowered to the number of anchors.

    layers: make every layer's value an output as well. head_only: end at the head's six maps
    (three of boxes, three of class logits), for runtimes that cannot select detections.
    """
    return _Builder(graph, batch, height, width, max_det).build(layers, head_only)


class _Builder:
    def __init__(self, graph: Graph, batch: int, height: int, width: int, max_det: int) -> None:
        self.graph = graph
        self.batch = batch
        self.size = height, width
        self.grids = [(height // s, width // s) for s in STRIDES]
        self.max_det = min(max_det, sum(h * w for h, w in self.grids))
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def build(self, layers: bool, head_only: bool) -> bytes:
        for node in self.graph.nodes:
            _EMIT[node.kind](self, node)
        if head_only:
            outputs = [*self.graph.boxes, *self.graph.classes]
        else:
            self._detect()
            outputs = [OUTPUT]
        if layers:
            outputs += [n.name for n in self.graph.nodes if n.name not in outputs]
        image = helper.make_tensor_value_info(IMAGE, _F32, [self.batch, 3, *self.size])
        model = helper.make_model(
            helper.make_graph(
                self.nodes,
                f"yolo26{self.graph.scale}",
                [image],
                [self._output(name) for name in outputs],
                list(self.constants.values()),
            ),
            opset_imports=[helper.make_opsetid("", OPSET)],
            producer_name="yolomlir",
            ir_version=8,
        )
        checker.check_model(model)
        return bytes(model.SerializeToString())

    def _output(self, name: str) -> Any:
        if name == OUTPUT:
            return helper.make_tensor_value_info(name, _F32, [self.batch, self.max_det, 6])
        shape = [self.batch, self.graph.node(name).channels, None, None]
        return helper.make_tensor_value_info(name, _F32, shape)

    # ---- emitting -------------------------------------------------------------------------------

    def op(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Append a node with one result."""
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: Array | Sequence[int] | Sequence[float]) -> str:
        """An initializer."""
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def integers(self, name: str, values: Sequence[int]) -> str:
        """An initializer of int64."""
        return self.constant(name, np.asarray(values, np.int64))

    def conv(self, node: Node) -> None:
        conv = node.conv
        if conv is None:
            raise ValueError(node.name)
        weight, bias = self.graph.weights[node.name]
        inputs = [
            node.inputs[0],
            self.constant(f"{node.name}.weight", weight),
            self.constant(f"{node.name}.bias", bias),
        ]
        pad = conv.kernel // 2
        self.op(
            "Conv",
            inputs,
            node.name,
            kernel_shape=[conv.kernel] * 2,
            strides=[conv.stride] * 2,
            pads=[pad] * 4,
            group=conv.groups,
        )

    def silu(self, node: Node) -> None:
        gate = self.op("Sigmoid", node.inputs, f"{node.name}.sigmoid")
        self.op("Mul", [node.inputs[0], gate], node.name)

    def add(self, node: Node) -> None:
        self.op("Add", node.inputs, node.name)

    def concat(self, node: Node) -> None:
        self.op("Concat", node.inputs, node.name, axis=1)

    def slice(self, node: Node) -> None:
        start = node.options["offset"]
        bounds = [
            self.integers(f"{node.name}.{part}", [value])
            for part, value in (("start", start), ("end", start + node.channels), ("axis", 1))
        ]
        self.op("Slice", [node.inputs[0], *bounds], node.name)

    def max_pool(self, node: Node) -> None:
        kernel = node.options["kernel"]
        self.op(
            "MaxPool",
            node.inputs,
            node.name,
            kernel_shape=[kernel] * 2,
            strides=[1, 1],
            pads=[kernel // 2] * 4,
        )

    def upsample(self, node: Node) -> None:
        scales = self.constant(f"{node.name}.scales", np.asarray([1, 1, 2, 2], np.float32))
        self.op(
            "Resize",
            [node.inputs[0], "", scales],
            node.name,
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )

    def attention(self, node: Node) -> None:
        name, heads = node.name, node.options["heads"]
        value = node.channels // heads
        key = value // 2
        stride = 32
        height, width = (side // stride for side in self.size)
        shape = self.integers(f"{name}.heads", [self.batch, heads, 2 * key + value, -1])
        split = self.op("Reshape", [node.inputs[0], shape], f"{name}.qkv")
        sizes = self.integers(f"{name}.sizes", [key, key, value])
        parts = [f"{name}.q", f"{name}.k", f"{name}.v"]
        self.nodes.append(helper.make_node("Split", [split, sizes], parts, axis=2))
        scale = self.constant(f"{name}.scale", np.asarray(key**-0.5, np.float32))
        queries = self.op("Transpose", [parts[0]], f"{name}.qt", perm=[0, 1, 3, 2])
        logits = self.op("MatMul", [queries, parts[1]], f"{name}.qk")
        scaled = self.op("Mul", [logits, scale], f"{name}.logits")
        weights = self.op("Softmax", [scaled], f"{name}.weights", axis=-1)
        turned = self.op("Transpose", [weights], f"{name}.turned", perm=[0, 1, 3, 2])
        mixed = self.op("MatMul", [parts[2], turned], f"{name}.mixed")
        out = self.integers(f"{name}.shape", [self.batch, node.channels, height, width])
        self.op("Reshape", [mixed, out], name)

    def _detect(self) -> None:
        """Decode, then the two-stage top-k: anchors by their best class, then scores."""
        n, count, classes = self.batch, self.max_det, self.graph.class_count
        boxes = self._rows("boxes", self.graph.boxes, 4)
        logits = self._rows("logits", self.graph.classes, classes)
        corners = self._corners(boxes)
        scores = self.op("Sigmoid", [logits], "scores")
        k = self.integers("count", [count])
        best = self.op("ReduceMax", [scores], "best", axes=[2], keepdims=0)
        self.nodes.append(helper.make_node("TopK", [best, k], ["best.k", "anchors"], axis=1))
        column = self.op("Unsqueeze", ["anchors", self.integers("axis2", [2])], "anchors.column")
        wide = self.op(
            "Expand", [column, self.integers("shape.c", [n, count, classes])], "anchors.c"
        )
        near = self.op("GatherElements", [scores, wide], "scores.k", axis=1)
        flat = self.op("Reshape", [near, self.integers("shape.f", [n, -1])], "scores.flat")
        self.nodes.append(helper.make_node("TopK", [flat, k], ["score", "winner"], axis=1))
        total = self.integers("class.count", [classes])
        which = self.op("Div", ["winner", total], "which")
        label = self.op("Mod", ["winner", total], "label")
        anchor = self.op("GatherElements", ["anchors", which], "anchor", axis=1)
        anchor = self.op("Unsqueeze", [anchor, "axis2"], "anchor.column")
        four = self.op("Expand", [anchor, self.integers("shape.4", [n, count, 4])], "anchor.4")
        box = self.op("GatherElements", [corners, four], "box", axis=1)
        score = self.op("Unsqueeze", ["score", "axis2"], "score.column")
        real = self.op("Cast", [label], "label.f32", to=_F32)
        real = self.op("Unsqueeze", [real, "axis2"], "label.column")
        self.op("Concat", [box, score, real], OUTPUT, axis=2)

    def _rows(self, name: str, maps: Sequence[str], channels: int) -> str:
        """The maps of all levels as [N, anchors, channels]."""
        shape = self.integers(f"{name}.shape", [self.batch, channels, -1])
        parts = [self.op("Reshape", [m, shape], f"{name}.{i}") for i, m in enumerate(maps)]
        joined = self.op("Concat", parts, f"{name}.all", axis=2)
        return self.op("Transpose", [joined], f"{name}.rows", perm=[0, 2, 1])

    def _corners(self, boxes: str) -> str:
        centres, strides = _anchors(self.grids)
        sign = np.asarray([-1, -1, 1, 1], np.float32)
        distances = self.op("Mul", [boxes, self.constant("sign", sign)], "distances")
        moved = self.op("Add", [distances, self.constant("centres", centres)], "corners.strides")
        return self.op("Mul", [moved, self.constant("strides", strides)], "corners")


def _anchors(grids: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """Centres [1, anchors, 4] (x, y, x, y, in strides) and strides [1, anchors, 1]."""
    centres, strides = [], []
    for (height, width), stride in zip(grids, STRIDES, strict=True):
        y, x = np.mgrid[0:height, 0:width].reshape(2, -1) + 0.5
        centres.append(np.stack([x, y, x, y], axis=1))
        strides.append(np.full((height * width, 1), stride))
    return (
        np.concatenate(centres)[None].astype(np.float32),
        np.concatenate(strides)[None].astype(np.float32),
    )


_EMIT: dict[str, Callable[[_Builder, Node], None]] = {
    "conv": _Builder.conv,
    "silu": _Builder.silu,
    "add": _Builder.add,
    "concat": _Builder.concat,
    "slice": _Builder.slice,
    "max_pool": _Builder.max_pool,
    "upsample": _Builder.upsample,
    "attention": _Builder.attention,
}
