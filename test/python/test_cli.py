"""The command line as a user meets it: what it prints, writes, refuses and returns."""

from __future__ import annotations

import json
import os
import pickle
import pkgutil
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import yolomlir.cli
from yolomlir.api import Model
from yolomlir.cli import main as command_line
from yolomlir.cli.main import main
from yolomlir.frontend.names import COCO_NAMES

pytestmark = pytest.mark.usefixtures("cache")
SIDE = 64
"""Of the model's images: 84 anchors, and kernels that run in microseconds."""
SMALL = ["--imgsz", str(SIDE), "--device", "cpu"]
ALL = [*SMALL, "--conf", "0"]


def yolomlir_command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "yolomlir", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=120, check=False, **options
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command says before it exits with 2."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("yolomlir: error: "), err
    assert err.count("\n") == 1, err
    return err


# ---- help ---------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom yolomlir.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'mlir', 'rich', 'cv2', 'PIL', 'llvmlite'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "predict" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_the_table_of_commands_is_what_the_modules_say() -> None:
    names = [m.name for m in pkgutil.iter_modules(yolomlir.cli.__path__)]
    modules = {n for n in names if hasattr(command_line.command(n), "add_parser")}
    assert modules == set(command_line.available())
    for name in modules:
        (choices,) = [
            action
            for action in command_line.build_parser(name)._actions
            if action.dest == "command"
        ]
        said = {c.dest: c.help for c in choices._choices_actions}
        assert said == command_line.available(), name


def test_python_minus_m() -> None:
    done = yolomlir_command("--version")
    assert (done.returncode, done.stdout) == (0, f"yolomlir {yolomlir.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["predct"], "did you mean 'predict'?"),
        (["frobnicate"], "one of: predict"),
        (["predict", "x.pt"], "required: source"),
        (["predict", "x.pt", "y.jpg", "--bogus"], "unrecognized arguments: --bogus"),
        (["predict", "x.pt", "y.jpg", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["compile", "x.pt"], "give -o FILE, --emit LEVEL or --plot-memory FILE"),
        (["compile", "x.pt", "-o", "y.ylm", "--target", "sm_999"], "one of: cpu, sm_80"),
        (["compile", "x.pt", "-o", "-"], "an artifact goes into a file"),
        (["compile", "x.pt", "--emit", "yolo", "--target", "cpu,sm_90"], "one target's IR"),
        (["compile", "x.pt", "--emit", "ptx", "-O", "7"], "invalid choice: 7"),
    ],
)
def test_wrong_commands(capsys, arguments, says) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize("size", ["100", "0", "abc", "64x", "64x65", "-32", "²", "1000000000"])
def test_sizes_that_cannot_be(capsys, photo, size) -> None:
    line = refused(capsys, "predict", "not-there.pt", photo, f"--imgsz={size}")
    assert size.lstrip("-") in line or "65" in line


def test_size_100_says_which_are_near(capsys, photo) -> None:
    line = refused(capsys, "predict", "not-there.pt", photo, "--imgsz", "100")
    assert "multiple of 32" in line
    assert "96 or 128" in line


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "many"])
def test_confidences_that_cannot_be(capsys, photo, value) -> None:
    line = refused(capsys, "predict", "x.pt", photo, f"--conf={value}")
    assert f"'{value}' is not a number in 0..1" in line


def test_no_gpu(capsys, photo, monkeypatch) -> None:
    monkeypatch.setattr("yolomlir.runtime.device.cuda_device", lambda: "no CUDA GPU is visible")
    line = refused(capsys, "predict", "x.pt", photo, "--device", "cuda")
    assert "no CUDA GPU is visible" in line
    assert "--device cpu" in line


def test_a_bad_environment_variable(capsys, monkeypatch) -> None:
    monkeypatch.setenv("YOLOMLIR_LOG_LEVEL", "LOUD")
    assert "YOLOMLIR_LOG_LEVEL: is 'LOUD'" in refused(capsys, "info")


# ---- bad checkpoints ----------------------------------------------------------------------------


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def _truncated(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[:100_000])


