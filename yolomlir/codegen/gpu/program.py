"""From the linalg level of a whole model to a GPU program: kernels, launches, packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Kernel, Launch, Parameter
from yolomlir.codegen.gpu.ptx import CompiledKernel, compile_kernels, to_ptx
from yolomlir.diagnostics import InternalError
from yolomlir.dialects import yolo
from yolomlir.frontend.weights import WeightStore
from yolomlir.progress import ProgressCallback
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.plan import Argument, Plan, Step, View
from yolomlir.settings import settings
from yolomlir.target import Target


def compile_gpu_program(
    module: ir.Module,
    plan: Plan,
    weights: WeightStore,
    target: Target,
    precision: str,
    *,
    progress: ProgressCallback | None = None,
) -> Program:
    """Compile every dispatch function of a linalg-level module for one GPU target.

    plan: of the same module. weights: in the physical order the module states. Raises UserError
    where a package is missing, InternalError where a kernel cannot be generated or assembled.
    """
    kernels = generate_kernels(module, target, precision)
    cache = Path(settings().cache_dir) / "kernels"
    compiled = compile_kernels(kernels, target, cache=cache, progress=progress)
    launches = {name: kernel.launch for name, kernel in kernels.items()}
    for step in plan.steps:
        _check_alignment(step, launches[step.kernel])
    records, binaries = {}, {}
    for name, kernel in compiled.items():
        records[name] = _record(name, kernel)
        binaries[f"{name}.cubin"] = kernel.cubin
        binaries[f"{name}.ptx"] = kernel.ptx.encode()
    packed = _pack_weights(plan, launches, weights)
    return Program(target.name, plan, packed, records, binaries)


def generate_kernels(module: ir.Module, target: Target, precision: str) -> dict[str, Kernel]:
    """A kernel for each dispatch function of a linalg-level module, by the function's name."""
    return {
        name: generate_kernel(function, target, precision=precision, name=name)
        for name, function in _functions(module)
    }


def emit_kernels(module: ir.Module, target: Target, precision: str, level: str) -> str:
    """Every kernel's `gpu` module or PTX, as text."""
    kernels = generate_kernels(module, target, precision)
    if level == "gpu":
        return "\n// -----\n\n".join(str(kernel.module) for kernel in kernels.values())
    return "\n".join(
        f"// ---- {name}\n{to_ptx(kernel.module, target)}" for name, kernel in kernels.items()
    )


def round_to_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to TF32 (10 mantissa bits), to nearest, ties away from zero, as `cvt.rna.tf32.f32`."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def _functions(module: ir.Module) -> Iterator[tuple[str, Any]]:
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func" and "yolo.family" in op.attributes:
            yield yolo.string(op, "sym_name"), view


def _record(name: str, kernel: CompiledKernel) -> dict[str, Any]:
    return {
        **kernel.launch.to_json(),
        "cubin": f"{name}.cubin",
        "ptx": f"{name}.ptx",
        "registers": kernel.registers,
    }


def _pack_weights(
    plan: Plan, launches: dict[str, Launch], weights: WeightStore
) -> dict[str, NDArray[Any]]:
    """The weights the plan uses, rounded to TF32 where their kernel expects it.

    They keep their order: the runtime brings them into their kernel's (`runtime/packing.py`).
    """
    packed: dict[str, NDArray[Any]] = {}
    rounded: dict[str, bool] = {}
    orders: dict[str, tuple[int, ...]] = {}
    for step in plan.steps:
        for argument, parameter in _parameters(step, launches[step.kernel]):
            name = getattr(argument, "weight", None)
            if name is None:
                continue
            if rounded.setdefault(name, parameter.tf32) != parameter.tf32:
                raise InternalError(
                    f"kernels disagree on the rounding of '{name}'", where=step.layer
                )
            if orders.setdefault(name, parameter.packed) != parameter.packed:
                raise InternalError(f"kernels disagree on the order of '{name}'", where=step.layer)
            packed[name] = round_to_tf32(weights[name]) if parameter.tf32 else weights[name]
    return packed


def _parameters(step: Step, launch: Launch) -> Iterator[tuple[Argument | View, Parameter]]:
    """A step's arguments and results, each with the kernel parameter that takes it."""
    values: list[Argument | View] = [*step.arguments, *step.results]
    parameters = [p for p in launch.parameters if p.role in (ACTIVATION, WEIGHT)]
    if len(values) != len(parameters):
        raise InternalError(
            f"kernel {launch.function} takes {len(parameters)} arguments; its step has "
            f"{len(values)}",
            where=step.layer,
        )
    yield from zip(values, parameters, strict=True)


def _check_alignment(step: Step, launch: Launch) -> None:
    for value, parameter in _parameters(step, launch):
        view = value.view if isinstance(value, Argument) else value
        if view is None:
            continue
        pitch_bytes = view.pitch * np.dtype(view.dtype).itemsize
        if parameter.dense:
            if view.offset_bytes % parameter.alignment_bytes or view.pitch != view.shape[1]:
                raise InternalError(
                    f"kernel {launch.function} needs a dense {parameter.alignment_bytes}-byte "
                    f"aligned image; the plan has offset {view.offset_bytes}, pitch {view.pitch}",
                    where=step.layer,
                )
            continue
        if view.offset_bytes % parameter.alignment_bytes or pitch_bytes % parameter.alignment_bytes:
            raise InternalError(
                f"kernel {launch.function} needs {parameter.alignment_bytes}-byte aligned rows; "
                f"the plan has offset {view.offset_bytes}, pitch {pitch_bytes} bytes",
                where=step.layer,
            )
