"""A module at the linalg level and its plan, compiled: a `Program` for this machine's CPU."""

from __future__ import annotations

import dataclasses

import numpy as np

from yolomlir.bindings import ir
from yolomlir.codegen import workers
from yolomlir.codegen.cpu import object_cache
from yolomlir.codegen.cpu.isa import Host, host
from yolomlir.codegen.cpu.kernel import Buffer, KernelSource
from yolomlir.codegen.cpu.lower import CompiledKernel, compile_kernel, entry_name
from yolomlir.diagnostics import InternalError, UnsupportedError
from yolomlir.frontend.weights import WeightStore
from yolomlir.progress import ProgressCallback
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cpu_driver import DRIVER, driver_object
from yolomlir.runtime.plan import Argument, Plan, Step, View
from yolomlir.settings import settings

_ELEMENTS = {"float32": "f32", "uint8": "i8"}
_FAMILY = "yolo.family"


def compile_cpu_program(
    module: ir.Module,
    plan: Plan,
    weights: WeightStore,
    *,
    progress: ProgressCallback | None = None,
    processes: int | None = None,
) -> Program:
    """Compile every kernel that the plan's steps need, from the cache where it has them.

    A kernel is a function together with the pitches of the step's views, so a function may become
    several. processes: how many compile at once; as many as the settings' threads by default.
    Raises UnsupportedError for float16 tensors, which the CPU's kernels have no arithmetic for.
    """
    machine = host()
    functions = _functions(module)
    sources: dict[str, KernelSource] = {}
    steps = []
    for step in plan.steps:
        source = _source(step, functions, weights)
        key = object_cache.kernel_key(source, machine)
        sources.setdefault(key, source)
        steps.append(dataclasses.replace(step, kernel=_kernel_name(source, key)))
    compiled = _compile(sources, machine, progress, processes or settings().num_threads)
    names = {key: _kernel_name(source, key) for key, source in sources.items()}
    used = {a.weight for s in plan.steps for a in s.arguments if a.weight is not None}
    return Program(
        target="cpu",
        plan=dataclasses.replace(plan, steps=tuple(steps)),
        weights={name: np.ascontiguousarray(weights[name]) for name in sorted(used)},
        kernels={names[key]: _record(names[key], kernel) for key, kernel in compiled.items()},
        binaries={
            DRIVER: driver_object(),
            **{f"{names[key]}.o": kernel.object_code for key, kernel in compiled.items()},
        },
        metadata={
            "triple": machine.triple,
            "cpu": machine.cpu,
            "features": list(machine.features),
        },
    )


def _record(name: str, kernel: CompiledKernel) -> dict[str, object]:
    return {
        "object": f"{name}.o",
        "phases": [[entry_name(p.name), p.blocks] for p in kernel.phases],
        "workspace_bytes": kernel.workspace_bytes,
        "scratch_bytes": kernel.scratch_bytes,
    }


def _kernel_name(source: KernelSource, key: str) -> str:
    return f"{source.name}_{key[:8]}"


def _functions(module: ir.Module) -> dict[str, str]:
    """The text of every dispatch function, by name."""
    found = {}
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func" and _FAMILY in op.attributes:
            found[str(ir.StringAttr(op.attributes["sym_name"]).value)] = str(op)
    return found


def _source(step: Step, functions: dict[str, str], weights: WeightStore) -> KernelSource:
    if step.kernel not in functions:
        raise InternalError(f"the module has no function '{step.kernel}'", where=step.layer)
    _check_elements(step, weights)
    operands = tuple(_operand(a, weights) for a in step.arguments)
    results = tuple(_buffer(v) for v in step.results)
    return KernelSource(step.kernel, functions[step.kernel], operands, results)


def _check_elements(step: Step, weights: WeightStore) -> None:
    views = [v for v in (*(a.view for a in step.arguments), *step.results) if v is not None]
    names = [a.weight for a in step.arguments if a.weight is not None]
    elements = [v.dtype for v in views] + [str(weights[name].dtype) for name in names]
    if "float16" in elements:
        raise UnsupportedError(
            "a tensor is float16; the CPU computes in float32",
            where=step.layer,
            hint="compile with --precision fp32, or for a GPU",
        )


def _operand(argument: Argument, weights: WeightStore) -> Buffer:
    if argument.view is not None:
        return _buffer(argument.view)
    return Buffer(weights[str(argument.weight)].shape)


def _buffer(view: View) -> Buffer:
    element = _ELEMENTS[view.dtype]
    if len(view.shape) != 4:
        return Buffer(view.shape, element)
    n, c, h, w = view.shape
    return Buffer((n, h, w, c), element, view.pitch)


def _compile(
    sources: dict[str, KernelSource],
    machine: Host,
    progress: ProgressCallback | None,
    processes: int,
) -> dict[str, CompiledKernel]:
    """Every kernel by its key; those the cache lacks are compiled and stored."""
    folder = settings().cache_dir
    compiled: dict[str, CompiledKernel] = {}
    for key in sources:
        kernel = object_cache.load(folder, key)
        if kernel is not None:
            compiled[key] = kernel
    missing = [key for key in sources if key not in compiled]
    jobs = [(sources[key], machine.isa, f"k{key[:16]}") for key in missing]

    def report() -> None:
        if progress is not None:
            progress("compiling kernels", len(compiled), len(sources))

    def done(index: int, kernel: CompiledKernel) -> None:
        object_cache.store(folder, missing[index], kernel)
        compiled[missing[index]] = kernel
        report()

    report()
    names = [source.name for source, _, _ in jobs]
    workers.compile_all(compile_kernel, jobs, names, processes, done)
    return compiled