def _random(path: Path, good: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def _executing(path: Path, good: Path) -> None:
    payload = {"model": _Payload(path.with_name("executed"))}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(payload))
        archive.writestr("archive/version", "3")


def _executing_unzipped(path: Path, good: Path) -> None:
    path.write_bytes(pickle.dumps({"model": _Payload(path.with_name("executed"))}))


def _misshapen(path: Path, good: Path) -> None:
    tensors = load_file(good)
    tensors["model.3.conv.weight"] = tensors["model.3.conv.weight"][:, :10].copy()
    save_file(tensors, path)


def _incomplete(path: Path, good: Path) -> None:
    tensors = load_file(good)
    del tensors["model.3.conv.weight"]
    save_file(tensors, path)


def _empty(path: Path, good: Path) -> None:
    path.touch()


def _folder(path: Path, good: Path) -> None:
    path.mkdir()


def _missing(path: Path, good: Path) -> None:
    return


BAD_CHECKPOINTS = [
    ("bad.safetensors", _truncated, "truncated"),
    ("bad.pt", _random, "not a readable .pt file"),
    ("bad.pt", _executing, "refused"),
    ("bad.pt", _executing_unzipped, "not a readable .pt file"),
    ("bad.safetensors", _misshapen, "model.3.conv.weight is 64x10x3x3, expected 64x64x3x3"),
    ("bad.safetensors", _incomplete, "1 missing (model.3.conv.weight)"),
    ("bad.safetensors", _empty, "the file is empty"),
    ("bad.safetensors", _folder, "Is a directory"),
    ("bad.safetensors", _missing, "no such file"),
    ("bad.ylm", _random, "is not a yolomlir artifact, or is damaged"),
    ("bad.ylm", _missing, "no such file"),
]


@pytest.mark.parametrize("command", ["predict", "compile", "info"])
@pytest.mark.parametrize(("name", "make", "says"), BAD_CHECKPOINTS)
def test_bad_checkpoints(
    capsys, tmp_path, checkpoint_file, photo, command, name, make, says
) -> None:
    path = tmp_path / name
    make(path, checkpoint_file)
    more = {"predict": [photo, *SMALL], "compile": ["-o", tmp_path / "out.ylm"], "info": []}
    line = refused(capsys, command, path, *more[command])
    assert str(path) in line
    assert says in line
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out.ylm").exists()


def test_no_traceback_in_a_process_of_its_own(tmp_path, checkpoint_file, photo) -> None:
    path = tmp_path / "bad.pt"
    _executing(path, checkpoint_file)
    done = yolomlir_command("predict", path, photo)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"yolomlir: error: {path}: refused")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "executed").exists()


