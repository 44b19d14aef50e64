"""Checkpoints: named tensors from safetensors and `.pt` files, under canonical key names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.pickle_reader import load_pt
from yolomlir.frontend.state_dict import (
    Array,
    Checkpoint,
    canonical_keys,
    parse_names,
    widen_bfloat16,
)

__all__ = ["Checkpoint", "load_checkpoint", "load_safetensors"]


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a `.safetensors` or `.pt` file; what it is is told by its first bytes, not its name.

    Raises UserError for a file that is absent, truncated or neither; UnsupportedError for an
    element type that is not handled.
    """
    path = Path(path)
    head = _first_bytes(path)
    if head[:4] == b"PK\x03\x04" or path.suffix in (".pt", ".pth"):
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
