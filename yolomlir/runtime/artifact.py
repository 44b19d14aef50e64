"""The artifact: one `.ylm` file with everything that runs a compiled model, and its IR.

A `.ylm` is an uncompressed zip: `manifest.json` (versions, model, programs, a SHA-256 of every
other member), and for each program its plan, packed weights, kernels, and the optimised IR they
were generated from, so that another target can be compiled from the file alone. Reading one needs
neither MLIR nor CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from yolomlir import __version__
from yolomlir.diagnostics import UserError
from yolomlir.files import replacing
from yolomlir.runtime.plan import Plan

FORMAT_VERSION = 1
"""Raised when a reader of the old layout could misread the new one."""

SUFFIX = ".ylm"
_MANIFEST = "manifest.json"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ModelInfo:
    """What the model is, whatever it is compiled for.

    names: class names by index. precision: `fp32`, `tf32` or `fp16`. input_dtype: `uint8` (N, H, W,
    3, RGB) or `float32` (N, H, W, 3, RGB in 0..1).
    """

    scale: str
    classes: int
    names: tuple[str, ...]
    height: int
    width: int
    batch: int
    max_det: int
    precision: str
    input_dtype: str = "uint8"
    source: str = ""


@dataclass
class Program:
    """The model compiled for one target.

    kernels: a record a kernel (launch geometry, file names in `binaries`), by the plan's names.
    binaries: object files, cubins and PTX by file name. ir: the optimised `yolo` module as text.
    """

    target: str
    plan: Plan
    weights: dict[str, NDArray[Any]]
    kernels: dict[str, dict[str, Any]]
    binaries: dict[str, bytes]
    ir: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Artifact:
    """A compiled model: what it is, and a program for each target it was compiled for."""

    info: ModelInfo
    programs: dict[str, Program]
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; an existing one is replaced only once the new one is whole.

        Raises UserError when the place cannot be written.
        """
        path = Path(path)
        members = dict(self._members())
        manifest = {
            "format": FORMAT_VERSION,
            "versions": {"yolomlir": __version__, **self.versions},
            "model": self.info.__dict__,
            "programs": {
                name: {"kernels": p.kernels, "metadata": p.metadata, "binaries": list(p.binaries)}
                for name, p in self.programs.items()
            },
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
        }
        try:
            _write(path, {_MANIFEST: json.dumps(manifest).encode(), **members})
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=path) from error

    def _members(self) -> dict[str, bytes]:
        members: dict[str, bytes] = {}
        for target, program in self.programs.items():
            weights = {k: np.ascontiguousarray(v) for k, v in program.weights.items()}
            members[f"{target}/plan.json"] = json.dumps(program.plan.to_json()).encode()
            members[f"{target}/weights.safetensors"] = safetensors.numpy.save(weights)
            members[f"{target}/optimized.mlir"] = program.ir.encode()
            for name, data in program.binaries.items():
                members[f"{target}/{name}"] = data
        return members

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Artifact:
        """Read a file written by `save`. Raises UserError that says what is wrong with another."""
        path = Path(path)
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = _read_manifest(archive, path)
                return _assemble(archive, manifest)
        except FileNotFoundError as error:
            raise UserError("no such file", where=path) from error
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=path) from error
        except _DamagedError as error:
            raise UserError(f"is damaged: {error}", where=path, hint="compile it again") from error
        except (zipfile.BadZipFile, AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"is not a yolomlir artifact, or is damaged: {error}"
            raise UserError(message, where=path, hint="compile it again") from error
        except safetensors.SafetensorError as error:
            raise UserError(f"has damaged weights: {error}", where=path) from error


class _DamagedError(Exception):
    """A member is missing or its checksum differs."""


def _write(path: Path, members: dict[str, bytes]) -> None:
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, _ZIP_EPOCH), data)


def _read_manifest(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))
    if manifest["format"] != FORMAT_VERSION:
        version = manifest.get("versions", {}).get("yolomlir", "unknown")
        raise UserError(
            f"has artifact format {manifest['format']} (yolomlir {version}); "
            f"this is yolomlir {__version__}, which reads format {FORMAT_VERSION}",
            where=path,
            hint="compile it again, or install that version",
        )
    return manifest


def _assemble(archive: zipfile.ZipFile, manifest: dict[str, Any]) -> Artifact:
    sums: dict[str, str] = manifest["sha256"]

    def member(name: str) -> bytes:
        try:
            data = archive.read(name)
        except (KeyError, zipfile.BadZipFile) as error:
            raise _DamagedError(f"{name}: {error}") from error
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise _DamagedError(f"the checksum of {name} differs")
        return data

    programs = {
        target: Program(
            target=target,
            plan=Plan.from_json(json.loads(member(f"{target}/plan.json"))),
            weights=safetensors.numpy.load(member(f"{target}/weights.safetensors")),
            kernels=record["kernels"],
            binaries={name: member(f"{target}/{name}") for name in record["binaries"]},
            ir=member(f"{target}/optimized.mlir").decode(),
            metadata=record["metadata"],
        )
        for target, record in manifest["programs"].items()
    }
    model = {**manifest["model"], "names": tuple(manifest["model"]["names"])}
    info = ModelInfo(**model)
    if not programs or len(info.names) != info.classes:
        raise _DamagedError(
            f"{len(programs)} programs, {len(info.names)} names of {info.classes} classes"
        )
    return Artifact(info, programs, manifest["versions"])
