"""Convolutions of images: windows of bytes in shared memory, K in the order that lanes read it."""

from __future__ import annotations

import dataclasses

import conv_kernels
import numpy as np
import pytest
from conv_cases import ROUNDED, Case, Expected, Operands, bounded, linalg_text
from gpu_dispatches import assembled
from hypothesis import given, settings
from hypothesis import strategies as st

from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.codegen.gpu.image_window import UNIT, image_window, units_of, used_slots
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.simulator.report import SimulationReport
from yolomlir.target import target_named

TILE = ConvTile(64, 16, 32, 2, 1, 1, 2)

pytestmark = pytest.mark.usefixtures("context")


def image_text(case: Case, image: str, *, scaled: bool) -> str:
    """A case's function with an image of `i8` or `f32`; converted to the case's element."""
    text = linalg_text(case)
    if not scaled:
        text = text.replace(ROUNDED, "1.0")
    if image == "f32":
        shape = "x".join(map(str, (case.batch, case.height, case.width, case.channels)))
        text = text.replace(f"tensor<{shape}xi8>", f"tensor<{shape}xf32>")
        text = text.replace("%in: i8", "%in: f32")
        text = text.replace("%f = arith.uitofp %in : i8 to f32\n", "")
        text = text.replace("arith.mulf %f,", "arith.mulf %in,")
    return text


def half_case(case: Case) -> Case:
    """The same at fp16."""
    return dataclasses.replace(case, element="f16")


def build(
    case: Case, tile: ConvTile | None, precision: str, image: str, *, scaled: bool, chip: str
) -> Kernel:
    text = image_text(case, image, scaled=scaled)
    return conv_kernels.build(case, tile, precision, target_named(chip), text=text)[0]


def run(
    case: Case, tile: ConvTile | None = TILE, precision: str = "tf32", *, image: str = "i8",
    scaled: bool = False, blocks: int | None = None, chip: str = "sm_90", seed: int = 0,
) -> SimulationReport:  # fmt: skip
    """Simulate a case and check what it computed against float64.

    The image has every byte exactly in any type, so what rounds are the sums and, where it is
    scaled, the image (to what the products take) and the scaling.
    """
    if precision == "fp16":
        case = half_case(case)
    kernel = build(case, tile, precision, image, scaled=scaled, chip=chip)
    operands = Operands.random(case, seed)
    outcome = conv_kernels.launch_of(case, kernel, operands)(blocks=blocks, seed=seed)
    outcome.check([reference(case, operands, precision, scaled=scaled)])
    return outcome.report


def reference(case: Case, operands: Operands, precision: str, *, scaled: bool) -> Expected:
    """Float64 outputs and the error that a kernel may have: see `conv_cases.bounded`."""
    x = operands.sources[0].astype(np.float32)
    if scaled:
        x = x * np.float32(float(ROUNDED))
    k = case.channels * case.kernel[0] * case.kernel[1]
    groups = -(-k // 3 // 32) * 4 + 4  # units may hold as little as three elements
    steps = groups * 4 * (3 if precision == "fp32" else 1) + 3
    return bounded(case, operands, x, precision, steps)


RGB = Case(64, 64, ((3, 1),), 16, stride=2, image=True)


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        RGB,
        dataclasses.replace(RGB, height=9, width=13, batch=2),
        dataclasses.replace(RGB, height=32, width=96, batch=3, stride=1),
    ],
    ids=["whole", "odd", "batch"],
)
def test_every_precision_agrees_with_float64(case, scaled, precision):
    run(case, precision=precision, scaled=scaled)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(7, 9, ((3, 1),), 24, image=True),
        Case(11, 20, ((1, 1),), 16, stride=2, image=True),
        Case(11, 12, ((4, 1),), 16, stride=2, image=True),
        Case(10, 16, ((2, 1),), 16, image=True, batch=2),
        Case(12, 32, ((3, 1),), 16, kernel=(6, 6), stride=2, image=True),
        Case(14, 32, ((3, 1),), 16, kernel=(7, 7), stride=2, image=True),
        Case(16, 32, ((3, 1),), 16, kernel=(4, 4), stride=4, pad=False, image=True),
        Case(9, 20, ((3, 1),), 16, kernel=(5, 3), image=True),
        Case(9, 20, ((3, 1),), 16, kernel=(1, 1), image=True),
        Case(9, 20, ((1, 1),), 16, dilation=2, image=True),
        Case(12, 20, ((3, 1),), 16, dilation=3, stride=2, image=True),
        Case(6, 7, ((3, 1),), 16, pad=False, image=True),
        Case(6, 8, ((3, 1),), 255, image=True, silu=False, residual=True),
        Case(6, 8, ((3, 1),), 6, image=True),
    ],
    ids=str,
)
def test_every_geometry_agrees_with_float64(case, precision):
    block_n = 8 if case.out_channels < 16 else 16 if case.out_channels < 255 else 32
    run(case, dataclasses.replace(TILE, block_n=block_n, unroll=True), precision)
    run(case, None, precision, scaled=True)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize(
    "tile",
    [
        ConvTile(16, 16, 32, 1, 1, 1, 2),
        ConvTile(128, 16, 32, 2, 1, 1, 2),
        ConvTile(128, 16, 32, 8, 1, 1, 2, release_early=True),
        ConvTile(128, 16, 32, 2, 1, 1, 2, staged=True),
        ConvTile(256, 16, 32, 8, 2, 1, 2),
        ConvTile(96, 32, 32, 2, 1, 1, 2),
        ConvTile(64, 40, 32, 4, 1, 1, 2),
        ConvTile(32, 32, 32, 2, 2, 1, 2, staged=True),
        ConvTile(16, 64, 32, 1, 4, 1, 2),
        ConvTile(32, 64, 32, 2, 2, 1, 2),
    ],
    ids=str,
)
def test_every_tile_agrees_with_float64(tile, precision):
    case = dataclasses.replace(RGB, height=34, width=96, out_channels=40)
    report = run(case, tile, precision, blocks=4)
    assert report.worst_bank_conflict <= 2, str(report)


