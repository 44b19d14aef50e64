"""`.pt` files without torch, without ultralytics and without running what is in them.

A `.pt` file is a zip: `data.pkl` describes objects, `data/0`, `data/1`, … hold the tensors' bytes.
Ultralytics puts a dictionary there whose `ema` (or `model`, when `ema` is None) is a whole module;
its tree of `_modules`, `_parameters` and `_buffers` gives the state dictionary. Plain state
dictionaries are read too.
"""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.pickle_machine import Global, Persistent, PickleError, Record, read_pickle
from yolomlir.frontend.state_dict import (
    Array,
    Checkpoint,
    canonical_keys,
    parse_names,
    widen_bfloat16,
)

_AGAIN = "it may be truncated or another format: download or export it again"
_LEGACY_MAGIC = b"\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
"""The number that files written by torch before 1.6 begin with, after the protocol's two bytes."""
_PICKLE_LIMIT_BYTES = 256 << 20
_MODULE_LIMIT = 100_000
_ELEMENT_LIMIT = 1 << 28
"""Limits that no detector comes near; a hostile file could ask for any amount of memory."""

_BFLOAT16 = "bfloat16"
_STORAGES = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "BFloat16Storage": _BFLOAT16,
    "LongStorage": "i8", "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1",
    "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_DTYPES = {
    "float64": "f8", "double": "f8", "float32": "f4", "float": "f4", "float16": "f2", "half": "f2",
    "bfloat16": _BFLOAT16, "int64": "i8", "long": "i8", "int32": "i4", "int": "i4", "int16": "i2",
    "short": "i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip


def load_pt(path: Path) -> Checkpoint:
    """Read a `.pt` file: an Ultralytics checkpoint, a pickled module or a state dictionary.

    Raises UserError for a damaged file, one whose pickle would run code, or one without a model;
    UnsupportedError for torch's format before 1.6, TorchScript and tensors of other kinds.
    """
    with _open(path) as archive:
        folder = _folder(archive, path)
        root = _read_pickle(archive, folder, path)
        model, names, metadata = _find_model(root, path)
        storages = _Storages(archive, folder, path)
        tensors = {key: storages.tensor(key, value) for key, value in _state(model, path)}
    if not tensors:
        raise UserError("its model holds no tensors", where=path, hint=_AGAIN)
    return Checkpoint(canonical_keys(tensors, path), names, path, metadata)


# ---- the zip ------------------------------------------------------------------------------------


def _open(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as file:
        head = file.read(64)
    if head[2 : 2 + len(_LEGACY_MAGIC)] == _LEGACY_MAGIC:
        raise UnsupportedError(
            "written in torch's format from before 1.6",
            where=path,
            hint="load it with torch and save it again: torch.save(torch.load(old), new)",
        )
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UserError(f"not a readable .pt file ({error})", where=path, hint=_AGAIN) from error


def _folder(archive: zipfile.ZipFile, path: Path) -> str:
    """The folder inside the zip that has `data.pkl`, with its slash."""
    members = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in members):
        raise UnsupportedError(
            "is a TorchScript archive",
            where=path,
            hint="give the .pt that training wrote, or export to safetensors",
        )
    for name in members:
        if name == "data.pkl" or name.endswith("/data.pkl"):
            return name[: -len("data.pkl")]
    raise UserError("is a zip without data.pkl, so no .pt file", where=path, hint=_AGAIN)


def _member(archive: zipfile.ZipFile, name: str, path: Path, limit_bytes: int) -> bytes:
    try:
        size = archive.getinfo(name).file_size
        if size > limit_bytes:
            raise UserError(
                f"'{name}' has {size} bytes; expected at most {limit_bytes}",
                where=path,
                hint=_AGAIN,
            )
        return archive.read(name)
    except KeyError:
        raise UserError(f"its part '{name}' is missing", where=path, hint=_AGAIN) from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"'{name}' is damaged ({error})", where=path, hint=_AGAIN) from error
    except zlib.error as error:
        raise UserError(f"'{name}' is damaged ({error})", where=path, hint=_AGAIN) from error


