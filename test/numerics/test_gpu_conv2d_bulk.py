"""Convolutions whose weights come by bulk copies: alone, or shared by the blocks of a cluster."""

from __future__ import annotations

import dataclasses
import re

import mutations
import numpy as np
import pytest
from conv_cases import Case
from conv_kernels import build, launch_of, run
from gpu_dispatches import START_ALONE, assembled, cluster_barriers
from simulated_launch import SimulatedLaunch

from yolomlir.autotune import space
from yolomlir.codegen.gpu.builder import Int
from yolomlir.codegen.gpu.conv2d_load import paired_channel, swizzle
from yolomlir.codegen.gpu.conv2d_tile import ConvTile, objection
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.codegen.gpu.kernel import Launch
from yolomlir.diagnostics import UserError
from yolomlir.runtime.packing import orders, packed
from yolomlir.runtime.plan import Argument, Plan, Step
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


# Rings that are used once and again, in loops and unrolled; one, two and four blocks.
TILES = [
    ConvTile(32, 16, 32, 2, 1, 1, 2, cluster_m=1),
    ConvTile(16, 32, 32, 1, 2, 1, 3, True, cluster_m=1),
    ConvTile(32, 32, 32, 2, 1, 1, 3, cluster_m=2),
    ConvTile(16, 16, 32, 1, 1, 2, 4, True, cluster_m=2),
    ConvTile(16, 32, 32, 1, 1, 2, 9, True, cluster_m=2),
    ConvTile(16, 16, 32, 1, 2, 1, 5, cluster_m=4),
    ConvTile(32, 16, 32, 2, 1, 1, 2, cluster_k=2, cluster_m=1),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_rings_agree_with_float64(tile, precision):
    """81 pixels fill no cluster; K has nine steps, or 18 of which two blocks have nine each."""
    element = "f16" if precision == "fp16" else "f32"
    channels = 32 * tile.cluster_k
    case = Case(9, 9, ((channels, 1),), 32, residual=True, extra_pitch=8, element=element)
    run(case, tile, precision, seed=TILES.index(tile))


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 6, ((64, 1),), 32, kernel=(1, 1)),
        Case(13, 11, ((16, 1),), 32, stride=2, batch=2),
        Case(8, 8, ((32, 1), (32, 2)), 32, kernel=(1, 1), silu=False),
    ],
    ids=str,
)
def test_every_geometry_agrees_with_float64(case):
    for block_k, tile in ((16, TILES[2]), (16, TILES[5])):
        run(case, dataclasses.replace(tile, block_k=block_k, stages=3))


def test_tiles_of_one_step():
    run(Case(5, 5, ((32, 1),), 16, kernel=(1, 1)), ConvTile(16, 16, 32, 1, 1, 1, 1, cluster_m=2))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_clusters_share_by_multicast_and_meet_at_the_start_alone(tile, target):
    kernel, _ = build(Case(16, 16, ((64, 1),), 32), tile, target=target_named(target))
    ptx = assembled(kernel, target)
    shared = tile.cluster_m > 1
    copies = re.findall(r"cp\.async\.bulk\.\S+", ptx)
    assert copies
    assert all(c.endswith(".multicast::cluster") == shared for c in copies)
    clustered = shared or tile.cluster_k > 1
    assert cluster_barriers(ptx) == (START_ALONE if clustered else [])
    reused = tile.stages < tile.k_tiles(ConvShape(1, 16, 16, 64, 16, 16, 32, 3, 3))
    returned = re.findall(r"mbarrier\.arrive\.shared::cluster", ptx)
    assert bool(returned) == (shared and reused)


def test_a_tile_without_it_makes_the_same_kernel_as_ever():
    tile = ConvTile(32, 16, 32, 2, 1, 1, 2)
    kernel, _ = build(Case(8, 8, ((32, 1),), 16), tile, "tf32")
    text = str(kernel.module)
    assert "bulk" not in text
    assert "mbarrier" not in text
    assert all(p.packed == () for p in kernel.launch.parameters)


# ---- tiles --------------------------------------------------------------------------------------

SHAPE = ConvShape(1, 40, 40, 64, 40, 40, 64, 3, 3, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("options", "shape", "target", "reason"),
    [
        ({"cluster_m": 3}, {}, "sm_90", "cluster_m = 3"),
        ({"cluster_m": 1}, {}, "sm_89", "on sm_89"),
        ({"cluster_m": 2, "cluster_k": 2}, {}, "sm_90", "one must be 1"),
        ({"cluster_m": 2}, {"out_channels": 80}, "sm_90", "divide the weights"),
        ({"cluster_m": 2}, {"in_channels": 40}, "sm_90", "divide the weights"),
        ({"cluster_m": 2, "stages": 2}, {}, "sm_90", "three stages"),
        ({"cluster_m": 1}, {"source_vector": 0}, "sm_90", "not copied in bulk"),
    ],
)
def test_an_illegal_tile_says_why(options, shape, target, reason):
    tile = dataclasses.replace(ConvTile(32, 32, 32, 2, 1, 1, 3), **options)
    found = objection(tile, dataclasses.replace(SHAPE, **shape), target_named(target), "tf32")
    assert found is not None
    assert reason in found


