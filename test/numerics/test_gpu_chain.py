"""Chain kernels, run by the simulator, against float64 within derived tolerances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chain_cases import ChainCase, Link, Part, chain_module, expected_results, random_operands
from conv_cases import round_to_tf32
from gpu_dispatches import assert_close
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain import shape_of
from yolomlir.codegen.gpu.chain_problem import match_chain
from yolomlir.codegen.gpu.chain_tile import ChainTile, default_tile, objection, plan, tile_space
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import ACTIVATION
from yolomlir.codegen.gpu.ptx import assemble, to_ptx
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.simulator.report import SimulationReport
from yolomlir.simulator.simulate import simulate
from yolomlir.target import target_named

SM_90 = target_named("sm_90")


@pytest.fixture(autouse=True)
def context():
    with yolo.new_context(), ir.Location.unknown():
        yield


def spread(x: np.ndarray, extra: int) -> tuple[np.ndarray, int]:
    """A dense N x H x W x C array as a flat one of a larger pitch, and that pitch."""
    pitch = x.shape[-1] + extra
    wide = np.full((*x.shape[:-1], pitch), np.nan, np.float32)
    wide[..., : x.shape[-1]] = x
    return wide.reshape(-1), pitch


def run(
    case: ChainCase,
    tile: ChainTile | None = None,
    precision: str = "tf32",
    *,
    target: str = "sm_90",
    extra: int = 4,
    seed: int = 0,
    blocks: int | None = None,
) -> tuple[list[np.ndarray], SimulationReport]:
    """Simulate a case and check what it computed; the results and the report."""
    module, roles = chain_module(case)
    function = module.body.operations[0]
    chip = target_named(target)
    problem = match_chain(function.operation, precision=precision)
    tile = tile or default_tile(shape_of(problem), chip, precision)
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    kernel = generate_kernel(function, chip, precision=precision)
    operands = random_operands(case, roles, seed)
    flat: list[Any] = []
    parameters = kernel.launch.parameters
    for operand, parameter in zip(operands, parameters, strict=False):
        if parameter.role == ACTIVATION:
            flat += spread(operand, extra)
        else:
            flat.append((round_to_tf32(operand) if parameter.tf32 else operand).reshape(-1))
    outputs, places = {}, []
    for index in case.results:
        shape = (case.batch, *case.out_size, case.links[index].out)
        y, pitch = spread(np.full(shape, np.nan, np.float32), extra)
        mask = np.zeros((*shape[:-1], pitch), bool)
        mask[..., : shape[-1]] = True
        outputs[len(flat)] = mask.reshape(-1)
        places.append((len(flat), (*shape[:-1], pitch), shape[-1]))
        flat += [y, pitch]
    report = simulate(kernel.module, kernel.launch, flat, seed=seed, blocks=blocks, outputs=outputs)
    slices = max(stage.warps_k for stage in plan(tile, shape_of(problem)).stages)
    wanted = expected_results(case, roles, operands, precision, slices + 4)
    results = []
    for (place, shape, channels), (value, tolerance) in zip(places, wanted, strict=True):
        written = report.written[place].reshape(shape)[..., :channels]
        got = flat[place].reshape(shape)[..., :channels]
        assert written.all() if blocks is None else written.any()
        assert_close(got[written], value[written], tolerance[written])
        results.append(got)
    return results, report


PAIR = (Link(32), Link(16, (Part(32, 0),)))
TWO = ChainCase(5, 7, 24, PAIR)


@pytest.mark.parametrize(
    "tile",
    [
        ChainTile(16, 1, 4),
        ChainTile(16, 1, 8, 2, 2),
        ChainTile(32, 1, 2, 1, 3),
        ChainTile(16, 2, 4),
        ChainTile(64, 1, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_two_stages(tile, precision):
    run(TWO, tile, precision)
