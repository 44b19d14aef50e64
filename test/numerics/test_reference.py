"""The float64 reference against ONNX Runtime, and against itself where the answer is known."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from reference import attention, conv2d, max_pool, run_reference, select

from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.network import SCALES
from yolomlir.frontend.seeded import seeded_checkpoint

BOX_TOLERANCE_PX, SCORE_TOLERANCE = 1e-2, 1e-5


def folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: it names the folder with the files of this test")
    return Path(value)


def run_onnx(path: Path, image: np.ndarray) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: image})[0]


def same_rows(rows: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rows[..., :4], expected[..., :4], rtol=0, atol=BOX_TOLERANCE_PX)
    np.testing.assert_allclose(rows[..., 4], expected[..., 4], rtol=0, atol=SCORE_TOLERANCE)
    np.testing.assert_array_equal(rows[..., 5], expected[..., 5])


def test_seeded_network_equals_onnx_runtime() -> None:
    files = folder("YOLOMLIR_TEST_REFERENCE")
    checkpoint = load_checkpoint(files / "yolo26n_seeded_unfused.safetensors")
    image = np.load(files / "input_bus_640.npy")
    rows = run_reference(checkpoint.tensors, image, keep=lambda name: False).rows
    same_rows(rows, run_onnx(files / "yolo26n_seeded.onnx", image))
    same_rows(rows, np.load(files / "output_300x6.npy"))


def test_trained_network_equals_onnx_runtime() -> None:
    """Equal rows where scores matter; far down, scores lie closer than float32 can tell apart."""
    weights, files = folder("YOLOMLIR_TEST_WEIGHTS"), folder("YOLOMLIR_TEST_REFERENCE")
    checkpoint = load_checkpoint(weights / "yolo26n_coco_dequantised_fused.safetensors")
    image = np.load(files / "input_bus_640.npy")
    rows = run_reference(checkpoint.tensors, image, keep=lambda name: False).rows[0]
    expected = run_onnx(weights / "yolo26n_coco_dequantised.onnx", image)[0]
    sure = expected[:, 4] > 0.25
    assert sure.sum() == 5
    same_rows(rows[sure], expected[sure])
    np.testing.assert_array_equal(rows[sure, 5], [5, 0, 0, 0, 0])  # a bus and four persons


# ---- seeded checkpoints through the reference ---------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_seeded_values_stay_sane(scale: str) -> None:
    """Every layer near unit scale and alive, no score saturated: a comparison means something."""
    checkpoint = seeded_checkpoint(scale, 80, 0)
    image = np.random.default_rng(1).random((1, 3, 96, 64))
    result = run_reference(checkpoint.tensors, image, max_det=100)
    for name, values in result.layers.items():
        assert 0.05 < values.std() < 20, name
        assert np.abs(values).max() < 200, name
    scores = result.rows[0, :, 4]
    assert 0.05 < scores[-1] < scores[0] < 1 - 1e-6
    assert len(np.unique(scores)) > 90


def test_fused_equals_unfused() -> None:
    """Folding rounds every weight once, by at most 2**-24 of it: errors of 1e-7 times depth."""
    image = np.random.default_rng(2).random((2, 3, 64, 96))
    results = [
        run_reference(seeded_checkpoint("n", 3, 4, fused=fused).tensors, image)
        for fused in (False, True)
    ]
    for a, b in zip(results[0].logits, results[1].logits, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert "model.2.cv1.bn" in results[0].layers
    assert "model.2.cv1.bn" not in results[1].layers


def test_batches_are_independent() -> None:
    tensors = seeded_checkpoint("n", 3, 4).tensors
    images = np.random.default_rng(3).integers(0, 256, (2, 3, 64, 64), np.uint8)
    both = run_reference(tensors, images).rows
    for i in range(2):
        single = run_reference(tensors, images[i : i + 1] / 255).rows
        np.testing.assert_allclose(both[i : i + 1], single, rtol=1e-9, atol=1e-9)


# ---- operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "kernel", "stride"),
    [(3, 4, 1, 3, 2), (4, 6, 1, 3, 1), (5, 2, 1, 1, 1), (4, 4, 4, 3, 1)],
)
def test_conv2d_from_its_formula(
    channels: int, outputs: int, groups: int, kernel: int, stride: int
) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, channels, 7, 6))
    w = rng.standard_normal((outputs, channels // groups, kernel, kernel))
    bias = rng.standard_normal(outputs)
    y = conv2d(x, w, bias, stride)
    for n, o, i, j in np.ndindex(y.shape):
        total = bias[o]
        for c, a, b in np.ndindex(w.shape[1:]):
            row, column = i * stride + a - kernel // 2, j * stride + b - kernel // 2
            if 0 <= row < 7 and 0 <= column < 6:
                source = o if groups > 1 else c
                total += w[o, c, a, b] * x[n, source, row, column]
        assert y[n, o, i, j] == pytest.approx(total, abs=1e-12)


def test_max_pool_of_negative_values() -> None:
    """The padding never wins."""
    x = -1 - np.random.default_rng(6).random((1, 2, 5, 8))
    y = max_pool(x, 5)
    for n, c, i, j in np.ndindex(y.shape):
        assert y[n, c, i, j] == x[n, c, max(i - 2, 0) : i + 3, max(j - 2, 0) : j + 3].max()


def test_attention_from_its_formula() -> None:
    rng = np.random.default_rng(7)
    qkv = 3 * rng.standard_normal((1, 2 * 16, 2, 3))
    y, v = attention(qkv, heads=2)
    for head in range(2):
        part = qkv[0, head * 16 : head * 16 + 16].reshape(16, 6)
        q, k, values = part[:4], part[4:8], part[8:]
        np.testing.assert_array_equal(v[0, head * 8 : head * 8 + 8].reshape(8, 6), values)
        for position in range(6):
            weights = np.exp(q[:, position] @ k / 2)  # 2 is the root of the 4 channels of a key
            expected = values @ (weights / weights.sum())
            np.testing.assert_allclose(
                y[0, head * 8 : head * 8 + 8].reshape(8, 6)[:, position], expected, rtol=1e-12
            )


def test_select_orders_ties_by_anchor_then_class() -> None:
    """One anchor may give several rows; equal scores come in the order of their indices."""
    boxes = [np.ones((1, 4, side, side)) for side in (4, 2, 1)]
    logits = [np.full((1, 3, side, side), -9.0) for side in (4, 2, 1)]
    logits[0][0, 2, 1, 3] = 1.0  # anchor 7
    logits[0][0, 0, 1, 3] = 0.5
    logits[1][0, 1, 0, 0] = 1.0  # anchor 16
    logits[2][0, :, 0, 0] = 0.5  # anchor 20
    rows = select(boxes, logits, 6)[0]
    np.testing.assert_array_equal(rows[:, 5], [2, 1, 0, 0, 1, 2])
    np.testing.assert_allclose(rows[:, 4], 1 / (1 + np.exp([-1, -1, -0.5, -0.5, -0.5, -0.5])))
    np.testing.assert_array_equal(rows[0, :4], [20, 4, 36, 20])  # (3.5 -+ 1, 1.5 -+ 1) * 8
    np.testing.assert_array_equal(rows[1, :4], [-8, -8, 24, 24])  # (0.5 -+ 1) * 16
    np.testing.assert_array_equal(rows[3, :4], [-16, -16, 48, 48])  # (0.5 -+ 1) * 32
