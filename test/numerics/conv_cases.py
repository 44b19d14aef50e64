"""Convolution dispatches for tests: their linalg text, random operands, a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from gpu_dispatches import activated, stored_half
from simulated_launch import round_to_tf32

ROUNDED = "0.00392156862745098"
"""1 / 255."""


@dataclass(frozen=True)
class Case:
    """A `conv2d` dispatch. sources: channels and upsampling; extra_pitch: of every activation;
    element: of activations and weights; result: of the result, the element where empty."""

    height: int
    width: int
    sources: tuple[tuple[int, int], ...]
    out_channels: int
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    pad: bool = True
    batch: int = 1
    dilation: int = 1
    silu: bool = True
    residual: bool = False
    image: bool = False
    extra_pitch: int = 0
    attributes: str = ""
    epilogue: tuple[str, ...] = field(default=())
    """Lines from %0 (accumulator plus bias) to %result, instead of SiLU."""
    element: str = "f32"
    result: str = ""

    @property
    def result_element(self) -> str:
        return self.result or self.element

    @property
    def read_element(self) -> str:
        """Of the input, as the convolution sees it."""
        return "f32" if self.image else self.element

    @property
    def channels(self) -> int:
        return sum(channels for channels, _ in self.sources)

    @property
    def padding(self) -> tuple[int, int]:
        if not self.pad:
            return 0, 0
        return self.dilation * (self.kernel[0] // 2), self.dilation * (self.kernel[1] // 2)

    @property
    def out_size(self) -> tuple[int, int]:
        sizes = zip((self.height, self.width), self.kernel, self.padding, strict=True)
        h, w = ((s + 2 * p - self.dilation * (k - 1) - 1) // self.stride + 1 for s, k, p in sizes)
        return h, w

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, *self.out_size, self.out_channels


_IDENTITY = "affine_map<(n, h, w, c) -> (n, h, w, c)>"
_PARALLEL = 'iterator_types = ["parallel", "parallel", "parallel", "parallel"]'


def _tensor(*shape: int, element: str = "f32") -> str:
    return f"tensor<{'x'.join(map(str, shape))}x{element}>"


def _source(case: Case, i: int) -> tuple[str, str, list[str]]:
    """Argument type, the value that the convolution reads, the lines that make it."""
    channels, factor = case.sources[i]
    element = "i8" if case.image else case.element
    height, width = case.height // factor, case.width // factor
    inner = _tensor(case.batch, height, width, channels, element=element)
    if factor == 1 and not case.image:
        return inner, f"%x{i}", []
    outer = _tensor(case.batch, case.height, case.width, channels, element=case.read_element)
    read = f"affine_map<(n, h, w, c) -> (n, h floordiv {factor}, w floordiv {factor}, c)>"
    region = [f"linalg.yield %in : {element}"]
    if case.image:
        region = [
            "%f = arith.uitofp %in : i8 to f32",
            f"%k = arith.constant {ROUNDED} : f32",
            "%m = arith.mulf %f, %k : f32",
            "linalg.yield %m : f32",
        ]
    lines = [
        f"%e{i} = tensor.empty() : {outer}",
        f"%u{i} = linalg.generic {{indexing_maps = [{read if factor > 1 else _IDENTITY}, "
        f"{_IDENTITY}], {_PARALLEL}}} ins(%x{i} : {inner}) outs(%e{i} : {outer}) {{",
        f"^bb0(%in: {element}, %out: {case.read_element}):",
        *region,
        f"}} -> {outer}",
    ]
    return inner, f"%u{i}", lines


def linalg_text(case: Case, name: str = "conv") -> str:
    """The dispatch's function at the linalg level, as docs/architecture.md writes it."""
    read = case.read_element
    arguments, values, body = [], [], ["%zero = arith.constant 0.0 : f32"]
    if read != "f32":
        body.append(f"%nothing = arith.constant 0.0 : {read}")
    nothing = "%zero" if read == "f32" else "%nothing"
    for i in range(len(case.sources)):
        type_, value, lines = _source(case, i)
        arguments.append(f"%x{i}: {type_}")
        values.append((value, case.sources[i][0]))
        body += lines
    shape = [case.batch, case.height, case.width, case.channels]
    value = values[0][0]
    if len(values) > 1:
        types = ", ".join(_tensor(*shape[:3], c, element=read) for _, c in values)
        names = ", ".join(v for v, _ in values)
        all_type = _tensor(*shape, element=read)
        body.append(f"%all = tensor.concat dim(3) {names} : ({types}) -> {all_type}")
        value = "%all"
    if any(case.padding):
        top, left = case.padding
        padded = [shape[0], shape[1] + 2 * top, shape[2] + 2 * left, shape[3]]
        body += [
            f"%padded = tensor.pad {value} low[0, {top}, {left}, 0] high[0, {top}, {left}, 0] {{",
            "^bb0(%i: index, %j: index, %k: index, %l: index):",
            f"tensor.yield {nothing} : {read}",
            f"}} : {_tensor(*shape, element=read)} to {_tensor(*padded, element=read)}",
        ]
        value, shape = "%padded", padded
    weights = _tensor(case.out_channels, *case.kernel, case.channels, element=case.element)
    out = _tensor(*case.out_shape)
    stored = _tensor(*case.out_shape, element=case.result_element)
    arguments += [f"%w: {weights}", f"%b: {_tensor(case.out_channels)}"]
    residual = _tensor(*case.out_shape, element=case.element)
    arguments += [f"%r: {residual}"] if case.residual else []
    body += [
        f"%empty = tensor.empty() : {out}",
        f"%init = linalg.fill ins(%zero : f32) outs(%empty : {out}) -> {out}",
        f"%conv = linalg.conv_2d_nhwc_fhwc {{strides = dense<{case.stride}> : tensor<2xi64>, "
        f"dilations = dense<{case.dilation}> : tensor<2xi64>}} ins({value}, %w : "
        f"{_tensor(*shape, element=read)}, {weights}) outs(%init : {out}) -> {out}",
        *_epilogue(case, out, stored),
        f"return %result : {stored}",
    ]
    joined = "\n  ".join(body)
    attributes = f'attributes {{yolo.family = "conv2d"{case.attributes}}}'
    return f"func.func @{name}({', '.join(arguments)}) -> {stored} {attributes} {{\n  {joined}\n}}"


