"""Chains whose weights come by bulk copies, in the simulator, against float64."""

from __future__ import annotations

import dataclasses
import re

import mutations
import numpy as np
import pytest
from chain_cases import ChainCase, Link, Part
from chain_forms import (
    ATTENTION_BLOCK,
    BOTTLENECK,
    BOTTLENECK_AND_C3K2_END,
    C3K2_END,
    CHAINS,
    DEPTHWISE,
    DIVISIBLE_DEPTHWISE,
    DOWN,
    STORED_PAIR,
    STORED_WINDOW,
    TWO,
)
from chain_kernels import kernel_of, launch_of, run, shape_of_case
from conv_cases import Case
from conv_kernels import run as run_conv
from gpu_dispatches import assembled

from yolomlir.autotune import space
from yolomlir.codegen.gpu.chain_tile import ChainTile, objection, plan
from yolomlir.codegen.gpu.kernel import ACTIVATION
from yolomlir.runtime.packing import orders, packed
from yolomlir.runtime.plan import Argument, Plan, Step
from yolomlir.target import target_named

SM_90 = target_named("sm_90")
WAIT = re.compile(r"\n *llvm\.inline_asm has_side_effects \"\{[^\n]*try_wait[^\n]*\$1;[^\n]*")
FENCE = re.compile(r"\n *nvvm\.fence\.proxy[^\n]*")

pytestmark = pytest.mark.usefixtures("context")


def bulk(*options: int, **more: int) -> ChainTile:
    return ChainTile(*options, **more, bulk=1)


def compare(case: ChainCase, tile: ChainTile, precision: str, extra: int = 8) -> None:
    """Within the bounds, and the bits of the kernel whose threads all copy."""
    seed = len(case.links)
    found, _ = run(case, tile, precision, extra=extra, seed=seed)
    usual, _ = run(case, dataclasses.replace(tile, bulk=0), precision, extra=extra, seed=seed)
    for a, b in zip(found, usual, strict=True):
        np.testing.assert_array_equal(a, b)


RAGGED = ChainCase(3, 6, 64, (Link(64), Link(56, (Part(64, 0),))))
"""The last block of a cluster has fewer channels of the last stage."""
# Rings that are used again and again, and steps that all have their slot; runs of pixels, ragged.
RINGS = [
    bulk(16, 1, 4, 1, 2),
    bulk(32, 1, 2, 1, 3),
    bulk(16, 1, 8, 8, 12),
    bulk(64, 1, 16, 2, 4),
]


@pytest.mark.parametrize("tile", RINGS, ids=str)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_rings_give_the_bits_of_threads_that_copy(tile, precision):
    compare(TWO, tile, precision)


@pytest.mark.parametrize("case", CHAINS, ids=range(len(CHAINS)))
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_every_form_gives_the_bits_of_threads_that_copy(case, precision):
    """K and channels that nothing divides, too: zeros come from memory."""
    compare(case, bulk(16, 1, 4, 2, 3), precision)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (CHAINS[0], bulk(16, 2, 4, 2, 3)),
        (ATTENTION_BLOCK, bulk(16, 2, 4, 2, 2)),
        (RAGGED, bulk(16, 4, 4, 8, 12)),
        (RAGGED, bulk(16, 2, 8, 4, 2)),
    ],
    ids=lambda value: str(value) if isinstance(value, ChainTile) else "",
)
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_each_block_of_a_cluster_has_weights_of_its_own(case, tile, precision):
    compare(case, tile, precision)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (DOWN, bulk(32, 1, 4, 2, 2, rows=4)),
        (C3K2_END, bulk(64, 1, 8, 8, 12, rows=8)),
        (C3K2_END, bulk(64, 2, 4, 1, 3, rows=4)),
        (STORED_WINDOW, bulk(16, 1, 4, 2, 3, rows=4)),
        (BOTTLENECK, bulk(32, 1, 4, 2, 2, rows=4)),
        (BOTTLENECK_AND_C3K2_END, bulk(32, 1, 8, 8, 12, rows=2)),
        (BOTTLENECK_AND_C3K2_END, bulk(16, 2, 4, 2, 3, rows=4)),
        (STORED_PAIR, bulk(16, 1, 4, 1, 2, rows=4)),
    ],
    ids=lambda value: str(value) if isinstance(value, ChainTile) else "",
)
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_windows_and_pairs_give_the_bits_of_threads_that_copy(case, tile, precision):
    compare(case, tile, precision)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_chains_behind_a_depthwise_stage_give_the_bits_of_threads_that_copy(precision):
    for case in DEPTHWISE[:2]:
        compare(case, bulk(16, 1, 4, 2, 3), precision)
        compare(case, bulk(32, 1, 4, 8, 12, rows=4), precision)
    compare(DIVISIBLE_DEPTHWISE, bulk(32, 2, 4, 1, 2, rows=4), precision)


