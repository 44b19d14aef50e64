"""A GPU's detections beside those of the CPU backend and of ONNX Runtime, on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import yolomlir
from yolomlir.evaluate.compare import compare
from yolomlir.evaluate.graph import graph_of
from yolomlir.evaluate.subjects import OnnxRuntimeSubject, ProgramSubject, Subject
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.vision.decode import read_image
from yolomlir.vision.demo import demo_image
from yolomlir.vision.letterbox import letterbox

pytestmark = pytest.mark.device

CONFIDENCE = {"seeded": 0.0, "real": 0.25}
"""Untrained weights have no score that stands out; the last rows of 300 are cut by the match."""


@pytest.fixture(params=CONFIDENCE)
def weights(request: pytest.FixtureRequest) -> tuple[str, Checkpoint]:
    if request.param == "seeded":
        return "seeded", seeded_checkpoint("n", 80, 0)
    path: Path = request.getfixturevalue("real_weights")
    return "real", load_checkpoint(path)


def pictures(count: int, size: tuple[int, int]) -> np.ndarray:
    """The packaged photo, and the same mirrored, upside down and both."""
    image, _ = letterbox(read_image(demo_image()), size)
    turned = [image, image[:, ::-1], image[::-1], image[::-1, ::-1]]
    return np.ascontiguousarray(np.stack(turned[:count]))


@pytest.mark.parametrize("size", [(640, 640), (384, 672)], ids=["640x640", "384x672"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_detections_are_those_of_the_cpu_and_of_onnxruntime(
    weights: tuple[str, Checkpoint], precision: str, batch: int, size: tuple[int, int]
) -> None:
    kind, checkpoint = weights
    assert_agrees(kind, checkpoint, "native", precision, pictures(batch, size))


def assert_agrees(
    kind: str, checkpoint: Checkpoint, target: str, precision: str, images: np.ndarray
) -> None:
    """Within tolerances that are derived from the network's own rounding (`compare`)."""
    graph = graph_of(checkpoint)
    options = {"imgsz": images.shape[1:3], "batch": len(images), "cache": False}
    with (
        yolomlir.compile(checkpoint, target=target, precision=precision, **options) as model,
        yolomlir.compile(checkpoint, target="cpu", **options) as cpu,
    ):
        others: list[Subject] = [
            ProgramSubject("cpu", cpu), OnnxRuntimeSubject(graph, model.info.max_det),
        ]  # fmt: skip
        for other in others:
            result = compare(
                ProgramSubject(target, model), other, graph, images, layers=False,
                confidence=CONFIDENCE[kind],
            )  # fmt: skip
            assert result.detections.matched >= len(images)
            assert result.agrees, f"{result.second}: {result.detections}"