def _epilogue(case: Case, out: str, stored: str) -> list[str]:
    channel = "affine_map<(n, h, w, c) -> (c)>"
    operands, types = ["%conv", "%b"], [out, _tensor(case.out_channels)]
    maps, names = [_IDENTITY, channel], ["%acc: f32", "%bias: f32"]
    lines, value = ["%0 = arith.addf %acc, %bias : f32"], "%0"
    if case.epilogue:
        lines += case.epilogue
        value = "%result"
    elif case.silu:
        lines += [
            "%one = arith.constant 1.0 : f32",
            "%1 = arith.negf %0 : f32",
            "%2 = math.exp %1 : f32",
            "%3 = arith.addf %one, %2 : f32",
            "%4 = arith.divf %0, %3 : f32",
        ]
        value = "%4"
    if case.residual:
        residual = _tensor(*case.out_shape, element=case.element)
        operands, types = [*operands, "%r"], [*types, residual]
        maps, names = [*maps, _IDENTITY], [*names, f"%other: {case.element}"]
        other = "%other"
        if case.element != "f32":
            lines.append(f"%wide = arith.extf %other : {case.element} to f32")
            other = "%wide"
        lines.append(f"%sum = arith.addf {value}, {other} : f32")
        value = "%sum"
    if case.result_element != "f32":
        lines.append(f"%stored = arith.truncf {value} : f32 to {case.result_element}")
        value = "%stored"
    return [
        f"%empty2 = tensor.empty() : {stored}",
        f"%result = linalg.generic {{indexing_maps = [{', '.join([*maps, _IDENTITY])}], "
        f"{_PARALLEL}}} ins({', '.join(operands)} : {', '.join(types)}) "
        f"outs(%empty2 : {stored}) {{",
        f"^bb0({', '.join(names)}, %out: {case.result_element}):",
        *lines,
        f"linalg.yield {value} : {case.result_element}",
        f"}} -> {stored}",
    ]


DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


