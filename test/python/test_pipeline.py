"""Pipelines as text, and the graph passes on the whole network."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from graphs import Recipe, build, recipes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.dialects.layout_rules import RULES
from yolomlir.passes.base import PassContext, parse_pass
from yolomlir.passes.cse import Cse
from yolomlir.tools.opt import main as opt_main
from yolomlir.tools.pass_reference import describe, own_passes

import yolomlir
from yolomlir.autotune import levels
from yolomlir.bindings import ir
from yolomlir.cli.options import add_level_option
from yolomlir.compiler import CompileOptions, emit
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.network import SCALES, parameters
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.weights import AbstractWeights, WeightStore
from yolomlir.frontend.yolo26 import ImportedModel, import_model
from yolomlir.interpreter import interpret
from yolomlir.pipeline import (
    DEFAULT_LEVEL,
    LEVELS,
    Pipeline,
    optimize,
    pipeline_for,
    split_pipeline,
)
from yolomlir.reproducer import configuration_of
from yolomlir.target import target_named

KINDS = {"cpu": "cpu", "gpu": "sm_90"}
GRAPH_PASSES = (
    "yolo-canonicalize,yolo-fold-batch-norm,yolo-fold-normalize,"
    "yolo-layout-propagation,yolo-transpose-elision"
)
RECORD = ("target", "scale", "precision", "height", "width", "batch")
"""What a measured level is of."""
CONFIGURATIONS = {"n": ("n", 80, 640, 640), "s-nc3": ("s", 3, 384, 640)}
RELATIVE = 1e-10
"""The interpreter sums the few hundred float64 products of an element in the order in which the
weight lies (5e-14 of the largest), and the ops after it enlarge an error less than 1000 times."""
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def import_zeros(name: str) -> ImportedModel:
    """The network of a configuration with weights of zero: for tests of the graph alone."""
    scale, classes, height, width = CONFIGURATIONS[name]
    shapes = parameters(SCALES[scale], classes, fused=False)
    zeros = {key: np.broadcast_to(np.float32(0), shape) for key, shape in shapes.items()}
    return import_model(Checkpoint(zeros), height=height, width=width)


def count(module: ir.Module) -> Counter[str]:
    return Counter(op.name for op in yolo.ops_in(module, ""))


# ---- text ---------------------------------------------------------------------------------------


def test_split_at_top_level_commas() -> None:
    text = "a{tile=1,2 x=3},func.func(b,c{y=(1,2)}), d"
    assert split_pipeline(text) == ["a{tile=1,2 x=3}", "func.func(b,c{y=(1,2)})", "d"]
    assert split_pipeline("") == []
    for bad in ("a)", "f(a", "a{", "f(a))("):
        with pytest.raises(UserError):
            split_pipeline(bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_pipeline_prints_as_text_that_runs_again(kind: str, level: int) -> None:
    text = pipeline_for(kind, level)
    assert str(Pipeline.parse(text)) == text
    assert str(Pipeline.parse(f"yolo-pipeline-{kind}{{level={level}}}")) == text
    if level == DEFAULT_LEVEL:
        assert str(Pipeline.parse(f"builtin.module(yolo-pipeline-{kind})")) == text


def test_unknown_kinds_and_levels_are_refused() -> None:
    with pytest.raises(UserError, match="no pipeline for a 'tpu' target"):
        pipeline_for("tpu")
    with pytest.raises(UserError, match="optimisation level is 4"):
        pipeline_for("cpu", 4)


def test_one_default_level() -> None:
    """Of compiles, the API and the command line: none, which means the measured one."""
    parser = argparse.ArgumentParser()
    add_level_option(parser)
    compiled = inspect.signature(yolomlir.compile).parameters["level"].default
    assert parser.parse_args([]).level is compiled is CompileOptions().level is None
    assert levels.DEFAULT_LEVEL == DEFAULT_LEVEL


def test_the_level_is_the_measured_one_where_there_is_one() -> None:
    size = (640, 640, 1)
    assert levels.measured_level("sm_90", "n", "tf32", *size) == 3
    assert levels.measured_level("sm_90", "m", "tf32", *size) == 2
    assert levels.measured_level("sm_120", "n", "tf32", *size) == DEFAULT_LEVEL


def test_a_level_serves_numbers_of_images_near_those_that_were_measured() -> None:
    found = [levels.measured_level("sm_90", "n", "tf32", 640, 640, n) for n in (4, 5, 8, 12, 64)]
    assert found == [3, 2, 2, 2, 2]
    assert levels.measured_level("sm_90", "n", "fp16", 640, 640, 64) == 3
    assert levels.measured_level("sm_90", "s", "fp16", 640, 640, 2) == 3
    assert levels.measured_level("sm_90", "m", "fp16", 640, 640, 3) == DEFAULT_LEVEL


def test_a_level_serves_image_sizes_near_those_that_were_measured() -> None:
    """Below the smallest all: the less there is to compute, the more launches count."""
    sizes = [(480, 640), (320, 320), (32, 32), (800, 800)]
    assert [levels.measured_level("sm_90", "n", "tf32", *s, 1) for s in sizes] == [3] * 4
    assert levels.measured_level("sm_90", "s", "fp16", 1280, 1280, 1) == DEFAULT_LEVEL


def test_pairs_serve_other_image_sizes() -> None:
    """They are named by the shapes that the image's size gives them."""
    measured = levels.measured_pairs("sm_90", "s", "tf32", 640, 640, 1)
    assert measured == "32x160x160:3+32x80x80:2+32x80x80:4"
    other = levels.measured_pairs("sm_90", "s", "tf32", 480, 640, 1)
    assert other == "32x120x160:3+32x60x80:2+32x60x80:4"
    assert levels.measured_pairs("sm_90", "s", "tf32", 1280, 1280, 1) == ""


