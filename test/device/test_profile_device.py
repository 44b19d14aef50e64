"""Profile, compare and bench on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from yolomlir.api import Model, compile
from yolomlir.cli.main import main
from yolomlir.diagnostics import InternalError
from yolomlir.evaluate.profile import CUPTI, EVENTS, Profile, profile
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.runtime.artifact import Artifact
from yolomlir.runtime.cupti import find_library

pytestmark = pytest.mark.device

ALL_WITHIN = "all within their derived tolerances"


@pytest.fixture(scope="module")
def checkpoint_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return seeded_file("n", tmp_path_factory.mktemp("weights"))


def seeded_file(scale: str, folder: Path) -> str:
    path = folder / f"yolo26{scale}.safetensors"
    save_file(seeded_checkpoint(scale, 80, 0).tensors, path)
    return str(path)


@pytest.fixture(scope="module")
def artifact(checkpoint_file: str) -> Artifact:
    with compile(checkpoint_file) as model:
        return model.artifact


def measured(artifact: Artifact, method: str) -> Profile:
    image = np.random.default_rng(0).integers(0, 256, (1, 640, 640, 3), dtype=np.uint8)
    return profile(lambda: Model(artifact), image, count=50, method=method)


def test_records_add_up_to_the_graph(artifact: Artifact) -> None:
    """What some kernel runs for is the graph's time but for launches; the rest is overlap."""
    if find_library() is None:
        pytest.skip("CUPTI is not installed")
    try:
        found = measured(artifact, CUPTI)
    except InternalError as error:
        pytest.skip(f"CUPTI cannot be used here: {error}")
    assert found.method == CUPTI
    assert found.sum_us >= found.busy_us - 1e-6
    assert found.busy_us == pytest.approx(found.total_us.median, rel=0.05)
    assert found.overlap_us == pytest.approx(found.sum_us - found.busy_us)
    assert bool(found.overlaps) == (found.overlap_us > 0.01)
    assert {t.name for t in found.transfers} == {"H2D image", "D2H detections"}


def test_events_time_every_kernel(artifact: Artifact) -> None:
    found = measured(artifact, EVENTS)
    assert found.method == EVENTS
    assert len(found.kernels) == len(artifact.programs[next(iter(artifact.programs))].plan.steps)
    assert found.overlaps == ()
    assert found.sum_us == pytest.approx(found.busy_us, rel=1e-6)
    assert sum(k.times.median > 0.5 for k in found.kernels) > 0.9 * len(found.kernels)


def test_the_profile_command(artifact: Artifact, tmp_path: Path) -> None:
    path, result = tmp_path / "model.ylm", tmp_path / "p.json"
    artifact.save(path)
    arguments = ["--count", "10", "--method", "events", "--json", str(result)]
    assert main(["profile", str(path), *arguments]) == 0
    data = json.loads(result.read_text())
    assert data["environment"]["gpu"]
    assert data["kernels"]


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_every_layer_is_that_of_the_cpu(
    checkpoint_file: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cuda", "--precision", precision, "--layers", "--against", "cpu"]
    main(["compare", checkpoint_file, *arguments])
    assert ALL_WITHIN in capsys.readouterr().out


@pytest.mark.parametrize("scale", ["n", "s"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("level", ["2", "3"])
def test_every_layer_is_that_in_float64(
    scale: str, precision: str, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each convolution by itself (level 2), and in chains (3)."""
    weights, model = seeded_file(scale, tmp_path), str(tmp_path / "model.ylm")
    options = ["--precision", precision, "-O", level, "-o", model]
    assert main(["compile", weights, *options]) == 0
    main(["compare", model, "--weights", weights, "--device", "cuda", "--layers"])
    assert ALL_WITHIN in capsys.readouterr().out


def test_bench_beside_pytorch(checkpoint_file: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = tmp_path / "b.json"
    arguments = ["--against", "torch-eager", "torch-channels-last", "--rounds", "2"]
    assert main(["bench", checkpoint_file, *arguments, "--json", str(result)]) == 0
    data = json.loads(result.read_text())
    for engine in data["engines"]:
        assert engine["state"] == "ok", engine
        columns = engine["columns_ms"]
        assert {"wall", "enqueue", "h2d", "gpu", "d2h"} <= set(columns)
        parts = sum(columns[c]["median"] for c in ("h2d", "gpu", "d2h"))
        assert parts <= 1.2 * columns["wall"]["median"]
