"""Dispatches of the GPU's depthwise, max_pool, attention and detect families for tests.

Each is written as a `yolo` function and lowered by `yolo-lower-to-linalg`, so that the kernels are
made from what the compiler gives them, and run with pitches wider than their channels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from simulated_launch import SimulatedLaunch
from yolomlir.passes.base import PassContext
from yolomlir.passes.lower_to_linalg import LowerToLinalg

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.ptx import assemble, to_ptx
from yolomlir.codegen.gpu.tile import TILE, to_attribute
from yolomlir.simulator.report import SimulationReport
from yolomlir.target import target_named

TARGETS = ("sm_80", "sm_90", "sm_120")
UNIT = 2.0**-24
"""The unit roundoff of float32."""
HALF_UNIT, HALF_STEP = 2.0**-11, 2.0**-25
"""What rounding to float16 is off by at most: relatively, or where the result is subnormal."""


# ---- functions of the yolo dialect --------------------------------------------------------------


def activation(*shape: int) -> str:
    """The type of N x C x H x W in NHWC."""
    return f'tensor<{"x".join(map(str, shape))}xf32, #yolo.layout<"nhwc">>'


def weight(*shape: int, layout: str = "hwio") -> str:
    """The type of a weight O x I x KH x KW."""
    encoding = f', #yolo.layout<"{layout}">' if layout else ""
    return f"tensor<{'x'.join(map(str, shape))}xf32{encoding}>"


def function(family: str, arguments: Sequence[str], lines: Sequence[str], result: str) -> str:
    """A private function; `lines` define %y of type `result`."""
    typed = ", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(arguments))
    body = "\n  ".join(lines)
    attributes = f'attributes {{yolo.family = "{family}"}}'
    head = f"func.func private @{family}({typed}) -> {result} {attributes}"
    return f"{head} {{\n  {body}\n  return %y : {result}\n}}"


def conv_attributes(kernel: int, stride: int, channels: int) -> str:
    """Of a depthwise convolution with half padding."""
    half = kernel // 2
    return (
        f"{{strides = array<i64: {stride}, {stride}>, groups = {channels} : i64, "
        f"padding = array<i64: {half}, {half}, {half}, {half}>}}"
    )


def pool_attributes(kernel: int, stride: int, padding: int) -> str:
    """Of a max pool."""
    return (
        f"{{kernel = array<i64: {kernel}, {kernel}>, strides = array<i64: {stride}, {stride}>, "
        f"padding = array<i64: {', '.join([str(padding)] * 4)}>}}"
    )


def halved(text: str) -> str:
    """A function with activations and weights of float16; vectors, without layout, stay float32."""
    return text.replace("xf32, #yolo", "xf16, #yolo")


def stored_half(want: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """The tolerance of results that are rounded to float16 besides."""
    return tolerance + (np.abs(want) + tolerance) * HALF_UNIT + HALF_STEP


def lowered(text: str) -> ir.Module:
    """The module of a function at the linalg level."""
    module = ir.Module.parse(text)
    LowerToLinalg().run(module, PassContext())
    return module


def kernel_of(
    text: str,
    *,
    target: str = "sm_90",
    precision: str = "tf32",
    tile: object = None,
    alignments: Sequence[int] = (),
    round_result: bool = False,
) -> Kernel:
    """The kernel of a function, with its own tile or `tile`. alignments: of `yolo.alignments`;
    round_result: with `yolo.round_result`."""
    module = lowered(text)  # owns the function
    dispatch = module.body.operations[0]
    if alignments:
        dispatch.operation.attributes["yolo.alignments"] = ir.DenseI64ArrayAttr.get(alignments)
    if round_result:
        dispatch.operation.attributes["yolo.round_result"] = ir.UnitAttr.get()
    if tile is not None:
        dispatch.operation.attributes[TILE] = to_attribute(tile)
    return generate_kernel(dispatch, target_named(target), precision=precision)


def assembled(kernel: Kernel, target: str) -> str:
    """The PTX of a kernel, which assembles without spills and within the target's limits."""
    gpu = target_named(target)
    ptx = to_ptx(kernel.module, gpu)
    cubin = assemble(ptx, gpu.chip)
    assert cubin.spill_bytes == 0
    assert cubin.registers * kernel.launch.block[0] <= gpu.registers_per_sm
    assert kernel.launch.shared_bytes <= gpu.shared_memory_bytes
    return ptx


def check_assembles(text: str, *, precision: str = "tf32", tile: object = None) -> None:
    """The kernel of a function assembles for sm_90 and sm_120."""
    for target in ("sm_90", "sm_120"):
        assembled(kernel_of(text, target=target, precision=precision, tile=tile), target)


START_ALONE = ["barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait;"]
"""The blocks of a cluster meet at the start, which makes nothing visible."""


def cluster_barriers(ptx: str) -> list[str]:
    """The instructions with which blocks of a cluster meet, in order."""
    return re.findall(r"barrier\.cluster\.\S*", ptx)


# ---- running ------------------------------------------------------------------------------------


@dataclass
class Result:
    """The kernel's output, dense, and the simulator's report."""

    value: np.ndarray
    report: SimulationReport


class Run(SimulatedLaunch):
    """A launch that has one result."""

    def __init__(
        self,
        kernel: Kernel,
        operands: Sequence[np.ndarray],
        result_shape: tuple[int, ...],
        *,
        extra: int = 4,
    ) -> None:
        super().__init__(kernel, operands, [result_shape], extra=extra)
        self.shape, self.position, self.pitch = result_shape, self.positions[0], self.pitches[0]

    def __call__(self, **options: Any) -> Result:
        outcome = super().__call__(**options)
        return Result(outcome.values[0], outcome.report)


# ---- float64 references -------------------------------------------------------------------------


def depthwise_terms(
    x: np.ndarray, w: np.ndarray, stride: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """A depthwise convolution of N x H x W x C with KH x KW x C; the sum of its terms' sizes."""
    kh, kw, _ = w.shape
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded, w64 = np.pad(x.astype(np.float64), pads), w.astype(np.float64)
    rows = (padded.shape[1] - kh) // stride + 1
    columns = (padded.shape[2] - kw) // stride + 1
    total = np.zeros((x.shape[0], rows, columns, x.shape[3]))
    size = np.zeros_like(total)
    for i in range(kh):
        for j in range(kw):
            part = padded[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
            total += part * w64[i, j]
            size += np.abs(part * w64[i, j])
    return total, size


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def activated(value: np.ndarray, tolerance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SiLU: its slope is at most 1.1; its own error is 2^-21 of its argument."""
    return silu(value), 1.1 * tolerance + np.abs(value) * 2.0**-21
