"""The network of a compiled program, its weights put back into the order of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import Graph, network_graph
from yolomlir.frontend.network import Conv
from yolomlir.runtime.artifact import ModelInfo, Program

Array = NDArray[Any]
_LOGICAL = "oihw"
_PIXEL_RANGE = 255


def graph_of_program(program: Program, info: ModelInfo) -> Graph:
    """The program's network with its weights in logical order, siblings apart, scale taken out.

    Raises UserError where the program was compiled without folding batch norms (-O0).
    """
    graph = network_graph(info.scale, info.classes)
    tensors: dict[str, tuple[str, Array]] = {}
    for joined, tensor in program.weights.items():
        tensors |= _apart(joined, tensor, graph)
    weights = {}
    for node in graph.nodes:
        if node.conv is None:
            continue
        pair = [tensors.get(f"{node.name}.{part}") for part in ("weight", "bias")]
        if pair[0] is None or pair[1] is None:
            raise UserError(
                f"the compiled model has no folded weights of {node.name}",
                hint="compile it at -O1 or above, or give its checkpoint with --weights",
            )
        weights[node.name] = (_logical(*pair[0], node.conv), pair[1][1])
    return Graph(graph.nodes, graph.boxes, graph.classes, graph.scale, graph.class_count, weights)


def _apart(joined: str, tensor: Array, graph: Graph) -> dict[str, tuple[str, Array]]:
    """Each tensor of a joined one by the checkpoint's name, with the tags of how it was made."""
    found: dict[str, tuple[str, Array]] = {}
    offset = 0
    for part in joined.split("+"):
        name, _, tags = part.partition(":")
        layer = name.rpartition(".")[0]
        if layer not in graph:
            continue
        size = graph.node(layer).channels
        axis = _order(tags).index("o") if tensor.ndim == 4 else 0
        found[name] = tags, np.take(tensor, range(offset, offset + size), axis=axis)
        offset += size
    return found


def _order(tags: str) -> str:
    """The physical order that a weight's tags name."""
    orders = [tag for tag in tags.split(":") if sorted(tag) == sorted(_LOGICAL)]
    return orders[-1] if orders else _LOGICAL


def _logical(tags: str, tensor: Array, conv: Conv) -> Array:
    order = _order(tags)
    weight = tensor.transpose([order.index(axis) for axis in _LOGICAL])
    if weight.shape != conv.weight_shape:
        raise UserError(f"has shape {weight.shape}; expected {conv.weight_shape}", where=conv.name)
    if "scale" in tags.split(":"):
        weight = weight.astype(np.float64) * _PIXEL_RANGE
    return np.ascontiguousarray(weight, np.float32)
