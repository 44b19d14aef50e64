"""The network as a PyTorch module, made from its definition; a checkpoint's weights in it.

[N, 3, H, W] float32 RGB in 0..1 to [N, rows, 6]: x1, y1, x2, y2 in pixels, score, class. It is an
`fx.GraphModule`: plain Python that eager mode, TorchScript, torch.compile and CUDA graphs all take.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE, STRIDES, Graph, Node

try:
    import torch
    from torch import fx, nn
    from torch.nn import functional
except ImportError as error:
    raise UserError("PyTorch is not installed", hint="pip install torch") from error


def build_torch(graph: Graph, *, height: int, width: int, max_det: int = 300) -> Any:
    """The module, on the CPU, in evaluation mode. graph: with weights."""
    builder = _Builder(graph)
    maps = builder.build()
    detect = _Detect(graph.class_count, height, width, max_det)
    builder.root.add_module("detect", detect)
    builder.fx.output(builder.fx.call_module("detect", tuple(maps)))
    return fx.GraphModule(builder.root, builder.fx).eval().requires_grad_(False)


def in_half(module: Any) -> Any:
    """The module at float16 but for its detection; it takes and gives float32 as before."""
    module.half()
    module.detect.float()
    return _Half(module).eval()


def run_layers(module: Any, image: Any) -> tuple[Any, dict[str, Any]]:
    """The module's result and every layer's value by its name, as numpy arrays."""
    values: dict[str, Any] = {}

    class Recorder(fx.Interpreter):  # type: ignore[misc, unused-ignore]
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and "layer" in n.meta:
                values[n.meta["layer"]] = value.detach().cpu().numpy()
            return value

    with torch.inference_mode():
        rows = Recorder(module).run(image)
    return rows.cpu().numpy(), values


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.root = nn.Module()
        self.fx = fx.Graph()

    def build(self) -> list[Any]:
        """Emit every node; the head's maps, boxes then classes."""
        values: dict[str, Any] = {IMAGE: self.fx.placeholder("images")}
        for node in self.graph.nodes:
            value = self._emit(node, [values[name] for name in node.inputs])
            value.meta["layer"] = node.name
            values[node.name] = value
        return [values[name] for name in (*self.graph.boxes, *self.graph.classes)]

    def _emit(self, node: Node, xs: list[Any]) -> Any:
        call = self.fx.call_function
        if node.kind == "conv":
            return self._module(node.name, self._conv(node), xs[0])
        if node.kind == "silu":
            return self._module(node.name, nn.SiLU(inplace=False), xs[0])
        if node.kind == "add":
            return call(torch.add, (xs[0], xs[1]))
        if node.kind == "concat":
            return call(torch.cat, (xs,), {"dim": 1})
        if node.kind == "slice":
            return call(torch.narrow, (xs[0], 1, node.options["offset"], node.channels))
        if node.kind == "max_pool":
            kernel = node.options["kernel"]
            return self._module(node.name, nn.MaxPool2d(kernel, 1, kernel // 2), xs[0])
        if node.kind == "upsample":
            return call(functional.interpolate, (xs[0],), {"scale_factor": 2.0})
        return self._module(node.name, _Attention(node.options["heads"]), xs[0])

    def _module(self, name: str, module: Any, x: Any) -> Any:
        key = name.replace(".", "_")
        self.root.add_module(key, module)
        return self.fx.call_module(key, (x,))

    def _conv(self, node: Node) -> Any:
        conv = node.conv
        if conv is None:
            raise ValueError(node.name)
        module = nn.Conv2d(
            conv.inputs,
            conv.outputs,
            conv.kernel,
            conv.stride,
            conv.kernel // 2,
            groups=conv.groups,
        )
        weight, bias = self.graph.weights[node.name]
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight))
            module.bias.copy_(torch.from_numpy(bias))
        return module


class _Half(nn.Module):  # type: ignore[misc, unused-ignore]  # untyped where torch is absent
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Any) -> Any:
        return self.module(images.half())


class _Attention(nn.Module):  # type: ignore[misc, unused-ignore]
    """softmax(qᵀ k / sqrt(d)) over positions; qkv holds a head's q, k and v after the other."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Any) -> Any:
        n, channels, height, width = qkv.shape
        per_head = channels // self.heads
        key = per_head // 4
        x = qkv.reshape(n, self.heads, per_head, height * width)
        q, k, v = x[:, :, :key], x[:, :, key : 2 * key], x[:, :, 2 * key :]
        weights = ((q.transpose(2, 3) @ k) * key**-0.5).softmax(-1)
        return (v @ weights.transpose(2, 3)).reshape(n, channels // 2, height, width)


class _Detect(nn.Module):  # type: ignore[misc, unused-ignore]
    """Decoding and the two-stage top-k."""

    def __init__(self, classes: int, height: int, width: int, max_det: int) -> None:
        super().__init__()
        centres, strides = [], []
        for stride in STRIDES:
            y, x = np.mgrid[0 : height // stride, 0 : width // stride].reshape(2, -1) + 0.5
            centres.append(np.stack([x, y, x, y]))
            strides.append(np.full((1, len(x)), stride))
        self.classes = classes
        self.max_det = min(max_det, sum(c.shape[1] for c in centres))
        self.register_buffer("centres", torch.from_numpy(np.concatenate(centres, 1)).float())
        self.register_buffer("strides", torch.from_numpy(np.concatenate(strides, 1)).float())
        self.register_buffer("sign", torch.tensor([[-1.0], [-1.0], [1.0], [1.0]]))

    def forward(self, *maps: Any) -> Any:
        levels = len(STRIDES)
        boxes = torch.cat([m.float().flatten(2) for m in maps[:levels]], 2)
        logits = torch.cat([m.float().flatten(2) for m in maps[levels:]], 2)
        corners = ((boxes * self.sign + self.centres) * self.strides).transpose(1, 2)
        scores = logits.sigmoid().transpose(1, 2)
        anchors = scores.amax(2).topk(self.max_det, 1).indices
        near = scores.gather(1, anchors[..., None].expand(-1, -1, self.classes))
        best, winner = near.flatten(1).topk(self.max_det, 1)
        anchor = anchors.gather(1, winner // self.classes)
        box = corners.gather(1, anchor[..., None].expand(-1, -1, 4))
        label = (winner % self.classes).to(box.dtype)
        return torch.cat([box, best[..., None], label[..., None]], 2)
