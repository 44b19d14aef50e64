"""Every pass, and the pipelines whole, leave the meaning of random graphs as it was."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from graphs import Graph, Recipe, build, recipes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext, parse_pass
from yolomlir.passes.registry import REGISTRY

from yolomlir.arena_interpreter import ORDERS, Arena, run_plan
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.diagnostics import UserError
from yolomlir.interpreter import interpret
from yolomlir.pipeline import Pipeline, pipeline_for
from yolomlir.target import target_named

RELATIVE = 1e-10
"""Graphs have float64 weights: what differs is the order of sums of at most a few hundred products
(5e-14 of the largest), through some 60 ops that enlarge an error by less than 10 together."""

OWN = (
    "yolo-merge-siblings",
    "yolo-conv-epilogue-fusion",
    "yolo-form-dispatches",
    "yolo-concat-views",
    "yolo-fuse-pointwise",
)
CHANGE = ("yolo-lower-to-linalg", "yolo-narrow-activations")
"""Passes whose result the interpreter does not read, or that round by intention."""
PLANS = ("yolo-plan-memory", "yolo-plan-memory{reuse=concurrent}")
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def _close(got: list[np.ndarray], expected: list[np.ndarray], what: str) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        atol = RELATIVE * max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=what)


def _run(graph: Graph, text: str, context: PassContext) -> None:
    parse_pass(text).run(graph.module, context)
    graph.module.operation.verify()
    yolo.verify(graph.module)


def _check_arena(graph: Graph, expected: list[np.ndarray], plans: tuple[str, ...] = PLANS) -> None:
    context = PassContext(weights=graph.weights)
    for text in plans:
        _run(graph, text, context)
        plan = build_plan(graph.module)
        arena = Arena(plan.arena_bytes)
        for order in ORDERS:
            inputs = {"image": graph.inputs[0]}
            outputs = run_plan(graph.module, plan, inputs, graph.weights, order=order, arena=arena)
            _close(list(outputs.values()), expected, f"{text}, {order}")


def _order(graph: Graph, plan_pass: str) -> list[int]:
    """For each step of a plan the steps that come before it in every order, as a bit mask."""
    _run(graph, plan_pass, PassContext(weights=graph.weights))
    found: list[int] = []
    for step in build_plan(graph.module).steps:
        found.append(0)
        for index in step.depends:
            found[-1] |= found[index] | 1 << index
    return found


@given(recipe=recipes())
@quick
def test_concurrent_reuse_costs_no_parallelism(recipe: Recipe) -> None:
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.NHWC)
        for text in OWN:
            _run(graph, text, PassContext(weights=graph.weights))
        free = _order(graph, "yolo-plan-memory{reuse=none}")
        assert _order(graph, "yolo-plan-memory{reuse=concurrent}") == free


@given(recipe=recipes())
@quick
def test_graph_passes_one_after_the_other(recipe: Recipe) -> None:
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.NHWC)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        context = PassContext(weights=graph.weights, target=target_named("sm_90"))
        for text in OWN:
            _run(graph, text, context)
            _close(interpret(graph.module, graph.inputs, graph.weights), expected, text)
        _check_arena(graph, expected)


@given(recipe=recipes(max_moves=5))
@quick
def test_without_merging_or_alignment(recipe: Recipe) -> None:
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.NHWC)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        context = PassContext(weights=graph.weights)
        for text in (*OWN[1:3], "yolo-concat-views{alignment=1}"):
            _run(graph, text, context)
        _check_arena(graph, expected)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@given(recipe=recipes())
@quick
def test_pipelines_step_by_step(kind: str, recipe: Recipe) -> None:
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        target = target_named("cpu" if kind == "cpu" else "sm_90")
        context = PassContext(weights=graph.weights, target=target)
        level = recipe.seed % 4
        for step in Pipeline.parse(pipeline_for(kind, level)).steps:
            if kind == "gpu" and step.name == "yolo-assign-tiles":
                continue  # slow: it ranks thousands of tiles a shape, and changes no meaning
            Pipeline([step]).run(graph.module, context)
            _close(interpret(graph.module, graph.inputs, graph.weights), expected, step.text)
        _check_arena(graph, expected, plans=())
        plan = build_plan(graph.module)
        for order in ORDERS:
            outputs = run_plan(
                graph.module, plan, {"image": graph.inputs[0]}, graph.weights, order=order
            )
            _close(list(outputs.values()), expected, order)


@pytest.mark.parametrize("name", [n for n in REGISTRY if n not in CHANGE])
@given(recipe=recipes(max_moves=6))
@settings(quick, max_examples=4)
def test_every_pass_alone(name: str, recipe: Recipe) -> None:
    """On the graph as it is, or as the passes that it needs leave it."""
    needs = {
        "yolo-concat-views": OWN[1:3],
        "yolo-plan-memory": OWN[1:],
        "yolo-fuse-pointwise": OWN[1:4],
        "yolo-fuse-bottlenecks": OWN[1:4],
    }
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.NHWC if name in (*OWN, *needs) else Layout.LOGICAL)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        target = target_named("sm_90" if name.startswith("yolo-fuse-") else "cpu")
        context = PassContext(weights=graph.weights, target=target)
        for text in (*needs.get(name, ()), name):
            _run(graph, text, context)
        _close(interpret(graph.module, graph.inputs, graph.weights), expected, name)


@given(
    recipe=recipes(),
    extra=st.lists(
        st.tuples(
            st.integers(0, 63),
            st.sampled_from([n for n in REGISTRY if n not in (*CHANGE, "yolo-assign-tiles")]),
        ),
        max_size=6,
    ),
)
@settings(quick, max_examples=60)
def test_passes_in_any_order(recipe: Recipe, extra: list[tuple[int, str]]) -> None:
    """A pass may refuse what it finds, which is a UserError; one that fails or leaves invalid IR
    raises InternalError here. None changes the meaning."""
    order = ["yolo-layout-propagation{weights=ohwi}", "yolo-transpose-elision", *OWN[1:], PLANS[1]]
    for place, name in extra:
        order.insert(place % (len(order) + 1), name)
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        context = PassContext(weights=graph.weights, target=target_named("sm_90"))
        for text in order:
            with suppress(UserError):
                Pipeline.parse(text).run(graph.module, context)
        _close(interpret(graph.module, graph.inputs, graph.weights), expected, ", ".join(order))
