"""Plans: dependencies from byte ranges, faults planted in plans and caught by the arena."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from graphs import Graph, Move, Recipe, build
from hypothesis import given, settings
from hypothesis import strategies as st
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext, parse_pass
from yolomlir.passes.registry import REGISTRY

from yolomlir.arena_interpreter import ORDERS, Arena, run_plan, schedule
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import Footprint, build_plan, dependencies
from yolomlir.codegen.memory_plot import lives, plot_memory
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.interpreter import interpret
from yolomlir.runtime.plan import Argument, Plan, Step, View

PASSES = ("conv-epilogue-fusion", "form-dispatches", "concat-views", "plan-memory")

pytestmark = pytest.mark.usefixtures("context")


def _planned(*moves: Move) -> tuple[Graph, Plan, list[np.ndarray]]:
    graph = build(Recipe(1, 6, 6, moves, 1, 5), layout=Layout.NHWC)
    expected = interpret(graph.module, graph.inputs, graph.weights)
    for name in PASSES:
        assert f"yolo-{name}" in REGISTRY
        parse_pass(f"yolo-{name}").run(graph.module, PassContext(weights=graph.weights))
    return graph, build_plan(graph.module), expected


def _bytes(view: View) -> set[int]:
    item = 1 if view.dtype == "uint8" else 4
    n, channels, height, width = view.shape
    return {
        view.offset_bytes + item * (position * view.pitch + c) + b
        for position in range(n * height * width)
        for c in range(channels)
        for b in range(item)
    }


def _views(pitches: st.SearchStrategy[int]) -> st.SearchStrategy[View]:
    shape = st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
    return st.builds(
        lambda offset, extra, shape: View(4 * offset, shape[1] + extra, shape),
        st.integers(0, 40),
        pitches,
        shape,
    )


@given(a=_views(st.integers(0, 5)), b=_views(st.integers(0, 5)))
@settings(max_examples=400, deadline=None)
def test_footprints_meet_where_bytes_do(a: View, b: View) -> None:
    share = bool(_bytes(a) & _bytes(b))
    assert Footprint.of(a).meets(Footprint.of(b)) >= share
    assert Footprint.of(a).meets(Footprint.of(b)) == Footprint.of(b).meets(Footprint.of(a))
    if a.pitch == b.pitch and a.shape[1:] == b.shape[1:] and a.shape[2] * a.shape[3] > 1:
        same_rows = abs(a.offset_bytes - b.offset_bytes) < 4 * a.pitch
        assert not same_rows or Footprint.of(a).meets(Footprint.of(b)) == share


def _step(reads: list[int], writes: list[int]) -> Step:
    def view(place: int) -> View:
        return View(64 * place, 4, (1, 4, 2, 2))

    arguments = tuple(Argument(view(place)) for place in reads)
    return Step("k", "layer", arguments, tuple(view(place) for place in writes))


def test_true_anti_and_output_dependencies_reduced() -> None:
    steps = [
        _step([0], [1]),
        _step([1], [2]),  # reads what 0 wrote
        _step([0], [3]),  # independent
        _step([2, 3], [1]),  # overwrites what 1 read, which implies 0
        _step([0], [3]),  # overwrites what 3 read, which implies 2
        _step([1, 3], [4]),  # 4 implies 3
    ]
    assert dependencies(steps) == [(), (0,), (), (1, 2), (3,), (4,)]


def test_channel_slices_of_one_buffer_are_independent() -> None:
    left = View(0, 8, (1, 4, 2, 2))
    right = View(16, 8, (1, 4, 2, 2))
    whole = View(0, 8, (1, 8, 2, 2))
    steps = [Step("k", "l", (), (left,)), Step("k", "l", (), (right,))]
    steps.append(Step("k", "l", (Argument(whole),), (View(1024, 8, (1, 8, 2, 2)),)))
    assert dependencies(steps) == [(), (), (0, 1)]


def test_plan_is_json_and_has_names() -> None:
    _, plan, _ = _planned(Move("c3k2", 1, 0, 1))
    assert Plan.from_json(plan.to_json()) == plan
    assert set(plan.inputs) == {"image"}
    assert plan.inputs["image"].dtype == "uint8"
    assert list(plan.outputs) == ["detections"]
    assert all(step.layer.split(".")[0] in {"conv", "silu"} for step in plan.steps)
    weights = [a.weight for step in plan.steps for a in step.arguments if a.view is None]
    assert weights
    assert all(weights)


def test_module_without_memory_plan_is_refused() -> None:
    graph = build(Recipe(1, 6, 6, (Move("conv", 0, 0, 0),), 1, 5))
    with pytest.raises(UserError, match="no memory plan"):
        build_plan(graph.module)


def test_views_that_do_not_fit_their_op_are_refused() -> None:
    graph, _, _ = _planned(Move("conv", 1, 0, 0))
    call = next(op for op in yolo.ops_in(graph.module, "func.call"))
    call.attributes["yolo.views"] = ir.ArrayAttr.get([])
    with pytest.raises(UserError, match=r"'yolo\.views' has 0 entries; expected 4"):
        build_plan(graph.module)


# ---- planted faults -----------------------------------------------------------------------------


def _run(graph: Graph, plan: Plan, order: str = "program") -> np.ndarray:
    inputs = {"image": graph.inputs[0]}
    return run_plan(graph.module, plan, inputs, graph.weights, order=order)["detections"]


def _changed(plan: Plan, index: int, **values: object) -> Plan:
    steps = list(plan.steps)
    steps[index] = dataclasses.replace(steps[index], **values)  # type: ignore[arg-type]
    return dataclasses.replace(plan, steps=tuple(steps))


def _differs(got: np.ndarray, expected: np.ndarray) -> bool:
    return not np.allclose(got, expected, rtol=0, atol=1e-9)


def test_sound_plan_in_every_order() -> None:
    graph, plan, expected = _planned(Move("c3k2", 1, 1, 1), Move("c2psa", 2, 1, 0))
    for order in ORDERS:
        assert not _differs(_run(graph, plan, order), expected[0])


def test_every_missing_dependency_is_seen_in_some_order() -> None:
    graph, plan, expected = _planned(Move("c3k2", 1, 1, 1))
    seen = 0
    edges = [(i, d) for i, step in enumerate(plan.steps) for d in step.depends]
    for index, gone in edges:
        kept = tuple(d for d in plan.steps[index].depends if d != gone)
        broken = _changed(plan, index, depends=kept)
        runs = [_run(graph, broken, "last_first")]
        seen += any(_differs(run, expected[0]) for run in runs)
    assert seen == len(edges)


def test_overlapping_views_are_seen() -> None:
    graph, plan, expected = _planned(Move("c3k2", 1, 1, 1))
    for index, step in enumerate(plan.steps[1:-1], 1):
        result = step.results[0]
        moved = dataclasses.replace(result, offset_bytes=result.offset_bytes + 4)
        broken = _changed(plan, index, results=(moved,))
        try:
            got = _run(graph, broken)
        except InternalError:
            continue  # it leaves the arena, or writes what it reads
        assert _differs(got, expected[0])


def test_step_that_writes_what_it_reads_is_refused() -> None:
    graph, plan, _ = _planned(Move("conv", 1, 0, 0))
    step = plan.steps[-1]
    place = step.arguments[0].view
    assert place is not None
    own = dataclasses.replace(step.results[0], offset_bytes=place.offset_bytes)
    with pytest.raises(InternalError, match="writes what it reads"):
        _run(graph, _changed(plan, len(plan.steps) - 1, results=(own,)))


def test_cycle_and_wrong_inputs_are_refused() -> None:
    graph, plan, _ = _planned(Move("conv", 1, 0, 0))
    with pytest.raises(InternalError, match="cycle"):
        list(schedule(_changed(plan, 0, depends=(1,)), "last_first"))
    with pytest.raises(UserError, match=r"expected \['image'\]"):
        run_plan(graph.module, plan, {}, graph.weights)
    with pytest.raises(UserError, match="unknown order 'backwards'"):
        _run(graph, plan, "backwards")


def test_arena_poisons_what_it_does_not_hold() -> None:
    arena = Arena(64)
    view = View(16, 2, (1, 1, 2, 2))
    assert np.isnan(arena.read(view)).all()
    arena.write(view, np.ones((1, 1, 2, 2)))
    assert (arena.read(view) == 1).all()
    assert np.isnan(arena.read(View(17, 2, (1, 1, 1, 1), "uint8"))).all()
    with pytest.raises(InternalError, match="leaves the arena"):
        arena.read(View(60, 2, (1, 2, 1, 1)))


# ---- the picture --------------------------------------------------------------------------------


def test_lives_end_with_the_last_reader() -> None:
    buffers = [View(256 * i, 4, (1, 4, 2, 2)) for i in range(3)]
    steps = (
        Step("conv2d_a", "a", (Argument(buffers[0]),), (buffers[1],)),
        Step("depthwise_b", "b", (Argument(buffers[1]),), (buffers[2],), (0,)),
        Step("other", "c", (Argument(buffers[2]),), (buffers[1],), (1,)),
    )
    plan = Plan(768, {"image": buffers[0]}, {"detections": buffers[1]}, steps)
    found = [(life.layer, life.first, life.last, life.family) for life in lives(plan)]
    assert found == [
        ("image", -1, 3, "input"),
        ("a", 0, 3, "conv2d"),
        ("b", 1, 2, "depthwise"),
        ("c", 2, 3, "other"),
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_memory_writes_a_picture(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    _, plan, _ = _planned(Move("c3k2", 1, 1, 1))
    path = tmp_path / f"memory.{ending}"
    plot_memory(plan, path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start
    with pytest.raises(UserError, match="cannot write the picture"):
        plot_memory(plan, tmp_path / "none" / "memory.png")
    with pytest.raises(UserError, match="cannot write the picture"):
        plot_memory(plan, tmp_path / "memory.doc")


def test_plot_without_matplotlib_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_memory(Plan(0, {}, {}, ()), "memory.png")
