"""One launch of a kernel in the simulator: its operands in memory, what it wrote, and how close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.kernel import ACTIVATION, SCRATCH, WEIGHT, Kernel
from yolomlir.runtime.packing import packed
from yolomlir.simulator.report import SimulationReport
from yolomlir.simulator.simulate import simulate


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """Nearest TF32, ties away from zero, as `cvt.rna.tf32.f32` rounds."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def spread(x: np.ndarray, extra: int) -> tuple[np.ndarray, int]:
    """A dense array as a flat one of a larger pitch, and that pitch.

    What lies between must be neither used nor changed: it is NaN, or 255 of bytes.
    """
    pitch = x.shape[-1] + extra
    wide = np.full((*x.shape[:-1], pitch), 255 if x.dtype == np.uint8 else np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide.reshape(-1), pitch


def assert_close(
    got: np.ndarray, want: np.ndarray, tolerance: np.ndarray, written: np.ndarray | None = None
) -> None:
    """Every element, or every one that was written, within its own tolerance; none NaN."""
    written = np.ones(got.shape, bool) if written is None else written
    excess = np.where(written, np.abs(got.astype(np.float64) - want) - tolerance, -np.inf)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert not np.isnan(got[written]).any()
    assert excess[worst] <= 0, (
        f"at {worst}: {got[worst]}, expected {want[worst]} +- {tolerance[worst]}"
    )


@dataclass
class Outcome:
    """Every result, dense, NaN where nothing was written; where it was; the simulator's report."""

    values: list[np.ndarray]
    written: list[np.ndarray]
    report: SimulationReport

    def check(self, wanted: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """What was written is within the tolerance of every result's (value, tolerance)."""
        for got, written, (value, tolerance) in zip(self.values, self.written, wanted, strict=True):
            assert_close(got, value, tolerance, written)


class SimulatedLaunch:
    """A kernel with operands in memory; calling it simulates one launch.

    operands: dense arrays in the order of the dispatch, of any float type: activations
    N x H x W x C, weights as the program has them before it packs them. results: their shapes.
    extra: elements that every activation's pitch is wider than its channels. The workspace, where
    there is one, is zero at first and kept.
    """

    def __init__(
        self,
        kernel: Kernel,
        operands: Sequence[np.ndarray],
        results: Sequence[tuple[int, ...]],
        *,
        extra: int = 0,
    ) -> None:
        self.kernel, self.shapes, self.extra = kernel, list(results), extra
        parameters = kernel.launch.parameters
        roles = [p.role for p in parameters if p.role != SCRATCH]
        assert len(roles) == len(operands) + len(results)
        self.arguments: list[Any] = []
        for operand, parameter in zip(operands, parameters, strict=False):
            x = operand.astype(parameter.dtype)
            if parameter.role == ACTIVATION:
                self.arguments += spread(x, extra)
                continue
            assert parameter.role == WEIGHT
            x = round_to_tf32(x) if parameter.tf32 else x
            self.arguments.append(packed(x, parameter.packed).reshape(-1).copy())
        self.dtypes = [p.dtype for p in parameters[len(operands) : len(roles)]]
        self.positions = [len(self.arguments) + 2 * i for i in range(len(results))]
        self.pitches = [s[-1] + (extra if len(s) == 4 else 0) for s in results]
        for pitch in self.pitches:
            self.arguments += [np.empty(0, np.float32), pitch]
        if kernel.launch.workspace_bytes:
            assert parameters[-1].role == SCRATCH
            self.arguments.append(np.zeros(kernel.launch.workspace_bytes // 4, np.int32))

    def __call__(
        self, *, text: str | None = None, blocks: int | None = None, **options: Any
    ) -> Outcome:
        """text: of the kernel's module, where it is not as generated. options: of `simulate`."""
        masks = {}
        for shape, pitch, position, dtype in zip(
            self.shapes, self.pitches, self.positions, self.dtypes, strict=True
        ):
            mask = np.zeros((*shape[:-1], pitch), bool)
            mask[..., : shape[-1]] = True
            masks[position] = mask.reshape(-1)
            self.arguments[position] = np.full(mask.size, np.nan, dtype)
        module = self.kernel.module if text is None else ir.Module.parse(text)
        report = simulate(
            module, self.kernel.launch, self.arguments, blocks=blocks, outputs=masks, **options
        )
        values, places = [], []
        for shape, pitch, position in zip(self.shapes, self.pitches, self.positions, strict=True):
            written = report.written[position]
            assert not written[~masks[position]].any()
            inside = written.reshape(*shape[:-1], pitch)[..., : shape[-1]]
            assert inside.all() if blocks is None else inside.any()
            value = self.arguments[position].reshape(*shape[:-1], pitch)[..., : shape[-1]]
            values.append(np.where(inside, value, np.nan))
            places.append(inside)
        return Outcome(values, places, report)
