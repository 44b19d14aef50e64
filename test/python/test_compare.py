"""Error analysis, layer-by-layer comparison, and `yolomlir compare`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_model
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.cli.main import main
from yolomlir.evaluate.compare import compare
from yolomlir.evaluate.detections import match_detections
from yolomlir.evaluate.graph import Graph, graph_of
from yolomlir.evaluate.onnx_model import build_onnx
from yolomlir.evaluate.subjects import OnnxRuntimeSubject, Run
from yolomlir.evaluate.tolerance import exact_reference, local_errors
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import import_model
from yolomlir.interpreter import interpret


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(small_model.folder() / "cache"))


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """A smooth picture with noise, [1, H, W, 3]."""
    random = np.random.default_rng(5)
    coarse = random.uniform(0, 255, (1, 4, 6, 3)).repeat(16, 1).repeat(16, 2)
    return np.clip(coarse + random.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(small_model.checkpoint())


def logical(image: np.ndarray) -> np.ndarray:
    return image.transpose(0, 3, 1, 2)


# ---- the network and its errors -----------------------------------------------------------------


@pytest.mark.parametrize("scale", ["n", pytest.param("m", marks=pytest.mark.slow)])
def test_the_graph_means_what_the_module_means(image: np.ndarray, scale: str) -> None:
    """The graph's float64 values are the interpreter's of the module as imported."""
    checkpoint = seeded_checkpoint(scale, 3, 1, fused=True)
    layers: dict[str, np.ndarray] = {}
    with yolo.new_context(), ir.Location.unknown():
        imported = import_model(checkpoint, height=64, width=96)
        (rows,) = interpret(imported.module, [logical(image)], imported.weights, layers=layers)
    exact = exact_reference(graph_of(checkpoint), logical(image), "fp32")
    for name, value in exact.values.items():
        if name in layers and layers[name].shape == value.shape:
            np.testing.assert_allclose(value, layers[name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert len(set(layers) & set(exact.values)) > 200
    np.testing.assert_allclose(exact.rows, rows, rtol=1e-9, atol=1e-9)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """x rounded to so many bits of significand."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def low_precision_layer(graph: Graph, inputs: dict[str, np.ndarray], name: str, bits: int):
    """A convolution whose factors are rounded to `bits` bits, in float64 otherwise."""
    from yolomlir.evaluate.tolerance import convolve

    node = graph.node(name)
    weight, bias = graph.weights[name]
    x = rounded(inputs[node.inputs[0]], bits)
    y = convolve(x, rounded(weight.astype(np.float64), bits), node.conv.stride)
    return y + bias.reshape(1, -1, 1, 1)


@pytest.mark.parametrize("name", ["model.1.conv", "model.8.cv2.conv", "model.23.one2one_cv3.0.2"])
def test_tolerances_fit_the_precision(graph: Graph, image: np.ndarray, name: str) -> None:
    """Errors of TF32 are within TF32's tolerance, not far below it, and outside of float32's."""
    exact = exact_reference(graph, logical(image), "fp32")
    observed = {node.name: exact.values[node.name] for node in graph.nodes}
    observed[name] = low_precision_layer(graph, observed, name, 11)
    ratios = {}
    for precision in ("tf32", "fp32"):
        for node, local in local_errors(graph, logical(image), precision, observed):
            if node.name == name:
                ratios[precision] = np.abs(local.error / local.deviation)
    assert ratios["tf32"].max() < 8
    assert np.sqrt((ratios["tf32"] ** 2).mean()) > 0.3
    assert ratios["fp32"].max() > 8


def test_onnx_runtime_is_within_tolerance(graph: Graph, image: np.ndarray) -> None:
    """An implementation of somebody else's, on an ONNX graph of ours, agrees at every layer."""
    pytest.importorskip("onnxruntime")
    found = compare(OnnxRuntimeSubject(graph, 126), None, graph, image)
    assert found.culprit is None
    assert len(found.layers) == len(graph.nodes)
    assert not found.detections.changed
    assert found.agrees


