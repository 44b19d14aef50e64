"""Convolution kernels, run by the simulator, against float64 within derived tolerances."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conv_cases import GEOMETRIES, Case, Operands, expected
from conv_kernels import build, launch_of, run
from network_dispatches import dispatches
from simulated_launch import round_to_tf32
from yolomlir.dialects import yolo

from yolomlir.autotune.untuned import best_gathered
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvProblem, match_conv
from yolomlir.codegen.gpu.kernel import ACTIVATION
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


TILE = ConvTile(32, 32, 32, 2, 2, 1, 3)


@pytest.mark.parametrize("width", [40, 20])
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_row_widths_that_tiles_do_not_divide(width, block_m):
    """An older system corrupted rows here."""
    tile = ConvTile(block_m, 32, 32, block_m // 16 if block_m < 64 else 2, 1, 1, 3)
    run(Case(5, width, ((32, 1),), 32), tile)


@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_every_geometry_agrees_with_float64(case):
    run(case, ConvTile(32, 8 if case.out_channels < 16 else 16, 32, 2, 1, 1, 3))
    run(case)


@pytest.mark.parametrize("channels", [80, 8, 4, 3, 255, 6])
def test_output_channels_that_tiles_do_not_divide(channels):
    block_n = 8 if channels < 16 else 48
    run(Case(5, 7, ((16, 1),), channels, kernel=(1, 1), residual=True),
        ConvTile(16, block_n, 16, 1, 1, 1, 2))  # fmt: skip


@pytest.mark.parametrize("channels", [3, 5, 6, 1])
def test_input_channels_that_a_copy_does_not_divide(channels):
    run(Case(6, 7, ((channels, 1),), 16), ConvTile(32, 16, 16, 2, 1, 1, 3))


@pytest.mark.parametrize("stride", [1, 2])
def test_the_first_layer_reads_bytes(stride):
    case = Case(16, 12, ((3, 1),), 16, stride=stride, image=True)
    run(case, ConvTile(64, 16, 32, 2, 1, 1, 2))
    run(dataclasses.replace(case, batch=2))


@pytest.mark.parametrize("extra", [4, 16, 8])
def test_views_of_wider_buffers(extra):
    case = Case(6, 7, ((16, 1), (16, 2)), 24, kernel=(1, 1), residual=True, extra_pitch=extra)
    run(dataclasses.replace(case, height=6, width=8), ConvTile(32, 24, 16, 2, 1, 1, 3))


def test_views_that_are_not_aligned():
    attributes = ", yolo.alignments = array<i64: 4, 0, 0, 4, 4>"
    case = Case(6, 7, ((16, 1),), 16, residual=True, extra_pitch=1, attributes=attributes)
    run(case, ConvTile(32, 16, 32, 2, 1, 1, 3))


@pytest.mark.parametrize("warps_k", [2, 4, 8])
@pytest.mark.parametrize("channels", [16, 20])
def test_k_may_be_divided_among_warps(warps_k, channels):
    tile = ConvTile(16, 16, 64, 1, 1, warps_k, 3)
    run(Case(5, 5, ((64, 1),), channels, residual=True), tile)


@pytest.mark.parametrize("block_k", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("unroll", [False, True])
def test_steps_of_k_are_read_without_bank_conflicts(block_k, unroll):
    tile = ConvTile(16, 32, block_k, 1, 4, 1, 3, unroll=unroll)
    channels = 32 if block_k == 8 else 64
    _, report = run(Case(6, 6, ((channels, 1),), 32), tile)
    assert report.worst_bank_conflict == 1, str(report)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_any_number_of_stages(stages):
    kernel = (1, 1) if stages == 1 else (3, 3)
    run(Case(5, 5, ((32, 1),), 16, kernel=kernel), ConvTile(16, 16, 32, 1, 1, 1, stages))


@pytest.mark.parametrize(
    "option", [{"through_l1": True}, {"staged": True}, {"release_early": True}], ids=str
)
def test_options_do_not_change_the_result(option):
    case = Case(6, 7, ((32, 1),), 32, residual=True)
    plain, _ = run(case, TILE)
    changed, _ = run(case, dataclasses.replace(TILE, **option))
    np.testing.assert_array_equal(plain, changed)


@pytest.mark.parametrize(
    "case",
    [
        Case(7, 9, ((16, 1),), 24, residual=True),
        Case(16, 12, ((3, 1),), 16, stride=2, image=True),
        Case(8, 8, ((16, 1), (32, 2)), 32, kernel=(1, 1)),
    ],
    ids=str,
)
def test_fp32_has_float32_errors(case):
    run(case, precision="fp32")
    run(case, ConvTile(32, 16, 32, 2, 1, 1 if case.image else 2, 2), precision="fp32")


def test_an_epilogue_that_is_not_silu():
    lines = (
        "%low = arith.constant -0.5 : f32",
        "%1 = arith.maximumf %0, %low : f32",
        "%2 = arith.mulf %1, %bias : f32",
        "%result = arith.subf %2, %acc : f32",
    )
    case = Case(5, 5, ((16, 1),), 16, epilogue=lines)
    kernel, _ = build(case, ConvTile(32, 16, 16, 1, 1, 1, 2), "tf32")
    operands = Operands.random(case)
    (y,) = launch_of(case, kernel, operands)().values
    plain = dataclasses.replace(case, silu=False, epilogue=())
    want = expected(plain, operands, "tf32")
    accumulated = want.value - operands.bias
    value = np.maximum(want.value, -0.5) * operands.bias - accumulated
    slope = np.abs(operands.bias) + 1
    tolerance = want.tolerance * slope + np.abs(value) * 2.0**-22
    assert (np.abs(y - value) <= tolerance).all()


def test_rounding_can_move_to_the_producer():
    """With inputs that are rounded already, both kernels compute the same bits."""
    case = Case(6, 6, ((16, 1),), 16, silu=False)
    tile = ConvTile(32, 16, 16, 1, 1, 1, 2)
    operands = Operands.random(case)
    operands.sources[0] = round_to_tf32(operands.sources[0])
    outputs: list[np.ndarray] = []
    for attributes in ("", ", yolo.tf32_rounded = array<i64: 0>"):
        changed = dataclasses.replace(case, attributes=attributes)
        kernel, _ = build(changed, tile, "tf32")
        outcome = launch_of(case, kernel, operands)()
        outputs += outcome.values
        conversions = outcome.report.operations.get("nvvm.convert.float.to.tf32", 0)
        assert (conversions == 0) == bool(attributes)
    np.testing.assert_array_equal(*outputs)


def test_a_result_can_be_rounded_for_its_consumers():
    case = Case(6, 6, ((16, 1),), 16, attributes=", yolo.round_result")
    kernel, _ = build(case, ConvTile(32, 16, 16, 1, 1, 1, 2), "tf32")
    (y,) = launch_of(case, kernel)().values
    np.testing.assert_array_equal(y, round_to_tf32(y))


@pytest.mark.parametrize("case", [Case(5, 20, ((32, 1),), 16), Case(6, 6, ((48, 1),), 80)], ids=str)
def test_the_same_bits_in_any_order_of_blocks_and_warps(case):
    tile, operands = ConvTile(16, 16, 32, 1, 1, 4, 3), Operands.random(case)
    first, report = run(case, tile, operands=operands)
    again, _ = run(case, tile, operands=operands, seed=1)
    np.testing.assert_array_equal(first, again)
    assert report.kernel == "conv"


def test_launch_says_what_the_kernel_needs():
    case = Case(8, 8, ((16, 1), (32, 2)), 32, kernel=(1, 1))
    kernel, _ = build(case, ConvTile(32, 32, 16, 2, 1, 1, 3), "tf32")
    launch = kernel.launch
    assert launch.grid == (2, 1, 1)
    assert launch.block == (64, 1, 1)
    assert launch.programmatic
    assert launch.shared_bytes == 3 * (32 + 32) * 16 * 4 + 32 * 4
    roles = [(p.role, p.alignment_bytes, p.tf32) for p in launch.parameters]
    activation = (ACTIVATION, 16, False)
    assert roles == [
        activation,
        activation,
        ("weight", 16, True),
        ("weight", 16, False),
        activation,
    ]


@pytest.mark.parametrize("cluster_k", [2, 4])
@pytest.mark.parametrize(
    "tile", [ConvTile(32, 16, 32, 2, 1, 1, 2), ConvTile(16, 24, 32, 1, 1, 2, 3)]
)
def test_k_may_be_divided_among_a_cluster(cluster_k, tile):
    """K = 432 is not a multiple of what the blocks share; 24 channels are one block and a half."""
    case = Case(5, 6, ((48, 1),), 36, residual=True, extra_pitch=4)
    run(case, dataclasses.replace(tile, cluster_k=cluster_k))


def network_case(problem: ConvProblem, *, silu: bool) -> Case:
    """The case that a dispatch of a real network is."""
    shape = problem.shape
    return Case(
        shape.height, shape.width,
        tuple((s.channels, s.upsample) for s in problem.sources),
        shape.out_channels,
        (shape.kernel_h, shape.kernel_w),
        shape.stride_h,
        pad=shape.pad_top > 0,
        batch=shape.batch,
        silu=silu,
        residual=bool(problem.epilogue.element),
        image=shape.source_vector == 0,
        element=_ELEMENTS[shape.dtype],
        result=_ELEMENTS[problem.parameters[-1].dtype],
    )  # fmt: skip


_ELEMENTS = {"float32": "f32", "float16": "f16"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("chip", "precision"),
    [
        ("sm_90", "tf32"),
        ("sm_120", "tf32"),
        ("sm_90", "fp32"),
        ("sm_90", "fp16"),
        ("sm_120", "fp16"),
    ],
)
def test_every_convolution_of_the_smallest_network(chip, precision):
    """With the tiles that the compiler chooses; a few blocks of each, the first and last too."""
    target = target_named(chip)
    count = 0
    for view in dispatches("conv2d", "n", chip, precision, level=2):
        op = view.operation
        name = yolo.string(op, "sym_name")
        problem = match_conv(op, precision=precision)
        case = network_case(problem, silu="_silu" in name)
        tile = best_gathered(problem.shape, target, precision)
        run(case, tile, precision, blocks=3, target=target)
        count += 1
    assert count >= 50
