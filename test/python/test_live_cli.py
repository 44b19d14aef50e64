"""`yolomlir predict` of cameras and streams: lines, JSON, Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import live_fakes
import pytest
from live_fakes import WAIT_S, FakeModel, counting, readers
from live_servers import tcp_server, transport_stream

from yolomlir.cli.main import main

pytest.importorskip("av", reason="PyAV is not installed")


@pytest.fixture
def plug_in(monkeypatch):
    """Makes a camera out of a script."""
    return partial(live_fakes.plug_in, monkeypatch)


@pytest.fixture
def model(monkeypatch) -> FakeModel:
    model = FakeModel()
    monkeypatch.setattr("yolomlir.api.compile", lambda *a, **k: model)
    monkeypatch.setattr("yolomlir.frontend.download.resolve_weights", lambda name: name)
    return model


def predict(*arguments: object) -> int:
    return main(["predict", "x.pt", *map(str, arguments), "--device", "cpu"])


def test_a_line_a_frame_and_a_closing_line(plug_in, model, tmp_path, capsys) -> None:
    plug_in(counting())
    assert predict("camera:0", "--frames", 3, "--save", tmp_path) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert err == ""
    assert len(lines) == 3
    for line, saved in zip(lines, sorted(tmp_path.iterdir()), strict=True):
        assert line.startswith("camera:0 frame ")
        assert " s  1 person, 2 bus  " in line
        assert line.endswith(f" ms  saved {saved}")
    passed = int(lines[-1].split()[2]) + 1
    assert last.startswith(f"camera:0: 3 frames, {passed - 3} dropped, median latency ")


def test_json_lines_at_once(plug_in, model, tmp_path, capsys) -> None:
    output = tmp_path / "out.jsonl"
    written: list[int] = []

    def script():
        for number in range(5):
            if output.exists():
                written.append(len(output.read_text().splitlines()))
            yield number

    plug_in(script())
    assert predict("camera:0", "--json", output) == 1
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert records[-1]["image"] == "camera:0 frame 4"
    assert records[-1]["frame_number"] == 4
    assert set(records[-1]) == {
        "image", "width", "height", "detections", "frame_number", "time_s", "latency_s"
    }  # fmt: skip
    assert [d["class"] for d in records[-1]["detections"]] == ["person", "bus", "bus"]
    assert capsys.readouterr().err == "yolomlir: error: camera:0: the stream ended after 5 frames\n"


def test_json_lines_of_pictures_and_of_none(model, tmp_path, photo, checkpoint_file) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("older\n")
    assert predict(photo, photo, "--json", output) == 0
    assert [json.loads(line)["image"] for line in output.read_text().splitlines()] == [
        str(photo)
    ] * 2
    assert predict(checkpoint_file, "--json", output) == 2  # no picture
    assert output.read_text() == ""


def test_live_json_on_stdout_is_lines_and_nothing_else(plug_in, model, capsys) -> None:
    plug_in(counting())
    assert predict("0", "--frames", 2, "--json", "-") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["detections"][0]["class"] for line in out.splitlines()] == [
        "person",
        "person",
    ]
    assert err.splitlines()[-1].startswith("0: 2 frames, ")


def test_ctrl_c_keeps_what_was_done_and_frees_the_camera(plug_in, model, tmp_path, capsys) -> None:
    model.interrupt_at = 3
    for name in ("out.jsonl", "out.json"):
        model.batches.clear()
        camera = plug_in(counting())
        assert predict("camera:0", "--json", tmp_path / name) == 130
        out, err = capsys.readouterr()
        assert err == "yolomlir: interrupted\n"
        assert out.splitlines()[-1].startswith("camera:0: 2 frames, ")
        assert camera.closed.is_set()
        assert readers() == []
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert len(json.loads((tmp_path / "out.json").read_text())) == 2


_PREDICTS = """
import signal, sys
import yolomlir.api
from live_fakes import FakeModel
from yolomlir.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
yolomlir.api.compile = lambda *a, **k: FakeModel()
sys.exit(main())
"""


def test_ctrl_c_of_a_process_that_reads_a_stream(photo, tmp_path) -> None:
    done = threading.Event()
    output = tmp_path / "out.jsonl"

    def serve(connection: socket.socket) -> None:
        connection.sendall(transport_stream(8))
        done.wait(100)

    with tcp_server(serve) as port:
        command = [sys.executable, "-c", _PREDICTS, "predict", photo]  # any file will do
        command += [f"tcp://127.0.0.1:{port}", "--json", output, "--device", "cpu"]
        folder = Path(__file__).parent
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": folder}
        with subprocess.Popen(command, text=True, **pipes) as process:
            first = process.stdout.readline()  # the rest is silence: it waits for a frame now
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        done.set()
    assert first.startswith(f"tcp://127.0.0.1:{port} frame ")
    assert process.returncode == 130, err
    assert err == "yolomlir: interrupted\n"
    assert "median latency" in out
    lines = [line for line in (first + out).splitlines() if f":{port} frame " in line]
    # An interrupt between the two leaves a frame written that was not printed.
    assert len(output.read_text().splitlines()) in (len(lines), len(lines) + 1)


@pytest.mark.usefixtures("cache")
def test_the_tutorials_camera(checkpoint_file, tmp_path, monkeypatch, capsys) -> None:
    """Its Python runs as it is printed, on a stream in place of a camera."""
    text = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert '"camera:0"' in code
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(checkpoint_file)
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(transport_stream(8))
        done.wait(WAIT_S)

    with tcp_server(serve) as port:
        code = code.replace("camera:0", f"tcp://127.0.0.1:{port}").replace("320", "64")
        exec(code.replace("frames=100", "frames=1"), {})
        done.set()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("0 ")


_WAITS = """
import sys
from yolomlir.vision.sources import open_sources
frames = open_sources(sys.argv[1], timeout_s=1)
print(next(frames).frame_number, flush=True)
frames.close()
"""


def test_a_program_ends_while_a_stream_is_silent() -> None:
    """The thread is in FFmpeg, which calls Python: it has to be gone before the interpreter is."""
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(transport_stream(8))
        done.wait(WAIT_S)

    with tcp_server(serve) as port:
        command = [sys.executable, "-c", _WAITS, f"tcp://127.0.0.1:{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        done.set()
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["camera:"], "camera:: names no camera"),
        (["camera:99"], "camera:99: no camera /dev/video99"),
        (["/dev/video99"], "/dev/video99: no such camera"),
        (["camera:0", "--frames", "0"], "'0' is not a whole number of at least 1"),
        (["camera:0", "--frames", "-3"], "'-3' is not a whole number of at least 1"),
        (["rtsp://host/x", "photo.jpg"], "may never end"),
    ],
)
def test_refused_before_anything_is_compiled(capsys, monkeypatch, arguments, message) -> None:
    if sys.platform != "linux" and "/dev" in message:
        pytest.skip("names of devices on Linux")
    monkeypatch.setattr("yolomlir.api.compile", lambda *a, **k: pytest.fail("compiled"))
    try:
        code = predict(*arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert err.count(os.linesep) == 1
