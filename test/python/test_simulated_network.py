"""The kernels of a whole network, simulated in the arena: every layer within its tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_model
from interpreted_model import HEIGHT, WIDTH
from simulated_model import Simulated
from yolomlir.dialects import yolo

from yolomlir.autotune.levels import measured_pairs
from yolomlir.bindings import ir
from yolomlir.evaluate.compare import compare
from yolomlir.evaluate.graph import graph_of
from yolomlir.evaluate.subjects import ProgramSubject


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("level", "pairs", "inner"), [(2, "", 0), (3, "", 0), (3, "all", 13)])
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_every_layer_is_within_tolerance(
    precision: str, level: int, pairs: str, inner: int
) -> None:
    """Every layer that is stored: what a pair's first convolution computes is not."""
    assert_layers(precision, level, pairs, inner)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("precision", "inner"), [("fp16", 13), ("tf32", 5)])
def test_every_layer_is_so_with_the_tiles_of_larger_images(
    precision: str, inner: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shipped table has none of this size: those of the smallest serve, where they are
    legal."""
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))  # without a database of this machine
    pairs = measured_pairs("sm_90", "n", precision, HEIGHT, WIDTH, 1)
    assert_layers(precision, 3, pairs, inner, tuned=True)


def assert_layers(
    precision: str, level: int, pairs: str, inner: int, *, tuned: bool = False
) -> None:
    image = np.random.default_rng(3).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)
    with yolo.new_context(), ir.Location.unknown():
        model = Simulated(
            small_model.checkpoint(), level=level, precision=precision, pairs=pairs, tuned=tuned
        )
        subject = ProgramSubject(precision, model)  # type: ignore[arg-type]  # stands in for a Model
        found = compare(subject, None, graph_of(small_model.checkpoint()), image)
    assert found.culprit is None
    assert not found.detections.changed
    kernels = [step.kernel for step in model.program.plan.steps]
    assert sum("_then_3x3s1_" in kernel for kernel in kernels) >= inner
    assert len(found.layers) > 60 - inner
