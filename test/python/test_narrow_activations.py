"""float16 in the graph: what narrowing does to weights, plans and the meaning of random graphs."""

from __future__ import annotations

import numpy as np
import pytest
import small_model
from graphs import Recipe, build, recipes
from hypothesis import HealthCheck, given, settings
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext
from yolomlir.passes.lower_to_linalg import LowerToLinalg
from yolomlir.passes.narrow_activations import NarrowActivations, to_half
from yolomlir.passes.outlining import dispatches

from yolomlir.arena_interpreter import ORDERS, Arena, run_plan
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.codegen.cpu.program import compile_cpu_program
from yolomlir.compiler import CompileOptions, compile_checkpoint, recompile
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.evaluate.graph import graph_of
from yolomlir.evaluate.program_graph import graph_of_program
from yolomlir.frontend.yolo26 import import_model
from yolomlir.interpreter import interpret
from yolomlir.pipeline import LEVELS, Pipeline, optimize, pipeline_for
from yolomlir.runtime.artifact import Artifact
from yolomlir.target import target_named

quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
HALF = 2.0**-11
"""Unit roundoff of float16."""
STEP = 2.0**-24
"""Its smallest positive number."""


# ---- weights ------------------------------------------------------------------------------------


def test_weights_are_rounded_to_nearest() -> None:
    """Ties to even, subnormal numbers kept, the largest number that is not out of range too."""
    exact = np.array([1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 1.4 * 2**-25, -0.6 * 2**-24, 65519.0])
    half = to_half(exact, "layer", "w")
    assert half.dtype == np.float16
    assert half.tolist() == [1.0, 1 + 2**-9, 2**-24, 2**-24, -(2**-24), 65504.0]


@pytest.mark.parametrize("value", [65530.0, -1e30])
def test_a_weight_out_of_range_is_named(value: float) -> None:
    checkpoint = small_model.planted("model.2.cv1.conv.weight", value)
    with yolo.new_context(), ir.Location.unknown():
        model = import_model(checkpoint, height=64, width=64)
        model.module.operation.attributes["yolo.precision"] = ir.StringAttr.get("fp16")
        context = PassContext(weights=model.weights)
        with pytest.raises(UserError, match=r"'model\.2\.cv1\.conv\.weight:ohwi' holds") as caught:
            optimize(model.module, context, target_named("sm_90"))
    assert caught.value.where == "model.2.cv1.conv"
    assert "float16 ends at 65504" in str(caught.value)
    assert "--precision tf32 or fp32" in str(caught.value)


def test_weights_in_the_store() -> None:
    """Rounded once from what they were; biases stay, and so does what the pass did not change."""
    with yolo.new_context(), ir.Location.unknown():
        model = import_model(small_model.checkpoint(), height=64, width=64)
        steps = Pipeline.parse(pipeline_for("gpu", 2, "fp16")).steps
        place = [step.name for step in steps].index("yolo-narrow-activations")
        context = PassContext(weights=model.weights, target=target_named("sm_90"))
        Pipeline(steps[:place]).run(model.module, context)
        wide = {yolo.string(op, "name") for op in yolo.ops_in(model.module, "yolo.weight")}
        Pipeline(steps[place : place + 1]).run(model.module, context)
        used = [yolo.string(op, "name") for op in yolo.ops_in(model.module, "yolo.weight")]
        count = context.statistics["yolo-narrow-activations"]["weights"]
    assert len(used) == len(set(used)) == len(wide)
    halves = [name for name in used if name.endswith(":f16")]
    assert len(halves) == count == sum(model.weights[name].ndim == 4 for name in used)
    for name in used:
        tensor = model.weights[name]
        if name in halves:
            source = model.weights[name.removesuffix(":f16")]
            assert tensor.dtype == np.float16
            error = np.abs(tensor - source.astype(np.float64))
            assert (error <= np.maximum(HALF * np.abs(source), STEP / 2)).all()
        else:
            assert name in wide
            assert tensor.dtype == np.float32


