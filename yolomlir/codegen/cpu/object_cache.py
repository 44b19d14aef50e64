"""Compiled kernels on disk, by a digest of everything that can change them."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path

from yolomlir.codegen.cpu.isa import Host
from yolomlir.codegen.cpu.kernel import KernelSource
from yolomlir.codegen.cpu.lower import CompiledKernel
from yolomlir.codegen.cpu.phases import Phase
from yolomlir.files import replacing, warn_unwritable

_LOG = logging.getLogger(__name__)
_MAGIC = b"yolomlir cpu kernel 1\n"


class _CorruptError(Exception):
    """The entry is not what was written."""


@lru_cache(maxsize=1)
def backend_digest() -> str:
    """A digest of this backend's sources and of the LLVM release: no edit meets a stale entry."""
    from yolomlir.bindings import SUPPORTED_LLVM

    digest = hashlib.sha256(SUPPORTED_LLVM.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel_key(source: KernelSource, host: Host) -> str:
    """Hexadecimal digest of a kernel's source, the host it is for, and the backend."""
    parts = (repr(source), repr(host), backend_digest())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(folder: Path, key: str) -> CompiledKernel | None:
    """The entry of that key; None where there is none or it is damaged (with a warning)."""
    path = _path(folder, key)
    try:
        return _decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, _CorruptError) as error:
        _LOG.warning("%s: damaged cache entry, compiling again: %s", path, error)
        return None


def store(folder: Path, key: str, kernel: CompiledKernel) -> None:
    """Write an entry, whole or not at all. A folder that cannot be written is a warning."""
    path = _path(folder, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(_encode(kernel))
    except OSError as error:
        warn_unwritable(folder, error, _LOG)


def _path(folder: Path, key: str) -> Path:
    return folder / "cpu" / key[:2] / f"{key}.kernel"


def _encode(kernel: CompiledKernel) -> bytes:
    header = {
        "phases": [[p.name, p.blocks] for p in kernel.phases],
        "workspace_bytes": kernel.workspace_bytes,
        "scratch_bytes": kernel.scratch_bytes,
        "object_bytes": len(kernel.object_code),
    }
    body = json.dumps(header).encode() + b"\n" + kernel.object_code
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data: bytes) -> CompiledKernel:
    if not data.startswith(_MAGIC):
        raise _CorruptError("another format")
    digest, _, body = data[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise _CorruptError("its checksum differs")
    head, _, code = body.partition(b"\n")
    header = json.loads(head)
    phases = tuple(Phase(name, blocks) for name, blocks in header["phases"])
    return CompiledKernel(code, phases, header["workspace_bytes"], header["scratch_bytes"])