@dataclass
class Operands:
    """Dense operands of a case, of its own types; activations N x H x W x C, weights
    O x KH x KW x C."""

    sources: list[np.ndarray]
    weights: np.ndarray
    bias: np.ndarray
    residual: np.ndarray | None

    def in_order(self) -> list[np.ndarray]:
        """As the dispatch has them."""
        last = [] if self.residual is None else [self.residual]
        return [*self.sources, self.weights, self.bias, *last]

    @staticmethod
    def random(case: Case, seed: int = 0) -> Operands:
        rng = np.random.default_rng(seed)
        dtype = DTYPES[case.element]
        sources = []
        for channels, factor in case.sources:
            shape = (case.batch, case.height // factor, case.width // factor, channels)
            if case.image:
                sources.append(rng.integers(0, 256, shape, dtype=np.uint8))
            else:
                sources.append(rng.standard_normal(shape, np.float32).astype(dtype))
        fan_in = case.channels * case.kernel[0] * case.kernel[1]
        weights = rng.standard_normal(
            (case.out_channels, *case.kernel, case.channels), np.float32
        ) / np.float32(np.sqrt(fan_in))
        bias = rng.standard_normal(case.out_channels, np.float32)
        residual = None
        if case.residual:
            residual = rng.standard_normal(case.out_shape, np.float32).astype(dtype)
        return Operands(sources, weights.astype(dtype), bias, residual)


def accumulate(case: Case, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The convolution of a dense N x H x W x C input, in float64, without epilogue."""
    top, left = case.padding
    x = np.pad(x.astype(np.float64), ((0, 0), (top, top), (left, left), (0, 0)))
    out_h, out_w = case.out_size
    total = np.zeros(case.out_shape)
    for kh in range(case.kernel[0]):
        for kw in range(case.kernel[1]):
            row, column = kh * case.dilation, kw * case.dilation
            rows = slice(row, row + case.stride * out_h, case.stride)
            columns = slice(column, column + case.stride * out_w, case.stride)
            tap = weights[:, kh, kw, :].astype(np.float64)
            total += x[:, rows, columns][:, :out_h, :out_w] @ tap.T
    return total


def dense_input(case: Case, operands: Operands) -> np.ndarray:
    """The concatenated, upsampled, normalised input."""
    parts = []
    for x, (_, factor) in zip(operands.sources, case.sources, strict=True):
        if case.image:
            x = x.astype(np.float32) * np.float32(float(ROUNDED))
        parts.append(x.repeat(factor, 1).repeat(factor, 2))
    return np.concatenate(parts, 3)


class Expected(NamedTuple):
    """Outputs and the error that a kernel may have, element by element."""

    value: np.ndarray
    tolerance: np.ndarray


def expected(case: Case, operands: Operands, precision: str, partial_sums: int = 1) -> Expected:
    """Float64 outputs from the inputs as the products see them, with a bound on the rest.

    A step of the tensor cores is 8 of K, or 16 at fp16; at fp32 it is three products.
    """
    k = case.channels * case.kernel[0] * case.kernel[1]
    depth, products = 16 if precision == "fp16" else 8, 3 if precision == "fp32" else 1
    steps = -(-k // depth) * products + partial_sums + 2
    return bounded(case, operands, dense_input(case, operands), precision, steps)


def bounded(case: Case, operands: Operands, x: np.ndarray, precision: str, steps: int) -> Expected:
    """`expected` of an input x [N, H, W, C] of float32 whose products are summed in `steps`.

    tf32: products of rounded inputs are exact in float32's exponent range; each of the steps, which
    are the sums of partial sums and the bias besides, rounds (truncates) once, by at most 2^-23 of
    the sum of magnitudes. fp32: the split leaves 3 x 2^-22 of each product besides. fp16: as tf32;
    a result that is stored as float16 is rounded once more.
    """
    weights = operands.weights
    per_product = 3 * 2.0**-22
    if precision == "tf32":
        x, weights, per_product = round_to_tf32(x), round_to_tf32(weights), 0.0
    if precision == "fp16":
        x, per_product = x.astype(np.float16), 0.0
    value = accumulate(case, x, weights) + operands.bias
    magnitude = accumulate(case, np.abs(x), np.abs(weights)) + np.abs(operands.bias)
    tolerance = magnitude * (steps * 2.0**-23 + per_product)
    if case.silu and not case.epilogue:
        value, tolerance = activated(value, tolerance)
    if operands.residual is not None:
        value = value + operands.residual
    tolerance = tolerance + np.abs(value) * 2.0**-23
    if case.result_element == "f16":
        tolerance = stored_half(value, tolerance)
    return Expected(value, tolerance)


GEOMETRIES = [
    Case(7, 9, ((16, 1),), 24),
    Case(13, 11, ((16, 1),), 32, stride=2),
    Case(12, 16, ((48, 1),), 64, kernel=(1, 1)),
    Case(6, 6, ((8, 1),), 16),
    Case(9, 7, ((32, 1),), 16, residual=True),
    Case(5, 6, ((16, 1),), 8, batch=3),
    Case(8, 8, ((16, 1), (32, 2)), 32, kernel=(1, 1)),
    Case(8, 6, ((12, 1), (8, 2), (16, 1)), 40, kernel=(1, 1), residual=True),
    Case(8, 6, ((8, 2), (16, 1)), 16),
    Case(7, 7, ((16, 1),), 16, kernel=(5, 3)),
    Case(12, 10, ((8, 1),), 16, kernel=(7, 7), stride=2),
    Case(9, 9, ((16, 1),), 16, dilation=2),
    Case(6, 7, ((16, 1),), 16, pad=False),
    Case(6, 7, ((16, 1),), 16, silu=False),
]
"""Kernels, strides, sources, padding and epilogues of every kind."""
