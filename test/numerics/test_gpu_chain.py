"""Chain kernels, run by the simulator, against float64 within derived tolerances."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from chain_cases import ChainCase, Link, Part
from chain_forms import ATTENTION_BLOCK, CHAINS, DIVISIBLE, DIVISIBLE_DEPTHWISE, TWO
from chain_kernels import kernel_of, launch_of, run, shape_of_case
from gpu_dispatches import assembled
from network_dispatches import dispatches
from simulated_launch import round_to_tf32
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain_problem import match_chain
from yolomlir.codegen.gpu.chain_space import default_tile, tile_space
from yolomlir.codegen.gpu.chain_tile import ChainTile, objection, plan
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.ptx import compile_kernels, to_ptx
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.target import target_named

SM_90 = target_named("sm_90")

pytestmark = pytest.mark.usefixtures("context")


@pytest.mark.parametrize(
    "tile",
    [
        ChainTile(16, 1, 4),
        ChainTile(16, 1, 8, 2, 2),
        ChainTile(32, 1, 2, 1, 3),
        ChainTile(16, 2, 4),
        ChainTile(64, 1, 16),
        ChainTile(16, 2, 4, release_early=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_two_stages_with_tiles_of_every_kind(tile, precision):
    run(TWO, tile, precision, extra=8 if precision == "fp16" else 4)


@pytest.mark.parametrize("case", CHAINS, ids=range(len(CHAINS)))
def test_every_form_agrees_with_float64(case):
    run(case, ChainTile(16, 1, 4, 2, 3))
    run(case, ChainTile(16, 1, 4, 2, 3), "fp16", extra=8)


@pytest.mark.parametrize("case", [CHAINS[i] for i in DIVISIBLE], ids=DIVISIBLE)
def test_forms_divided_among_blocks_agree_with_float64(case):
    run(case, ChainTile(16, 2, 4, 2, 3))
    run(case, ChainTile(16, 2, 4, 2, 3), "fp16", extra=8)


@pytest.mark.parametrize("case", CHAINS, ids=range(len(CHAINS)))
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_forms_with_the_default_tile_agree_with_float64(case, precision):
    run(case, precision=precision, extra=8)


@pytest.mark.parametrize("index", [2, 5, 8])
def test_forms_at_fp32_have_float32_errors(index):
    run(CHAINS[index], precision="fp32")
    run(CHAINS[index], ChainTile(32, 1, 8, 1, 2), precision="fp32", extra=0)


def test_a_depthwise_stage_is_divided_among_blocks():
    run(DIVISIBLE_DEPTHWISE, ChainTile(16, 2, 4, 2, 3))
    run(DIVISIBLE_DEPTHWISE, ChainTile(32, 2, 8, 1, 2), precision="fp32")
    run(DIVISIBLE_DEPTHWISE, ChainTile(16, 2, 4, 2, 3), "fp16", extra=8)


def test_clusters_of_eight_and_many_slices_of_k():
    case = ChainCase(3, 6, 64, (Link(64), Link(64, (Part(64, 0),), add=0)), stored=(0,))
    run(case, ChainTile(16, 8, 8, 4, 2))
    run(case, ChainTile(16, 4, 16, 16, 2))
    run(case, ChainTile(16, 4, 16, 16, 2), "fp16", extra=8)


@pytest.mark.parametrize(("extra", "bytes_"), [(2, 8), (1, 4)])
def test_rows_may_be_less_aligned_than_their_channels(extra, bytes_):
    """Nine operands: input, w, b, part, w, b, residual, two results."""
    stated = [0 if i in (1, 2, 4, 5) else bytes_ for i in range(9)]
    case = ChainCase(
        4, 4, 8, (Link(8), Link(8, (Part(8), Part(8, 0)), add="argument")), stored=(0,),
        attributes=f", yolo.alignments = array<i64: {', '.join(map(str, stated))}>",
    )  # fmt: skip
    run(case, extra=extra)


@pytest.mark.parametrize("extra", [4, 2, 1])
def test_float16_rows_may_be_less_aligned_than_their_channels(extra):
    stated = [0 if i in (1, 2, 4, 5) else 2 * extra for i in range(9)]
    case = ChainCase(
        4, 4, 8, (Link(8), Link(8, (Part(8), Part(8, 0)), add="argument")), stored=(0,),
        attributes=f", yolo.alignments = array<i64: {', '.join(map(str, stated))}>",
    )  # fmt: skip
    run(case, precision="fp16", extra=extra)


def test_results_can_be_rounded_for_their_readers():
    """Within TF32's rounding of what they are otherwise, and with its low bits zero."""
    links = (Link(16), Link(8, (Part(16, 0),)))
    plain, _ = run(ChainCase(4, 4, 8, links, stored=(0,)))
    case = ChainCase(4, 4, 8, links, stored=(0,), attributes=", yolo.round_result")
    for rounded, value in zip(run(case, rounded=True)[0], plain, strict=True):
        np.testing.assert_array_equal(rounded, round_to_tf32(value))