def test_pairs_are_the_measured_ones_of_level_3() -> None:
    """By default and where the level is asked for; other levels have none."""
    fused = {}
    for level, size in ((None, 640), (3, 640), (2, 640), (3, 1280)):
        options = CompileOptions("sm_90", "tf32", height=size, width=size, level=level)
        text = emit(seeded_checkpoint("n", 80, 0), options, "optimized")
        fused[level, size] = text.count("call @chain_3x3s1_16x80x80_16_silu_then_3x3s1_16_silu_add")
    assert fused == {(None, 640): 2, (3, 640): 2, (2, 640): 0, (3, 1280): 0}
    other = ("sm_120", "n", "tf32", 640, 640, 1)
    assert levels.measured_pairs(*other) == ""


def test_measured_pairs_are_what_the_pass_takes() -> None:
    for record in levels._records():
        pairs = levels.measured_pairs(*(record[key] for key in RECORD))
        assert pairs == record.get("pairs", "")
        text = pipeline_for("gpu", 3, record["precision"], pairs)
        assert str(Pipeline.parse(text)) == text
        assert ("yolo-fuse-bottlenecks" in text) == bool(pairs)
        named = f"yolo-pipeline-gpu{{level=3 precision={record['precision']} pairs={pairs}}}"
        assert str(Pipeline.parse(named)) == text


def test_the_highest_level_is_for_gpus() -> None:
    assert pipeline_for("cpu", 3) == pipeline_for("cpu", 2)
    assert "yolo-fuse-pointwise" in pipeline_for("gpu", 3)
    assert "yolo-fuse-pointwise" not in pipeline_for("gpu", 2)


def test_levels_only_add_passes() -> None:
    for kind in KINDS:
        names = [[s.name for s in Pipeline.parse(pipeline_for(kind, n)).steps] for n in LEVELS]
        for fewer, more in pairwise(names):
            remaining = iter(more)
            assert all(name in remaining for name in fewer)


