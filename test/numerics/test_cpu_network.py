"""The whole network on the CPU, from a checkpoint to rows, against the float64 reference."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from reference import run_reference

from yolomlir.compiler import CompileOptions, compile_checkpoint
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.runtime.cpu import CpuExecutor

BOX_TOLERANCE_PX, SCORE_TOLERANCE = 1e-2, 1e-5
"""What the project promises against another implementation in float32."""


def run(checkpoint: Checkpoint, image: np.ndarray, **options) -> np.ndarray:
    """Rows [N, max_det, 6] for an N, H, W, C image."""
    n, height, width, _ = image.shape
    chosen = CompileOptions(
        height=height, width=width, batch=n, input_dtype=str(image.dtype), **options
    )
    program = compile_checkpoint(checkpoint, chosen).programs["cpu"]
    name = next(iter(program.plan.inputs))
    with CpuExecutor(program, threads=2) as executor:
        return next(iter(executor.run({name: image}).values()))


def matched(rows: np.ndarray, expected: np.ndarray) -> None:
    """Rows that are alike up to the order of nearly equal scores, from the best score down.

    The last rows compete with others that are not in the list, so what scores within the tolerance
    of the last one may differ.
    """
    for got, want in zip(rows, expected, strict=True):
        np.testing.assert_allclose(got[:, 4], want[:, 4], rtol=0, atol=SCORE_TOLERANCE)
        sure = want[:, 4] > want[-1, 4] + 2 * SCORE_TOLERANCE
        assert sure.any()
        left = list(got)
        for row in want[sure]:
            alike = [
                i
                for i, g in enumerate(left)
                if g[5] == row[5]
                and abs(g[4] - row[4]) < SCORE_TOLERANCE
                and np.max(abs(g[:4] - row[:4])) < BOX_TOLERANCE_PX
            ]
            assert alike, f"no row like {row}"
            del left[alike[0]]


CASES = [
    # scale, classes, batch, height, width, max_det, level
    ("n", 3, 2, 64, 96, 50, 2),
    ("n", 1, 1, 32, 32, 21, 2),
    ("n", 83, 1, 96, 64, 30, 2),
    ("s", 3, 1, 96, 160, 300, 2),
    ("n", 80, 1, 64, 64, 20, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_networks_of_other_sizes(case) -> None:
    scale, classes, batch, height, width, max_det, level = case
    checkpoint = seeded_checkpoint(scale, classes, seed=1)
    image = np.random.default_rng(0).random((batch, height, width, 3)).astype(np.float32)
    rows = run(checkpoint, image, max_det=max_det, level=level)
    nchw = image.transpose(0, 3, 1, 2)
    reference = run_reference(checkpoint.tensors, nchw, max_det=max_det, keep=lambda name: False)
    matched(rows, reference.rows)


@pytest.mark.slow
def test_bytes_and_floats_give_the_same() -> None:
    checkpoint = seeded_checkpoint("n", 4, seed=2)
    image = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    from_bytes = run(checkpoint, image, max_det=40)
    from_floats = run(checkpoint, (image / 255).astype(np.float32), max_det=40)
    matched(from_bytes, from_floats)


def test_the_seeded_network_equals_its_stored_rows() -> None:
    folder = os.environ.get("YOLOMLIR_TEST_REFERENCE")
    if not folder:
        pytest.skip("YOLOMLIR_TEST_REFERENCE is not set: it names the seeded reference's folder")
    files = Path(folder)
    checkpoint = load_checkpoint(files / "yolo26n_seeded_unfused.safetensors")
    image = np.load(files / "input_bus_640.npy")
    rows = run(checkpoint, np.ascontiguousarray(image.transpose(0, 2, 3, 1)))
    matched(rows, np.load(files / "output_300x6.npy").reshape(rows.shape))