def test_pixels_of_float32_at_fp16():
    run(RGB, precision="fp16", image="f32")
    run(dataclasses.replace(RGB, height=9, width=13, batch=2), precision="fp16", image="f32")
    run(RGB, None, precision="fp16", image="f32", scaled=True)


def test_every_byte_is_exact():
    """A 1x1 kernel of one weight of one: outputs are the bytes."""
    case = Case(16, 16, ((1, 1),), 8, kernel=(1, 1), image=True, silu=False)
    for precision in ("tf32", "fp16", "fp32"):
        here = half_case(case) if precision == "fp16" else case
        kernel = build(here, dataclasses.replace(TILE, block_n=8), precision, "i8",
                       scaled=False, chip="sm_90")  # fmt: skip
        pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
        ones, zeros = np.ones((8, 1, 1, 1), np.float32), np.zeros(8, np.float32)
        operands = Operands([pixels], ones, zeros, None)
        (y,) = conv_kernels.launch_of(here, kernel, operands)().values
        np.testing.assert_array_equal(y, np.repeat(pixels, 8, 3).astype(y.dtype))


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.integers(1, 20),
    dilation=st.integers(1, 3),
)
def test_units_hold_each_element_once(kernel, channels, dilation):
    shape = ConvShape(
        1, 64, 64, channels, 64, 64, 16, *kernel, dilation_h=dilation, dilation_w=dilation,
        source_vector=0,
    )  # fmt: skip
    groups = units_of(shape)
    pitch, found = 4096, []
    for group in groups:
        assert len(group) == 4
        assert used_slots(group) <= UNIT
        for unit in group:
            for i, slot in enumerate(unit.slots):
                k = unit.first_k + i * unit.step_k
                tap, channel = divmod(k, channels)
                kh, kw = divmod(tap, kernel[1])
                place = kh * dilation * pitch + kw * dilation * channels + channel
                assert unit.offset(slot, pitch) == place
                found.append(k)
    assert sorted(found) == list(range(shape.k))


def test_windows_of_the_first_layer_are_no_longer_than_their_pixels():
    """Aligned alike in every block, and no longer than their pixels need."""
    shape = ConvShape(
        1, 640, 640, 3, 320, 320, 16, 3, 3, 2, 2, 1, 1, source_vector=0
    )  # fmt: skip
    window = image_window(shape, 128, 64, 1)
    assert (window.rows, window.columns) == (2, 64)
    assert window.shift == 13
    assert (window.height, window.pieces, window.piece) == (5, 25, 16)
    assert window.wavefronts() <= 6


def test_the_image_must_be_dense():
    kernel = build(RGB, TILE, "tf32", "i8", scaled=False, chip="sm_90")
    image, *others = kernel.launch.parameters
    assert (image.dtype, image.alignment_bytes, image.dense) == ("uint8", 16, True)
    assert not any(other.dense for other in others)


def test_an_image_is_not_upsampled():
    with pytest.raises(UnsupportedError, match="upsamples an image"):
        run(dataclasses.replace(RGB, sources=((3, 2),)))


def test_k_is_not_divided_among_warps():
    with pytest.raises(UserError, match="not divided along K"):
        run(RGB, ConvTile(32, 16, 32, 2, 1, 2, 2))


@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_first_layers_assemble_without_spills(precision, chip):
    tiles = {
        16: [ConvTile(128, 16, 32, 2, 1, 1, 2), ConvTile(64, 16, 32, 2, 1, 1, 2)],
        64: [ConvTile(64, 64, 32, 2, 2, 1, 2), ConvTile(64, 64, 32, 4, 1, 1, 2)],
    }
    for channels, choices in tiles.items():
        case = dataclasses.replace(RGB, height=640, width=640, out_channels=channels)
        case = half_case(case) if precision == "fp16" else case
        for tile in choices:
            assembled(build(case, tile, precision, "i8", scaled=False, chip=chip), chip)
