"""float16 through yolo-lower-to-linalg and the plainest lowering, against float64 numpy.

Inputs are float16, so products are exact in float32; sums are bounded as float32's are. What is
stored is rounded once: by at most half a unit, 2^-11 of it, or half of the smallest step, 2^-25.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import linalg_jit
import numpy as np
import pytest
from linalg_cases import (
    EPSILON,
    SILU_SLOPE,
    check,
    conv_reference,
    filters,
    image,
    lower,
    physical_weight,
    silu,
    vector,
)
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout

from yolomlir.bindings import ir

UNIT, HALF_STEP = 2.0**-11, 2.0**-25


def stored(y: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The bound of a result that is rounded to float16, given that of what is rounded."""
    return error + np.maximum(UNIT * (np.abs(y) + error), HALF_STEP)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


def lowered(
    body: Callable[..., ir.Value],
    types: Sequence[ir.Type],
    inputs: Sequence[np.ndarray],
    shape: tuple[int, ...],
    dtype: type[np.floating] = np.float16,
) -> np.ndarray:
    """Build, lower and run; `inputs` are physical, `shape` the physical shape of the result."""
    return linalg_jit.run(lower(body, types), "f", inputs, [shape], dtype)[0]


pytestmark = pytest.mark.usefixtures("context")


