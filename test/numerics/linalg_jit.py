"""Runs functions at the linalg level with the plainest lowering there is, as a reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from yolomlir.dialects import yolo

from yolomlir.bindings import execution_engine, ir, linalg, passmanager

_BUFFERIZE = (
    "builtin.module(eliminate-empty-tensors,"
    "one-shot-bufferize{bufferize-function-boundaries=1 "
    "function-boundary-type-conversion=identity-layout-map},"
    "buffer-results-to-out-params{hoist-static-allocs=1 modify-public-functions=1},"
    "canonicalize,cse)"
)
_LOWER = (
    "builtin.module(func.func(convert-linalg-to-loops,scf-forall-to-for,lower-affine),"
    "expand-strided-metadata,lower-affine,convert-scf-to-cf,convert-math-to-llvm,"
    "convert-math-to-libm,convert-arith-to-llvm,convert-cf-to-llvm,convert-index-to-llvm,"
    "finalize-memref-to-llvm,convert-func-to-llvm,reconcile-unrealized-casts)"
)


def _descriptor(array: np.ndarray) -> ctypes.Structure:
    """A memref descriptor of a C-contiguous array."""

    class Descriptor(ctypes.Structure):
        _fields_ = (
            ("allocated", ctypes.c_void_p),
            ("aligned", ctypes.c_void_p),
            ("offset", ctypes.c_int64),
            ("shape", ctypes.c_int64 * array.ndim),
            ("strides", ctypes.c_int64 * array.ndim),
        )

    strides = [s // array.itemsize for s in array.strides]
    pair = ctypes.c_int64 * array.ndim
    return Descriptor(array.ctypes.data, array.ctypes.data, 0, pair(*array.shape), pair(*strides))


def _write_out_copies(module: ir.Module) -> None:
    """`memref.copy` as `linalg.copy`, which needs no library of MLIR's at run time."""
    for op in list(yolo.ops_in(module, "memref.copy")):
        with ir.InsertionPoint(op):
            linalg.copy(op.operands[0], outs=[op.operands[1]])
        op.erase()


def run(
    module: ir.Module,
    name: str,
    inputs: Sequence[np.ndarray],
    results: Sequence[tuple[int, ...]],
    dtype: type[np.floating] = np.float32,
) -> list[np.ndarray]:
    """Call `name` of a copy of `module` on contiguous arrays; `results` are its results' shapes."""
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(str(module))
        for view in list(copy.body.operations):
            if ir.StringAttr(view.operation.attributes["sym_name"]).value != name:
                view.operation.erase()
                continue
            view.operation.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
            del view.operation.attributes["sym_visibility"]
        passmanager.PassManager.parse(_BUFFERIZE).run(copy.operation)
        _write_out_copies(copy)
        passmanager.PassManager.parse(_LOWER).run(copy.operation)
        engine = execution_engine.ExecutionEngine(copy, opt_level=2)
        outputs = [np.full(shape, np.nan, dtype) for shape in results]
        arrays = [*(np.ascontiguousarray(a) for a in inputs), *outputs]
        descriptors = [_descriptor(a) for a in arrays]
        pointers = [ctypes.pointer(d) for d in descriptors]
        places = [ctypes.cast(ctypes.pointer(p), ctypes.c_void_p) for p in pointers]
        packed = (ctypes.c_void_p * len(places))(*places)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            engine.raw_lookup(f"_mlir_ciface_{name}")
        )
        function(packed)
    return outputs