# ---- pipelines and plans ------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_only_fp16_has_the_pass(level: int) -> None:
    names = [step.name for step in Pipeline.parse(pipeline_for("gpu", level, "fp16")).steps]
    assert names.index("yolo-narrow-activations") < names.index("yolo-conv-epilogue-fusion")
    assert names.index("yolo-narrow-activations") > names.index("yolo-fold-batch-norm")
    for precision in ("", "tf32", "fp32"):
        assert "yolo-narrow-activations" not in pipeline_for("gpu", level, precision)
        assert "alignment" not in pipeline_for("gpu", level, precision)
    with yolo.new_context():
        named = Pipeline.parse(f"yolo-pipeline-gpu{{level={level} precision=fp16}}")
    assert str(named) == pipeline_for("gpu", level, "fp16")


def test_the_named_pipeline_knows_its_options() -> None:
    with pytest.raises(UserError, match="has no option 'precision=fp8'") as caught:
        Pipeline.parse("yolo-pipeline-gpu{precision=fp8}")
    assert "precision=fp32|tf32|fp16" in str(caught.value)


def optimized(precision: str) -> tuple[ir.Module, PassContext]:
    """The small model for sm_90, without tiles, in the current context."""
    model = import_model(small_model.checkpoint(), height=64, width=96)
    context = PassContext(weights=model.weights, target=target_named("sm_90"))
    steps = Pipeline.parse(pipeline_for("gpu", 2, precision)).steps
    Pipeline([s for s in steps if s.name != "yolo-assign-tiles"]).run(model.module, context)
    return model.module, context


def test_the_plan_of_the_network() -> None:
    """Of two bytes an element: half of the arena, rows at multiples of 16 bytes, float32 where
    detection reads, and the dispatches of the other precisions."""
    with yolo.new_context(), ir.Location.unknown():
        module, _ = optimized("fp16")
        half, layers = build_plan(module), [yolo.layer_of(c.location) for c in dispatches(module)]
        other, _ = optimized("tf32")
        full = build_plan(other)
        assert layers == [yolo.layer_of(call.location) for call in dispatches(other)]
    assert half.metadata["precision"] == "fp16"
    assert half.inputs["image"].dtype == "uint8"
    assert half.outputs["detections"].dtype == "float32"
    *others, last = half.steps
    read_by_detect = {a.view for a in last.arguments}
    assert len(read_by_detect) == 6
    for step in others:
        for view in step.results:
            assert view.dtype == ("float32" if view in read_by_detect else "float16")
            size = 4 if view in read_by_detect else 2
            assert view.offset_bytes % 16 == 0
            channels = view.shape[1]
            assert view.pitch * size % min(16, channels * size & -(channels * size)) == 0
    assert half.arena_bytes < 0.65 * full.arena_bytes
    written = {(s.layer, r.shape): r for s in full.steps for r in s.results}
    assert all((s.layer, r.shape) in written for s in half.steps for r in s.results)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The small model compiled for sm_90, as read from a file."""
    options = CompileOptions(target="sm_90", precision="fp16", height=64, width=64)
    path = tmp_path_factory.mktemp("fp16") / "model.ylm"
    compile_checkpoint(small_model.checkpoint(), options).save(path)
    return Artifact.load(path)


def test_the_artifact(artifact: Artifact) -> None:
    """Weights of convolutions as float16, exactly the checkpoint's rounded once; biases float32."""
    assert artifact.info.precision == "fp16"
    program = artifact.programs["sm_90"]
    assert program.metadata["precision"] == program.plan.metadata["precision"] == "fp16"
    kinds = {(w.ndim, str(w.dtype)) for w in program.weights.values()}
    assert kinds == {(4, "float16"), (1, "float32")}
    exact = graph_of(small_model.checkpoint())
    for name, (weight, bias) in graph_of_program(program, artifact.info).weights.items():
        wide, other = (a.astype(np.float64) for a in exact.weights[name])
        step = STEP / 2 * (255 if name == "model.0.conv" else 1)
        error = 1.001 * np.maximum(HALF * np.abs(wide), step)  # the checkpoint's are rounded, too
        assert (np.abs(weight - wide) <= error).all(), name
        np.testing.assert_allclose(bias, other, rtol=1e-6, atol=1e-30)


