"""The kernels of a whole network, simulated in the arena: every layer within its tolerance."""

from __future__ import annotations

import numpy as np
import pytest
import small_model
from interpreted_model import HEIGHT, WIDTH
from simulated_model import Simulated
from yolomlir.dialects import yolo

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
    image = np.random.default_rng(3).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)
    with yolo.new_context(), ir.Location.unknown():
        model = Simulated(small_model.checkpoint(), level=level, precision=precision, pairs=pairs)
        subject = ProgramSubject(precision, model)  # type: ignore[arg-type]  # stands in for a Model
        found = compare(subject, None, graph_of(small_model.checkpoint()), image)
    assert found.culprit is None
    assert not found.detections.changed
    kernels = [step.kernel for step in model.program.plan.steps]
    assert sum("_then_3x3s1_" in kernel for kernel in kernels) >= inner
    assert len(found.layers) > 60 - inner