def _read_pickle(archive: zipfile.ZipFile, folder: str, path: Path) -> Any:
    data = _member(archive, f"{folder}data.pkl", path, _PICKLE_LIMIT_BYTES)
    try:
        return read_pickle(data)
    except PickleError as error:
        if error.dangerous is None:
            raise UserError(str(error), where=path, hint=_AGAIN) from error
        raise UserError(
            f"refused: loading it elsewhere would call {error.dangerous}, which no model needs "
            "(nothing was run)",
            where=path,
            hint="do not trust this file; get the checkpoint from its author",
        ) from error


# ---- from the root to the state dictionary ------------------------------------------------------


def _mapping(value: Any) -> dict[Any, Any] | None:
    """A dictionary, or the items of a record that stands for one (an OrderedDict)."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Record) and (value.items or str(value.callee).startswith("collections.")):
        return value.items
    return None


def _is_module(value: Any) -> bool:
    return isinstance(value, Record) and {"_modules", "_parameters"} <= value.attributes().keys()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Record) and value.callee.name.startswith("_rebuild_")


def _find_model(root: Any, path: Path) -> tuple[Any, dict[int, str] | None, dict[str, str]]:
    """The module or state dictionary to read, its class names, and the plain values beside it."""
    if _is_module(root):
        return root, _names(root), {}
    mapping = _mapping(root)
    if mapping is None:
        raise UserError(
            f"holds a {_kind(root)}; expected a model or a dictionary", where=path, hint=_AGAIN
        )
    metadata = {
        str(key): str(value)
        for key, value in mapping.items()
        if isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 1 << 63)
    }
    for key in ("ema", "model", "state_dict", "model_state_dict"):
        value = mapping.get(key)
        if _is_module(value) or _holds_tensors(value):
            return value, _names(value) or parse_names(mapping.get("names")), metadata
    if _holds_tensors(mapping):
        return mapping, parse_names(mapping.get("names")), metadata
    keys = ", ".join(map(str, list(mapping)[:10])) or "none"
    raise UserError(
        f"has no model under 'ema' or 'model' and no tensors (its keys: {keys})",
        where=path,
        hint="give a checkpoint that training wrote, best.pt or last.pt",
    )


def _kind(value: Any) -> str:
    return str(value.callee) if isinstance(value, Record) else type(value).__name__


def _holds_tensors(value: Any) -> bool:
    mapping = _mapping(value)
    return mapping is not None and any(_is_tensor(item) for item in mapping.values())


def _names(model: Any) -> dict[int, str] | None:
    if not isinstance(model, Record):
        return None
    value = model.attributes().get("names")
    return parse_names(_mapping(value) or value)


def _state(model: Any, path: Path) -> Iterator[tuple[str, Record]]:
    """Key and tensor record of everything in a module or a state dictionary."""
    if _is_module(model):
        yield from _walk(model, path)
        return
    for key, value in (_mapping(model) or {}).items():
        if _is_tensor(value):
            yield str(key), value


def _walk(root: Record, path: Path) -> Iterator[tuple[str, Record]]:
    """Depth first, a module's own tensors before its children's, as torch's state_dict has it."""
    pending = [("", root)]
    for count in itertools.count():
        if not pending:
            return
        if count > _MODULE_LIMIT:
            raise UserError(f"has more than {_MODULE_LIMIT} modules", where=path, hint=_AGAIN)
        prefix, module = pending.pop()
        yield from _own_tensors(prefix, module)
        children = _mapping(module.attributes().get("_modules")) or {}
        pending += [
            (f"{prefix}{name}.", child)
            for name, child in reversed(children.items())
            if _is_module(child)
        ]


def _own_tensors(prefix: str, module: Record) -> Iterator[tuple[str, Record]]:
    attributes = module.attributes()
    skipped = _members(attributes.get("_non_persistent_buffers_set"))
    for group in ("_parameters", "_buffers"):
        for name, value in (_mapping(attributes.get(group)) or {}).items():
            if value is not None and name not in skipped:
                yield f"{prefix}{name}", value


def _members(value: Any) -> set[Any]:
    """A set, or the call of `set` with a list that stands for one before protocol 4."""
    if isinstance(value, Record) and value.callee.name == "set" and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, (set, list)):
        return set()
    return {name for name in value if isinstance(name, str)}


# ---- tensors ------------------------------------------------------------------------------------


