"""`.pt` files: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pt_writer import Call, Name, Object, PtWriter, Stored, dump, ordered

from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.pickle_machine import Global, PickleError, Record, read_pickle

NAMES = {0: "cat", 1: "dog"}


def small_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "model.0.conv.weight": rng.standard_normal((4, 3, 3, 3)).astype(np.float16),
        "model.0.bn.weight": rng.standard_normal(4).astype(np.float16),
        "model.0.bn.running_mean": rng.standard_normal(4).astype(np.float16),
        "model.0.bn.num_batches_tracked": np.array(7, np.int64),
        "model.1.bias": rng.standard_normal(4).astype(np.float32),
    }


def ultralytics(writer: PtWriter, key: str, tensors: dict[str, np.ndarray]) -> dict[str, object]:
    root: dict[str, object] = {
        "epoch": -1,
        "model": None,
        "ema": None,
        "optimizer": None,
        "train_args": {"data": "coco.yaml", "path": Call(Name("pathlib", "PosixPath"), ("a", "b"))},
        "date": "2026-01-02",
        "version": "8.4.0",
    }
    return root | {key: writer.module(tensors, names=NAMES, yaml={"scale": "n"})}


@pytest.mark.parametrize("key", ["ema", "model"])
def test_module_tree(tmp_path: Path, key: str) -> None:
    tensors = small_tensors()
    writer = PtWriter()
    path = writer.save(tmp_path / "w.pt", ultralytics(writer, key, tensors), folder="best")
    checkpoint = load_checkpoint(path)
    assert checkpoint.names == NAMES
    assert checkpoint.metadata["version"] == "8.4.0"
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor)


def test_ema_goes_before_model(tmp_path: Path) -> None:
    writer = PtWriter()
    old, new = ({"model.0.bias": np.full(3, v, np.float32)} for v in (1, 2))
    root = {"model": writer.module(old), "ema": writer.module(new)}
    checkpoint = load_checkpoint(writer.save(tmp_path / "w.pt", root))
    np.testing.assert_array_equal(checkpoint.tensors["model.0.bias"], [2, 2, 2])


def test_plain_state_dict(tmp_path: Path) -> None:
    tensors = small_tensors()
    writer = PtWriter()
    root = ordered({k: writer.tensor(v) for k, v in tensors.items()})
    checkpoint = load_checkpoint(writer.save(tmp_path / "w.pt", root))
    assert checkpoint.tensors.keys() == tensors.keys()
    assert checkpoint.names is None


def test_nested_state_dict_with_prefix(tmp_path: Path) -> None:
    writer = PtWriter()
    tensors = {f"model.{k}": writer.tensor(v) for k, v in small_tensors().items()}
    path = writer.save(tmp_path / "w.pt", {"state_dict": ordered(tensors), "names": ["a", "b"]})
    checkpoint = load_checkpoint(path)
    assert checkpoint.tensors.keys() == small_tensors().keys()
    assert checkpoint.names == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"],
)
def test_storage_types(tmp_path: Path, dtype: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    writer = PtWriter()
    checkpoint = load_checkpoint(writer.save(tmp_path / "w.pt", {"a.b": writer.tensor(array)}))
    assert checkpoint.tensors["a.b"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(checkpoint.tensors["a.b"], array)


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38, 1e-40, 0.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    writer = PtWriter()
    tensor = writer.tensor(bits, type="BFloat16Storage")
    checkpoint = load_checkpoint(writer.save(tmp_path / "w.pt", {"a.b": tensor}))
    assert checkpoint.tensors["a.b"].dtype == np.float32
    np.testing.assert_array_equal(checkpoint.tensors["a.b"], expected)


def test_big_endian(tmp_path: Path) -> None:
    array = np.array([1.5, -2.25], np.float32)
    writer = PtWriter()
    tensor = writer.tensor(array, data=array.astype(">f4").tobytes())
    path = writer.save(tmp_path / "w.pt", {"a.b": tensor}, byte_order="big")
    np.testing.assert_array_equal(load_checkpoint(path).tensors["a.b"], array)


def test_strides_and_offsets(tmp_path: Path) -> None:
    base = np.arange(40, dtype=np.float32)
    writer = PtWriter()
    root = {
        "transposed": writer.tensor(base, offset=4, shape=(3, 5), stride=(1, 3)),
        "every.second": writer.tensor(base, offset=1, shape=(6,), stride=(2,)),
        "expanded": writer.tensor(base, offset=7, shape=(4, 2), stride=(0, 1)),
        "scalar": writer.tensor(base, offset=39, shape=(), stride=()),
        "empty": writer.tensor(base, offset=0, shape=(0, 3), stride=(3, 1)),
    }
    tensors = load_checkpoint(writer.save(tmp_path / "w.pt", root)).tensors
    np.testing.assert_array_equal(tensors["transposed"], base[4:19].reshape(5, 3).T)
    np.testing.assert_array_equal(tensors["every.second"], base[1:13:2])
    np.testing.assert_array_equal(tensors["expanded"], [[7, 8]] * 4)
    assert tensors["scalar"].shape == ()
    assert tensors["scalar"] == 39
    assert tensors["empty"].shape == (0, 3)


def test_rebuild_v3_takes_its_own_dtype(tmp_path: Path) -> None:
    array = np.array([1, 2, 3], np.float16)
    writer = PtWriter()
    v2 = writer.tensor(array, type="UntypedStorage")
    callee = Name("torch._utils", "_rebuild_tensor_v3")
    v3 = Call(callee, (*v2.arguments, Name("torch", "float16")))
    checkpoint = load_checkpoint(writer.save(tmp_path / "w.pt", {"a.b": v3}))
    np.testing.assert_array_equal(checkpoint.tensors["a.b"], array)


def test_non_persistent_buffers_are_left_out(tmp_path: Path) -> None:
    writer = PtWriter()
    module = writer.module({"0.running_mean": np.ones(2, np.float32)})
    child = module.state["_modules"].items["0"]
    # a set, as pickle.dumps writes it in protocol 2
    child.state["_non_persistent_buffers_set"] = Call(
        Name("__builtin__", "set"), (["running_mean"],)
    )
    path = writer.save(tmp_path / "w.pt", {"model": module})
    with pytest.raises(UserError, match="no tensors"):
        load_checkpoint(path)


# ---- refusals -----------------------------------------------------------------------------------


class _Touch:
    """Pickles to a call that makes a file."""

    def __init__(self, call: object, arguments: tuple[object, ...]) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    payload = {"model": _Touch(os.system, (f"touch {witness}",))}
    path = PtWriter().save_pickle(tmp_path / "bad.pt", pickle.dumps(payload, protocol))
    with pytest.raises(UserError, match=rf"would call {os.system.__module__}\.system"):
        load_checkpoint(path)
    assert not witness.exists()
    # The test can fail: the same bytes do run in Python's own unpickler.
    pickle.loads(pickle.dumps(payload, protocol))
    assert witness.exists()


@pytest.mark.parametrize(
    "callee",
    [
        Name("os", "system"),
        Name("subprocess", "Popen"),
        Name("builtins", "eval"),
        Name("__builtin__", "exec"),
        Name("builtins", "__import__"),
        Name("runpy", "run_path"),
        Name("torch.hub", "load"),
        Name("numpy.testing._private.utils", "runstring"),
        Name("some_package", "install"),
    ],
)
@pytest.mark.parametrize("form", ["reduce", "newobj", "inst", "obj"])
def test_calls_are_refused_by_name(tmp_path: Path, callee: Name, form: str) -> None:
    name = f"c{callee.module}\n{callee.name}\n".encode()
    programs = {
        "reduce": name + b"(X\x01\x00\x00\x00xtR.",
        "newobj": name + b"(X\x01\x00\x00\x00xt\x81.",
        "inst": b"(X\x01\x00\x00\x00xi" + name[1:] + b".",
        "obj": b"(" + name + b"X\x01\x00\x00\x00xo.",
    }
    path = PtWriter().save_pickle(tmp_path / "bad.pt", b"\x80\x02" + programs[form])
    with pytest.raises(UserError, match=rf"{callee.name}, which no model needs") as caught:
        load_checkpoint(path)
    assert "nothing was run" in str(caught.value)


def test_getattr_is_no_way_around() -> None:
    os_module = Name("os", "environ")
    with pytest.raises(PickleError, match=r"builtins\.getattr"):
        read_pickle(dump(Call(Name("builtins", "getattr"), (os_module, "system"))))
    method = Call(Name("builtins", "getattr"), (Object(Name("a.b", "Conv")), "forward_fuse"))
    assert isinstance(read_pickle(dump(method)), Record)
    with pytest.raises(PickleError, match="no global"):
        read_pickle(dump(Call(method, ("x",))))


def test_unknown_classes_become_records() -> None:
    value = read_pickle(dump(Object(Name("my.blocks", "Fancy"), {"x": 1})))
    assert value.callee == Global("my.blocks", "Fancy")
    assert value.attributes() == {"x": 1}


def test_agrees_with_pickle_on_plain_values() -> None:
    value = {
        "a": [1, -5, 1 << 70, 2.5, None, True, False, b"bytes", "text é"],
        ("t", 1): {1, 2, 3},
        3: (1, (2, (3, 4, 5, 6))),
        "f": frozenset({"x"}),
        "e": [(), [], {}],
    }
    for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):  # before 4, sets are calls
        assert read_pickle(pickle.dumps(value, protocol)) == value
    plain = {k: v for k, v in value.items() if k not in (("t", 1), "f")} | {"a": [1, 2.5, "x"]}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickle(pickle.dumps(plain, protocol)) == plain


def test_shared_values_stay_shared() -> None:
    inner = [1]
    value = read_pickle(pickle.dumps([inner, inner]))
    assert value[0] is value[1]


def test_ordered_dict_items() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        value = read_pickle(pickle.dumps(OrderedDict(a=1, b=2), protocol))
        assert value.items == {"a": 1, "b": 2}


# ---- damage -------------------------------------------------------------------------------------


def good_file(path: Path) -> Path:
    writer = PtWriter()
    return writer.save(path, ultralytics(writer, "ema", small_tensors()))


def test_truncated_zip(tmp_path: Path) -> None:
    data = good_file(tmp_path / "good.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"cut\.pt: "):
            load_checkpoint(path)


def test_random_bytes(tmp_path: Path) -> None:
    path = tmp_path / "noise.pt"
    path.write_bytes(random.Random(1).randbytes(5000))
    with pytest.raises(UserError, match=r"not a readable \.pt file"):
        load_checkpoint(path)


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    """Any damage is a UserError or UnsupportedError, or passes unseen in a part not read."""
    data = good_file(tmp_path / "good.pt").read_bytes()
    rng = random.Random(2)
    path = tmp_path / "bad.pt"
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            load_checkpoint(path)
        except (UserError, UnsupportedError):
            refused += 1
    assert refused > 100  # zip's checksums alone see any change of the members' bytes


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_pickles_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Without the zip's checksum in the way, each program ends in a checkpoint or an error."""
    writer = PtWriter()
    program = bytearray(dump(ultralytics(writer, "ema", {"0.bias": np.ones(2, np.float32)})))
    for _ in range(data.draw(st.integers(1, 4))):
        program[data.draw(st.integers(0, len(program) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    writer.save_pickle(path, bytes(program))
    with contextlib.suppress(UserError, UnsupportedError):
        load_checkpoint(path)


def test_legacy_format(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        load_checkpoint(path)


def test_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02N.")
        archive.writestr("m/constants.pkl", b"\x80\x02N.")
    with pytest.raises(UnsupportedError, match="TorchScript"):
        load_checkpoint(path)


def test_other_zip(tmp_path: Path) -> None:
    path = tmp_path / "doc.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match=r"without data\.pkl"):
        load_checkpoint(path)


def test_missing_storage(tmp_path: Path) -> None:
    writer = PtWriter()
    root = {"a.b": writer.tensor(np.ones(3, np.float32))}
    writer.storages.clear()
    with pytest.raises(UserError, match="'archive/data/0' is missing"):
        load_checkpoint(writer.save(tmp_path / "w.pt", root))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 2}, "needs 5 elements; its storage has 3"),
        ({"stride": (4,)}, "needs 9 elements; its storage has 3"),
        ({"stride": (-1,)}, "strides"),
        ({"offset": -1}, "offset -1"),
        ({"shape": (1 << 40,), "stride": (0,)}, "more than"),
        ({"data": b"12345"}, "whole elements"),
        ({"shape": "abc"}, "shape"),
    ],
)
def test_tensors_that_leave_their_storage(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    writer = PtWriter()
    tensor = writer.tensor(np.ones(3, np.float32), **changes)
    with pytest.raises(UserError, match=message):
        load_checkpoint(writer.save(tmp_path / "w.pt", {"a.b": tensor}))


def test_other_kinds_of_tensors(tmp_path: Path) -> None:
    writer = PtWriter()
    sparse = Call(Name("torch._utils", "_rebuild_sparse_tensor"), (1, 2))
    path = writer.save(tmp_path / "w.pt", {"a.b": sparse})
    with pytest.raises(UnsupportedError, match="_rebuild_sparse_tensor"):
        load_checkpoint(path)
    quantised = writer.tensor(np.ones(3, np.int8), type="QInt8Storage")
    with pytest.raises(UnsupportedError, match="QInt8Storage"):
        load_checkpoint(writer.save(tmp_path / "w.pt", {"a.b": quantised}))


def test_no_model(tmp_path: Path) -> None:
    path = PtWriter().save(tmp_path / "w.pt", {"epoch": 3, "optimizer": None})
    with pytest.raises(UserError, match=r"no model under 'ema' or 'model'.*epoch, optimizer"):
        load_checkpoint(path)
    path = PtWriter().save(tmp_path / "w.pt", [1, 2])
    with pytest.raises(UserError, match="holds a list"):
        load_checkpoint(path)


def test_module_that_holds_itself(tmp_path: Path) -> None:
    """A cycle of modules ends in an error, not in an endless walk."""
    cycle = io.BytesIO()
    # memo 0 is the module; its state's _modules has it again
    cycle.write(b"\x80\x02" + b"}X\x05\x00\x00\x00model")
    cycle.write(b"ca\nB\n)\x81q\x00")
    cycle.write(
        b"}(X\x0b\x00\x00\x00_parameters}X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00mh\x00s"
    )
    cycle.write(b"ubs.")
    path = PtWriter().save_pickle(tmp_path / "w.pt", cycle.getvalue())
    with pytest.raises(UserError, match="modules"):
        load_checkpoint(path)


def test_values_shared_a_billion_times_are_not_printed(tmp_path: Path) -> None:
    """`x = (x, x)` forty times over is a short pickle; its text would fill the memory."""
    bomb = b"X\x01\x00\x00\x00x" + b"2\x86" * 40
    tensor = dump(PtWriter().tensor(np.ones(3, np.float32)))
    for offset in (b"\x8a\x09" + bytes(9), b"X\x01\x00\x00\x000"):  # the offset, the storage's name
        assert tensor.count(offset) == 1
        program = b"\x80\x02}X\x03\x00\x00\x00a.b" + tensor[2:-1].replace(offset, bomb) + b"s."
        writer = PtWriter()
        writer.storages.append(bytes(12))
        with pytest.raises(UserError, match=r"tensor 'a\.b' has a"):
            load_checkpoint(writer.save_pickle(tmp_path / "w.pt", program))


def test_persistent_id_of_another_kind(tmp_path: Path) -> None:
    callee = Name("torch._utils", "_rebuild_tensor_v2")
    tensor = Call(callee, (Stored(("module", 1)), 0, (1,), (1,), False, {}))
    path = PtWriter().save(tmp_path / "w.pt", {"a.b": tensor})
    with pytest.raises(UserError, match="has no storage"):
        load_checkpoint(path)
