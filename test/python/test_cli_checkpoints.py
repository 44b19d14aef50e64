"""Files that are no weights, or are harmful: one line that says why, and nothing executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from cli_runs import SMALL, refused, yolomlir_command
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.usefixtures("cache")


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
def test_bad_checkpoints_are_refused_and_not_executed(
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