def test_another_gpu_from_the_artifact(artifact: Artifact) -> None:
    again = recompile(artifact, "sm_120").programs["sm_120"]
    first = artifact.programs["sm_90"]
    assert again.metadata["precision"] == "fp16"
    assert again.plan == first.plan
    for name, tensor in first.weights.items():
        assert again.weights[name].dtype == tensor.dtype
        np.testing.assert_array_equal(again.weights[name], tensor)


def test_the_cpu_refuses() -> None:
    with pytest.raises(UnsupportedError, match="'fp16' needs a GPU; the target is cpu") as e:
        CompileOptions(target="cpu", precision="fp16").resolved()
    assert "use fp32 on the CPU" in str(e.value)
    with yolo.new_context(), ir.Location.unknown():
        module, context = optimized("fp16")
        plan = build_plan(module)
        LowerToLinalg().run(module, context)
        with pytest.raises(UnsupportedError, match="a tensor is float16"):
            compile_cpu_program(module, plan, context.weights)


# ---- random graphs ------------------------------------------------------------------------------


@given(recipe=recipes())
@quick
def test_nothing_but_roundings(recipe: Recipe) -> None:
    """Every tensor is float16 but those that are tied to what is given or returned, verifies, and
    differs by what was rounded on the way to it: at most as many roundings as there are ops, of
    values no larger than the largest, each enlarged by no more than a weight of the graph does."""
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe)
        wide: dict[str, np.ndarray] = {}
        interpret(graph.module, graph.inputs, graph.weights, layers=wide)
        NarrowActivations().run(graph.module, PassContext(weights=graph.weights))
        graph.module.operation.verify()
        yolo.verify(graph.module)
        narrow: dict[str, np.ndarray] = {}
        interpret(graph.module, graph.inputs, graph.weights, layers=narrow)
        block = graph.module.body.operations[0].regions[0].blocks[0]
        for view in block.operations:
            op = view.operation
            if op.name in ("yolo.conv2d", "yolo.silu", "yolo.add") and _is_half(op.results[0]):
                value = narrow[yolo.layer_of(op.location)]
                assert (value == value.astype(np.float16)).all()
        first = next(v.operation for v in block.operations if v.operation.name == "yolo.conv2d")
        layer = yolo.layer_of(first.location)
        assert not np.array_equal(wide[layer], narrow[layer])
        # One convolution of the image: weights and image rounded, then the result.
        taps = int(np.prod(yolo.shape_of(first.operands[1])[1:]))
        largest = np.abs(graph.weights[_weight(first).removesuffix(":f16")]).max()
        bound = 2.1 * HALF * taps * largest + 1.1 * HALF * np.abs(wide[layer]).max() + taps * STEP
        assert np.abs(wide[layer] - narrow[layer]).max() <= bound


def _is_half(value: ir.Value) -> bool:
    return yolo.element_of(value) == "f16"


def _weight(conv: ir.Operation) -> str:
    return yolo.string(conv.operands[1].owner.operation, "name")


@pytest.mark.parametrize("reuse", ["sequential", "concurrent"])
@given(recipe=recipes())
@quick
def test_the_arena_of_a_float16_graph(reuse: str, recipe: Recipe) -> None:
    """Through two-byte views in any order, what the functions mean when they run alone."""
    with yolo.new_context(), ir.Location.unknown():
        graph = build(recipe, layout=Layout.NHWC)
        context = PassContext(weights=graph.weights, target=target_named("sm_90"))
        text = (
            "yolo-merge-siblings{alignment=8},yolo-narrow-activations,yolo-conv-epilogue-fusion,"
            "yolo-form-dispatches"
        )
        Pipeline.parse(text).run(graph.module, context)
        expected = interpret(graph.module, graph.inputs, graph.weights)
        for text in ("yolo-concat-views{alignment=8}", f"yolo-plan-memory{{reuse={reuse}}}"):
            Pipeline.parse(text).run(graph.module, context)
            got = interpret(graph.module, graph.inputs, graph.weights)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=text)
        plan = build_plan(graph.module)
        arena = Arena(plan.arena_bytes)
        for order in ORDERS:
            inputs = {"image": graph.inputs[0]}
            outputs = run_plan(graph.module, plan, inputs, graph.weights, order=order, arena=arena)
            for a, b in zip(outputs.values(), expected, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=order)