# ---- the whole network --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_conversion_is_left(name: str, kind: str) -> None:
    with yolo.new_context():
        model = import_zeros(name)
        context = PassContext(weights=AbstractWeights(), target=target_named(KINDS[kind]))
        assert count(model.module)["yolo.convert_layout"] == 1, "the image is NHWC, the model NCHW"
        Pipeline.parse(GRAPH_PASSES).run(model.module, context)
        ops = count(model.module)
        assert ops["yolo.convert_layout"] == 0
        assert ops["yolo.batch_norm"] == 0
        assert ops["yolo.conv2d"] == 102
        scale = next(yolo.ops_in(model.module, "yolo.normalize"))
        assert yolo.real(scale, "scale") == 1.0
        for conv in yolo.ops_in(model.module, "yolo.conv2d"):
            x, w = list(conv.operands)[:2]
            assert Layout.of(x.type) is Layout.NHWC
            depthwise = yolo.integer(conv, "groups") > 1
            hwio = kind == "cpu" or depthwise
            assert Layout.of(w.type) is (Layout.HWIO if hwio else Layout.OHWI)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_direction_alone_leaves_no_conversion(direction: str) -> None:
    with yolo.new_context():
        module = import_zeros("n").module
        layout = f"yolo-layout-propagation{{direction={direction}}}"
        passes = f"yolo-canonicalize,yolo-fold-batch-norm,{layout},yolo-transpose-elision"
        Pipeline.parse(passes).run(module, PassContext())
        assert count(module)["yolo.convert_layout"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_step_prints_and_parses_to_the_same(kind: str, level: int) -> None:
    context = PassContext(target=target_named(KINDS[kind]))
    with yolo.new_context():
        module = import_zeros("n").module
        for step in Pipeline.parse(pipeline_for(kind, level)).steps:
            Pipeline([step]).run(module, context)
            text = module.operation.get_asm(enable_debug_info=True)
            again = ir.Module.parse(text).operation.get_asm(enable_debug_info=True)
            assert again == text, step.name


def test_optimize_is_the_pipeline_and_takes_at_most_two_seconds() -> None:
    with yolo.new_context():
        one, two = import_zeros("n"), import_zeros("n")
        target = target_named("cpu")
        started = time.process_time()
        optimize(one.module, PassContext(weights=one.weights), target)
        assert time.process_time() - started <= 2.0
        context = PassContext(weights=two.weights, target=target)
        Pipeline.parse(pipeline_for("cpu", 2)).run(two.module, context)
        assert str(one.module) == str(two.module)
        for op in yolo.ops_in(one.module, "yolo.weight"):
            assert yolo.string(op, "name") in one.weights
        documented = {
            name: set(describe(c).items["Statistics"]) for name, c in own_passes().items()
        }
        for name, counts in context.statistics.items():
            assert set(counts) <= documented[name], f"{name} counts what it does not document"


def test_passes_leave_a_shared_store_usable_for_another_target() -> None:
    with yolo.new_context():
        model = import_zeros("n")
        other = ir.Module.parse(str(model.module))
        original = set(model.weights)
        for module, name in ((model.module, "cpu"), (other, "sm_90")):
            optimize(module, PassContext(weights=model.weights), target_named(name), level=0)
        assert original <= set(model.weights)


def test_a_failure_in_the_product_leaves_a_reproducer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Cse, module: ir.Module, context: PassContext) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Cse, "run", fail)
    with yolo.new_context():
        model = import_zeros("n")
        context = PassContext(weights=model.weights)
        with pytest.raises(InternalError) as caught:
            optimize(model.module, context, target_named("sm_90"))
    match = re.search(r"pass 'yolo-cse' failed: .*reproducer: (.*)\)$", str(caught.value))
    assert match, caught.value
    file = Path(match[1])
    try:
        flags = configuration_of(file.read_text())
        assert flags is not None
        assert flags[:2] == ["--pass-pipeline=builtin.module(yolo-cse)", "--target=sm_90"]
        monkeypatch.undo()
        assert opt_main([str(file), "--run-reproducer", "--no-output"]) == 0
    finally:
        shutil.rmtree(file.parent)


def test_a_reproducer_that_cannot_be_written_hides_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Cse, module: ir.Module, context: PassContext) -> None:
        raise ZeroDivisionError("by zero")

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Cse, "run", fail)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with yolo.new_context():
        model = import_zeros("n")
        context = PassContext(weights=model.weights)
        with pytest.raises(InternalError, match=r"pass 'yolo-cse' failed.*a bug of yolomlir\)$"):
            optimize(model.module, context, target_named("sm_90"))
    assert "no reproducer could be written: [Errno 28] No space left on device" in caplog.text