@pytest.mark.parametrize(
    "name",
    ["model.0.conv", "model.10.m.0.attn.qkv.conv", "model.16.m.0.cv2.conv",
     "model.23.one2one_cv3.1.0.0.conv", "model.23.one2one_cv2.2.2"],
)  # fmt: skip
def test_a_planted_weight_is_found_where_it_is(graph: Graph, image: np.ndarray, name: str) -> None:
    pytest.importorskip("onnxruntime")
    wrong = graph_of(small_model.planted(f"{name}.weight", 0.01))
    found = compare(OnnxRuntimeSubject(wrong, 126), None, graph, image)
    assert [layer.name for layer in found.layers if not layer.agrees] == [name]
    assert found.culprit is not None
    assert found.culprit.index[1] == wrong.node(name).channels // 2
    assert sum(found.culprit.histogram) == np.prod(found.culprit.shape)
    assert sum(found.culprit.histogram[5:]) > 0


class Broken:
    """A run whose layer holds what no arithmetic gives."""

    def __init__(self, graph: Graph, layer: str, value: float) -> None:
        self.subject = OnnxRuntimeSubject(graph, 126)
        self.layer, self.value = layer, value

    def run(self, images: np.ndarray, layers: bool) -> Run:
        found = self.subject.run(images, layers)
        values = dict(found.layers)
        values[self.layer] = values[self.layer].copy()
        values[self.layer][0, 1, 0, 2] = self.value
        return Run("broken", "fp32", found.rows, values)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_a_number_is_not_within_tolerance(
    graph: Graph, image: np.ndarray, value: float
) -> None:
    pytest.importorskip("onnxruntime")
    found = compare(Broken(graph, "model.3.act", value), None, graph, image)
    assert found.culprit is not None
    assert found.culprit.name == "model.3.act"
    assert found.culprit.index == (0, 1, 0, 2)


def test_onnx_sizes_and_batches(graph: Graph) -> None:
    """The rows of a batch are those of its images one by one, at another size as well."""
    onnxruntime = pytest.importorskip("onnxruntime")
    images = np.random.default_rng(0).uniform(0, 1, (2, 3, 96, 64)).astype(np.float32)

    def run(batch: np.ndarray) -> np.ndarray:
        model = build_onnx(graph, batch=len(batch), height=96, width=64, max_det=20)
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return session.run(None, {"images": batch})[0]

    both = run(images)
    assert both.shape == (2, 20, 6)
    np.testing.assert_allclose(both, np.concatenate([run(x[None]) for x in images]), atol=1e-3)


# ---- detections ---------------------------------------------------------------------------------

ROW = [10.0, 20.0, 110.0, 220.0, 0.9, 1.0]


def rows(*some: list[float]) -> np.ndarray:
    return np.array([some], np.float32)


def test_row_order_does_not_matter() -> None:
    other = [300.0, 20.0, 310.0, 50.0, 0.8, 2.0]
    found = match_detections(rows(ROW, other), rows(other, ROW))
    assert (found.matched, found.changed, found.box_px, found.score) == (2, False, 0.0, 0.0)


@pytest.mark.parametrize(
    ("index", "change", "changed"),
    [(0, 0.9, False), (0, 30.0, True), (5, 1.0, True), (4, -0.2, False), (3, np.nan, True)],
)
def test_what_counts_as_another_detection(index: int, change: float, changed: bool) -> None:
    other = list(ROW)
    other[index] += change
    found = match_detections(rows(ROW), rows(other), confidence=0.25)
    assert found.changed is changed
    if index == 4:
        assert found.score == pytest.approx(0.2, abs=1e-6)


def test_a_low_score_in_one_run_is_not_a_lost_detection() -> None:
    low = [*ROW[:4], 0.2499, 1.0]
    high = [*ROW[:4], 0.2501, 1.0]
    assert not match_detections(rows(low), rows(high), confidence=0.25).changed


def test_rows_at_the_cut_may_be_missing() -> None:
    kept, first, second = list(ROW), [1.0, 1, 9, 9, 0.5, 0], [50.0, 50, 60, 60, 0.5001, 0]
    assert match_detections(rows(kept, first), rows(kept, second)).changed
    assert not match_detections(rows(kept, first), rows(kept, second), cut=0.001).changed


