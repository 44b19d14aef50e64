"""`yolomlir bench`: engines in processes of their own, checked, then timed in rounds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small_model

from yolomlir.cli.main import main
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.benchmark import _Checker, candidates_named
from yolomlir.evaluate.graph import graph_of
from yolomlir.evaluate.peers import worker
from yolomlir.evaluate.peers.base import PEERS, CpuPeer, Problem
from yolomlir.evaluate.statistics import summarize
from yolomlir.evaluate.tolerance import exact_reference

HEIGHT, WIDTH = small_model.SIZE


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(small_model.folder() / "cache"))


def bench(*arguments: str) -> int:
    return main(
        ["bench", small_model.checkpoint_file(), "--device", "cpu", "--imgsz", small_model.IMGSZ,
         "--threads", "1", "--rounds", "2", "--seconds", "0.05", *arguments]
    )  # fmt: skip


def test_the_table_and_its_files(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    """ONNX Runtime beside us; TensorRT is named though it is not here."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("a.json", "a.md", "a.png")}
    engines = ["onnxruntime", *(n for n in ("openvino", "torch-eager") if not PEERS[n].missing())]
    code = bench(
        "--against", *engines, "tensorrt-rtx",
        "--json", str(files["a.json"]),
        "--markdown", str(files["a.md"]),
        "--plot", str(files["a.png"]),
    )  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0, text
    assert "checked" in text
    data = json.loads(files["a.json"].read_text())
    assert data["kind"] == "bench"
    assert data["environment"]["command"].startswith("yolomlir")
    assert data["settings"]["threads"] == 1
    by_name = {engine["name"]: engine for engine in data["engines"]}
    for name in ("yolomlir cpu fp32", *engines):
        engine = by_name[name]
        assert engine["state"] == "ok", engine
        assert len(engine["rounds_ms"]) == 2
        wall = engine["columns_ms"]["wall"]
        assert wall["count"] >= 6
        assert wall["minimum"] <= wall["median"] <= wall["p90"] <= wall["p99"] <= wall["maximum"]
        assert engine["inferences_per_s"] == pytest.approx(1e3 / wall["median"])
        assert 20 < engine["peak_mb"] < 4000
        assert engine["build_s"] > 0
    assert by_name["tensorrt-rtx"]["state"] == "absent"
    assert "not installed" in by_name["tensorrt-rtx"]["reason"]
    table = files["a.md"].read_text()
    assert "| engine |" in table
    assert "| onnxruntime (cpu) | fp32 |" in table
    assert files["a.png"].read_bytes().startswith(b"\x89PNG")


def test_a_compiled_file_alone(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    path = tmp_path / "model.ylm"
    size = ["--imgsz", small_model.IMGSZ]
    source = small_model.checkpoint_file()
    assert main(["compile", source, "-o", str(path), "--target", "cpu", *size]) == 0
    exported = tmp_path / "model.onnx"
    arguments = ["--against", "none", "--rounds", "1", "--seconds", "0.05", "--onnx", str(exported)]
    assert main(["bench", str(path), *arguments]) == 0
    assert "yolomlir cpu fp32" in capsys.readouterr().out
    assert main(["bench", str(path), *arguments[:2], "--batch", "4"]) == 2
    assert "compiled with batch 1, not 4" in capsys.readouterr().err
    onnx = pytest.importorskip("onnx")
    onnx.checker.check_model(onnx.load(exported))


def problem(folder: object) -> Problem:
    return Problem(str(folder), HEIGHT, WIDTH, 1, 20, 1, "cpu", "fp32")


@pytest.fixture
def laid_out(tmp_path) -> Problem:
    """A folder as the engines' processes get it."""
    from yolomlir.evaluate.benchmark import _lay_out

    image = np.random.default_rng(0).integers(0, 256, (1, HEIGHT, WIDTH, 3), dtype=np.uint8)
    _lay_out(tmp_path, graph_of(small_model.checkpoint()), image, [])
    return problem(tmp_path)


@pytest.mark.parametrize("name", [n for n, kind in PEERS.items() if "cpu" in kind.devices])
def test_every_engine_that_is_installed_is_right(laid_out: Problem, name: str) -> None:
    """In this process: what each gives is what float64 gives."""
    kind = PEERS[name]
    if kind.missing():
        pytest.skip(kind.missing() or "")
    if name == "torch-compile":
        pytest.skip("takes a minute and a C++ compiler")
    runner = worker.Worker(laid_out, name)
    answer = runner.build()
    graph = graph_of(small_model.checkpoint())
    right, text = _Checker(graph, laid_out.image, laid_out.max_det)(
        np.load(answer["rows"]), answer["precision"], each_layer=True
    )
    assert right, text
    assert len(runner.time(0.01)["samples"]["wall"]) >= 3


def test_wrong_detections_are_not_timed(laid_out: Problem) -> None:
    graph = graph_of(small_model.checkpoint())
    exact = exact_reference(graph, laid_out.image.transpose(0, 3, 1, 2), "fp32", max_det=20)
    checker = _Checker(graph, laid_out.image, 20)
    good = exact.rows.astype(np.float32)
    assert checker(good, "fp32", each_layer=False)[0]
    for index, change in ((0, 0.5), (4, 0.01), (5, 1.0)):
        wrong = good.copy()
        wrong[0, 3, index] += change
        assert not checker(wrong, "fp32", each_layer=True)[0], index
    assert not checker(good[:, :10], "fp32", each_layer=False)[0]


def test_an_engine_that_dies_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process fails; the others' figures are there, and the exit code says so."""
    from yolomlir.evaluate import benchmark

    spawn = benchmark._spawn

    def broken(name: str, problem: Problem) -> object:
        return spawn("nonsense" if name == "onnxruntime" else name, problem)

    monkeypatch.setattr(benchmark, "_spawn", broken)
    pytest.importorskip("onnxruntime")
    assert bench("--against", "onnxruntime") == 1
    text = capsys.readouterr().out
    assert "onnxruntime: failed: KeyError: 'nonsense'" in text
    assert "yolomlir cpu fp32: checked" in text


@pytest.mark.parametrize("asked", [1, 5])
def test_an_interrupt_keeps_the_rounds_that_are_done(
    laid_out: Problem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: int
) -> None:
    from yolomlir.evaluate import benchmark

    pytest.importorskip("onnxruntime")
    turns = 0
    original = benchmark._Engine.ask

    def ask(engine: benchmark._Engine, command: str, **arguments: object) -> dict[str, object]:
        nonlocal turns
        turns += command == "time"
        if turns == asked and command == "time":
            with monkeypatch.context() as patch:
                patch.setattr(engine.process.stdout, "readline", interrupted)
                return original(engine, command, **arguments)
        return original(engine, command, **arguments)

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark._Engine, "ask", ask)
    candidates = [benchmark.Candidate("onnxruntime", "fp32")]
    arguments = (candidates, laid_out, graph_of(small_model.checkpoint()), laid_out.image)
    if asked == 1:
        with pytest.raises(KeyboardInterrupt):
            benchmark.benchmark(*arguments, rounds=9, seconds=0.01)
        return
    result = benchmark.benchmark(*arguments, rounds=9, seconds=0.01)
    assert result.settings["rounds"] == 4
    assert len(result.engines[0].rounds_ms) == 4
    assert result.engines[0].columns["wall"].count >= 4
    assert "interrupted: the times are of 4 of 9 rounds" in caplog.text


