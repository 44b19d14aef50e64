"""Layer-by-layer comparison and profiles of programs whose kernels compute several convolutions.

A program for an H200 is run here by interpreting its kernels' functions through the plan's arena,
with the roundings of the GPU: factors of products to TF32, every op's result to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small_model
from interpreted_model import HEIGHT, WIDTH, Interpreted
from yolomlir.dialects import yolo

from yolomlir import interpreter
from yolomlir.bindings import ir
from yolomlir.evaluate.compare import Comparison, compare
from yolomlir.evaluate.graph import Graph, graph_of, network_graph
from yolomlir.evaluate.profile import _bytes, _flops
from yolomlir.evaluate.step_layers import StepLayers, step_layers
from yolomlir.evaluate.subjects import ProgramSubject
from yolomlir.runtime.plan import Step

PLACES = 13
"""Low bits of a float32 that TF32 does not have."""


def to_tf32(x: np.ndarray) -> np.ndarray:
    """To nearest, ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + (1 << (PLACES - 1))) >> PLACES << PLACES
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[None]:
    with yolo.new_context(), ir.Location.unknown():
        yield


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's rules with the roundings of a GPU's kernels."""

    def in_float32(rule: Any, *, products: bool) -> Any:
        def rounded(op: ir.Operation, *operands: np.ndarray) -> np.ndarray:
            if products:
                operands = (*map(to_tf32, operands[:2]), *operands[2:])
            return rule(op, *operands).astype(np.float32).astype(np.float64)

        return rounded

    for name, rule in list(interpreter._RULES.items()):
        made = in_float32(rule, products=name == "yolo.conv2d")
        monkeypatch.setitem(interpreter._RULES, name, made)


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(small_model.checkpoint())


@pytest.fixture(scope="module")
def model(context: None) -> Interpreted:
    return Interpreted(small_model.checkpoint())


@pytest.fixture(scope="module")
def paired(context: None) -> Interpreted:
    """With the pairs of 3x3 convolutions that `yolo-fuse-bottlenecks` makes one dispatch."""
    return Interpreted(small_model.checkpoint(), pairs="all")


def compared(model: Interpreted, graph: Graph, image: np.ndarray) -> Comparison:
    return compare(ProgramSubject("program", model), None, graph, image)  # type: ignore[arg-type]  # stands in for a Model


def chains(model: Interpreted) -> list[tuple[Step, StepLayers]]:
    known = step_layers(model.program, network_graph("n", small_model.CLASSES))
    pairs = zip(model.program.plan.steps, known, strict=True)
    return [(step, layers) for step, layers in pairs if layers.family == "chain"]


def test_every_result_of_every_chain_is_a_layer(model: Interpreted, graph: Graph) -> None:
    """By name and channels; what is computed and what is written is in the network's order."""
    found = chains(model)
    assert len(found) >= 20
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    for step, layers in found:
        assert len(layers.results) == len(step.results)
        convolutions = [name for name in layers.nodes if graph.node(name).kind == "conv"]
        assert len(convolutions) >= 2
        assert len(set(layers.nodes)) == len(layers.nodes)
        for names, view in zip(layers.results, step.results, strict=True):
            assert set(names) <= set(layers.nodes)
            assert sum(graph.node(name).channels for name in names) == view.shape[1]
        for name in layers.nodes:
            inside = [i for i in graph.node(name).inputs if i in layers.nodes]
            assert all(order[i] < order[name] for i in inside)
    assert any(len(layers.results) > 1 for _, layers in found)
    every = [name for known in step_layers(model.program, graph) for name in known.nodes]
    assert len(set(every)) == len(every)
    wanted = {n.name for n in graph.nodes if n.kind in ("conv", "silu", "add", "attention")}
    assert set(every) - {n.name for n in graph.nodes if n.kind == "max_pool"} == wanted


def test_a_right_program_is_within_tolerance(
    model: Interpreted, graph: Graph, image: np.ndarray, rounding: None
) -> None:
    """Of TF32, with the roundings of what stays on the chip, and not far below it."""
    found = compared(model, graph, image)
    assert found.culprit is None
    assert not found.detections.changed
    by_name = {layer.name: layer for layer in found.layers}
    written = [name for _, layers in chains(model) for names in layers.results for name in names]
    assert set(written) <= set(by_name)
    for name in written:
        assert 0.2 < 8 * by_name[name].rms_ratio < 1.2, name  # standard deviations


@pytest.mark.parametrize(
    ("wrong", "seen_at"),
    [
        ("model.1.conv", "model.2.cv1.act"),
        ("model.6.m.0.cv2.conv", "model.6.m.0.cv2.act"),  # computed together with its sibling
        ("model.8.m.0.cv3.conv", "model.8.cv2.act"),  # whose chain writes model.9.cv1, too
        ("model.10.m.0.ffn.0.conv", "model.10.cv2.act"),
        ("model.23.one2one_cv3.1.1.0.conv", "model.23.one2one_cv3.1.2"),  # depthwise
    ],
)
def test_a_wrong_weight_inside_a_chain(
    graph: Graph, image: np.ndarray, rounding: None, wrong: str, seen_at: str
) -> None:
    """It is found in the first result behind it that the chain writes, and nowhere else."""
    model = Interpreted(small_model.planted(f"{wrong}.weight", 2.0))
    layers = next(layers for _, layers in chains(model) if wrong in layers.nodes)
    assert seen_at in [name for names in layers.results for name in names]
    found = compared(model, graph, image)
    assert [layer.name for layer in found.layers if not layer.agrees] == [seen_at]


@pytest.mark.parametrize("wrong", ["model.2.m.0.cv1.conv", "model.6.m.0.m.0.cv1.conv"])
def test_a_wrong_weight_inside_a_pair(
    graph: Graph, image: np.ndarray, rounding: None, wrong: str
) -> None:
    """What it changes is not stored; it is found in what the dispatch does store."""
    model = Interpreted(small_model.planted(f"{wrong}.weight", 2.0), pairs="all")
    step, layers = next((s, layers) for s, layers in chains(model) if wrong in layers.nodes)
    assert "_then_3x3s1_" in step.kernel
    ((name,),) = layers.results
    found = compared(model, graph, image)
    assert [layer.name for layer in found.layers if not layer.agrees] == [name]


@pytest.mark.parametrize("program", ["model", "paired"])
def test_operations_and_bytes_of_chains(
    program: str, graph: Graph, request: pytest.FixtureRequest
) -> None:
    """Of all stages; weights, what is read and what is written once each, nothing in between.

    Borders that two blocks compute are counted once.
    """
    model = request.getfixturevalue(program)
    for step, layers in chains(model):
        n, _, height, width = step.results[0].shape
        convolutions = [name for name in layers.nodes if name in graph.weights]
        sizes = [graph.weights[name] for name in convolutions]
        positions = n * height * width
        assert _flops(step, layers, graph) == 2 * positions * sum(w.size for w, _ in sizes)
        read = {a.view for a in step.arguments if a.view is not None}
        floats = sum(w.size + b.size for w, b in sizes)
        floats += sum(int(np.prod(view.shape)) for view in (*read, *step.results))
        assert _bytes(step, model.program) == 4 * floats


def test_an_operand_given_twice_is_read_once(model: Interpreted) -> None:
    step = next(step for step, _ in chains(model))
    again = replace(step, arguments=(*step.arguments, *step.arguments))
    assert _bytes(again, model.program) == _bytes(step, model.program)