@pytest.mark.parametrize(("precision", "element"), [("tf32", "f32"), ("fp16", "f16")])
def test_a_convolution_that_is_a_window_has_them_too(precision, element):
    case = Case(9, 9, ((16, 1),), 32, residual=True, extra_pitch=8, element=element)
    run_conv(case, bulk(32, 1, 4, 2, 3, rows=4), precision)


def test_rows_are_in_pairs_where_lanes_have_whole_sums():
    """Rows of the weights are in the order of `paired_channel` then."""
    case = ChainCase(8, 8, 32, (Link(32), Link(32, (Part(32, 0),), add="argument")))
    tile = bulk(64, 1, 4, 4, 2)
    kernel = kernel_of(case, tile)
    found = [p.packed for p in kernel.launch.parameters if p.packed]
    assert any(order[2] for order in found)
    for precision in ("tf32", "fp16"):
        compare(case, tile, precision)


# ---- the kernel ---------------------------------------------------------------------------------


SHAPES = [
    (ChainCase(40, 40, 64, (Link(64), Link(80, (Part(32), Part(64, 0))))), bulk(32, 2, 8, 16, 3)),
    (ChainCase(40, 40, 32, (Link(64), Link(64, (Part(64, 0),))), kernel=3), bulk(32, 1, 8, 8, 3)),
]


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_one_copy_and_one_wait_a_step_the_first_before_the_earlier_kernels_end(target, precision):
    """The first copies come before the wait for earlier kernels, one copy and one wait a step."""
    for case, tile in SHAPES:
        ptx = assembled(kernel_of(case, tile, target, precision), target)
        work = plan(tile, shape_of_case(case, precision))
        before, after = ptx.split("griddepcontrol.wait")
        assert before.count("cp.async.bulk.shared") == work.slots
        assert after.count("cp.async.bulk.shared") == work.steps - work.slots
        assert after.count("try_wait.parity.shared") == work.steps


