"""Which layers a plan's step computes: from its weights' names and the ops of its function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import InternalError
from yolomlir.evaluate.graph import Graph
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.plan import Step

_FUNCTION = re.compile(r"^  func\.func private @([\w.$-]+|\"[^\"]+\")(.*?)^  }$", re.M | re.S)
_CALL = re.compile(r"call @([\w.$-]+|\"[^\"]+\")\([^\n]*yolo\.dispatch")
_OP = re.compile(r'"yolo\.(\w+)"\(')
_FAMILY = re.compile(r'yolo\.family = "(\w+)"')


@dataclass(frozen=True)
class StepLayers:
    """What one step is.

    family: of its code generator. nodes: the graph's nodes it computes, in order. results: those of
    them that it writes, one after the other along the channels of its result; empty for detection
    and for what the graph does not have (as at -O0).
    """

    family: str
    nodes: tuple[str, ...]
    results: tuple[str, ...]


def step_layers(program: Program, graph: Graph) -> list[StepLayers]:
    """For each step of the program's plan. Raises InternalError where the IR is not the plan's."""
    functions = {name.strip('"'): text for name, text in _FUNCTION.findall(program.ir)}
    calls = [name.strip('"') for name in _CALL.findall(program.ir)]
    if len(calls) != len(program.plan.steps):
        raise InternalError(
            f"the IR has {len(calls)} dispatches; the plan has {len(program.plan.steps)} steps"
        )
    found = []
    for step, name in zip(program.plan.steps, calls, strict=True):
        text = functions[name]
        family = _FAMILY.search(text)
        layers = _layers(step, _OP.findall(text), graph)
        found.append(StepLayers(family[1] if family else "", *_fitting(layers, step, graph)))
    return found


def split_result(layers: StepLayers, result: NDArray[Any], graph: Graph) -> dict[str, NDArray[Any]]:
    """A step's result [N, C, H, W] as its layers' values."""
    parts: dict[str, NDArray[Any]] = {}
    offset = 0
    for name in layers.results:
        channels = graph.node(name).channels
        parts[name] = result[:, offset : offset + channels]
        offset += channels
    return parts


def _fitting(
    layers: tuple[tuple[str, ...], tuple[str, ...]], step: Step, graph: Graph
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers, if they have the channels of the step's result."""
    nodes, results = layers
    channels = sum(graph.node(name).channels for name in results)
    if results and channels != step.results[0].shape[1]:
        return nodes, ()
    return layers


def _layers(step: Step, ops: list[str], graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if "detect" in ops:
        return (), ()
    if "attention" in ops:
        return _attention(step, ops, graph)
    if "max_pool2d" in ops:
        return _pools(step, ops.count("max_pool2d"), graph)
    convs = convolutions_of(step)
    if "conv2d" not in ops or not all(name in graph for name in convs):
        name = step.layer
        return ((name,), (name,)) if name in graph else ((), ())
    nodes: list[str] = []
    results: list[str] = []
    for name in convs:
        chain = _epilogue(name, [op for op in ops if op in ("silu", "add")], graph)
        nodes += chain
        results.append(chain[-1])
    return tuple(nodes), tuple(results)


def convolutions_of(step: Step) -> list[str]:
    """The convolutions whose weights a step reads: more than one where siblings were merged."""
    names: list[str] = []
    for argument in step.arguments:
        for part in (argument.weight or "").split("+"):
            name, dot, _ = part.partition(".weight")
            if dot and name not in names:
                names.append(name)
    return names


def _epilogue(name: str, ops: list[str], graph: Graph) -> list[str]:
    chain = [name]
    for op in ops:
        user = next((u for u in graph.users(chain[-1]) if u.kind == op), None)
        if user is None:
            break
        chain.append(user.name)
    return chain


def _attention(step: Step, ops: list[str], graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if step.layer not in graph:
        return (), ()
    chain = _epilogue(step.layer, ["add"] if "add" in ops else [], graph)
    return (*chain[:1], *convolutions_of(step), *chain[1:]), (chain[-1],)


def _pools(step: Step, count: int, graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if step.layer not in graph:
        return (), ()
    chain = tuple(_epilogue(step.layer, ["max_pool"] * (count - 1), graph))
    channels = sum(graph.node(name).channels for name in chain)
    joined = len(step.results[0].shape) == 4 and step.results[0].shape[1] == channels
    return chain, chain if joined else chain[-1:]


def node_flops(graph: Graph, name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Floating-point operations of a node: 2 a multiply-add of convolutions and attention.

    shapes: [N, C, H, W] of the node, and of what it reads.
    """
    node = graph.node(name)
    n, channels, height, width = shapes[name]
    if node.conv is not None:
        return 2 * int(np.prod(node.conv.weight_shape[1:])) * n * channels * height * width
    if node.kind != "attention":
        return 0
    tokens = height * width
    key_dim = channels // node.options["heads"] // 2
    return 2 * n * tokens * tokens * (node.options["heads"] * key_dim + channels)
