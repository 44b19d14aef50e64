"""Safetensors files, key prefixes, class names, seeded checkpoints."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.frontend.names import COCO_NAMES, class_names
from yolomlir.frontend.network import SCALES, parameters
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.state_dict import canonical_keys, parse_names

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def raw_safetensors(path: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps({"model.0.bias": {
        "dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]
    }}).encode()  # fmt: skip
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_come_as_stored(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"model.0.conv.weight": WEIGHT.astype(dtype)}, path)
    checkpoint = load_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.names is None
    tensor = checkpoint.tensors["model.0.conv.weight"]
    assert tensor.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(tensor, WEIGHT.astype(dtype))


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    # 0x3F80 is 1, 0xC000 is -2, 0x0001 the smallest subnormal, 2**-133.
    data = np.array([0x3F80, 0xC000, 0x0001], "<u2").tobytes()
    tensor = load_checkpoint(raw_safetensors(tmp_path / "w", "BF16", [3], data)).tensors
    np.testing.assert_array_equal(tensor["model.0.bias"], np.float32([1, -2, 2.0**-133]))


def test_an_element_type_that_is_not_read(tmp_path: Path) -> None:
    path = raw_safetensors(tmp_path / "w.safetensors", "F8_E4M3", [3], b"123")
    with pytest.raises(UnsupportedError, match=r"'model\.0\.bias' has element type F8_E4M3"):
        load_checkpoint(path)


def test_names_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"model.0.bias": WEIGHT}, path, {"names": "{0: 'a', 1: 'b'}", "date": "today"})
    checkpoint = load_checkpoint(path)
    assert checkpoint.names == {0: "a", 1: "b"}
    assert checkpoint.metadata["date"] == "today"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"1": "b", 0: "a"}, {0: "a", 1: "b"}),
        (["x", "y"], {0: "x", 1: "y"}),
        ('["x", "y"]', {0: "x", 1: "y"}),
        ("__import__('os')", None),
        ("{0: ", None),
        ({}, None),
        ({"one": "b"}, None),
        ({0: ["b"]}, None),
        ("(" * 5000, None),
        (None, None),
        (7, None),
    ],
)
def test_parse_names(value: object, names: dict[int, str] | None) -> None:
    assert parse_names(value) == names


def test_parse_names_of_mixed_keys_never_raises() -> None:
    assert parse_names({None: "a", 0: "b"}) is None


# ---- prefixes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["model.", "", "model.model.", "ema.", "ema.model.", "module.model.", "ema.module."]
)
def test_prefixes_become_model(prefix: str) -> None:
    tensors = {f"{prefix}0.conv.weight": WEIGHT, f"{prefix}23.one2one_cv2.0.2.bias": WEIGHT}
    assert list(canonical_keys(tensors)) == ["model.0.conv.weight", "model.23.one2one_cv2.0.2.bias"]


def test_the_averaged_set_is_taken() -> None:
    both = {"model.0.bias": WEIGHT, "ema.model.0.bias": WEIGHT + 1, "updates": WEIGHT}
    keys = canonical_keys(both)
    np.testing.assert_array_equal(keys["model.0.bias"], WEIGHT + 1)
    assert keys.keys() == {"model.0.bias", "updates"}


def test_two_sets_are_ambiguous() -> None:
    with pytest.raises(UserError, match=r"several sets .*'model\.', 'model\.model\.'"):
        canonical_keys({"model.0.bias": WEIGHT, "model.model.0.bias": WEIGHT})


# ---- bad files ----------------------------------------------------------------------------------


def test_truncated_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"model.0.bias": WEIGHT, "model.1.bias": WEIGHT}, path)
    data = path.read_bytes()
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"w\.safetensors: not a readable safetensors file"):
            load_checkpoint(path)


def test_empty_absent_and_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(UserError, match="the file is empty"):
        load_checkpoint(tmp_path / "empty.safetensors")
    with pytest.raises(UserError, match="no such file"):
        load_checkpoint(tmp_path / "absent.pt")
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.safetensors"
    path.write_text("These are notes, and no tensors at all.")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_checkpoint(path)


# ---- class names --------------------------------------------------------------------------------


def test_coco_names() -> None:
    assert len(COCO_NAMES) == len(set(COCO_NAMES)) == 80
    assert COCO_NAMES[0] == "person"
    assert COCO_NAMES[5] == "bus"
    assert COCO_NAMES[9] == "traffic light"
    assert COCO_NAMES[79] == "toothbrush"
    assert all(name == name.strip() for name in COCO_NAMES)


def test_class_names() -> None:
    named = Checkpoint({}, names={0: "cat", 2: "dog"})
    assert class_names(named, 3) == ("cat", "class 1", "dog")
    assert class_names(Checkpoint({}), 80) == COCO_NAMES
    assert class_names(Checkpoint({}), 2) == ("class 0", "class 1")


# ---- seeded checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_seeded_shapes(fused: bool) -> None:
    checkpoint = seeded_checkpoint("n", 3, 1, fused=fused)
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    assert shapes == parameters(SCALES["n"], 3, fused=fused)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {np.dtype("float32")}


def test_seeded_depends_on_the_seed_only() -> None:
    one, same, other = (seeded_checkpoint("n", 3, seed).tensors for seed in (1, 1, 2))
    for key, tensor in one.items():
        np.testing.assert_array_equal(tensor, same[key])
    assert not np.array_equal(one["model.0.conv.weight"], other["model.0.conv.weight"])


def test_seeded_refuses() -> None:
    with pytest.raises(UserError, match=r"unknown scale 'z'.*one of: n, s, m, l, x"):
        seeded_checkpoint("z", 80, 0)
    with pytest.raises(UserError, match="class count is 0"):
        seeded_checkpoint("n", 0, 0)
