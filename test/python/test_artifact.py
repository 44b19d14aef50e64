"""The artifact file: round trip, damage, foreign files, atomic writing."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from yolomlir.diagnostics import UserError
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.plan import Argument, Plan, Step, View


def make() -> Artifact:
    x, y = View(0, 3, (1, 3, 4, 4), "uint8"), View(256, 6, (1, 2, 6))
    step = Step("kernel", "model.0", (Argument(view=x), Argument(weight="w")), (y,), ())
    plan = Plan(512, {"image": x}, {"detections": y}, (step,), {"note": "test"})
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    program = Program("cpu", plan, weights, {"kernel": {"grid": [1, 2, 3]}}, {"a.o": b"\0\1"}, "ir")
    info = ModelInfo("n", 2, ("a", "b"), 64, 96, 1, 2, "fp32")
    return Artifact(info, {"cpu": program})


def test_round_trip(tmp_path: Path) -> None:
    make().save(tmp_path / "m.ylm")
    loaded = Artifact.load(tmp_path / "m.ylm")
    expected = make()
    assert loaded.info == expected.info
    program, reference = loaded.programs["cpu"], expected.programs["cpu"]
    assert program.plan == reference.plan
    assert program.kernels == reference.kernels
    assert program.binaries == reference.binaries
    assert program.ir == "ir"
    np.testing.assert_array_equal(program.weights["w"], reference.weights["w"])
    assert loaded.versions["yolomlir"]


def test_same_content_gives_same_bytes(tmp_path: Path) -> None:
    make().save(tmp_path / "a.ylm")
    make().save(tmp_path / "b.ylm")
    assert (tmp_path / "a.ylm").read_bytes() == (tmp_path / "b.ylm").read_bytes()


@pytest.mark.parametrize("position", [0.3, 0.6, 0.9])
def test_flipped_byte_is_noticed(tmp_path: Path, position: float) -> None:
    path = tmp_path / "m.ylm"
    make().save(path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"m\.ylm: .*damaged"):
        Artifact.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"programs": {}},
        {"programs": []},
        {"model": {**make().info.__dict__, "names": ["a"]}},
        {"sha256": []},
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, change: dict) -> None:
    whole, changed = tmp_path / "m.ylm", tmp_path / "c.ylm"
    make().save(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "manifest.json":
                data = json.dumps({**json.loads(data), **change}).encode()
            target.writestr(name, data)
    with pytest.raises(UserError, match=r"c\.ylm: .*damaged"):
        Artifact.load(changed)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4" + b"\0" * 64])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.ylm"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a yolomlir artifact"):
        Artifact.load(path)


def test_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.ylm"
    make().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged"):
        Artifact.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Artifact.load(tmp_path / "none.ylm")


def test_other_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.ylm"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", '{"format": 99, "versions": {"yolomlir": "7.0"}}')
    with pytest.raises(UserError, match=r"format 99 \(yolomlir 7\.0\)"):
        Artifact.load(path)


def test_unwritable_place_keeps_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        make().save(tmp_path / "no" / "such" / "folder.ylm")
    assert list(tmp_path.iterdir()) == []


def test_reading_needs_no_mlir(tmp_path: Path) -> None:
    make().save(tmp_path / "m.ylm")
    code = (
        "import sys; from yolomlir.runtime.artifact import Artifact;"
        f"Artifact.load({str(tmp_path / 'm.ylm')!r});"
        "sys.exit(any(m.split('.')[0] in ('mlir', 'cuda') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
