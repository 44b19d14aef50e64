"""Writes `.pt` files as torch lays them out, for tests: pickles by hand, no torch."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


@dataclass(frozen=True)
class Name:
    """A global."""

    module: str
    name: str


@dataclass
class Call:
    """What REDUCE builds."""

    callee: Any
    arguments: tuple[Any, ...] = ()
    items: dict[Any, Any] | None = None


@dataclass
class Object:
    """What NEWOBJ and BUILD make: an object of a class with a state."""

    callee: Name
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Stored:
    """A persistent id."""

    id: tuple[Any, ...]


def ordered(items: dict[Any, Any]) -> Call:
    return Call(Name("collections", "OrderedDict"), (), items)


def dump(value: Any) -> bytes:
    """A pickle of protocol 2."""
    return b"\x80\x02" + _body(value) + b"."


def _items(items: dict[Any, Any]) -> bytes:
    return b"(" + b"".join(_body(k) + _body(v) for k, v in items.items()) + b"u"


def _body(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(9, "little", signed=True)
            return b"\x8a\x09" + data
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case tuple():
            return b"(" + b"".join(map(_body, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_body, value)) + b"e"
        case dict():
            return b"}" + _items(value)
        case Name():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            body = _body(value.callee) + _body(value.arguments) + b"R"
            return body if value.items is None else body + _items(value.items)
        case Object():
            return _body(value.callee) + b")\x81" + _body(value.state) + b"b"
        case Stored():
            return _body(value.id) + b"Q"
    raise TypeError(f"no pickle for {value!r}")


class PtWriter:
    """Collects storages; `tensor` and `parameter` give what stands for them in the pickle."""

    def __init__(self) -> None:
        self.storages: list[bytes] = []

    def tensor(self, array: np.ndarray, **changes: Any) -> Call:
        """A dense tensor in a storage of its own. `changes`: data, offset, shape, stride, type."""
        array = np.asarray(array)
        strides = tuple(s // array.itemsize for s in array.strides)
        values = {
            "data": np.ascontiguousarray(array).tobytes(),
            "offset": 0,
            "shape": array.shape,
            "stride": strides,
            "type": STORAGES.get(array.dtype.name, ""),
        } | changes
        key = str(len(self.storages))
        self.storages.append(values["data"])
        storage = Stored(
            ("storage", Name("torch", values["type"]), key, "cpu", len(values["data"]))
        )
        arguments = (storage, values["offset"], values["shape"], values["stride"], False)
        return Call(Name("torch._utils", "_rebuild_tensor_v2"), (*arguments, ordered({})))

    def parameter(self, array: np.ndarray) -> Call:
        name = Name("torch._utils", "_rebuild_parameter")
        return Call(name, (self.tensor(array), True, ordered({})))

    def module(self, tensors: dict[str, np.ndarray], **state: Any) -> Object:
        """A module tree as torch.nn pickles it; running statistics are buffers."""
        own: dict[str, np.ndarray] = {}
        children: dict[str, dict[str, np.ndarray]] = {}
        for key, array in tensors.items():
            head, dot, rest = key.partition(".")
            if dot:
                children.setdefault(head, {})[rest] = array
            else:
                own[head] = array
        buffers = {k: v for k, v in own.items() if k.startswith(("running_", "num_batches"))}
        parameters = {k: v for k, v in own.items() if k not in buffers}
        return Object(
            Name("ultralytics.nn.modules", "Block"),
            {
                "training": False,
                "_parameters": ordered({k: self.parameter(v) for k, v in parameters.items()}),
                "_buffers": ordered({k: self.tensor(v) for k, v in buffers.items()}),
                "_modules": ordered({k: self.module(v) for k, v in children.items()}),
                **state,
            },
        )

    def save(self, path: Path, root: Any, *, folder: str = "archive", byte_order: str = "") -> Path:
        return self.save_pickle(path, dump(root), folder=folder, byte_order=byte_order)

    def save_pickle(
        self, path: Path, pickle: bytes, *, folder: str = "archive", byte_order: str = ""
    ) -> Path:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(f"{folder}/data.pkl", pickle)
            if byte_order:
                archive.writestr(f"{folder}/byteorder", byte_order)
            for i, data in enumerate(self.storages):
                archive.writestr(f"{folder}/data/{i}", data)
            archive.writestr(f"{folder}/version", "3\n")
        return path