class _Storages:
    """Tensors from the zip's storages, each storage read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, path: Path) -> None:
        self.archive = archive
        self.folder = folder
        self.path = path
        self.cache: dict[tuple[str, str], Array] = {}
        order = f"{folder}byteorder"
        big = order in archive.namelist() and _member(archive, order, path, 16) == b"big"
        self.byte_order = ">" if big else "<"

    def fail(self, key: str, message: str) -> UserError:
        return UserError(f"tensor '{key}' {message}", where=self.path, hint=_AGAIN)

    def tensor(self, key: str, record: Any) -> Array:
        """The tensor a record describes, contiguous, in native byte order."""
        name = record.callee.name if isinstance(record, Record) else ""
        if name.startswith("_rebuild_parameter") and record.arguments:
            return self.tensor(key, record.arguments[0])
        if name not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            raise UnsupportedError(
                f"tensor '{key}' is a {_kind(record)}; only dense tensors are read",
                where=self.path,
                hint="save the checkpoint with ordinary float16 or float32 tensors",
            )
        dtype = record.arguments[6] if name.endswith("v3") and len(record.arguments) > 6 else None
        if len(record.arguments) < 4:
            raise self.fail(key, "is described by too few values")
        storage, offset, shape, stride = record.arguments[:4]
        data = self.storage(key, storage, dtype)
        return self.strided(key, data, offset, _sizes(shape), _sizes(stride))

    def storage(self, key: str, storage: Any, dtype: Any) -> Array:
        """All elements of a storage: ('storage', type, name, device, number of elements)."""
        fields = storage.id if isinstance(storage, Persistent) else None
        if not isinstance(fields, tuple) or len(fields) < 5 or fields[0] != "storage":
            raise self.fail(key, "has no storage")
        element = self.element(key, fields[1], dtype)
        name = fields[2]
        if not isinstance(name, str):
            raise self.fail(key, "has a storage without a name")
        if (name, element) not in self.cache:
            self.cache[name, element] = self.read(key, name, element)
        return self.cache[name, element]

    def element(self, key: str, storage_type: Any, dtype: Any) -> str:
        table, source = (_STORAGES, storage_type) if dtype is None else (_DTYPES, dtype)
        name = source.name.rpartition(".")[2] if isinstance(source, Global) else _kind(source)
        if name not in table:
            raise UnsupportedError(
                f"tensor '{key}' has elements of {name}",
                where=self.path,
                hint="save the checkpoint in float32, float16 or bfloat16",
            )
        return table[name]

    def read(self, key: str, name: str, element: str) -> Array:
        part = f"{self.folder}data/{name}"
        data = _member(self.archive, part, self.path, self.path.stat().st_size)
        numpy_type = "u2" if element == _BFLOAT16 else element
        order = np.dtype(f"{self.byte_order}{numpy_type}")
        if len(data) % order.itemsize:
            raise self.fail(key, f"needs whole elements; '{part}' has {len(data)} bytes")
        values = np.frombuffer(data, order).astype(numpy_type, copy=False)
        return widen_bfloat16(values) if element == _BFLOAT16 else values

    def strided(
        self, key: str, data: Array, offset: Any, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Array:
        if not isinstance(offset, int):
            raise self.fail(key, f"has a {_kind(offset)} as its offset")
        if offset < 0 or len(shape) != len(stride) or min((*shape, *stride), default=0) < 0:
            raise self.fail(key, f"has shape {shape}, strides {stride}, offset {offset}")
        if math.prod(shape) > _ELEMENT_LIMIT:
            raise self.fail(key, f"has shape {shape}, more than {_ELEMENT_LIMIT} elements")
        if 0 in shape:
            return np.zeros(shape, data.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if last >= data.size:
            raise self.fail(key, f"needs {last + 1} elements; its storage has {data.size}")
        steps = tuple(step * data.itemsize for step in stride)
        view = np.lib.stride_tricks.as_strided(data[offset:], shape, steps, writeable=False)
        return np.array(view, order="C")  # ascontiguousarray would give a scalar a dimension


def _sizes(value: Any) -> tuple[int, ...]:
    """A tuple of whole numbers, or torch.Size of one; (-1,) where it is neither."""
    if isinstance(value, Record) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, int) for v in value):
        return (-1,)
    return tuple(value)
