"""Convolution kernels of float16, run by the simulator, against float64 within derived bounds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from conv_cases import GEOMETRIES, Case
from conv_kernels import run

from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


def half(*arguments: Any, **options: Any) -> Case:
    """A case of float16."""
    return Case(*arguments, element="f16", **options)


def simulated(case: Case, tile: ConvTile | None = None, **options: Any) -> Any:
    return run(case, tile, "fp16", **options)


TILE = ConvTile(32, 32, 32, 2, 2, 1, 3)


@pytest.mark.parametrize("width", [40, 20])
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_row_widths_that_tiles_do_not_divide(width, block_m):
    tile = ConvTile(block_m, 32, 32, block_m // 16 if block_m < 64 else 2, 1, 1, 3)
    simulated(half(5, width, ((32, 1),), 32), tile)


@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_every_geometry_agrees_with_float64(case):
    case = dataclasses.replace(case, element="f16")
    simulated(case, ConvTile(32, 8 if case.out_channels < 16 else 16, 64, 2, 1, 1, 3))
    simulated(case)


@pytest.mark.parametrize("channels", [80, 12, 8, 4, 3, 255, 6])
def test_output_channels_that_tiles_do_not_divide(channels):
    block_n = 8 if channels < 16 else 48
    case = half(5, 7, ((16, 1),), channels, kernel=(1, 1), residual=True)
    simulated(case, ConvTile(16, block_n, 16, 1, 1, 1, 2))
    simulated(case, ConvTile(16, block_n, 32, 1, 1, 2, 2))


@pytest.mark.parametrize("channels", [12, 10, 3, 5, 6, 1])
def test_input_channels_that_a_copy_does_not_divide(channels):
    """Copies of 8 and 4 bytes, and of single elements, which `cp.async` does not make."""
    simulated(half(6, 7, ((channels, 1),), 16), ConvTile(32, 16, 16, 2, 1, 1, 3))
    simulated(half(6, 7, ((channels, 1),), 16), ConvTile(32, 16, 32, 2, 1, 1, 8))


@pytest.mark.parametrize("stride", [1, 2])
def test_the_first_layer_reads_bytes(stride):
    case = half(16, 12, ((3, 1),), 16, stride=stride, image=True)
    simulated(case, ConvTile(64, 16, 32, 2, 1, 1, 2))
    simulated(dataclasses.replace(case, batch=2))


@pytest.mark.parametrize("extra", [8, 4, 2, 16])
def test_views_of_wider_buffers(extra):
    """A pitch of 2 or 4 more elements allows only narrower accesses, as the function says."""
    bytes_ = min(16, 2 * extra)
    attributes = f", yolo.alignments = array<i64: {bytes_}, {bytes_}, 0, 0, {bytes_}, {bytes_}>"
    case = half(
        6, 8, ((16, 1), (16, 2)), 24, kernel=(1, 1), residual=True, extra_pitch=extra,
        attributes=attributes,
    )  # fmt: skip
    simulated(case, ConvTile(32, 24, 16, 2, 1, 1, 3))
    simulated(case, ConvTile(32, 24, 32, 2, 1, 2, 3))


def test_views_that_are_not_aligned():
    attributes = ", yolo.alignments = array<i64: 2, 0, 0, 2, 2>"
    case = half(6, 7, ((16, 1),), 16, residual=True, extra_pitch=1, attributes=attributes)
    simulated(case, ConvTile(32, 16, 32, 2, 1, 1, 3))


@pytest.mark.parametrize("warps_k", [2, 4])
@pytest.mark.parametrize("channels", [16, 20])
def test_k_may_be_divided_among_warps(warps_k, channels):
    tile = ConvTile(16, 16, 64, 1, 1, warps_k, 3)
    simulated(half(5, 5, ((64, 1),), channels, residual=True), tile)


@pytest.mark.parametrize("cluster_k", [2, 4])
@pytest.mark.parametrize(
    "tile", [ConvTile(32, 16, 32, 2, 1, 1, 2), ConvTile(16, 24, 32, 1, 1, 2, 3)]
)
def test_k_may_be_divided_among_a_cluster(cluster_k, tile):
    case = half(5, 6, ((48, 1),), 36, residual=True, extra_pitch=8)
    simulated(case, dataclasses.replace(tile, cluster_k=cluster_k))


@pytest.mark.parametrize("block_k", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("unroll", [False, True])
def test_steps_of_k_are_read_without_bank_conflicts(block_k, unroll):
    tile = ConvTile(32, 32, block_k, 2, 2, 1, 3, unroll=unroll)
    _, report = simulated(half(6, 6, ((64, 1),), 32), tile)
    assert report.worst_bank_conflict == 1, str(report)


@pytest.mark.parametrize(
    "option", [{"through_l1": True}, {"staged": True}, {"release_early": True}], ids=str
)
def test_options_do_not_change_the_result(option):
    case = half(6, 7, ((32, 1),), 32, residual=True)
    plain, _ = simulated(case, TILE)
    changed, _ = simulated(case, dataclasses.replace(TILE, **option))
    np.testing.assert_array_equal(plain, changed)


@pytest.mark.parametrize("channels", [80, 76])
@pytest.mark.parametrize("tile", [ConvTile(16, 80, 32, 1, 5), ConvTile(16, 16, 16)], ids=str)
@pytest.mark.parametrize("inputs", [32, 36, 34, 35])
def test_channels_in_the_order_of_four_a_lane(tile, channels, inputs):
    """However many rows of weights the threads copy at once."""
    assert tile.warp_n % 16 == 0
    simulated(half(4, 5, ((inputs, 1),), channels, kernel=(1, 1), residual=True), tile)


@pytest.mark.parametrize("tile", [TILE, dataclasses.replace(TILE, staged=True)])
def test_the_head_stores_float32(tile):
    """What `detect` reads."""
    simulated(half(6, 7, ((32, 1),), 20, silu=False, kernel=(1, 1), result="f32"), tile)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_agree_with_float64(seed):
    """Any size, channel count, stride and pitch, with the tile that the compiler chooses."""
    rng = random.Random(seed)
    case = half(
        rng.randint(1, 9), rng.randint(1, 13), ((rng.randint(1, 40), 1),), rng.randint(1, 40),
        kernel=rng.choice([(1, 1), (3, 3), (1, 3)]), stride=rng.choice([1, 2]),
        residual=rng.random() < 0.5, batch=rng.choice([1, 2]),
    )  # fmt: skip
    simulated(case, seed=seed, target=target_named(rng.choice(["sm_80", "sm_90", "sm_120"])))
