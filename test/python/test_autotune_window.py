"""Windows in the space of convolutions: keys, ranks, the model of their time against measurements.

`window_times.json` has the measurements: 240 windows of 15 convolutions, and the tuned other tile.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import statistics
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from autotune_fakes import workload
from test_gpu_assembles import check, conv_text, dispatches, linalg_module
from yolomlir.dialects import yolo

from yolomlir.autotune import space, untuned, window_model
from yolomlir.autotune.calibration import _measured
from yolomlir.autotune.constants import shipped_calibration
from yolomlir.autotune.space import Problem
from yolomlir.autotune.workload import Case
from yolomlir.bindings import ir
from yolomlir.codegen.gpu import conv2d_kinds
from yolomlir.codegen.gpu.chain_tile import ChainTile
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape, match_conv
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.diagnostics import UserError
from yolomlir.target import TARGETS, target_named

SM_90 = TARGETS["sm_90"]
FEW_CHANNELS = ConvShape(1, 160, 160, 16, 160, 160, 8, 3, 3, 1, 1, 1, 1)
MANY = ConvShape(1, 80, 80, 128, 40, 40, 128, 3, 3, 2, 2, 1, 1)
POINTWISE = ConvShape(1, 80, 80, 96, 80, 80, 80, 1, 1)
IMAGE = ConvShape(1, 64, 64, 3, 32, 32, 16, 3, 3, 2, 2, 1, 1, source_vector=0)
HALF = dataclasses.replace(FEW_CHANNELS, source_vector=8, dtype="float16")
KEY = "block_m=128,cluster_n=1,warps=8,step_kib=8,slots=2,rows=8"


def problem(shape: ConvShape, target: str = "sm_90", precision: str = "tf32") -> Problem:
    """Of a convolution."""
    return Problem("conv2d", shape, TARGETS[target], precision)


# ---- keys and kinds -----------------------------------------------------------------------------


def test_the_names_of_a_keys_options_tell_its_kind() -> None:
    tile = space.tile_of("conv2d", KEY)
    assert tile == ChainTile(128, 1, 8, 8, 2, rows=8)
    assert space.key_of(tile) == KEY
    other = space.tile_of("conv2d", "block_m=64,block_n=32,block_k=32")
    assert other == ConvTile(64, 32, 32)
    for key in (
        "block_m=64,block_n=8,block_k=8,rows=4",
        "rows=4",
        "block_m=64,cluster_n=1,warps=4",
    ):
        with pytest.raises(UserError, match="is not a tile of family 'conv2d'"):
            space.tile_of("conv2d", key)


def test_attributes_bring_back_both_kinds() -> None:
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(conv_text(FEW_CHANNELS))
        function = module.body.operations[0].operation
        assert conv2d_kinds.stated_tile(function) is None
        for tile in (ConvTile(64, 8, 16, 4, unroll=True), ChainTile(128, 1, 8, 8, 2, rows=8)):
            function.attributes["yolo.tile"] = space.attribute(tile)
            assert conv2d_kinds.stated_tile(function) == tile
        function.attributes["yolo.tile"] = ir.Attribute.parse("{block_m = 16, rows = 4}")
        with pytest.raises(UserError, match="the tile is incomplete"):
            conv2d_kinds.stated_tile(function)


@pytest.mark.parametrize(
    ("shape", "tile", "reason"),
    [
        (FEW_CHANNELS, ChainTile(128, 1, 8), "rows = 0"),
        (POINTWISE, ChainTile(128, 1, 8, rows=8), "more than one tap"),
        (IMAGE, ChainTile(128, 1, 8, rows=8), "not converted"),
        (FEW_CHANNELS, ChainTile(128, 1, 8, rows=3), "rows = 3"),
        (FEW_CHANNELS, ConvTile(24, 8, 8), "block_m = 24"),
    ],
)
def test_an_illegal_tile_says_why(
    shape: ConvShape, tile: conv2d_kinds.Conv2dTile, reason: str
) -> None:
    assert reason in (space.illegal(problem(shape), tile) or "")
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(conv_text(POINTWISE))
        function = module.body.operations[0]
        function.operation.attributes["yolo.tile"] = space.attribute(ChainTile(64, 1, 4, rows=8))
        with pytest.raises(UserError, match=r"illegal tile ChainTile.*more than one tap"):
            generate_kernel(function, SM_90, precision="tf32")


# ---- the space ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("shape", [FEW_CHANNELS, HALF], ids=["tf32", "fp16"])
def test_both_kinds_are_in_the_space(shape: ConvShape, target: str) -> None:
    case = problem(shape, target, "fp16" if shape is HALF else "tf32")
    ranked = space.ranked(case)
    assert len(ranked) == len(set(ranked)) == 512
    assert {type(t) for t in ranked[:10]} == {ConvTile, ChainTile}
    assert all(space.illegal(case, t) is None for t in ranked[::7])
    assert all(space.tile_of("conv2d", space.key_of(t)) == t for t in ranked)
    us = space.predicted_us(case, list(ranked))
    assert us[0] == min(us)
    assert {type(t) for t in space.sample(case, 60, "seed")} == {ConvTile, ChainTile}


@pytest.mark.parametrize("shape", [POINTWISE, IMAGE], ids=["1x1", "image"])
def test_where_no_window_can_be_there_is_none(shape: ConvShape) -> None:
    assert conv2d_kinds.window_tiles(shape, SM_90, "tf32") == ()
    assert all(isinstance(t, ConvTile) for t in space.ranked(problem(shape)))
    assert isinstance(space.default(problem(shape)), ConvTile)


def test_neighbours_of_a_window_are_windows() -> None:
    case = problem(FEW_CHANNELS)
    tile = space.tile_of("conv2d", KEY)
    near = space.neighbours(case, tile)
    assert len(near) >= 5
    assert tile not in near
    for other in near:
        assert isinstance(other, ChainTile)
        assert space.illegal(case, other) is None
        changed = [
            f.name
            for f in dataclasses.fields(tile)
            if getattr(tile, f.name) != getattr(other, f.name)
        ]
        assert 1 <= len(changed) <= 2


def test_an_order_of_both_kinds_keeps_the_times_apart() -> None:
    case = problem(FEW_CHANNELS)
    window, gathered = ChainTile(128, 1, 8, 8, 2, rows=8), ConvTile(64, 8, 16, 4)
    alone = [space.predicted_us(case, [t])[0] for t in (window, gathered)]
    assert space.predicted_us(case, [gathered, window, gathered]) == [alone[i] for i in (1, 0, 1)]
    assert space.predicted_us(case, []) == []


def test_without_measurements_a_window_needs_a_clear_gain() -> None:
    constants = shipped_calibration().constants
    kinds = set()
    for name in ("sm_90", "sm_120"):
        for shape in {c.problem.shape for c in convolutions()} | {FEW_CHANNELS, MANY}:
            case = problem(shape, name)
            tile = space.default(case)
            kinds.add(type(tile))
            window = untuned.best_window(shape, case.target, "tf32")
            if window is None:
                continue
            other = untuned.best_gathered(shape, case.target, "tf32")
            us = space.predicted_us(case, [window, other], constants)
            assert tile == (window if us[0] < 0.9 * us[1] else other)
    assert kinds == {ConvTile, ChainTile}
    assert isinstance(space.default(problem(FEW_CHANNELS)), ChainTile)
    assert isinstance(space.default(problem(MANY)), ConvTile)


def convolutions() -> list[Case]:
    """The cases of a network."""
    return [c for c in workload().cases.values() if c.problem.family == "conv2d"]


@pytest.mark.parametrize(
    ("chip", "precision"),
    [("sm_90", "tf32"), ("sm_120", "tf32"), ("sm_120", "fp32"), ("sm_90", "fp16")],
)
def test_windows_assemble_without_spills(chip: str, precision: str) -> None:
    target = target_named(chip)
    element = "f16" if precision == "fp16" else "f32"
    kernels = {}
    with yolo.new_context(), ir.Location.unknown():
        for shape in (HALF if precision == "fp16" else FEW_CHANNELS, MANY):
            if precision == "fp16":
                shape = dataclasses.replace(shape, source_vector=8, dtype="float16")
            module = ir.Module.parse(conv_text(shape, element))
            function = module.body.operations[0]
            tiles = conv2d_kinds.window_tiles(shape, target, precision)
            for tile in random.Random(chip + precision).sample(tiles, 2):
                function.operation.attributes["yolo.tile"] = space.attribute(tile)
                kernels[f"{shape.k} {tile}"] = generate_kernel(
                    function, target, precision=precision
                )
        check(kernels, target)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
@pytest.mark.parametrize("scale", ["n", "s", "m"])
def test_windows_of_every_convolution_assemble(scale: str, chip: str, precision: str) -> None:
    """Some of each, without spills."""
    target, chosen = target_named(chip), random.Random(f"{scale} {chip} {precision}")
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(linalg_module(scale, chip, precision))
        kernels = {}
        for name, function in dispatches(module, "conv2d").items():
            shape = match_conv(function.operation, precision=precision).shape
            tiles = conv2d_kinds.window_tiles(shape, target, precision)
            for tile in chosen.sample(tiles, min(3, len(tiles))):
                function.operation.attributes["yolo.tile"] = space.attribute(tile)
                key = f"{name} {space.key_of(tile)}"
                kernels[key] = generate_kernel(function, target, precision=precision)
        assert len(kernels) >= 40
        check(kernels, target)


# ---- the model ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Timed:
    """Measurements of one convolution."""

    problem: Problem
    gathered: tuple[float, ConvTile]
    windows: list[tuple[float, ChainTile]]


@cache
def measured() -> dict[str, Timed]:
    """By function."""
    data = json.loads(Path(__file__).with_name("window_times.json").read_text(encoding="utf-8"))
    found = {}
    for name, times in data["convolutions"].items():
        sizes = re.match(r"conv2d_(\d)x\ds(\d)_(\d+)x(\d+)x(\d+)_(\d+)", name)
        assert sizes is not None
        k, s, c, h, w, n = map(int, sizes.groups())
        shape = ConvShape(1, h, w, c, h // s, w // s, n, k, k, s, s, 1, 1)
        us, key = times["gathered"]
        windows = [(t, space.tile_of("conv2d", key)) for t, key in times["windows"]]
        found[name] = Timed(problem(shape), (us, space.tile_of("conv2d", key)), windows)
    return found


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation of ranks."""
    ranks = [np.argsort(np.argsort(v)) for v in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def legal(timed: Timed) -> list[tuple[float, ChainTile]]:
    """The measured windows that the generator still makes."""
    return [(us, t) for us, t in timed.windows if space.illegal(timed.problem, t) is None]


def test_windows_are_predicted_as_they_were_measured() -> None:
    """What `window_model.py` and docs/tuning.md state of the fit."""
    real, model, within, losses = [], [], [], []
    for timed in measured().values():
        rows = legal(timed)
        us = np.array([us for us, _ in rows])
        ours = np.array(space.predicted_us(timed.problem, [t for _, t in rows]))
        real.append(us)
        model.append(ours)
        within.append(spearman(us, ours))
        losses.append(us[np.argsort(ours, kind="stable")[:4]].min() / us.min())
    us, ours = np.concatenate(real), np.concatenate(model)
    assert len(us) >= 230
    assert np.median(np.abs(ours / us - 1)) < 0.05
    assert np.quantile(np.abs(ours / us - 1), 0.9) < 0.15
    assert spearman(us, ours) > 0.97
    assert statistics.median(within) > 0.88
    assert max(losses) < 1.05


def test_the_faster_kind_is_predicted_to_be() -> None:
    """Of the measured tiles; ties within 5 % count as right either way."""
    constants = shipped_calibration().constants
    right = []
    for timed in measured().values():
        us, window = min(timed.windows, key=lambda item: item[0])
        ours = space.predicted_us(timed.problem, [window, timed.gathered[1]], constants)
        tie = abs(us / timed.gathered[0] - 1) < 0.05
        right.append(tie or (us < timed.gathered[0]) == (ours[0] < ours[1]))
    assert len(right) == 15
    assert sum(right) >= 14


def test_the_weights_are_those_of_least_squares() -> None:
    """No other factor of one term alone is better."""
    rows, us = [], []
    for timed in measured().values():
        case = timed.problem
        for time, tile in legal(timed):
            terms = window_model.terms(tile, case.shape, case.target, case.precision)
            rows.append([terms[name] * window_model.WEIGHTS[name] for name in terms])
            us.append(1e-6 * time * 1.755e9)
    cycles = np.array(rows) / np.array(us)[:, None]
    least = ((cycles.sum(axis=1) - 1) ** 2).sum()
    for column in range(cycles.shape[1]):
        for factor in (0.8, 1.25):
            changed = cycles.sum(axis=1) + (factor - 1) * cycles[:, column]
            assert ((changed - 1) ** 2).sum() > least


def test_windows_do_not_count_where_the_other_model_is_fitted() -> None:
    points = {f"block_m={m},block_n=8,block_k=16": 3.0 + m for m in (16, 32, 64, 128)}
    found = _measured(FEW_CHANNELS, {**points, KEY: 1.0}, "tf32")
    assert found is not None
    assert sorted(found.us) == sorted(points.values())
