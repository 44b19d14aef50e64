"""Runs an executable plan in numpy through its arena, to prove that the memory plan is right.

Every step reads and writes the arena's bytes where the plan says, in any order that the plan's
dependencies allow. Whatever nobody has written reads as NaN, and so does what a wrong plan
overwrote in part, so that a mistake does not stay hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import ITEM_BYTES, Footprint
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.dialects import yolo
from yolomlir.frontend.weights import WeightStore
from yolomlir.interpreter import Interpreter
from yolomlir.runtime.plan import Plan, Step, View

Array = NDArray[Any]
ORDERS = ("program", "last_first", "random")


class Arena:
    """A plan's arena with a float64 for every byte: an element lies in its first byte's."""

    def __init__(self, size: int) -> None:
        self._slots = np.full(size, np.nan)

    def read(self, view: View) -> Array:
        """A copy of a tensor, in logical order."""
        return np.ascontiguousarray(self._window(view, 0))

    def write(self, view: View, array: Array) -> None:
        """Store a tensor in logical order; the other bytes of its elements become NaN."""
        self._window(view, 0)[...] = array
        for byte in range(1, ITEM_BYTES[view.dtype]):
            self._window(view, byte)[...] = np.nan

    def _window(self, view: View, byte: int) -> Array:
        item = ITEM_BYTES[view.dtype]
        if view.offset_bytes < 0 or Footprint.of(view).end > self._slots.size:
            raise InternalError(f"{view} leaves the arena of {self._slots.size} bytes")
        shape = view.shape
        physical = (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape
        strides, step = [1], view.pitch
        for size in reversed(physical[1:-1]):
            strides.insert(0, step)
            step *= size
        if len(physical) > 1:
            strides.insert(0, step)
        window = np.lib.stride_tricks.as_strided(
            self._slots[view.offset_bytes + byte :],
            physical,
            [s * item * self._slots.itemsize for s in strides],
        )
        return np.moveaxis(window, -1, 1) if len(shape) == 4 else window


def run_plan(
    module: ir.Module,
    plan: Plan,
    inputs: Mapping[str, Array],
    weights: WeightStore,
    *,
    order: str = "program",
    seed: int = 0,
    arena: Arena | None = None,
) -> dict[str, Array]:
    """Run a plan's steps by interpreting the functions that `module` has for their kernels.

    order: `program`; `last_first`, which of the steps that may run takes the last; or `random`, by
    `seed`. `arena` is one that an earlier inference has left its data in. Arrays are in logical
    order. Raises InternalError for a step that writes what it reads, and for a view outside the
    arena.
    """
    if order not in ORDERS:
        raise UserError(f"unknown order '{order}'", hint=f"one of: {', '.join(ORDERS)}")
    if set(inputs) != set(plan.inputs):
        raise UserError(f"inputs are {sorted(inputs)}; expected {sorted(plan.inputs)}")
    arena = arena or Arena(plan.arena_bytes)
    interpreter = Interpreter(module, weights)
    types = _weight_types(module)
    for name, view in plan.inputs.items():
        arena.write(view, inputs[name])
    for index in schedule(plan, order, seed):
        _run_step(plan.steps[index], arena, interpreter, types)
    return {name: arena.read(view) for name, view in plan.outputs.items()}


def schedule(plan: Plan, order: str, seed: int = 0) -> Iterator[int]:
    """The steps' indices in an order that the dependencies allow."""
    if order == "program":
        yield from range(len(plan.steps))
        return
    choose = np.random.default_rng(seed)
    waiting = {index: set(step.depends) for index, step in enumerate(plan.steps)}
    while waiting:
        ready = [index for index, depends in waiting.items() if not depends]
        if not ready:
            raise InternalError("the plan's dependencies have a cycle")
        index = ready[-1] if order == "last_first" else int(choose.choice(ready))
        yield index
        del waiting[index]
        for depends in waiting.values():
            depends.discard(index)


def _run_step(
    step: Step, arena: Arena, interpreter: Interpreter, types: dict[str, ir.Type]
) -> None:
    arguments = []
    for argument in step.arguments:
        if argument.view is not None:
            arguments.append(arena.read(argument.view))
        elif argument.weight is not None:
            arguments.append(interpreter.weight(argument.weight, types[argument.weight]))
    for result in step.results:
        own = Footprint.of(result)
        for argument in step.arguments:
            if argument.view is not None and own.meets(Footprint.of(argument.view)):
                raise InternalError(f"kernel {step.kernel} writes what it reads", where=step.layer)
    results = interpreter.call(step.kernel, arguments)
    for view, array in zip(step.results, results, strict=True):
        arena.write(view, array)


def _weight_types(module: ir.Module) -> dict[str, ir.Type]:
    found: dict[str, ir.Type] = {}
    for op in yolo.ops_in(module, "yolo.weight"):
        found[yolo.string(op, "name")] = op.results[0].type
    return found
