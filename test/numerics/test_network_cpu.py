"""The whole network on the CPU as the API runs it, against ONNX Runtime and against float64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from reference import run_reference

from yolomlir.api import compile
from yolomlir.evaluate.graph import graph_of
from yolomlir.evaluate.subjects import ProgramSubject, Run
from yolomlir.evaluate.tolerance import DEVIATIONS, FLOAT32, exact_reference
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.vision.letterbox import letterbox

BOX_PX, SCORE = 1e-2, 1e-5
"""What the project promises against another implementation in float32."""
FOLDING = 4
"""Roundings of a folded weight: variance + epsilon, its root, the quotient, the product."""
_OUTPUT = re.compile(r"/(?:m/)?(.+)/(Conv|Mul|Add|Add_1|Concat)_output_0")
_SUFFIX = {"Conv": "", "Mul": "", "Add": ".add", "Add_1": ".ffn.add", "Concat": ".concat"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this file: the two models of one shape have the same kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def onnx_layer(output: str) -> str | None:
    """The layer of an intermediate value of Ultralytics' export, by its scoped name."""
    match = _OUTPUT.fullmatch(output)
    if match is None:
        return None
    parts = match[1].split("/")
    following = [*parts[1:], ""]
    # A list's own scope comes before its item's: m/m.0.
    kept = [p for p, n in zip(parts, following, strict=True) if not n.startswith(f"{p}.")]
    return ".".join(kept) + _SUFFIX[match[2]]


@dataclass(frozen=True)
class OnnxFile:
    """An exported network, every layer of it an output."""

    path: Path

    def run(self, images: np.ndarray, layers: bool) -> Run:
        onnx = pytest.importorskip("onnx")
        runtime = pytest.importorskip("onnxruntime")
        model = onnx.load(str(self.path))
        names = {}
        if layers:
            names = {
                o: layer for n in model.graph.node for o in n.output if (layer := onnx_layer(o))
            }
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
        session = runtime.InferenceSession(model.SerializeToString(), _options(runtime))
        pixels = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32) / np.float32(255)
        rows, *values = session.run(["output0", *names], {"images": pixels})
        return Run("onnxruntime", "fp32", rows, dict(zip(names.values(), values, strict=True)))


def _options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 2
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return options


def equal_rows(rows: np.ndarray, expected: np.ndarray) -> None:
    """Rows pairwise alike. Where scores are closer than the tolerance, the order may differ."""
    assert rows.shape == expected.shape
    for got, want in zip(rows, expected, strict=True):
        np.testing.assert_allclose(got[:, 4], want[:, 4], rtol=0, atol=SCORE)
        sure = want[:, 4] > want[-1, 4] + 2 * SCORE  # the last ones compete with those cut off
        left = list(got)
        for row in want[sure]:
            alike = [i for i, other in enumerate(left) if _alike(other, row)]
            assert alike, f"no row like {row}"
            del left[alike[0]]


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    near = np.abs(a[:4] - b[:4]).max() < BOX_PX and abs(a[4] - b[4]) < SCORE
    return bool(near and a[5] == b[5])


def bus_pixels(folder: Path) -> np.ndarray:
    """The photo of a bus as the network sees it, [1, 640, 640, 3] uint8."""
    with Image.open(folder / "bus.jpg") as photo:
        pixels, _ = letterbox(np.asarray(photo.convert("RGB")), (640, 640))
    return pixels[None]


def test_the_seeded_network_equals_onnx_runtime_layer_by_layer(reference_folder) -> None:
    checkpoint = load_checkpoint(reference_folder / "yolo26n_seeded_unfused.safetensors")
    pixels = bus_pixels(reference_folder)
    with compile(checkpoint, target="cpu", threads=2) as model:
        ours = ProgramSubject("yolomlir", model).run(pixels, layers=True)
        rows = model(pixels)
    theirs = OnnxFile(reference_folder / "yolo26n_seeded.onnx").run(pixels, layers=True)
    np.testing.assert_array_equal(ours.rows, rows)
    equal_rows(rows, theirs.rows)
    exact = exact_reference(graph_of(checkpoint), pixels.transpose(0, 3, 1, 2), "fp32")
    common = [name for name in exact.values if name in ours.layers and name in theirs.layers]
    assert len(common) >= 90
    for name in common:
        # Two runs' roundings, and those of folding the batch norm in float32, as the export did.
        tolerance = DEVIATIONS * math.sqrt(2) * exact.deviations[name]
        tolerance = tolerance + FOLDING * FLOAT32 * np.abs(exact.values[name])
        difference = np.abs(ours.layers[name].astype(np.float64) - theirs.layers[name])
        worst = np.unravel_index(int((difference - tolerance).argmax()), difference.shape)
        assert difference[worst] <= tolerance[worst], (name, worst)


def test_the_seeded_network_equals_its_stored_rows(reference_folder) -> None:
    checkpoint = load_checkpoint(reference_folder / "yolo26n_seeded_unfused.safetensors")
    image = np.load(reference_folder / "input_bus_640.npy")
    with compile(checkpoint, target="cpu", input_dtype="float32", threads=2) as model:
        rows = model(image)
    equal_rows(rows, np.load(reference_folder / "output_300x6.npy").reshape(rows.shape))


def test_trained_weights_find_the_bus(real_weights, reference_folder) -> None:
    with compile(real_weights, target="cpu", threads=2) as model:
        found = model.predict(reference_folder / "bus.jpg")
        pixels = bus_pixels(reference_folder)
        rows = model(pixels)
    expected = OnnxFile(real_weights.with_name("yolo26n_coco_dequantised.onnx"))
    equal_rows(rows, expected.run(pixels, layers=False).rows)
    assert [d.class_name for d in found] == ["bus", "person", "person", "person", "person"]
    assert found[0].score == pytest.approx(0.930, abs=5e-4)
    with Image.open(reference_folder / "bus.jpg") as photo:
        _, record = letterbox(np.asarray(photo.convert("RGB")), (640, 640))
    theirs = record.to_original(expected.run(pixels, layers=False).rows[0, :5])
    for detection, row in zip(found, theirs, strict=True):
        np.testing.assert_allclose(detection.box, row[:4], rtol=0, atol=BOX_PX * 1080 / 640)


def test_another_scale_size_batch_and_number_of_classes() -> None:
    checkpoint = seeded_checkpoint("s", 3, seed=1)
    images = np.random.default_rng(0).integers(0, 256, (2, 320, 640, 3), dtype=np.uint8)
    options = {"imgsz": (320, 640), "batch": 2, "max_det": 1000}
    with compile(checkpoint, target="cpu", threads=2, **options) as model:
        rows = model(images)
        single = model(images[1:])
        twice = model(np.stack([images[1]] * 3))
    assert rows.shape == (2, 1000, 6)
    for equal in (single[0], *twice):
        np.testing.assert_array_equal(equal, rows[1])
    reference = run_reference(
        checkpoint.tensors, images.transpose(0, 3, 1, 2), max_det=1000, keep=lambda name: False
    )
    equal_rows(rows, reference.rows)
