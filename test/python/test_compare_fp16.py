"""Layer-by-layer comparison of float16 programs, run by interpreting their kernels' functions.

The interpreter rounds as the kernels do: what is stored to float16, weights, attention's softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import small_model
from interpreted_model import HEIGHT, WIDTH, Interpreted
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.evaluate.compare import compare
from yolomlir.evaluate.graph import Graph, graph_of
from yolomlir.evaluate.subjects import ProgramSubject, Run
from yolomlir.evaluate.tolerance import DEVIATIONS, exact_reference

PLANTED = ("model.0.conv", "model.10.m.0.attn.pe.conv", "model.22.cv2.conv")


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[None]:
    with yolo.new_context(), ir.Location.unknown():
        yield


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(small_model.checkpoint())


def run_of(model: Interpreted, image: np.ndarray) -> Run:
    return ProgramSubject("program", model).run(image, layers=True)  # type: ignore[arg-type]  # stands in for a Model


class Given:
    """A run that has been made."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, images: np.ndarray, layers: bool) -> Run:
        return self._run


@pytest.fixture(scope="module")
def half_run(context: None, image: np.ndarray) -> Run:
    return run_of(Interpreted(small_model.checkpoint(), level=2, precision="fp16"), image)


def test_a_right_program_is_within_tolerance(
    half_run: Run, graph: Graph, image: np.ndarray
) -> None:
    """And not far below it: the deviation is that of the errors, give or take a half."""
    found = compare(Given(half_run), None, graph, image)
    assert found.culprit is None
    assert not found.detections.changed
    assert len(found.layers) > 90
    computed = [x for x in found.layers if x.kind in ("conv", "silu", "add", "attention")]
    for layer in computed:
        assert 0.5 < 8 * layer.rms_ratio < 1.5, layer.name  # standard deviations


@pytest.mark.parametrize("level", [0, 1, 3])
def test_other_levels(graph: Graph, image: np.ndarray, level: int) -> None:
    """Without the fold of the scale the image is rounded; without merging the layers are
    others, and of chains what stays on the chip is not seen."""
    run = run_of(Interpreted(small_model.checkpoint(), level=level, precision="fp16"), image)
    assert compare(Given(run), None, graph, image).agrees


def test_it_is_outside_of_float32s_tolerance(
    half_run: Run, graph: Graph, image: np.ndarray
) -> None:
    found = compare(Given(replace(half_run, precision="fp32")), None, graph, image)
    assert all(not x.agrees for x in found.layers if x.kind in ("conv", "silu", "add"))


@pytest.mark.parametrize("wrong", PLANTED)
def test_a_wrong_weight_is_found(graph: Graph, image: np.ndarray, wrong: str) -> None:
    checkpoint = small_model.planted(f"{wrong}.weight", 2.0)
    run = run_of(Interpreted(checkpoint, level=2, precision="fp16"), image)
    found = compare(Given(run), None, graph, image)
    assert found.culprit is not None
    disagree = [layer.name for layer in found.layers if not layer.agrees]
    assert disagree == [found.culprit.name]
    assert found.culprit.name.startswith(wrong.rpartition(".")[0].removesuffix(".pe"))


def test_torch_rounds_every_layer(graph: Graph, image: np.ndarray) -> None:
    """PyTorch at float16 is within the tolerance of engines that store each layer's result."""
    torch = pytest.importorskip("torch")
    from yolomlir.evaluate.torch_model import build_torch, in_half, run_layers

    module = in_half(build_torch(graph, height=HEIGHT, width=WIDTH, max_det=126))
    pixels = image.transpose(0, 3, 1, 2)
    floats = torch.from_numpy(np.ascontiguousarray(pixels, np.float32) / 255)
    _, values = run_layers(module.module, floats.half())
    exact = exact_reference(graph, pixels, "fp16", each_layer=True)
    assert len(values) == len(graph.nodes)
    for name, value in values.items():
        ratio = np.abs(value.astype(np.float64) - exact.values[name]) / exact.deviations[name]
        assert ratio.max() < DEVIATIONS, name
    assert module(floats).dtype == torch.float32