def test_the_same_bits_in_any_order_of_blocks_and_warps():
    kernel = kernel_of(ATTENTION_BLOCK, ChainTile(16, 2, 8, 2, 3))
    launch, _ = launch_of(ATTENTION_BLOCK, kernel)
    first, *others = (launch(seed=seed).values for seed in (0, 1, 2))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_candidates_are_within_the_limits_and_assemble(name):
    """sm_80 has no clusters and no programmatic launch."""
    target = target_named(name)
    case = ChainCase(40, 40, 64, (Link(64, add="argument"), Link(80, (Part(32), Part(64, 0)))))
    shape = shape_of_case(case)
    tiles = list(tile_space(shape, target, "tf32"))
    assert len(tiles) == len(set(tiles)) >= 50
    assert all(plan(t, shape).shared_bytes <= target.shared_memory_bytes for t in tiles)
    assert target.clusters or all(t.cluster_n == 1 for t in tiles)
    for tile in (default_tile(shape, target, "tf32"), *tiles[:: len(tiles) // 2]):
        kernel = kernel_of(case, tile, name)
        text = assembled(kernel, name)
        assert kernel.launch.programmatic == target.programmatic_launch
        assert ("griddepcontrol" in text) == target.programmatic_launch


@pytest.mark.parametrize("early", [False, True])
def test_dependents_are_released_before_the_last_epilogue_or_after_the_wait(early):
    kernel = kernel_of(TWO, ChainTile(16, 2, 4, release_early=early))
    text = to_ptx(kernel.module, SM_90)
    assert text.count("griddepcontrol.launch_dependents") == 1
    before, after = text.split("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in before
    assert ("mma.sync" in before) != early
    assert ("mma.sync" in after) == early


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (ChainTile(24, 1, 4), "block_m = 24"),
        (ChainTile(16, 3, 4), "cluster_n = 3"),
        (ChainTile(16, 8, 4), "without channels"),
        (ChainTile(16, 1, 3), "warps = 3"),
        (ChainTile(16, 1, 4, 16, 1), "slots"),
        (ChainTile(256, 1, 2), "runs a thread"),
    ],
)
def test_an_illegal_tile_says_why(tile, reason):
    shape = shape_of_case(CHAINS[0])
    assert reason in (objection(tile, shape, SM_90, "tf32") or "")
    with pytest.raises(UserError, match="illegal tile"):
        kernel_of(CHAINS[0], tile)


def test_a_chain_that_fits_nowhere_is_unsupported():
    case = ChainCase(2, 2, 8, (Link(2048), Link(2048, (Part(2048, 0),))))
    with pytest.raises(UnsupportedError, match="no chain tile fits"):
        default_tile(shape_of_case(case), target_named("sm_80"), "tf32")


def test_other_forms_are_refused():
    pool = """func.func private @f(%x: tensor<1x4x4x8xf32>) -> tensor<1x4x4x8xf32>
        attributes {yolo.family = "chain"} { return %x : tensor<1x4x4x8xf32> }"""
    with pytest.raises(UnsupportedError, match="holds no convolution"):
        match_chain(ir.Module.parse(pool).body.operations[0].operation, precision="tf32")


# ---- the whole network --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scale", "precision"),
    [*product(("n", "s"), ("tf32", "fp32", "fp16")), ("m", "fp16")],
)
@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
def test_every_chain_assembles(scale, chip, precision):
    target = target_named(chip)
    kernels = {
        yolo.string(view.operation, "sym_name"): generate_kernel(view, target, precision=precision)
        for view in dispatches("chain", scale, chip, precision)
    }
    assert len(kernels) >= 15
    for name, compiled in compile_kernels(kernels, target).items():
        assert compiled.spill_bytes == 0, name
        assert compiled.launch.shared_bytes <= target.shared_memory_bytes, name
        assert compiled.registers * compiled.launch.block[0] <= target.registers_per_sm, name
