"""The model of a chain's time against measurements (`chain_times.json`) and on other targets."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from yolomlir.autotune import space
from yolomlir.autotune.fitting import spearman
from yolomlir.codegen.gpu.chain_model import WEIGHTS, estimate_us, terms
from yolomlir.codegen.gpu.chain_space import default_tile, likely_tiles, tile_space
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, plan
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.target import TARGETS

SM_90 = TARGETS["sm_90"]
DEPTHWISE = ChainShape(
    ConvShape(1, 40, 40, 80, 40, 40, 80, 3, 3, 1, 1, 1, 1), ((80, 80), (80, 80)), depthwise=True
)
POINTWISE = ChainShape(ConvShape(1, 20, 20, 256, 20, 20, 256, 1, 1), ((128, 128),))


@cache
def measured() -> list[tuple[str, ChainShape, list[ChainTile], np.ndarray]]:
    """Precision, shape, tiles and microseconds of each chain."""
    found = []
    data = json.loads((Path(__file__).parent / "chain_times.json").read_text())
    for chain in data["chains"]:
        shape = ChainShape(
            ConvShape(**chain["first"]),
            tuple((k, n) for k, n in chain["later"]),
            tuple(chain.get("kept", ())),
            chain.get("depthwise", False),
            tuple(ConvShape(**inner) for inner in chain.get("inner", ())),
        )
        tiles: list[Any] = [space.tile_of("chain", key) for _, key in chain["times"]]
        found.append((chain["precision"], shape, tiles, np.array([us for us, _ in chain["times"]])))
    return found


def estimates(precision: str, shape: ChainShape, tiles: list[ChainTile]) -> np.ndarray:
    return np.array([estimate_us(tile, shape, SM_90, precision) for tile in tiles])


def test_estimates_are_near_the_measurements() -> None:
    off = np.concatenate([np.log(estimates(p, s, t) / us) for p, s, t, us in measured()])
    assert len(off) >= 300
    assert np.median(np.abs(off)) < 0.12
    assert abs(np.median(off)) < 0.08


def test_estimates_order_the_tiles_of_a_chain() -> None:
    ranks = [spearman(us, estimates(p, s, t)) for p, s, t, us in measured()]
    assert statistics.median(ranks) > 0.8


def test_one_of_four_least_estimates_is_fast() -> None:
    """Of sixteen, of which the five fastest measured ones are five."""
    losses = []
    for precision, shape, tiles, us in measured():
        chosen = np.argsort(estimates(precision, shape, tiles), kind="stable")[:4]
        losses.append(us[chosen].min() / us.min() - 1)
    assert np.mean(losses) < 0.01
    assert max(losses) < 0.05


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("shape", [DEPTHWISE, POINTWISE], ids=["depthwise", "pointwise"])
def test_the_default_has_the_least_estimate(shape: ChainShape, precision: str, target: str) -> None:
    chip = TARGETS[target]
    tiles = list(tile_space(shape, chip, precision))
    us = [estimate_us(tile, shape, chip, precision) for tile in tiles]
    assert all(math.isfinite(t) and t > 0 for t in us)
    default = default_tile(shape, chip, precision)
    assert estimate_us(default, shape, chip, precision) == min(us)
    assert likely_tiles(shape, chip, precision)[0] == default


def test_every_term_counts_somewhere() -> None:
    """And none is missing: a chain of eight images takes longer than that of one."""
    seen: set[str] = set()
    for precision, shape, tiles, _ in measured():
        for tile in tiles:
            counts = terms(plan(tile, shape), SM_90, precision)
            assert set(counts) == set(WEIGHTS)
            seen |= {name for name, count in counts.items() if count > 0}
    assert seen == set(WEIGHTS)


def test_more_images_take_longer_and_products_of_float32_three_times_the_work() -> None:
    tile = default_tile(POINTWISE, SM_90, "tf32")
    first = POINTWISE.first
    many = ChainShape(
        ConvShape(64, 20, 20, first.in_channels, 20, 20, first.out_channels, 1, 1), POINTWISE.later
    )
    one = estimate_us(tile, POINTWISE, SM_90, "tf32")
    assert 8 * one < estimate_us(tile, many, SM_90, "tf32") < 64 * one
    assert one < estimate_us(tile, POINTWISE, SM_90, "fp32") < 3 * one
