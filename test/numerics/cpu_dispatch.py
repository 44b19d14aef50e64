"""Runs one dispatch through the whole CPU backend: compile, load, a team of threads, an arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import linalg_cases
import numpy as np

from yolomlir.bindings import ir
from yolomlir.codegen.cpu.program import compile_cpu_program
from yolomlir.frontend.weights import WeightStore
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cpu import CpuExecutor
from yolomlir.runtime.plan import Argument, Plan, Step, View

Operand = tuple[str, np.ndarray]
"""`("x", activation)` or `("w", weight)`, in physical order."""
GAP = 4
"""Channels between a view's pixels that are another tensor's."""
_SENTINEL = 0xA5


def compile_dispatch(
    body: Callable[..., ir.Value],
    types: Sequence[ir.Type],
    operands: Sequence[Operand],
    result: tuple[int, ...],
    gap: int = GAP,
) -> Program:
    """A program of one step. `result`: physical shape. Activations and result lie `gap` channels
    apart, as slices of wider buffers do."""
    module, weights, offset = linalg_cases.lower(body, types), WeightStore(), 0
    arguments, inputs = [], {}

    def place(shape: tuple[int, ...], dtype: np.dtype) -> View:
        nonlocal offset
        pitch = shape[-1] + (gap if len(shape) == 4 else 0)
        logical = (shape[0], shape[3], *shape[1:3]) if len(shape) == 4 else shape
        view = View(offset, pitch, logical, str(dtype))
        size = int(np.prod(shape[:-1])) * pitch * dtype.itemsize
        offset += -(-size // 64) * 64
        return view

    for index, (kind, array) in enumerate(operands):
        name = f"{kind}{index}"
        if kind == "w":
            weights.derive(name, [], lambda array=array: array)
            arguments.append(Argument(weight=name))
            continue
        inputs[name] = place(array.shape, array.dtype)
        arguments.append(Argument(view=inputs[name]))
    output = place(result, np.dtype(np.float32))
    step = Step("f", "layer", tuple(arguments), (output,))
    plan = Plan(offset, inputs, {"y": output}, (step,))
    return compile_cpu_program(module, plan, weights, processes=1)


def run_dispatch(
    body: Callable[..., ir.Value],
    types: Sequence[ir.Type],
    operands: Sequence[Operand],
    result: tuple[int, ...],
    *,
    threads: int = 2,
    gap: int = GAP,
) -> np.ndarray:
    """The result of one dispatch; fails if the kernel wrote anything besides its result."""
    program = compile_dispatch(body, types, operands, result, gap)
    arrays = {f"{k}{i}": a for i, (k, a) in enumerate(operands) if k == "x"}
    with CpuExecutor(program, threads=threads) as executor:
        arena, output = executor._memory.arena, executor._memory.outputs["y"]
        arena[...] = _SENTINEL
        first = executor.run(arrays)["y"]
        again = executor.run(arrays)["y"]
        np.testing.assert_array_equal(first, again)
        for name, array in arrays.items():
            np.testing.assert_array_equal(executor._memory.inputs[name], array)
            executor._memory.inputs[name].view(np.uint8)[...] = _SENTINEL
        output.view(np.uint8)[...] = _SENTINEL
        assert (arena == _SENTINEL).all(), "the kernel wrote outside of its result"
    return first
