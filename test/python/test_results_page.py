"""The page of results: only what commands wrote, with how it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from yolomlir.tools.results_page import kind_of, main, page

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.benchmark import BenchmarkResult, EngineResult, benchmark_from
from yolomlir.evaluate.environment import environment
from yolomlir.evaluate.statistics import summarize

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


@pytest.fixture
def bench() -> dict[str, Any]:
    record = environment()
    record |= {"gpu": "NVIDIA Test", "driver": "580.1", "cuda": "13.0"}
    settings = {
        "height": 640, "width": 640, "batch": 1, "threads": 2, "max_det": 300, "rounds": 3,
        "seconds_a_turn": 0.5, "scale": "n", "classes": 80,
    }  # fmt: skip
    engines = [
        EngineResult("yolomlir sm_90 tf32", "cuda", "tf32", check="20 matched"),
        EngineResult("torch-eager", "cuda", "tf32", check="20 matched"),
        EngineResult("tensorrt", "cuda", "tf32", state="absent", reason="not installed (tensorrt)"),
    ]
    for engine, wall, gpu in zip(engines, (0.4567, 5.5), (0.25, 5.0), strict=False):
        engine.columns = {"wall": summarize([wall]), "gpu": summarize([gpu])}
        engine.rounds_ms = [wall]
    data: dict[str, Any] = json.loads(
        json.dumps(BenchmarkResult(engines, settings, record).to_dict())
    )
    return data


def test_a_benchmark_is_read_again(bench: dict[str, Any]) -> None:
    assert json.loads(json.dumps(benchmark_from(bench).to_dict())) == bench


def test_figures_come_with_how_they_were_measured(bench: dict[str, Any]) -> None:
    text = page([("h200.json", bench)])
    assert "| yolomlir sm_90 tf32 (cuda) | tf32 | 2189.6 | 0.457 | 0.457 |" in text
    assert "| 20.00x |" in text  # 5.0 / 0.25 of GPU time
    assert "absent: not installed (tensorrt)" in text
    assert f"`{bench['environment']['command']}`" in text
    assert "NVIDIA Test, driver 580.1, CUDA 13.0" in text
    assert bench["environment"]["date"][:10] in text
    assert "D2H" not in text  # nothing was measured for that column


def test_accuracy(tmp_path: Path) -> None:
    data = dict.fromkeys(FIGURES, 0.25) | {"images": 12, "settings": {"confidence": 0.001}}
    source, output = tmp_path / "val.json", tmp_path / "results.md"
    source.write_text(json.dumps(data))
    assert main([str(tmp_path), "-o", str(output)]) == 0
    text = output.read_text()
    assert "| AP | AP50 |" in text
    assert "12 images; confidence 0.001" in text
    assert "## Accuracy" in text
    assert "## Speed" not in text


@pytest.mark.parametrize("data", [{}, [], {"kind": "tune"}, {"AP": 0.1}])
def test_other_files_are_refused(tmp_path: Path, data: Any, capsys: Any) -> None:
    assert kind_of(data) is None
    with pytest.raises(UserError, match=r"x\.json: was written by none of"):
        page([("x.json", data)])
    source = tmp_path / "x.json"
    source.write_text(json.dumps(data))
    assert main([str(source), "-o", str(tmp_path / "y.md")]) == 2
    assert "results_page: error:" in capsys.readouterr().err


def test_commands_do_not_tell_where_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["yolomlir", "bench", "/home/somebody/yolo26n.pt", "--json", "a/b.json"]
    monkeypatch.setattr("sys.argv", arguments)
    assert environment()["command"] == "yolomlir bench yolo26n.pt --json a/b.json"