CASES = [(1, 5, 7, 8, 6, 3, 1), (2, 6, 9, 3, 5, 3, 2), (1, 4, 5, 7, 9, 1, 1)]
"""n, h, w, c, out, kernel, stride"""
FORMS = [(form, "f16") for form in ("plain", "bias", "silu", "residual", "residual_first")]
FORMS += [(form, "f32") for form in ("plain", "bias", "silu")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("form", "element"), FORMS)
def test_convolution(case: tuple[int, ...], form: str, element: str) -> None:
    """One rounding, where there is one: the bound of two would let a rounded sum pass."""
    n, h, w, c, out, k, s = case
    f16 = ir.F16Type.get()
    result = ir.Type.parse(element)
    rng = np.random.default_rng(k * 100 + c)
    x = half(rng.standard_normal((n, h, w, c)))
    weight = half(rng.standard_normal((out, c, k, k)))
    bias = rng.standard_normal(out).astype(np.float32)
    padding = (k // 2,) * 4
    y, size = conv_reference(x, weight, (s, s), padding)
    residual = half(rng.standard_normal(y.shape))

    def body(a: ir.Value, b: ir.Value, *rest: ir.Value) -> ir.Value:
        operand = rest[0] if form != "plain" else None
        v = yolo.conv2d(a, b, operand, strides=(s, s), padding=padding, element=result)
        if form in ("silu", "residual", "residual_first"):
            v = yolo.silu(v)
        if form.startswith("residual"):
            v = yolo.add(rest[1], v) if form == "residual_first" else yolo.add(v, rest[1])
        return v

    physical = (y.shape[0], out, *y.shape[1:3])
    types = [
        image(n, c, h, w, f16), filters(out, c, k, k, Layout.OHWI, f16), vector(out),
        image(*physical, f16),
    ]  # fmt: skip
    inputs = [x, physical_weight(weight, Layout.OHWI), bias, residual]
    count = {"plain": 2, "bias": 3, "silu": 3}.get(form, 4)
    dtype = np.float16 if element == "f16" else np.float32
    got = lowered(body, types[:count], inputs[:count], y.shape, dtype)
    bound = (c * k * k + 2) * EPSILON * (size + abs(bias))
    if form != "plain":
        y = y + bias
    if form in ("silu", "residual", "residual_first"):
        y = silu(y)
        bound = SILU_SLOPE * bound + 8 * EPSILON * abs(y)
    if form.startswith("residual"):
        y = y + residual
        bound = bound + EPSILON * abs(y)
    check(got, y, stored(y, bound) if element == "f16" else bound)


@pytest.mark.parametrize("layout", [Layout.HWIO, Layout.OHWI])
def test_depthwise(layout: Layout) -> None:
    rng = np.random.default_rng(7)
    x, weight = half(rng.standard_normal((2, 5, 6, 7))), half(rng.standard_normal((7, 1, 3, 3)))
    bias = rng.standard_normal(7).astype(np.float32)
    padding = (1, 1, 1, 1)
    y, size = conv_reference(x, weight, (1, 1), padding, groups=7)
    y = y + bias
    f16 = ir.F16Type.get()
    got = lowered(
        lambda a, b, c: yolo.silu(yolo.conv2d(a, b, c, padding=padding, groups=7)),
        [image(2, 7, 5, 6, f16), filters(7, 1, 3, 3, layout, f16), vector(7)],
        [x, physical_weight(weight, layout), bias],
        y.shape,
    )
    bound = SILU_SLOPE * 11 * EPSILON * (size + abs(bias)) + 8 * EPSILON * abs(silu(y))
    check(got, silu(y), stored(silu(y), bound))


def test_the_image_is_not_rounded() -> None:
    """Bytes times float16 weights, in float32; values above 127 too."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 256, (1, 6, 8, 3), dtype=np.uint8)
    weight = half(rng.standard_normal((4, 3, 3, 3)))
    y, size = conv_reference(x, weight, (2, 2), (1, 1, 1, 1))
    f16 = ir.F16Type.get()
    got = lowered(
        lambda a, w: yolo.conv2d(
            yolo.normalize(a, scale=1.0), w, strides=(2, 2), padding=(1,) * 4, element=f16
        ),
        [
            image(1, 3, 6, 8, ir.IntegerType.get_unsigned(8)),
            filters(4, 3, 3, 3, Layout.OHWI, f16),
        ],
        [x, physical_weight(weight, Layout.OHWI)],
        y.shape,
    )
    check(got, y, stored(y, 28 * EPSILON * size))


def test_what_does_no_arithmetic_is_exact() -> None:
    """Pooling with its padding, upsampling, slices and concats give numbers that were there."""
    x = half(-np.abs(np.random.default_rng(3).standard_normal((1, 4, 5, 6))) - 1)

    def body(a: ir.Value) -> ir.Value:
        pooled = yolo.max_pool2d(a, kernel=(3, 3), padding=(1, 1, 1, 1))
        parts = [yolo.slice_(pooled, offset=2, size=4), yolo.slice_(a, offset=0, size=2)]
        return yolo.upsample(yolo.concat(parts))

    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = [padded[:, i : i + 4, j : j + 5] for i in range(3) for j in range(3)]
    whole = np.concatenate([np.maximum.reduce(windows)[..., 2:], x[..., :2]], 3)
    want = whole.repeat(2, 1).repeat(2, 2)
    got = lowered(body, [image(1, 6, 4, 5, ir.F16Type.get())], [x], want.shape)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("encoded", [False, True])
def test_attention(encoded: bool) -> None:
    """Softmax's weights are rounded to float16; with the encoding the sum is rounded once."""
    heads, key_dim, head_dim, height, width = 2, 4, 8, 3, 4
    depth, tokens = 2 * key_dim + head_dim, height * width
    rng = np.random.default_rng(11)
    x = half(rng.standard_normal((2, height, width, heads * depth)))
    weight = half(rng.standard_normal((heads * head_dim, 1, 3, 3)))
    bias = rng.standard_normal(heads * head_dim).astype(np.float32)
    f16 = ir.F16Type.get()

    def body(a: ir.Value, *rest: ir.Value) -> ir.Value:
        options = {"heads": heads, "key_dim": key_dim, "head_dim": head_dim, "scale": 0.5}
        y = yolo.attention(a, **options)
        if not rest:
            return y
        starts = [head * depth + 2 * key_dim for head in range(heads)]
        v = yolo.concat([yolo.slice_(a, offset=start, size=head_dim) for start in starts])
        padding = (1, 1, 1, 1)
        return yolo.add(y, yolo.conv2d(v, *rest, padding=padding, groups=heads * head_dim))

    wide = x.astype(np.float64).reshape(2, tokens, heads, depth).transpose(0, 2, 1, 3)
    q, k, v = np.split(wide, [key_dim, 2 * key_dim], axis=3)
    raw = q @ k.swapaxes(2, 3)
    logits = 0.5 * raw
    wrong = (key_dim + 2) * EPSILON * 0.5 * (abs(q) @ abs(k).swapaxes(2, 3)) + EPSILON * abs(logits)
    exponentials = np.exp(logits - logits.max(3, keepdims=True))
    # The error of a difference of logits, and of the exponential itself; then one to float16.
    relative = np.exp(2 * wrong.max() + 4 * EPSILON * (1 + abs(logits).max())) - 1
    total = exponentials.sum(3, keepdims=True)
    p = exponentials / total
    y = p @ v
    rounding = (UNIT * p + HALF_STEP / total) @ abs(v)
    error = rounding + (2 * relative + (2 * tokens + 4) * EPSILON) * (p @ abs(v))
    shape = (2, height, width, heads * head_dim)
    y, error = (a.transpose(0, 2, 1, 3).reshape(shape) for a in (y, error))
    types = [image(2, heads * depth, height, width, f16)]
    inputs: list[np.ndarray] = [x]
    if encoded:
        channels = heads * head_dim
        types += [filters(channels, 1, 3, 3, Layout.HWIO, f16), vector(channels)]
        inputs += [physical_weight(weight, Layout.HWIO), bias]
        values = v.transpose(0, 2, 1, 3).reshape(shape)
        conv, size = conv_reference(values, weight, (1, 1), (1, 1, 1, 1), groups=channels)
        y = y + conv + bias
        error = error + 12 * EPSILON * (size + abs(bias)) + EPSILON * abs(y)
    check(lowered(body, types, inputs, shape), y, stored(y, error))