def test_a_bug_is_one_line_with_exit_code_1(capsys, monkeypatch) -> None:
    def fail(args):
        raise ZeroDivisionError("planted\nfault")

    monkeypatch.setattr("yolomlir.cli.info.run", fail)
    assert main(["info"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("yolomlir: internal error: ZeroDivisionError: planted fault")
    assert err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main(["--traceback", "info"])


# ---- sources and outputs ------------------------------------------------------------------------


def test_bad_sources_fail_before_the_compile(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("yolomlir.api.compile", lambda *a, **k: pytest.fail("compiled"))
    (tmp_path / "empty").mkdir()
    assert "no such file" in refused(capsys, "predict", "x.pt", tmp_path / "absent.jpg")
    assert "without images" in refused(capsys, "predict", "x.pt", tmp_path / "empty")
    assert "matches this pattern" in refused(capsys, "predict", "x.pt", tmp_path / "*.jpg")


def test_a_text_file_as_image(capsys, tmp_path, checkpoint_file) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("hello")
    line = refused(capsys, "predict", checkpoint_file, text, *SMALL)
    assert f"{text}: not a picture" in line


def test_unwritable_outputs_fail_before_the_compile(capsys, tmp_path, photo, monkeypatch) -> None:
    monkeypatch.setattr("yolomlir.api.compile", lambda *a, **k: pytest.fail("compiled"))
    monkeypatch.setattr("yolomlir.api.compile_artifact", lambda *a, **k: pytest.fail("compiled"))
    nowhere = tmp_path / "absent" / "out"
    in_file = tmp_path / "file" / "folder"
    in_file.parent.touch()
    assert str(nowhere) in refused(capsys, "predict", "x.pt", photo, "--json", nowhere)
    assert str(tmp_path) in refused(capsys, "predict", "x.pt", photo, "--json", tmp_path)
    assert str(in_file) in refused(capsys, "predict", "x.pt", photo, "--save", in_file)
    for option in ("-o", "--plot-memory"):
        assert str(nowhere) in refused(capsys, "compile", "x.pt", option, nowhere)


def test_a_failed_run_leaves_the_old_json_and_no_new_one(
    capsys, tmp_path, photo, checkpoint_file
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("precious")
    for path in (old, new):
        refused(
            capsys,
            "predict",
            checkpoint_file,
            photo,
            *SMALL,
            "--json",
            path,
            "--classes",
            "unicorn",
        )
    assert old.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.json"]


def test_one_bad_image_of_several(capsys, tmp_path, photo, checkpoint_file) -> None:
    folder = tmp_path / "photos with spaces"
    folder.mkdir()
    shutil.copy(photo, folder / "a photo.jpg")
    shutil.copy(photo, folder / "c.jpg")
    (folder / "b.jpg").write_bytes(photo.read_bytes()[:2000])
    output = tmp_path / "out.json"
    code = main(["predict", str(checkpoint_file), str(folder), *ALL, "--json", str(output)])
    out, err = capsys.readouterr()
    assert code == 1
    assert err.count("\n") == 1
    assert "b.jpg" in err
    images = [record["image"] for record in json.loads(output.read_text())]
    assert images == [str(folder / "a photo.jpg"), str(folder / "c.jpg")]
    assert str(folder / "a photo.jpg") in out


def test_json_on_stdout_is_nothing_but_json(tmp_path, photo, checkpoint_file) -> None:
    done = yolomlir_command(
        "predict", checkpoint_file, photo, *ALL, "--json", "-", "--save", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert set(record) == {"image", "width", "height", "detections"}
    assert (record["image"], record["width"], record["height"]) == (str(photo), 512, 512)
    assert len(record["detections"]) == 84
    for d in record["detections"]:
        assert all(0 <= side <= 512 for side in d["box"])
        assert d["class"] == COCO_NAMES[d["class_id"]]
    scores = [d["score"] for d in record["detections"]]
    assert scores == sorted(scores, reverse=True)
    with Image.open(tmp_path / "out" / photo.name) as saved:
        assert saved.size == (512, 512)
    assert "saved" in done.stderr


def detections(capsys, *arguments: object) -> list[dict]:
    assert main(["predict", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)[0]["detections"]


def test_classes_by_name_index_or_both(capsys, photo, checkpoint_file) -> None:
    everything = detections(capsys, checkpoint_file, photo, *ALL)
    ids = sorted({d["class_id"] for d in everything})[:2]
    assert len(ids) == 2
    wanted = [d for d in everything if d["class_id"] in ids]
    first, second = COCO_NAMES[ids[0]], str(ids[1])
    for given in ([first, second], [f"{first},{second}"]):
        assert detections(capsys, checkpoint_file, photo, *ALL, "--classes", *given) == wanted
    line = refused(capsys, "predict", checkpoint_file, photo, *SMALL, "--classes", "persn")
    assert "unknown class 'persn'" in line
    assert "did you mean 'person'?" in line
    for given in ("80", "²"):
        line = refused(capsys, "predict", checkpoint_file, photo, *SMALL, "--classes", given)
        assert f"unknown class '{given}'" in line


def test_max_det_is_honoured_or_refused(capsys, photo, checkpoint_file) -> None:
    everything = detections(capsys, checkpoint_file, photo, *ALL)
    assert detections(capsys, checkpoint_file, photo, *ALL, "--max-det", 7) == everything[:7]
    line = refused(capsys, "predict", checkpoint_file, photo, *SMALL, "--max-det", "1000")
    assert "only 84 candidate boxes" in line


def test_names_that_are_not_utf8(tmp_path, photo, checkpoint_file) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9 \xff.jpg"
    shutil.copy(photo, path)
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, path, *ALL]
    done = subprocess.run(
        [*command, "--save", tmp_path / "out", "--json", "-"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert os.fsencode(record["image"]) == path
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_video(capsys, tmp_path, checkpoint_file) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        for level in (0, 100, 200):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    output = tmp_path / "out.json"
    arguments = [checkpoint_file, path, *SMALL, "--json", output, "--save", tmp_path / "out"]
    assert main(["predict", *map(str, arguments)]) == 0
    records = json.loads(output.read_text())
    assert [r["image"] for r in records] == [f"{path} frame {i}" for i in range(3)]
    assert len(list((tmp_path / "out").iterdir())) == 3


# ---- endings ------------------------------------------------------------------------------------


def test_a_reader_that_goes_away(photo, checkpoint_file) -> None:
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 40, *ALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_interruption_keeps_what_was_done(
    capsys, tmp_path, photo, checkpoint_file, monkeypatch
) -> None:
    whole = Model.predict_many

    def interrupted(self, sources, **options):
        yield from whole(self, sources[:1], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "predict_many", interrupted)
    output = tmp_path / "out.json"
    arguments = [checkpoint_file, photo, photo, *ALL, "--json", output]
    assert main(["predict", *map(str, arguments)]) == 130
    assert capsys.readouterr().err == "yolomlir: interrupted\n"
    assert len(json.loads(output.read_text())) == 1


def test_ctrl_c(photo, checkpoint_file) -> None:
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 5000, *ALL]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.readline()  # it is at work now
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "yolomlir: interrupted\n"


# ---- the start ----------------------------------------------------------------------------------

_MEASURE = """
import resource, sys
from yolomlir.cli.main import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
loaded = sorted({'mlir', 'matplotlib', 'pycocotools'} & set(sys.modules))
(peak,) = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]
print(code, used.ru_utime + used.ru_stime, int(peak) * 1024, loaded, file=sys.stderr)
"""
# Not ru_maxrss: a process inherits it from the one that started it.


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_a_warm_start_is_quick_and_small(photo, checkpoint_file, capsys) -> None:
    arguments = ["predict", str(checkpoint_file), str(photo), *SMALL]
    assert main(arguments) == 0  # now it is in the cache
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    code, cpu_s, peak_bytes, loaded = done.stderr.split(maxsplit=3)
    assert int(code) == 0
    assert loaded == "[]\n"
    assert int(peak_bytes) < 300e6
    assert float(cpu_s) < 1.5  # processor time: a busy machine must not fail this


# ---- compile, info, demo ------------------------------------------------------------------------


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
def test_what_a_compiled_file_cannot_honour(capsys, photo, artifact_file, option, says) -> None:
    line = refused(capsys, "predict", artifact_file, photo, "--device", "cpu", *option)
    assert f"{artifact_file}: was compiled with {says}" in line


@pytest.mark.parametrize("place", [0.001, 0.3, 0.99])
def test_a_damaged_compiled_file(capsys, tmp_path, photo, artifact_file, place) -> None:
    data = bytearray(artifact_file.read_bytes())
    at = int(len(data) * place)
    data[at : at + 8] = bytes(b ^ 0xFF for b in data[at : at + 8])
    path = tmp_path / "damaged.ylm"
    path.write_bytes(data)
    line = refused(capsys, "predict", path, photo)
    assert str(path) in line
    assert "damaged" in line
    assert "compile it again" in line


def test_a_compiled_file_for_another_target(capsys, tmp_path, artifact_file) -> None:
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


def test_a_picture_of_the_memory(tmp_path, checkpoint_file) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "arena.svg"
    arguments = [checkpoint_file, "--target", "cpu", "--imgsz", SIDE, "--plot-memory", path]
    assert main(["compile", *map(str, arguments)]) == 0
    assert "<svg" in path.read_text()


def test_info_as_json(capsys, checkpoint_file, artifact_file) -> None:
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


def test_info_as_text(capsys, checkpoint_file, artifact_file) -> None:
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


def test_demo_with_weights(capsys, tmp_path, checkpoint_file) -> None:
    assert main(["demo", "--weights", str(checkpoint_file), *SMALL, "--save", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "512x512" in out
