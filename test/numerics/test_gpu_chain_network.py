"""Every chain of YOLO26n with its own shape and default tile, a few of its blocks simulated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from chain_cases import TF32_ROUNDING, convolve
from gpu_dispatches import activated, stored_half
from network_dispatches import dispatches
from simulated_launch import SimulatedLaunch, round_to_tf32

from yolomlir.bindings import func, ir
from yolomlir.codegen.gpu.chain import shape_of
from yolomlir.codegen.gpu.chain_model import estimate_us
from yolomlir.codegen.gpu.chain_problem import STAGE, ChainProblem, Stage, match_chain
from yolomlir.codegen.gpu.chain_space import default_tile, tile_space
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, plan
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import ACTIVATION, Kernel
from yolomlir.codegen.gpu.tile import tile_or, to_attribute
from yolomlir.target import Target, target_named

pytestmark = pytest.mark.usefixtures("context")
Bounded = tuple[np.ndarray, np.ndarray]
"""Values and how far they may be off."""


def exact(x: np.ndarray) -> Bounded:
    """Values that are what they should be."""
    return x.astype(np.float64), np.zeros(x.shape)


def read(problem: ChainProblem, index: int, operands: list[np.ndarray], done: list[Bounded]):
    """A stage's input as its products see it."""
    parts: list[Bounded] = []
    if index == 0:
        for source in problem.first.sources:
            x = operands[source.argument].repeat(source.upsample, 1).repeat(source.upsample, 2)
            parts.append(exact(x if problem.depthwise else round_to_tf32(x)))
    for piece in problem.stages[index].pieces:
        if piece.argument is not None:
            parts.append(exact(round_to_tf32(operands[piece.argument])))
            continue
        span = slice(piece.offset, piece.offset + piece.channels)
        value, error = (a[..., span] for a in done[piece.stage])
        rounding = TF32_ROUNDING if problem.first.shape.dtype == "float32" else 0.0
        parts.append((value, error + rounding * (np.abs(value) + error)))
    return tuple(np.concatenate([p[i] for p in parts], 3) for i in (0, 1))


def compute(stage: Stage, x: Bounded, w: np.ndarray, operands: list[np.ndarray], done, sums: int):
    """A stage's result; the bound is that of `chain_cases.expected_results`."""
    bias = sum(operands[number].astype(np.float64) for number in stage.epilogue.channel)
    stride = stage.shape.stride_h
    value = convolve(x[0], w, stride) + bias
    magnitude = convolve(np.abs(x[0]) + x[1], np.abs(w), stride) + np.abs(bias)
    steps = stage.shape.k // stage.shape.element.k_step + sums + 12
    error = convolve(x[1], np.abs(w), stride) + magnitude * steps * 2.0**-23
    if "math.exp" in str(stage.epilogue.generic):
        value, error = activated(value, error)
    for number in stage.epilogue.element:
        other = exact(operands[number]) if number < STAGE else done[number - STAGE]
        value, error = value + other[0], error + other[1]
    return value, error + np.abs(value) * 2.0**-23


def evaluate(problem: ChainProblem, operands: list[np.ndarray], sums: int) -> list[Bounded]:
    """Every stage's result in float64."""
    done: list[Bounded] = []
    for index, stage in enumerate(problem.stages):
        w = operands[stage.weight]
        if problem.depthwise and index == 0:  # as a dense one, each channel of which reads one
            taps = w.reshape(*w.shape[:2], -1)
            w = np.eye(taps.shape[2])[:, None, None, :] * taps
        x = read(problem, index, operands, done)
        value, error = compute(stage, x, w, operands, done, sums)
        stored = None if stage.result is None else problem.parameters[stage.result].dtype
        if (stored or stage.shape.dtype) == "float16":
            error = stored_half(value, error)
        done.append((value, error))
    return done


def random_operands(
    function: ir.Operation, kernel: Kernel, problem: ChainProblem
) -> list[np.ndarray]:
    """Physical arrays for the arguments; weights as the program packs them."""
    by_tap = problem.stages[0].weight if problem.depthwise else -1
    rng = np.random.default_rng(0)
    found = []
    arguments = function.regions[0].blocks[0].arguments
    pairs = zip(arguments, kernel.launch.parameters, strict=False)
    for number, (argument, parameter) in enumerate(pairs):
        x = rng.standard_normal(ir.RankedTensorType(argument.type).shape).astype(np.float32)
        if parameter.role != ACTIVATION and x.ndim == 4:
            x /= np.float32(np.sqrt(x[..., 0].size if number == by_tap else x[0].size))
        found.append((round_to_tf32(x) if parameter.tf32 else x).astype(parameter.dtype))
    return found


def best_window(shape: ChainShape, target: Target, precision: str) -> ChainTile | None:
    """The tile of the least estimate that loads a window; None where there is none."""
    tiles = [tile for tile in tile_space(shape, target, precision) if tile.rows]
    return min(tiles, key=lambda t: estimate_us(t, shape, target, precision), default=None)


def tile_for(
    function: ir.Operation, shape: ChainShape, target: Target, precision: str, which: str
) -> ChainTile | None:
    """The default tile, the best window, either in bulk, or the one that ships for the shape."""
    if which == "shipped":
        default = ChainTile(0, 0, 0, 0, 0)
        tile = tile_or(function, ChainTile, lambda: default)
        return None if tile == default else tile
    kind, _, bulk = which.partition(" in ")
    tile = (best_window if kind == "window" else default_tile)(shape, target, precision)
    return tile and dataclasses.replace(tile, bulk=int(bulk == "bulk"))


def check(view: func.FuncOp, chip: str, precision: str, which: str) -> bool:
    """Simulate some blocks of one chain and compare what they wrote; whether it has such a tile."""
    function, target = view.operation, target_named(chip)
    problem = match_chain(function, precision=precision)
    shape = shape_of(problem)
    tile = tile_for(function, shape, target, precision, which)
    if tile is None:
        return False
    function.attributes["yolo.tile"] = to_attribute(tile)
    kernel = generate_kernel(view, target, precision=precision)
    operands = random_operands(function, kernel, problem)
    stored = [(s.result, i) for i, s in enumerate(problem.stages) if s.result is not None]
    wide = [operand.astype(np.float32) for operand in operands]
    wanted = evaluate(problem, wide, max(stage.warps_k for stage in plan(tile, shape).stages))
    wanted = [wanted[index] for _, index in sorted(stored)]
    shapes = [value.shape for value, _ in wanted]
    SimulatedLaunch(kernel, operands, shapes)(blocks=2).check(wanted)
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
@pytest.mark.parametrize(
    "which", ["default", "default in bulk", "window", "window in bulk", "shipped"]
)
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_every_chain_in_the_simulator(chip, which, precision):
    if which == "shipped" and chip != "sm_90":
        pytest.skip("no table of measured tiles of chains ships for it")
    views = dispatches("chain", "n", chip, precision)
    checked = sum(check(view, chip, precision, which) for view in views)
    assert checked >= (15 if which.startswith("window") else 20)
