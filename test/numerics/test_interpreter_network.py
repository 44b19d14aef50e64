"""The interpreter on the whole network as imported, layer by layer, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from reference import run_reference
from yolomlir.dialects import yolo

from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import import_model
from yolomlir.interpreter import interpret

RELATIVE = 1e-11
"""Both compute in float64; sums of up to 2304 products differ by 2e-13 of the largest, and some
hundred layers add up to less than 50 times that."""


@pytest.mark.parametrize(("scale", "classes", "shape"), [("n", 80, (64, 96)), ("s", 3, (96, 64))])
def test_every_layer_equals_the_reference(scale: str, classes: int, shape: tuple[int, int]) -> None:
    checkpoint = seeded_checkpoint(scale, classes, 0)
    images = np.random.default_rng(3).integers(0, 256, (2, 3, *shape), dtype=np.uint8)
    reference = run_reference(checkpoint.tensors, images)
    with yolo.new_context():
        model = import_model(checkpoint, height=shape[0], width=shape[1], batch=2)
        layers: dict[str, np.ndarray] = {}
        rows = interpret(model.module, [images], model.weights, layers=layers)[0]
    shared = [name for name in reference.layers if name in layers]
    assert len(shared) > 200
    for name in shared:
        expected = reference.layers[name]
        atol = RELATIVE * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(layers[name], expected, rtol=0, atol=atol, err_msg=name)
    # A score reaches few places of the box: pixels are at most a side long.
    np.testing.assert_allclose(rows, reference.rows, rtol=0, atol=RELATIVE * max(shape))