def test_barriers_are_made_in_a_branch_that_stays():
    """One barrier is so little that ptxas would predicate the branch, for the whole warp to run."""
    case = ChainCase(40, 40, 64, (Link(64), Link(80, (Part(64, 0),))), kernel=3, depthwise=True)
    tile = bulk(32, 1, 8, 16, 2, rows=4)
    assert plan(tile, shape_of_case(case, "fp16")).slots == 1
    ptx = assembled(kernel_of(case, tile, "sm_90", "fp16"), "sm_90")
    *earlier, last = ptx.split("mbarrier.init")
    assert earlier
    assert "bar.warp.sync" in last.split("$L__")[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_what_the_tuner_tries_assembles(target, precision):
    for case, _ in SHAPES:
        problem = space.Problem(
            "chain", shape_of_case(case, precision), target_named(target), precision
        )
        tiles = [dataclasses.replace(t, bulk=1) for t in space.ranked(problem)[::12]]
        tiles = [t for t in tiles if space.illegal(problem, t) is None]
        assert len(tiles) >= 5
        for tile in tiles:
            assembled(kernel_of(case, tile, target, precision), target)


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_a_tile_without_it_makes_the_same_kernel_as_ever(target):
    kernel = kernel_of(ATTENTION_BLOCK, ChainTile(16, 1, 4, 2, 3), target)
    text = str(kernel.module)
    assert "bulk" not in text
    assert "mbarrier" not in text
    assert all(p.packed == () for p in kernel.launch.parameters)


def test_every_weight_has_its_own_order():
    kernel = kernel_of(ATTENTION_BLOCK, bulk(16, 2, 4, 2, 3))
    work = plan(bulk(16, 2, 4, 2, 3), shape_of_case(ATTENTION_BLOCK))
    found = [p.packed for p in kernel.launch.parameters if p.packed]
    assert [order[:2] for order in found] == [(s.n, s.block_k) for s in work.stages]
    assert len(set(found)) > 1
    arguments = tuple(
        Argument() if p.role == ACTIVATION else Argument(weight=f"w{i}")
        for i, p in enumerate(kernel.launch.parameters[:-1])
    )
    program = Plan(0, {}, {}, (Step("k", "layer", arguments, (), ()),))
    named = orders(program, {"k": kernel.launch.to_json()})
    assert list(named.values()) == found


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_missing_of_a_tile_is_zero(dtype):
    size = 16 // np.dtype(dtype).itemsize
    values = np.arange(1, 1 + 10 * 3 * size).reshape(10, 1, 1, 3 * size).astype(dtype)
    order = (8, 2 * size, 0)
    whole = np.zeros((16, 1, 1, 4 * size), dtype)
    whole[:10, ..., : 3 * size] = values
    found = packed(values, order)
    assert found.size == whole.size
    np.testing.assert_array_equal(found.reshape(-1), packed(whole, order).reshape(-1))


# ---- tiles --------------------------------------------------------------------------------------


def test_legal_only_on_gpus_that_have_bulk_copies():
    shape = shape_of_case(TWO)
    assert objection(bulk(16, 1, 4), shape, SM_90, "tf32") is None
    assert objection(bulk(16, 1, 4), shape, target_named("sm_120"), "tf32") is None
    assert "bulk = 1" in (objection(bulk(16, 1, 4), shape, target_named("sm_89"), "tf32") or "")
    assert "bulk = 2" in (objection(ChainTile(16, 1, 4, bulk=2), shape, SM_90, "tf32") or "")


def test_keys_say_the_tile_again():
    old = "block_m=16,cluster_n=1,warps=4,step_kib=16,slots=4,rows=0"
    assert space.tile_of("chain", old) == ChainTile(16, 1, 4)
    for tile in (*RINGS, bulk(32, 1, 4, 2, 2, rows=4)):
        assert space.tile_of("chain", space.key_of(tile)) == tile
    window = bulk(32, 1, 4, 2, 2, rows=4)
    assert space.tile_of("conv2d", space.key_of(window)) == window


@pytest.mark.parametrize(("target", "both"), [("sm_90", True), ("sm_120", True), ("sm_89", False)])
def test_the_tuner_comes_upon_them(target, both):
    gpu = target_named(target)
    problem = space.Problem("chain", shape_of_case(SHAPES[0][0]), gpu, "tf32")
    ranked = space.ranked(problem)
    assert not space.default(problem).bulk
    assert any(t.bulk for t in ranked[:10]) == both
    assert len(set(ranked)) == len(ranked)
    window = ChainTile(64, 1, 8, 8, 4, rows=4)
    conv = space.Problem("conv2d", shape_of_case(SHAPES[1][0]).first, gpu, "tf32")
    for case, tile in ((problem, ranked[-1]), (conv, window)):
        near = space.neighbours(case, tile)
        other = dataclasses.replace(tile, bulk=1)
        assert (near[0] == other) == both
        assert all(space.illegal(case, t) is None for t in near)
        if both:
            back = space.neighbours(case, other)
            assert back[0] == tile
            assert all(t.bulk for t in back[1:])
            assert len(back) == len(near)


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "tile"),
    [(TWO, bulk(16, 1, 4, 1, 2)), (DOWN, bulk(32, 1, 4, 4, 12, rows=4))],
    ids=["ring", "resident"],
)
def test_every_wait_is_needed(case, tile):
    kernel = kernel_of(case, tile)
    launch, text = launch_of(case, kernel)[0], str(kernel.module)
    launch(schedule="warps")
    waits = list(WAIT.finditer(text))
    assert len(waits) == plan(tile, shape_of_case(case)).steps
    for wait in waits:
        found = mutations.kinds(launch, mutations.without(text, wait))
        assert found <= {"in-flight", "race", "uninitialised", "barrier"}


def test_copies_go_to_where_inputs_were_behind_a_fence():
    """Of the first stage's slots, which hold a tile of its input; windows lie elsewhere."""
    tile = bulk(16, 1, 4, 1, 2)
    work = plan(tile, shape_of_case(TWO))
    assert len(FENCE.findall(str(kernel_of(TWO, tile).module))) == sum(
        work.overwrites_input(step) for step in range(work.steps)
    )
    assert any(work.overwrites_input(step) for step in range(work.steps))
    assert not FENCE.findall(str(kernel_of(TWO, bulk(16, 1, 4, 8, 12)).module))
    assert not FENCE.findall(str(kernel_of(DOWN, bulk(32, 1, 4, 2, 2, rows=4)).module))
