"""`yolomlir predict` of images: what it reads, prints and writes, how it ends, how it starts."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cli_runs import ALL, SMALL, detections, refused, yolomlir_command
from PIL import Image
from rich.console import Console

from yolomlir.api import Model
from yolomlir.cli.main import main
from yolomlir.cli.report import _print_table
from yolomlir.frontend.names import COCO_NAMES
from yolomlir.results import Detection, Result

pytestmark = pytest.mark.usefixtures("cache")


def test_bad_sources_fail_before_the_compile(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("yolomlir.api.compile", lambda *a, **k: pytest.fail("compiled"))
    (tmp_path / "empty").mkdir()
    assert "no such file" in refused(capsys, "predict", "x.pt", tmp_path / "absent.jpg")
    assert "without images" in refused(capsys, "predict", "x.pt", tmp_path / "empty")
    assert "matches this pattern" in refused(capsys, "predict", "x.pt", tmp_path / "*.jpg")


def test_a_text_file_is_not_a_picture(capsys, tmp_path, checkpoint_file) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("hello")
    line = refused(capsys, "predict", checkpoint_file, text, *SMALL)
    assert f"{text}: not a picture" in line


def test_a_large_picture_is_read_without_pillows_warning(tmp_path, checkpoint_file) -> None:
    large = tmp_path / "large.png"
    Image.new("1", (10_000, 9_000)).save(large)  # Pillow warns from 89 million pixels on
    done = yolomlir_command("predict", checkpoint_file, large, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("url", ["ftp://host/a.jpg", "file:///a.jpg", "S3://bucket/a.jpg"])
def test_other_kinds_of_urls_are_refused(capsys, url) -> None:
    line = refused(capsys, "predict", "x.pt", url)
    assert f"{url}: no URL of a kind that is read (http, https, rtsp" in line


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


def test_one_bad_image_is_said_and_the_others_are_done(
    capsys, tmp_path, photo, checkpoint_file
) -> None:
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


def test_a_list_without_a_class_is_refused(capsys, photo, checkpoint_file) -> None:
    line = refused(capsys, "predict", checkpoint_file, photo, *SMALL, "--classes", ",")
    assert "names no class" in line


def test_a_picture_may_come_through_a_pipe(capsys, tmp_path, photo, checkpoint_file) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=lambda: pipe.write_bytes(Path(photo).read_bytes()), daemon=True
    )  # which waits for ever where nobody reads
    writer.start()
    found = detections(capsys, checkpoint_file, pipe, *ALL)
    writer.join(10)
    assert found == detections(capsys, checkpoint_file, photo, *ALL)


def test_names_do_not_steer_the_terminal(capsys, tmp_path, photo, checkpoint_file) -> None:
    name = tmp_path / "a\x1b[2J\n.png"
    shutil.copy(photo, name)
    arguments = [checkpoint_file, name, tmp_path / "b\x1b[2J.jpg", *SMALL]
    (tmp_path / "b\x1b[2J.jpg").touch()
    assert main(["predict", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "a\\x1b[2J\\n.png  " in out
    assert "b\\x1b[2J.jpg: " in err


def test_figures_are_whole_on_a_narrow_terminal(capsys, photo, checkpoint_file) -> None:
    found = detections(capsys, checkpoint_file, photo, *ALL)[0]
    narrow = Console(file=io.StringIO(), width=20, force_terminal=True)
    box = tuple(found["box"])
    detection = Detection(box, found["score"], found["class_id"], found["class"])
    _print_table(narrow, Result("x", 1, 1, (detection,), np.zeros((1, 1, 3), np.uint8)))
    assert all(f"{value:.1f}" in narrow.file.getvalue() for value in box)


def test_max_det_is_honoured_or_refused(capsys, photo, checkpoint_file) -> None:
    everything = detections(capsys, checkpoint_file, photo, *ALL)
    assert detections(capsys, checkpoint_file, photo, *ALL, "--max-det", 7) == everything[:7]
    line = refused(capsys, "predict", checkpoint_file, photo, *SMALL, "--max-det", "1000")
    assert "only 84 candidate boxes" in line


def test_file_names_need_not_be_utf8(tmp_path, photo, checkpoint_file) -> None:
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


def test_a_video_is_read_frame_by_frame(capsys, tmp_path, checkpoint_file) -> None:
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


def test_a_reader_that_goes_away_is_no_error(photo, checkpoint_file) -> None:
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 40, *ALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_what_is_written_goes_on_without_the_reader_of_the_table(
    tmp_path, photo, checkpoint_file
) -> None:
    output, folder = tmp_path / "out.json", tmp_path / "out"
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 8, *ALL]
    command += ["--json", output, "--save", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
    assert len(json.loads(output.read_text())) == 8
    assert len(list(folder.iterdir())) == 8


def test_a_full_disk_keeps_what_was_done_and_no_half_picture(
    capsys, tmp_path, photo, checkpoint_file, monkeypatch
) -> None:
    whole, saved = Image.Image.save, []

    def save(self, file, *rest, **options):
        saved.append(file)
        if len(saved) == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, file, *rest, **options)

    monkeypatch.setattr(Image.Image, "save", save)
    output, folder = tmp_path / "out.json", tmp_path / "out"
    arguments = [checkpoint_file, photo, photo, *ALL, "--json", output, "--save", folder]
    assert main(["predict", *map(str, arguments)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert len(json.loads(output.read_text())) == 2
    assert len(list(folder.iterdir())) == 1


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


def test_ctrl_c_amid_an_import_ends_it_in_one_line(tmp_path) -> None:
    """`dataclasses` runs code from strings, of which CPython remembers the interruption."""
    (tmp_path / "amid.py").write_text(
        "import sys\n"
        "from yolomlir.cli import main\n"
        "main.command = lambda name: exec('raise KeyboardInterrupt')\n"
        "sys.exit(main.main(['info']))\n"
    )
    command = [sys.executable, "-m", "amid"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "yolomlir: interrupted\n")


def test_ctrl_c_ends_it_in_one_line(photo, checkpoint_file) -> None:
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 5000, *ALL]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.readline()  # it is at work now
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "yolomlir: interrupted\n"


def test_termination_keeps_what_was_done(tmp_path, photo, checkpoint_file) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "yolomlir", "predict", checkpoint_file, *[photo] * 5000, *ALL]
    command += ["--json", output]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        process.stdout.readline()  # it is at work now
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "yolomlir: terminated\n"
    assert json.loads(output.read_text())


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
