"""Which layers a plan's step computes: from its weights' names and the ops of its function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import InternalError
from yolomlir.evaluate.graph import Graph
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.plan import Argument, Step

_FUNCTION = re.compile(r"^  func\.func private @([\w.$-]+|\"[^\"]+\")(.*?)^  }$", re.M | re.S)
_CALL = re.compile(r"call @([\w.$-]+|\"[^\"]+\")\([^\n]*yolo\.dispatch")
_OP = re.compile(r'"yolo\.(\w+)"\(')
_FAMILY = re.compile(r'yolo\.family = "(\w+)"')
_ARGUMENT = re.compile(r"(%\w+): ")
_DEFINITION = re.compile(r'^ +(%\w+) = "yolo\.(\w+)"\(([^)]*)\)', re.M)
_RETURN = re.compile(r"^ +return ([^:]+) :", re.M)
Layers = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""`StepLayers.nodes` and `StepLayers.results`."""


@dataclass(frozen=True)
class StepLayers:
    """What one step is.

    family: of its code generator. nodes: the graph's nodes it computes, in order. results: for each
    of its results those of them that it writes there, one after the other along the channels; empty
    for detection and for what the graph does not have (as at -O0). A chain's other nodes stay on
    the chip.
    """

    family: str
    nodes: tuple[str, ...]
    results: tuple[tuple[str, ...], ...]


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
        found_family = _FAMILY.search(text)
        family = found_family[1] if found_family else ""
        if family == "chain":
            layers = _chain(step, text, graph)
        else:
            nodes, written = _layers(step, _OP.findall(text), graph)
            layers = nodes, (written,) if written else ()
        found.append(StepLayers(family, *_fitting(layers, step, graph)))
    return found


def split_results(
    layers: StepLayers, results: Sequence[NDArray[Any]], graph: Graph
) -> dict[str, NDArray[Any]]:
    """A step's results [N, C, H, W] as its layers' values."""
    parts: dict[str, NDArray[Any]] = {}
    for names, result in zip(layers.results, results, strict=False):
        offset = 0
        for name in names:
            channels = graph.node(name).channels
            parts[name] = result[:, offset : offset + channels]
            offset += channels
    return parts


def _fitting(layers: Layers, step: Step, graph: Graph) -> Layers:
    """The layers, if they have the channels of the step's results."""
    nodes, results = layers
    channels = [sum(graph.node(name).channels for name in names) for names in results]
    if results and channels != [view.shape[1] for view in step.results]:
        return nodes, ()
    return layers


def _chain(step: Step, text: str, graph: Graph) -> Layers:
    """Of the stages of a chain, each of which ends where the next convolution begins."""
    header, _, body = text.partition("\n")
    places = {name: index for index, name in enumerate(_ARGUMENT.findall(header))}
    nodes: list[str] = []
    last: list[str] = []
    written: dict[str, tuple[str, ...]] = {}
    for value, op, operands in _DEFINITION.findall(body):
        if op == "conv2d":
            last = _named(step.arguments[places[operands.split(", ")[1]]])
            if not all(name in graph for name in last):
                return (), ()
            nodes += last
        elif op in ("silu", "add"):
            last = [_epilogue(name, [op], graph)[-1] for name in last]
            nodes += last
        else:  # what puts a stage's input together
            continue
        written[value] = tuple(last)
    returned = _RETURN.search(body)
    values = returned[1].split(", ") if returned else []
    return tuple(nodes), tuple(written[value] for value in values)


def _layers(step: Step, ops: list[str], graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if {"detect", "candidates", "merge_detections"} & set(ops):
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
    names = [name for argument in step.arguments for name in _named(argument)]
    return list(dict.fromkeys(names))


def _named(argument: Argument) -> list[str]:
    """The convolutions whose weights an argument is; none where it is something else."""
    parts = [part.partition(".weight") for part in (argument.weight or "").split("+")]
    return [name for name, dot, _ in parts if dot]


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