def test_old_keys_keep_their_meaning():
    old = "block_m=32,block_n=32,block_k=64,warps_m=1,warps_n=1,warps_k=4,stages=6"
    tile = space.tile_of("conv2d", old)
    assert tile == ConvTile(32, 32, 64, 1, 1, 4, 6)
    assert tile.cluster_m == 0
    for tile in TILES:
        assert space.tile_of("conv2d", space.key_of(tile)) == tile
        assert ConvTile.from_attribute(tile.to_attribute()) == tile
    with pytest.raises(UserError):
        space.tile_of("conv2d", old + ",cluster_z=1")


@pytest.mark.parametrize(("target", "most"), [("sm_90", 4), ("sm_120", 1), ("sm_89", 0)])
def test_the_tuner_comes_upon_them(target, most):
    problem = space.Problem("conv2d", SHAPE, target_named(target), "tf32")
    ranked = [t for t in space.ranked(problem) if isinstance(t, ConvTile)]
    assert max(t.cluster_m for t in ranked) == most
    near = space.neighbours(problem, ConvTile(32, 32, 64, 1, 1, 4, 6))
    assert any(t.cluster_m for t in near) == (most > 0)


# ---- the order of the weights -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("columns", [16, 64])
@pytest.mark.parametrize("paired", [0, 1])
def test_the_order_is_that_of_shared_memory(dtype, columns, paired):
    """Element by element, by the functions that kernels index it with."""
    rows, channels, k = 16, 32, 2 * columns
    values = np.arange(channels * k).reshape(channels, 1, 2, columns).astype(dtype)
    flat = packed(values, (rows, columns, paired)).reshape(-1)
    assert packed(values, ()) is values
    size = 16 // values.itemsize
    for channel, element in ((0, 0), (5, 3), (15, k - 1), (17, columns), (30, columns - size)):
        tile, inside = divmod(channel, rows)
        step, column = divmod(element, columns)
        row = next(r for r in range(rows) if (known(paired_channel(r)) if paired else r) == inside)
        chunk = known(swizzle(Int.of(row), column // size, columns // size))
        at = ((tile * 2 + step) * rows + row) * columns + chunk * size + column % size
        assert flat[at] == values.reshape(channels, k)[channel, element]


def known(value: Int) -> int:
    assert value.known is not None
    return value.known


def test_the_launch_says_the_order():
    kernel, _ = build(Case(8, 8, ((32, 1),), 16), TILES[0], "tf32")
    launch = Launch.from_json(kernel.launch.to_json())
    assert launch == kernel.launch
    assert [p.packed for p in launch.parameters] == [(), (16, 32, 0), (), ()]
    step = Step("k", "layer", (Argument(), Argument(weight="w"), Argument(weight="b")), (), ())
    plan = Plan(0, {}, {}, (step,))
    assert orders(plan, {"k": kernel.launch.to_json()}) == {"w": (16, 32, 0)}


# ---- faults -------------------------------------------------------------------------------------

CASE = Case(7, 7, ((32, 1),), 16)
SHARED = ConvTile(16, 16, 32, 1, 1, 1, 3, True, cluster_m=2)


@pytest.fixture
def planted() -> tuple[SimulatedLaunch, str]:
    """A launch, and the kernel's text for a fault to be planted in."""
    kernel, _ = build(CASE, SHARED)
    return launch_of(CASE, kernel), str(kernel.module)


def test_every_wait_is_needed(planted):
    """Those for weights and, of one thread, those for slots that other blocks have read."""
    launch, text = planted
    launch(schedule="warps")
    waits = list(mutations.WAIT.finditer(text))
    steps, slots = 9, SHARED.stages
    assert len(waits) == steps + (steps - slots)
    for wait in waits[:: len(waits) // 5]:
        found = mutations.kinds(launch, mutations.without(text, wait), seeds=3)
        assert found <= {"in-flight", "race", "uninitialised", "barrier"}


def test_a_wrong_count_is_found(planted):
    launch, text = planted
    for change in (16, -16):
        wrong = mutations.with_wrong_count(text, change)
        assert mutations.kinds(launch, wrong, seeds=3) == {"barrier"}


def test_the_meeting_at_the_start_is_needed(planted):
    launch, text = planted
    early = mutations.without_meeting(text)
    assert mutations.kinds(launch, early, seeds=3) <= {"race", "uninitialised"}


@pytest.mark.parametrize("which", [0, -1])
def test_giving_back_is_needed(planted, which):
    launch, text = planted
    given = list(re.finditer(r"nvvm\.mbarrier\.arrive %[^\n]*", text))
    assert len(given) == 2 * (9 - SHARED.stages)
    assert mutations.kinds(launch, mutations.without(text, given[which]), seeds=3) == {"barrier"}