def test_names_of_engines() -> None:
    names = [c.name for c in candidates_named(["torch", "onnxruntime"], "cpu", ["fp32"])]
    assert names == [
        "torch-eager", "torchscript", "torch-compile", "torch-channels-last", "onnxruntime",
    ]  # fmt: skip
    assert "tensorrt" not in [c.name for c in candidates_named(["all"], "cpu", ["fp32"])]
    assert "tensorrt" in [c.name for c in candidates_named(["all"], "cuda", ["tf32"])]
    with pytest.raises(UserError, match="unknown engine 'darknet'"):
        candidates_named(["darknet"], "cpu", ["fp32"])


@pytest.mark.parametrize(
    ("precisions", "expected"),
    [
        (("tf32", "fp32", "fp16"), ["torchscript", "torchscript fp16", "onnxruntime-cuda"]),
        (("fp16",), ["torchscript fp16", "onnxruntime-cuda"]),
        (("fp32",), ["torchscript", "onnxruntime-cuda"]),
    ],
)
def test_engines_that_have_float16_are_timed_at_it(
    precisions: tuple[str, ...], expected: list[str]
) -> None:
    """Beside the first precision, or instead of it when yolomlir has no other."""
    found = candidates_named(["torchscript", "onnxruntime-cuda"], "cuda", precisions)
    assert [c.title for c in found] == expected
    other = precisions[0] if precisions[0] != "fp16" else "tf32"
    assert [c.precision for c in found] == [
        "fp16" if "fp16" in name else other for name in expected
    ]


def test_engines_that_round_every_layer_have_a_wider_tolerance(laid_out: Problem) -> None:
    """Of float16; what fewer roundings explain is right there as well. No other precision's is."""
    graph = graph_of(small_model.checkpoint())
    image = laid_out.image.transpose(0, 3, 1, 2)
    deviations = {
        (precision, each): exact_reference(graph, image, precision, max_det=20, each_layer=each)
        for precision in ("fp16", "tf32")
        for each in (False, True)
    }
    fused, each = deviations["fp16", False], deviations["fp16", True]
    assert 1.05 * fused.box_deviation < each.box_deviation < 3 * fused.box_deviation
    assert 1.05 * fused.score_deviation < each.score_deviation < 3 * fused.score_deviation
    assert deviations["tf32", False].box_deviation == deviations["tf32", True].box_deviation
    rows = fused.rows.astype(np.float32)
    rows[0, 0, 4] += 4 * (fused.score_deviation + each.score_deviation)
    checker = _Checker(graph, laid_out.image, 20)
    assert not checker(rows, "fp16", each_layer=False)[0]
    assert checker(rows, "fp16", each_layer=True)[0]


def test_statistics() -> None:
    s = summarize([1.0, 2.0, 3.0, 4.0, 100.0], [2.0, 3.0])
    assert (s.count, s.median, s.minimum, s.maximum) == (5, 3.0, 1.0, 100.0)
    assert s.spread == pytest.approx(1 / 3)
    assert summarize([2.0]).spread == 0.0


def test_a_peer_runs_for_the_time_it_is_given() -> None:
    peer = CpuPeer(lambda: np.zeros(1))
    assert len(peer.time(0.0)["wall"]) == 3
    assert len(peer.time(0.02)["wall"]) > 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "darknet"], "unknown engine 'darknet'"),
        (["--seconds", "0"], "--seconds 0.0"),
        (["--json", "/nonexistent/x.json"], "/nonexistent/x.json: cannot be written"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert bench(*arguments) == 2
    assert says in capsys.readouterr().err