# ---- random graphs ------------------------------------------------------------------------------


@given(
    recipe=recipes(max_moves=8),
    direction=st.sampled_from(["forward", "backward", "both"]),
    logical=st.booleans(),
    seed=st.integers(0, 2**16),
)
@quick
def test_layout_passes_keep_meaning_and_signature(
    recipe: Recipe, direction: str, logical: bool, seed: int
) -> None:
    """With conversions thrown in, in each direction; and a second run finds nothing to do."""
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.LOGICAL if logical else Layout.NHWC)
        _sprinkle(graph.module, np.random.default_rng(seed))
        expected = interpret(graph.module, graph.inputs, graph.weights)
        signature = str(next(yolo.ops_in(graph.module, "func.func")).attributes["function_type"])
        context = PassContext(weights=graph.weights)
        passes = f"yolo-layout-propagation{{direction={direction}}},yolo-transpose-elision"
        Pipeline.parse(passes).run(graph.module, context)
        got = interpret(graph.module, graph.inputs, graph.weights)
        for a, b in zip(got, expected, strict=True):
            atol = RELATIVE * max(1.0, float(np.abs(b).max()))
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)
        after = str(next(yolo.ops_in(graph.module, "func.func")).attributes["function_type"])
        assert after == signature
        text = str(graph.module)
        Pipeline.parse("yolo-transpose-elision").run(graph.module, context)
        assert str(graph.module) == text


@pytest.mark.parametrize(
    "name",
    ["canonicalize", "cse", "dce", "fold-batch-norm", "fold-normalize", "transpose-elision"],
)
@given(recipe=recipes(max_moves=8))
@settings(quick, max_examples=8)
def test_a_second_run_changes_nothing(name: str, recipe: Recipe) -> None:
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe)
        context = PassContext(weights=graph.weights)
        parse_pass(f"yolo-{name}").run(graph.module, context)
        once = str(graph.module)
        parse_pass(f"yolo-{name}").run(graph.module, context)
        assert str(graph.module) == once


def _sprinkle(module: ir.Module, rng: np.random.Generator) -> None:
    """Conversions there and back after some of the activations."""
    for op in list(yolo.ops_in(module)):
        value = op.results[0]
        if op.name == "yolo.weight" or len(yolo.shape_of(value)) != 4 or rng.random() < 0.6:
            continue
        now = Layout.of(value.type)
        away = Layout.NHWC if now is Layout.LOGICAL else Layout.LOGICAL
        with ir.InsertionPoint.after(op):
            there = yolo.convert_layout(value, away, loc=op.location)
            back = yolo.convert_layout(there, now, loc=op.location)
        value.replace_all_uses_except(back, [there.owner.operation])


# ---- the rest -----------------------------------------------------------------------------------


def test_every_op_has_a_layout_rule() -> None:
    with yolo.new_context() as context:
        names = set()
        for line in yolo._DEFINITION.read_text().splitlines():
            word = line.strip().split(" ")
            if word[0] == "irdl.operation":
                names.add(f"yolo.{word[1].removeprefix('@')}")
        assert names
        assert all(context.is_registered_operation(name) for name in names)
    assert names == set(RULES)


def test_an_error_names_pass_and_layer() -> None:
    text = """
      func.func @main(%x: tensor<1x8x6x6xf32>) -> tensor<1x8x6x6xf32> {
        %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 8 : i64}
            : (tensor<1x8x6x6xf32>) -> tensor<1x8x6x6xf32> loc("model.2.split")
        return %0 : tensor<1x8x6x6xf32>
      }"""
    with yolo.new_context() as context, ir.Location.unknown():
        module = ir.Module.parse(text)
        op = next(yolo.ops_in(module, "yolo.slice"))
        op.attributes["offset"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), 4)
        with pytest.raises(InternalError) as caught:
            Pipeline.parse("yolo-cse").run(module, PassContext(weights=WeightStore()))
    assert str(caught.value).startswith("model.2.split: pass 'yolo-cse' left invalid IR: ")
