"""Kernels of chain cases, run by the simulator and compared with float64."""

from __future__ import annotations

from functools import cache

import numpy as np
from chain_cases import (
    TF32_ROUNDING,
    ChainCase,
    chain_module,
    chain_text,
    expected_results,
    random_operands,
)
from simulated_launch import SimulatedLaunch

from yolomlir.codegen.gpu.chain import shape_of
from yolomlir.codegen.gpu.chain_problem import match_chain
from yolomlir.codegen.gpu.chain_space import default_tile
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, plan
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.simulator.report import SimulationReport
from yolomlir.target import target_named


@cache
def shape_of_case(case: ChainCase, precision: str = "tf32") -> ChainShape:
    """What tiles of a case depend on."""
    module, _ = chain_module(case, half=precision == "fp16")
    return shape_of(match_chain(module.body.operations[0].operation, precision=precision))


def kernel_of(
    case: ChainCase, tile: ChainTile, target: str = "sm_90", precision: str = "tf32"
) -> Kernel:
    """The kernel of a case with a tile."""
    module, _ = chain_module(case, half=precision == "fp16")
    function = module.body.operations[0]
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    return generate_kernel(function, target_named(target), precision=precision)


def launch_of(
    case: ChainCase, kernel: Kernel, *, extra: int = 0, seed: int = 0
) -> tuple[SimulatedLaunch, list[np.ndarray]]:
    """A launch on random operands, and these as the kernel's types have them."""
    _, roles = chain_text(case)
    pairs = zip(random_operands(case, roles, seed), kernel.launch.parameters, strict=False)
    operands = [operand.astype(parameter.dtype) for operand, parameter in pairs]
    shapes = [(case.batch, *case.out_size, case.links[i].out) for i in case.results]
    return SimulatedLaunch(kernel, operands, shapes, extra=extra), operands


def run(
    case: ChainCase,
    tile: ChainTile | None = None,
    precision: str = "tf32",
    *,
    target: str = "sm_90",
    extra: int = 4,
    seed: int = 0,
    blocks: int | None = None,
    rounded: bool = False,
) -> tuple[list[np.ndarray], SimulationReport]:
    """Simulate a case and check what it computed; the results and the report.

    rounded: results are rounded to TF32 for their readers.
    """
    shape = shape_of_case(case, precision)
    tile = tile or default_tile(shape, target_named(target), precision)
    launch, operands = launch_of(
        case, kernel_of(case, tile, target, precision), extra=extra, seed=seed
    )
    outcome = launch(seed=seed, blocks=blocks)
    _, roles = chain_text(case)
    slices = max(stage.warps_k for stage in plan(tile, shape).stages)
    wide = [operand.astype(np.float32) for operand in operands]
    wanted = expected_results(case, roles, wide, precision, slices + 4)
    if rounded:
        wanted = [(value, error + TF32_ROUNDING * np.abs(value)) for value, error in wanted]
    outcome.check(wanted)
    return outcome.values, outcome.report