# ---- the command --------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return main(["compare", *arguments, "--device", "cpu", "--imgsz", small_model.IMGSZ])


def test_the_cpu_backend_agrees_at_every_layer(
    capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    result = tmp_path / "result.json"
    assert run(small_model.checkpoint_file(), "--layers", "--json", str(result)) == 0
    text = capsys.readouterr().out
    assert "all within their derived tolerances" in text
    assert "unchanged" in text
    data = json.loads(result.read_text())
    assert data["agrees"]
    assert data["first_layer_out_of_tolerance"] is None
    assert len(data["layers"]) > 90


def test_a_planted_weight_is_found_in_a_compiled_model(
    capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    """Also where siblings were merged: model.6.m.0.cv2 is computed together with cv1."""
    name = "model.6.m.0.cv2"
    wrong = small_model.save("planted", small_model.planted(f"{name}.conv.weight"))
    result = tmp_path / "result.json"
    code = run(
        wrong, "--against", small_model.checkpoint_file(), "--layers", "--noise", "3", "--json",
        str(result),
    )  # fmt: skip
    assert code == 1
    text = capsys.readouterr().out
    assert f"first: {name}.act (silu)" in text
    assert "worst element: image 0, channel 16," in text
    assert "DIFFER" in text
    data = json.loads(result.read_text())
    assert data["first_layer_out_of_tolerance"] == f"{name}.act"
    outside = [layer["name"] for layer in data["layers"] if layer["ratio"] > 1]
    assert outside == [f"{name}.act"]


def test_a_compiled_file_against_other_runtimes(
    capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    """A .ylm is compared by its own weights, put back into a checkpoint's order."""
    pytest.importorskip("onnxruntime")
    path = tmp_path / "model.ylm"
    size = ["--imgsz", small_model.IMGSZ]
    source = small_model.checkpoint_file()
    assert main(["compile", source, "-o", str(path), "--target", "cpu", *size]) == 0
    for against in ("onnxruntime", "reference", str(path)):
        assert main(["compare", str(path), "--against", against, "--layers"]) == 0, against
    assert main(["compare", str(path), "--against", "onnxruntime"]) == 0
    assert "agree" in capsys.readouterr().out


def test_weights_by_name(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    """Wherever compare takes a checkpoint: of the model, as what is right, as the other model."""
    path = str(tmp_path / "model.ylm")
    assert main(["compile", "seeded:n", "-o", path, "--target", "cpu", "--imgsz", "32"]) == 0
    assert main(["compare", path, "--weights", "seeded:n", "--noise", "1"]) == 0
    assert main(["compare", path, "--against", "seeded:n", "--noise", "1"]) == 0
    capsys.readouterr()
    assert main(["compare", path, "--against", "seeded:s", "--noise", "1"]) == 2
    assert "is YOLO26s at 32x32; the model is YOLO26n" in capsys.readouterr().err
    assert main(["compare", path, "--weights", "seeded:q", "--noise", "1"]) == 2
    assert "unknown scale 'q'" in capsys.readouterr().err


def test_torch_agrees(graph: Graph, image: np.ndarray) -> None:
    pytest.importorskip("torch")
    from yolomlir.evaluate.subjects import TorchSubject

    assert compare(TorchSubject(graph, 126), None, graph, image).agrees


@pytest.mark.parametrize(
    ("against", "says"),
    [("tensorflow", "neither a file nor something to compare with"), ("", "neither a file")],
)
def test_what_cannot_be_compared_with(
    capsys: pytest.CaptureFixture[str], against: str, says: str
) -> None:
    assert run(small_model.checkpoint_file(), "--against", against) == 2
    assert says in capsys.readouterr().err


def test_an_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    place = str(tmp_path / "none" / "x.json")
    assert run(small_model.checkpoint_file(), "--json", place) == 2
    assert f"{place}: cannot be written" in capsys.readouterr().err
