"""Kernels of convolution cases, run by the simulator and compared with float64."""

from __future__ import annotations

import numpy as np
from conv_cases import Case, Operands, expected, linalg_text
from simulated_launch import SimulatedLaunch

from yolomlir.autotune.untuned import best_gathered
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv2d_kinds import Conv2dTile, attribute_of
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import match_conv
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.simulator.report import SimulationReport
from yolomlir.target import Target, target_named

SM_90 = target_named("sm_90")


def build(
    case: Case,
    tile: Conv2dTile | None,
    precision: str = "tf32",
    target: Target = SM_90,
    *,
    text: str | None = None,
) -> tuple[Kernel, Conv2dTile]:
    """The kernel of a case, and its tile: the default one where none is given.

    text: the case's function, where it is another than `linalg_text` writes.
    """
    module = ir.Module.parse(text or linalg_text(case))  # owns the function
    function = module.body.operations[0]
    if tile is None:
        shape = match_conv(function.operation, precision=precision).shape
        tile = best_gathered(shape, target, precision)
    function.operation.attributes["yolo.tile"] = attribute_of(tile)
    return generate_kernel(function, target, precision=precision), tile


def launch_of(case: Case, kernel: Kernel, operands: Operands | None = None) -> SimulatedLaunch:
    """A launch on operands; random ones unless given."""
    given = (operands or Operands.random(case)).in_order()
    return SimulatedLaunch(kernel, given, [case.out_shape], extra=case.extra_pitch)


def partial_sums(tile: Conv2dTile) -> int:
    """How many an output is the sum of, at most."""
    return tile.warps_k * tile.cluster_k if isinstance(tile, ConvTile) else tile.warps


def run(
    case: Case,
    tile: Conv2dTile | None = None,
    precision: str = "tf32",
    *,
    operands: Operands | None = None,
    blocks: int | None = None,
    seed: int = 0,
    target: Target = SM_90,
) -> tuple[np.ndarray, SimulationReport]:
    """Simulate a case and check what it computed; the result, NaN where none was, the report."""
    kernel, tile = build(case, tile, precision, target)
    operands = operands or Operands.random(case, seed)
    outcome = launch_of(case, kernel, operands)(seed=seed, blocks=blocks)
    outcome.check([expected(case, operands, precision, partial_sums(tile))])
    return outcome.values[0], outcome.report
