"""`yolomlir val`: figures, files, interruption, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coco_protocol import (
    ScriptedDetector,
    noisy_rows,
    pycocotools_figures,
)

from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS
from yolomlir.evaluate.scoring import FIGURES
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.plan import Plan


class FakeModel:
    """A compiled model whose rows are a scripted detector's."""

    def __init__(self, detector: ScriptedDetector) -> None:
        self._detector = detector
        height, width = detector.imgsz
        self.info = ModelInfo(
            scale="n",
            classes=80,
            names=tuple(f"thing {i}" for i in COCO_CATEGORY_IDS),
            height=height,
            width=width,
            batch=detector.batch,
            max_det=300,
            precision="fp32",
        )
        program = Program("cpu", Plan(0, {}, {}, ()), {"w": np.ones(3, np.float32)}, {}, {})
        self.target = "cpu"
        self.artifact = Artifact(self.info, {"cpu": program})
        self.closed = False

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self._detector(images)

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.fixture
def command(few_categories, tmp_path, monkeypatch):
    """Runs `yolomlir val` with a scripted model; returns the exit code and that model."""
    from yolomlir.cli import main, val

    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(val, "resolve_weights", lambda name: name)

    def run(*arguments: object, fail_after: int | None = None) -> tuple[int, FakeModel]:
        model = FakeModel(ScriptedDetector(few_categories, noisy_rows, fail_after=fail_after))
        monkeypatch.setattr(val, "compile", lambda *_, **__: model)
        return main.main(["val", "yolo26n.pt", "--device", "cpu", *map(str, arguments)]), model

    return run


def test_figures_are_printed_and_written(command, few_categories, tmp_path, capsys) -> None:
    annotations = few_categories / "annotations" / "instances_val2017.json"
    figures, found = tmp_path / "figures.json", tmp_path / "found.json"
    code, model = command(
        *("--images", few_categories / "val2017", "--annotations", annotations),
        *("--json", figures, "--save-json", found, "--workers", 1),
    )
    assert code == 0
    assert model.closed
    data = json.loads(figures.read_text())
    expected = pycocotools_figures(few_categories, json.loads(found.read_text()))
    assert {k: data[k] for k in FIGURES} == pytest.approx(expected, abs=1e-12)
    assert data["settings"]["model"] == "yolo26n.pt"
    assert f"{data['AP']:.4f}" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_a_cache_that_cannot_be_written_is_a_warning(
    command, few_categories, tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "file"))
    code, _ = command("--data", few_categories)
    assert code == 0
    assert "will begin anew" in caplog.text


def test_an_interrupted_run_goes_on(command, few_categories, tmp_path, capsys) -> None:
    code, _ = command("--data", few_categories, fail_after=2)
    assert code == 130
    code, model = command("--data", few_categories)
    assert code == 0
    assert len(model._detector.seen) == 16 - 6
    assert "6 images were taken from an interrupted run" in capsys.readouterr().out
    command("--data", few_categories, fail_after=2)
    _, model = command("--data", few_categories, "--no-resume")
    assert len(model._detector.seen) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --data"),
        (("--images", "."), "expected either --data"),
        (("--data", ".", "--images", ".", "--annotations", "x"), "expected either --data"),
        (("--data", "nowhere"), "nowhere: no such file or folder"),
        (("--data", ".", "--conf", "2"), "confidence 2.0"),
        (("--data", ".", "--max-det", "1000"), "compiled for 300"),
        (("--data", ".", "--json", "no/folder/x.json"), "no/folder/x.json: cannot be written"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    command, capsys, arguments, message, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = command(*arguments)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
