"""A program for a GPU, its kernels run by the simulator on the bytes of the plan's arena."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from interpreted_model import Interpreted
from yolomlir.passes.base import PassContext
from yolomlir.passes.lower_to_linalg import LowerToLinalg

from yolomlir.autotune.untuned import assign_default_tiles
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.program import _check_alignment, _pack_weights, generate_kernels
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.runtime.packing import packed
from yolomlir.runtime.plan import Step, View
from yolomlir.simulator.simulate import simulate
from yolomlir.target import target_named


class Simulated(Interpreted):
    """What `ProgramSubject` needs of a model, as `Interpreted`, but every kernel is simulated.

    Bytes that nothing has written are NaN. A kernel's results are copied to the arena without what
    lies between their rows, which others write.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        level: int,
        precision: str,
        pairs: str = "",
        tuned: bool = False,
    ) -> None:
        super().__init__(checkpoint, level=level, precision=precision, pairs=pairs, tuned=tuned)
        target = target_named(self.target)
        lowered = ir.Module.parse(str(self._module))
        LowerToLinalg().run(lowered, PassContext(target=target))
        assign_default_tiles(lowered, target, precision)
        self._kernels: dict[str, Kernel] = generate_kernels(lowered, target, precision)
        plan = self.program.plan
        launches = {name: kernel.launch for name, kernel in self._kernels.items()}
        for step in plan.steps:
            _check_alignment(step, launches[step.kernel])
        self._packed = _pack_weights(plan, launches, self._weights)

    def trace(self, batch: np.ndarray) -> Iterator[tuple[Step, list[np.ndarray]]]:
        plan = self.program.plan
        arena = np.full(plan.arena_bytes, 0xFF, np.uint8)
        region, mask = _region(arena, plan.inputs["image"])
        region[mask] = batch.reshape(-1)
        _put(arena, plan.inputs["image"], region, mask)
        for step in plan.steps:
            yield step, self._run(step, arena)

    def _run(self, step: Step, arena: np.ndarray) -> list[np.ndarray]:
        kernel = self._kernels[step.kernel]
        arguments: list[Any] = []
        for argument, parameter in zip(step.arguments, kernel.launch.parameters, strict=False):
            if argument.view is None:
                values = self._packed[str(argument.weight)]
                arguments.append(packed(values, parameter.packed).reshape(-1))
            else:
                arguments += [_region(arena, argument.view)[0], argument.view.pitch]
        outputs, regions = {}, []
        for view in step.results:
            region, mask = _region(arena, view)
            outputs[len(arguments)] = mask
            regions.append((view, region, mask))
            arguments += [region, view.pitch]
        if kernel.launch.workspace_bytes:
            arguments.append(np.zeros(kernel.launch.workspace_bytes // 4, np.int32))
        simulate(kernel.module, kernel.launch, arguments, outputs=outputs)
        for view, region, mask in regions:
            _put(arena, view, region, mask)
        return [_logical(view, region[mask]) for view, region, mask in regions]


def _region(arena: np.ndarray, view: View) -> tuple[np.ndarray, np.ndarray]:
    """A copy of the bytes from a view's first element to its last, and which elements it has."""
    rows, channels = _rows(view)
    count = (rows - 1) * view.pitch + channels
    size = count * np.dtype(view.dtype).itemsize
    assert view.offset_bytes + size <= arena.size
    copied = arena[view.offset_bytes : view.offset_bytes + size].copy().view(view.dtype)
    return copied, np.arange(count) % view.pitch < channels


def _put(arena: np.ndarray, view: View, region: np.ndarray, mask: np.ndarray) -> None:
    there = arena[view.offset_bytes : view.offset_bytes + region.nbytes].view(view.dtype)
    there[mask] = region[mask]


def _rows(view: View) -> tuple[int, int]:
    channels = view.shape[1] if len(view.shape) == 4 else view.shape[-1]
    return int(np.prod(view.shape)) // channels, channels


def _logical(view: View, values: np.ndarray) -> np.ndarray:
    """Dense physical values in logical order, as float32."""
    values = values.astype(np.float32)
    if len(view.shape) != 4:
        return values.reshape(view.shape)
    n, channels, height, width = view.shape
    return values.reshape(n, height, width, channels).transpose(0, 3, 1, 2)
