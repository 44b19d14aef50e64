"""`yolomlir compile`, `info` and `demo`, and what a compiled file can and cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import ALL, SIDE, SMALL, detections, refused

import yolomlir.cli
from yolomlir.cli.main import main
from yolomlir.frontend.names import COCO_NAMES

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def artifact_file(cache_folder, checkpoint_file, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model.ylm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOMLIR_CACHE_DIR", str(cache_folder))
        arguments = ["compile", checkpoint_file, "-o", path, "--target", "cpu", "--imgsz", SIDE]
        assert main([str(a) for a in arguments]) == 0
    return path


def test_a_compiled_file_predicts_the_same(capsys, photo, checkpoint_file, artifact_file) -> None:
    from_checkpoint = detections(capsys, checkpoint_file, photo, *ALL)
    assert detections(capsys, artifact_file, photo, "--conf", "0") == from_checkpoint
    assert detections(capsys, artifact_file, photo, *ALL) == from_checkpoint


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--imgsz", "640"], "imgsz 64x64, not 640x640"),
        (["--max-det", "300"], "max_det 84, not 300"),
        (["--precision", "tf32"], "precision fp32, not tf32"),
    ],
)
def test_options_that_a_compiled_file_cannot_honour_are_refused(
    capsys, photo, artifact_file, option, says
) -> None:
    line = refused(capsys, "predict", artifact_file, photo, "--device", "cpu", *option)
    assert f"{artifact_file}: was compiled with {says}" in line


@pytest.mark.parametrize("place", [0.001, 0.3, 0.99])
def test_a_damaged_compiled_file_is_refused(capsys, tmp_path, photo, artifact_file, place) -> None:
    data = bytearray(artifact_file.read_bytes())
    at = int(len(data) * place)
    data[at : at + 8] = bytes(b ^ 0xFF for b in data[at : at + 8])
    path = tmp_path / "damaged.ylm"
    path.write_bytes(data)
    line = refused(capsys, "predict", path, photo)
    assert str(path) in line
    assert "damaged" in line
    assert "compile it again" in line


def test_a_compiled_file_keeps_its_target_and_options(capsys, tmp_path, artifact_file) -> None:
    other = tmp_path / "x.ylm"
    line = refused(capsys, "compile", artifact_file, "--target", "sm_90", "-o", other)
    assert "holds programs for cpu" in line
    assert "compile the checkpoint with --target sm_90" in line
    line = refused(capsys, "compile", artifact_file, "--imgsz", "32", "-o", other)
    assert "--imgsz can no longer change" in line
    line = refused(capsys, "compile", artifact_file, "-O", "2", "-o", other)
    assert "-O can no longer change" in line
    assert not other.exists()


@pytest.mark.parametrize(
    ("level", "target"),
    [("yolo", "cpu"), ("optimized", "cpu"), ("linalg", "cpu"), ("linalg", "sm_120")],
)
def test_emitted_ir_is_read_again(tmp_path, checkpoint_file, level, target) -> None:
    path = tmp_path / "out.mlir"
    arguments = [checkpoint_file, "--emit", level, "--target", target, "--imgsz", SIDE, "-o", path]
    assert main(["compile", *map(str, arguments)]) == 0
    _read_again(path)


def _read_again(path: Path) -> None:
    from yolomlir.dialects import yolo

    from yolomlir.bindings import ir

    with yolo.new_context(), ir.Location.unknown():
        for text in path.read_text().split("// -----\n"):
            module = ir.Module.parse(text)
            module.operation.verify()
            assert str(module).strip() == text.strip()


def test_emitted_ir_goes_to_standard_output(tmp_path, checkpoint_file, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compile", str(checkpoint_file), "--emit", "yolo", "--imgsz", "64"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "-o", "-"]) == 0
    assert capsys.readouterr().out == plain
    assert "yolo.conv2d" in plain
    assert not list(tmp_path.glob("-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "target"),
    [("optimized", "sm_90"), ("linalg", "sm_86"), ("gpu", "sm_90"), ("gpu", "sm_120")],
)
def test_emitted_ir_of_every_target_is_read_again(tmp_path, checkpoint_file, level, target) -> None:
    test_emitted_ir_is_read_again(tmp_path, checkpoint_file, level, target)


def test_plot_memory_writes_a_picture(tmp_path, checkpoint_file) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "arena.svg"
    arguments = [checkpoint_file, "--target", "cpu", "--imgsz", SIDE, "--plot-memory", path]
    assert main(["compile", *map(str, arguments)]) == 0
    assert "<svg" in path.read_text()


def test_info_as_json_describes_machine_checkpoint_and_artifact(
    capsys, checkpoint_file, artifact_file
) -> None:
    def info(*arguments: object) -> dict:
        assert main(["info", "--json", *map(str, arguments)]) == 0
        return json.loads(capsys.readouterr().out)

    machine = info()
    assert machine["yolomlir"] == yolomlir.__version__
    assert machine["native_target"]
    assert machine["cpu"]["threads"] == 2
    checkpoint = info(checkpoint_file)
    assert (checkpoint["model"], checkpoint["classes"]) == ("yolo26n", 80)
    assert checkpoint["names"] == list(COCO_NAMES)
    artifact = info(artifact_file)
    assert artifact["input"] == {"shape": [1, SIDE, SIDE, 3], "dtype": "uint8"}
    assert artifact["output"]["shape"] == [1, 84, 6]
    program = artifact["programs"]["cpu"]
    assert program["precision"] == "fp32"
    assert 50 < program["launches"] <= 100


def test_info_is_readable_text(capsys, checkpoint_file, artifact_file) -> None:
    for arguments, says in (
        ([], "native target"),
        ([str(checkpoint_file)], "person, bicycle"),
        ([str(artifact_file)], "precision fp32"),
    ):
        assert main(["info", *arguments]) == 0
        assert says in capsys.readouterr().out


def test_demo_says_that_its_weights_are_random(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "random, not trained" in err
    (saved,) = (tmp_path / "runs" / "demo").iterdir()
    assert str(saved.relative_to(tmp_path)) in out


def test_demo_with_weights_says_nothing_of_random_ones(capsys, tmp_path, checkpoint_file) -> None:
    assert main(["demo", "--weights", str(checkpoint_file), *SMALL, "--save", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "512x512" in out
