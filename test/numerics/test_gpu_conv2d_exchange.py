"""How the blocks of a cluster that divide K add their sums: sent, counted, waited for."""

from __future__ import annotations

import re

import mutations
import numpy as np
import pytest
from conv_cases import Case, Operands
from conv_kernels import build, launch_of, run
from gpu_dispatches import START_ALONE, assembled, cluster_barriers
from simulated_launch import SimulatedLaunch

from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


# Sums of one warp go from registers; of several through the ring. Two to sixteen rows of a block.
TILES = [
    ConvTile(16, 16, 16, 1, 1, 1, 2, cluster_k=8),
    ConvTile(32, 16, 16, 2, 1, 1, 2, cluster_k=2),
    ConvTile(32, 24, 32, 1, 1, 2, 3, cluster_k=4),
    ConvTile(64, 16, 16, 2, 2, 1, 2, True, cluster_k=4),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("channels", [16, 22])
def test_sums_of_a_cluster_agree_with_float64(tile, channels):
    case = Case(7, 9, ((28, 1),), channels, residual=channels == 22, extra_pitch=4)
    run(case, tile)
    case = Case(7, 9, ((28, 1),), channels, residual=channels == 22, extra_pitch=8, element="f16")
    run(case, deeper(tile), "fp16", seed=1)


def deeper(tile: ConvTile) -> ConvTile:
    """The same for products that are twice as deep."""
    return ConvTile(
        tile.block_m, tile.block_n, 2 * tile.block_k, tile.warps_m, tile.warps_n, tile.warps_k,
        tile.stages, cluster_k=min(tile.cluster_k, 4),
    )  # fmt: skip


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_results_repeat_bit_by_bit(tile):
    case = Case(6, 7, ((24, 1),), 16)
    operands = Operands.random(case, 0)
    first, *others = (run(case, tile, operands=operands, seed=seed)[0] for seed in range(3))
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_no_thread_waits_for_its_writes(tile, target):
    kernel, _ = build(Case(8, 8, ((64, 1),), 32), tile, target=target_named(target))
    ptx = assembled(kernel, target)
    assert cluster_barriers(ptx) == START_ALONE
    assert "complete_tx::bytes.v4.b32" in ptx


def test_one_block_needs_none_of_this():
    kernel, _ = build(Case(8, 8, ((16, 1),), 16), ConvTile(32, 16, 16, 2, 1, 1, 2))
    text = str(kernel.module)
    assert "mbarrier" not in text
    assert "cluster" not in text


# ---- faults -------------------------------------------------------------------------------------

CASE = Case(6, 7, ((24, 1),), 16)


def planted(tile: ConvTile) -> tuple[SimulatedLaunch, str]:
    """A launch, and the kernel's text for a fault to be planted in."""
    kernel, _ = build(CASE, tile)
    return launch_of(CASE, kernel), str(kernel.module)


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_the_wait_is_needed(tile):
    launch, text = planted(tile)
    launch(schedule="warps")
    (wait,) = mutations.WAIT.finditer(text)
    found = mutations.kinds(launch, mutations.without(text, wait))
    assert found <= {"in-flight", "race", "uninitialised"}


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_a_wrong_count_is_found(tile):
    """One sum more is waited for for ever; one less is more than was expected."""
    launch, text = planted(tile)
    for change in (4, -4):
        assert mutations.kinds(launch, mutations.with_wrong_count(text, change)) == {"barrier"}


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_the_meeting_at_the_start_is_needed(tile):
    launch, text = planted(tile)
    assert mutations.kinds(launch, mutations.without_meeting(text)) <= {"race", "uninitialised"}


def test_the_threads_of_a_block_meet_before_they_read():
    """Else one could miss another's sums of the block's own rows."""
    launch, text = planted(TILES[1])
    wait = mutations.WAIT.search(text)
    *_, barrier = re.finditer("gpu.barrier", text[: wait.start()])
    found = mutations.kinds(launch, mutations.without(text, barrier))
    assert found <= {"race", "uninitialised"}
