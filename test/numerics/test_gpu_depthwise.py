"""Depthwise convolution kernels in the simulator, against float64 within a derived tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_dispatches import (
    TARGETS,
    UNIT,
    Run,
    activation,
    check_assembles,
    conv_attributes,
    depthwise_terms,
    function,
    halved,
    kernel_of,
    silu,
    stored_half,
    weight,
)
from simulated_launch import assert_close

from yolomlir.codegen.gpu.depthwise import DepthwiseTile
from yolomlir.simulator.faults import SimulationError

pytestmark = pytest.mark.usefixtures("context")


@dataclass(frozen=True)
class Case:
    channels: int
    height: int
    width: int
    kernel: int = 3
    stride: int = 1
    batch: int = 1
    act: bool = True
    residual: bool = False
    layout: str = "hwio"

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        def size(x: int) -> int:
            return (x + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

        return self.batch, size(self.height), size(self.width), self.channels

    def text(self) -> str:
        n, height, width, channels = self.out_shape
        x = activation(n, channels, self.height, self.width)
        y = activation(n, channels, height, width)
        w = weight(channels, 1, self.kernel, self.kernel, layout=self.layout)
        bias = f"tensor<{channels}xf32>"
        names = iter(("%0", "%1", "%2"))
        last = next(names)
        attributes = conv_attributes(self.kernel, self.stride, channels)
        lines = [f'{last} = "yolo.conv2d"(%a0, %a1, %a2) {attributes} : ({x}, {w}, {bias}) -> {y}']
        if self.act:
            lines.append(f'%1 = "yolo.silu"({last}) : ({y}) -> {y}')
            last = "%1"
        if self.residual:
            lines.append(f'%2 = "yolo.add"({last}, %a3) : ({y}, {y}) -> {y}')
            last = "%2"
        lines[-1] = lines[-1].replace(f"{last} =", "%y =")
        arguments = [x, w, bias] + ([y] if self.residual else [])
        return function("depthwise", arguments, lines, y)


def run(
    case: Case,
    tile: DepthwiseTile | None = None,
    target: str = "sm_90",
    *,
    extra: int = 4,
    alignments: Sequence[int] = (),
    precision: str = "tf32",
    **options,
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((case.batch, case.height, case.width, case.channels), np.float32)
    w = rng.standard_normal((case.kernel, case.kernel, case.channels), np.float32)
    bias = rng.standard_normal(case.channels, np.float32)
    residual = rng.standard_normal(case.out_shape, np.float32)
    text, half = case.text(), precision == "fp16"
    if half:
        text = halved(text)
        x, w, residual = (a.astype(np.float16) for a in (x, w, residual))
    stored = w if case.layout == "hwio" else np.ascontiguousarray(w.transpose(2, 0, 1))
    operands = [x, stored, bias] + ([residual] if case.residual else [])
    kernel = kernel_of(text, target=target, tile=tile, alignments=alignments, precision=precision)
    got = Run(kernel, operands, case.out_shape, extra=extra)(**options).value

    total, size = depthwise_terms(x, w, case.stride, case.kernel // 2)
    want, size = total + bias, size + np.abs(bias)
    # One fused multiply-add a tap and the bias: each rounds a partial sum, at most `size`.
    tolerance = (case.kernel**2 + 1) * UNIT * size
    if case.act:
        # SiLU's slope is below 1.1; its own error is sigmoid's, 2^-22, times |x|.
        tolerance = 1.1 * tolerance + np.abs(want) * 2.0**-22
        want = silu(want)
    if case.residual:
        want = want + residual
        tolerance = tolerance + UNIT * np.abs(want)
    tolerance = tolerance + UNIT * np.abs(want)
    assert_close(got, want, stored_half(want, tolerance) if half else tolerance)


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 5, 7),
        Case(16, 4, 40),
        Case(12, 3, 20, batch=2),
        Case(5, 6, 9),
        Case(6, 7, 5, residual=True),
        Case(8, 9, 11, stride=2),
        Case(3, 8, 6, stride=2, act=False),
        Case(8, 6, 7, kernel=5),
        Case(4, 9, 10, kernel=7, stride=2),
        Case(8, 1, 1),
        Case(4, 2, 13, layout="ohwi", residual=True),
        Case(4, 2, 3, layout=""),
    ],
    ids=str,
)
def test_geometries(case):
    run(case)
    if case.layout:
        run(case, precision="fp16", extra=8)


@pytest.mark.parametrize("pixels", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [7, 8])
def test_strips_that_do_and_do_not_divide_the_row(pixels, width):
    run(Case(8, 3, width), DepthwiseTile(pixels, 64))
    run(Case(4, 5, width, stride=2), DepthwiseTile(pixels, 32))
    run(Case(8, 3, width), DepthwiseTile(pixels, 64), precision="fp16")


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    run(Case(16, 5, 6, residual=True), target=target)


@pytest.mark.parametrize(("extra", "bytes_"), [(2, 8), (1, 4)])
def test_rows_less_aligned_than_their_channels(extra, bytes_):
    """A view of 8 channels whose pitch or first channel is no multiple of 4."""
    case = Case(8, 5, 6, residual=True)
    for place in (0, 3, 4):
        alignments = [bytes_ if i == place else 0 for i in range(5)]
        run(case, extra=extra, alignments=alignments)
    with pytest.raises(SimulationError):
        run(case, extra=extra)


@pytest.mark.parametrize(("extra", "bytes_"), [(2, 4), (1, 2)])
def test_float16_rows_less_aligned_than_their_channels(extra, bytes_):
    case = Case(8, 5, 6, residual=True)
    for place in (0, 3, 4):
        alignments = [bytes_ if i == place else 0 for i in range(5)]
        run(case, extra=extra, alignments=alignments, precision="fp16")


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_random_shapes(precision):
    rng = np.random.default_rng(7)
    for _ in range(6):
        channels, height, width = (int(v) for v in rng.integers(1, 20, 3))
        case = Case(
            channels, height, width, kernel=int(rng.choice([1, 3, 5])),
            stride=int(rng.integers(1, 3)), batch=int(rng.integers(1, 3)),
            residual=bool(rng.integers(2)),
        )  # fmt: skip
        tile = DepthwiseTile(int(rng.integers(1, 5)), 64)
        run(case, tile, precision=precision, extra=8 if precision == "fp16" else 4)


def test_real_layer():
    """The class head's first convolution at 20x20; a few of its blocks."""
    case = Case(256, 20, 20)
    kernel = kernel_of(case.text())
    assert kernel.launch.grid[0] >= 132
    check_assembles(case.text())


@pytest.mark.parametrize(
    "case",
    [Case(64, 80, 80), Case(80, 40, 40), Case(80, 20, 20, batch=4), Case(85, 20, 20),
     Case(96, 24, 42, residual=True), Case(8, 16, 16, kernel=7)],
    ids=str,
)  # fmt: skip
def test_assembles(case):
    check_assembles(case.text())
    check_assembles(halved(case.text()), precision="fp16")
