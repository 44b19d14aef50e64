"""Checkpoints: named tensors from safetensors and `.pt` files, under canonical key names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from yolomlir.diagnostics import UnsupportedError, UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one model.

    tensors: by canonical name (`model.0.conv.weight`), in the order and dtype of the file;
    bfloat16 is widened to float32, exactly, since numpy has no such type. names: class names by
    index, None where the file has none. metadata: what else the file says of itself, as text.
    """

    tensors: dict[str, Array]
    names: dict[int, str] | None = None
    path: Path | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a `.safetensors` or `.pt` file; what it is is told by its first bytes, not its name.

    Raises UserError for a file that is absent, truncated or neither; UnsupportedError for an
    element type that is not handled.
    """
    path = Path(path)
    head = _first_bytes(path)
    if head[:4] == b"PK\x03\x04" or path.suffix in (".pt", ".pth"):
        from yolomlir.frontend.pickle_reader import load_pt

        return load_pt(path)
    return load_safetensors(path)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise UserError("no such file", where=path, hint="give the path of a checkpoint") from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise UserError(message, where=path, hint="give a .safetensors or .pt file") from error
    if not head:
        raise UserError("the file is empty", where=path, hint="download or export it again")
    return head


# ---- safetensors --------------------------------------------------------------------------------

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U8": "u1", "BOOL": "?", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns as float32: they are its upper halves."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _tensor(path: Path, name: str, entry: Mapping[str, Any]) -> Array:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype == "BF16":
        return widen_bfloat16(np.frombuffer(entry["data"], "<u2")).reshape(shape)
    if dtype not in _NUMPY:
        raise UnsupportedError(
            f"tensor '{name}' has element type {dtype}",
            where=path,
            hint="export the checkpoint in float32, float16 or bfloat16",
        )
    return np.frombuffer(entry["data"], _NUMPY[dtype]).reshape(shape)


def load_safetensors(path: Path) -> Checkpoint:
    """Read a safetensors file. Raises UserError for one that is damaged or no such file."""
    data = path.read_bytes()
    try:
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise UserError(
            f"not a readable safetensors file ({error}; {len(data)} bytes)",
            where=path,
            hint="it may be truncated or another format: download or export it again",
        ) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
    tensors = {name: _tensor(path, name, entry) for name, entry in entries}
    return Checkpoint(
        canonical_keys(tensors, path), parse_names(metadata.get("names")), path, metadata
    )


# ---- keys and names -----------------------------------------------------------------------------

_KEY = re.compile(r"(?P<prefix>(?:(?:ema|model|module|state_dict)\.)*)(?P<rest>\d+\..+)")


def canonical_keys(tensors: Mapping[str, Array], where: object = None) -> dict[str, Array]:
    """Tensors with prefixes such as `ema.` and `model.model.` replaced by `model.`.

    A file with several sets of weights under different prefixes gives the averaged one (`ema.`).
    Other keys stay as they are. Raises UserError where the choice would be a guess.
    """
    groups: dict[str, dict[str, Array]] = {}
    others: dict[str, Array] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            others[key] = tensor
        else:
            groups.setdefault(match["prefix"], {})[f"model.{match['rest']}"] = tensor
    averaged = [prefix for prefix in groups if "ema." in prefix]
    candidates = averaged or list(groups)
    if len(candidates) > 1:
        found = ", ".join(f"'{prefix}'" for prefix in candidates)
        raise UserError(
            f"holds several sets of weights, under the prefixes {found}",
            where=where,
            hint="keep one of them",
        )
    chosen = groups[candidates[0]] if candidates else {}
    return chosen | others


def parse_names(value: object) -> dict[int, str] | None:
    """Class names from a dictionary, a list or the text of one; None where there are none."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return None
    if not all(isinstance(index, (int, str)) for index in value):
        return None
    if not all(isinstance(name, (int, str)) for name in value.values()):
        return None
    try:
        return dict(sorted((int(index), str(name)) for index, name in value.items()))
    except ValueError:
        return None
