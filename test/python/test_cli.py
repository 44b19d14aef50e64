"""The command line as a user meets it: help, options that cannot be, bugs."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest
from cli_runs import refused, yolomlir_command

import yolomlir.cli
from yolomlir.cli import main as command_line
from yolomlir.cli.main import main

pytestmark = pytest.mark.usefixtures("cache")


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


def test_python_minus_m_runs_the_command() -> None:
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
        (["predict", "x.pt", "y.jpg", "--cnf", ".5"], "did you mean '--conf'? (yolomlir predict"),
        (["predict", "x.pt", "y.jpg", "--threads", "9999999"], "is more than 999999"),
        (["compare", "x.pt", "--noise", "-1"], "not a whole number of at least 0"),
        (["val", "x.pt", "--data", ".", "--batch", "0"], "not a whole number of at least 1"),
        (["val", "x.pt", "--data", ".", "--plots", "/dev/null/x"], "cannot be written"),
        (["compile", "x.pt", "-o", "y.txt"], "name ends in .ylm (-o y.ylm)"),
        (["compile", "x.pt", "--plot-memory", "y.foo"], "names no kind of picture"),
        (["bench", "x.pt", "--plot", "y.foo"], "names no kind of picture"),
        (["profile", "x.pt", "--roofline", "y.foo"], "names no kind of picture"),
        (["tune", "x.pt", "--plot", "y.foo"], "names no kind of picture"),
        (["tune", "x.pt", "--target", "sm_120", "--predict"], "add --table FILE"),
        (["predict", "x.pt", "y.jpg", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["compile", "x.pt"], "give -o FILE, --emit LEVEL or --plot-memory FILE"),
        (["compile", "x.pt", "-o", "y.ylm", "--target", "sm_999"], "one of: cpu, sm_80"),
        (["compile", "x.pt", "-o", "-"], "an artifact goes into a file"),
        (["compile", "x.pt", "--emit", "yolo", "--target", "cpu,sm_90"], "one target's IR"),
        (["compile", "x.pt", "--emit", "ptx", "-O", "7"], "invalid choice: 7"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(capsys, arguments, says) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize("size", ["100", "0", "abc", "64x", "64x65", "-32", "²", "1000000000"])
def test_sizes_that_cannot_be_are_refused(capsys, photo, size) -> None:
    line = refused(capsys, "predict", "not-there.pt", photo, f"--imgsz={size}")
    assert size.lstrip("-") in line or "65" in line


def test_size_100_says_which_are_near(capsys, photo) -> None:
    line = refused(capsys, "predict", "not-there.pt", photo, "--imgsz", "100")
    assert "multiple of 32" in line
    assert "96 or 128" in line


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "many"])
def test_confidences_that_cannot_be_are_refused(capsys, photo, value) -> None:
    line = refused(capsys, "predict", "x.pt", photo, f"--conf={value}")
    assert f"'{value}' is not a number in 0..1" in line


def test_without_a_gpu_the_line_points_to_the_cpu(capsys, photo, monkeypatch) -> None:
    monkeypatch.setattr("yolomlir.runtime.device.cuda_device", lambda: "no CUDA GPU is visible")
    line = refused(capsys, "predict", "x.pt", photo, "--device", "cuda")
    assert "no CUDA GPU is visible" in line
    assert "--device cpu" in line


def test_a_bad_environment_variable_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setenv("YOLOMLIR_LOG_LEVEL", "LOUD")
    assert "YOLOMLIR_LOG_LEVEL: is 'LOUD'" in refused(capsys, "info")


def test_an_unknown_environment_variable_is_said(caplog, monkeypatch) -> None:
    monkeypatch.setenv("YOLOMLIR_NUM_THREAD", "1")
    assert main(["cache", "ls"]) == 0
    assert "YOLOMLIR_NUM_THREAD is no setting of yolomlir: did you mean" in caplog.text


def test_too_little_memory_is_no_bug(capsys, monkeypatch) -> None:
    def fail(args):
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr("yolomlir.cli.info.run", fail)
    assert "not enough memory: Unable to allocate 1 TiB" in refused(capsys, "info")


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
