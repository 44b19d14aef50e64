"""Every family through yolo-lower-to-linalg and the plainest lowering, against float64 numpy.

Tolerances: a float32 sum of K products rounds at most K + 1 times in any order, so its error is at
most gamma = (K + 1) * 2^-24 times the sum of the products' magnitudes, which the reference
computes beside the sum. SiLU's slope is at most 1.1, and it rounds a few times itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import linalg_jit
import numpy as np
import pytest
from linalg_cases import (
    EPSILON,
    SILU_SLOPE,
    build,
    check,
    conv_reference,
    detect_reference,
    filters,
    image,
    lower,
    physical_weight,
    silu,
    vector,
)
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext
from yolomlir.passes.lower_to_linalg import LowerToLinalg

from yolomlir.bindings import ir
from yolomlir.diagnostics import UnsupportedError, UserError


def lowered(body, types: Sequence[ir.Type], inputs, shape: tuple[int, ...]) -> np.ndarray:
    """Build, lower and run; `inputs` are physical, `shape` the physical shape of the result."""
    module = lower(body, types)
    return linalg_jit.run(module, "f", inputs, [shape])[0]


pytestmark = pytest.mark.usefixtures("context")


CONVOLUTIONS = [
    # n, h, w, c, out, kernel, stride, padding, layout
    (1, 5, 7, 8, 6, 3, 1, (1, 1, 1, 1), Layout.HWIO),
    (2, 6, 9, 3, 5, 3, 2, (1, 1, 1, 1), Layout.OHWI),
    (1, 4, 5, 7, 9, 1, 1, (0, 0, 0, 0), Layout.HWIO),
    (1, 8, 8, 2, 1, 3, 2, (0, 1, 1, 0), Layout.HWIO),
    (1, 6, 6, 1, 4, 5, 1, (2, 0, 1, 3), Layout.OHWI),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("form", ["plain", "bias", "silu", "residual", "residual_first"])
def test_convolution(case, form: str) -> None:
    n, h, w, c, out, k, s, padding, layout = case
    rng = np.random.default_rng(k * 100 + c)
    x = rng.standard_normal((n, h, w, c)).astype(np.float32)
    weight = rng.standard_normal((out, c, k, k)).astype(np.float32)
    bias = rng.standard_normal(out).astype(np.float32)
    y, size = conv_reference(x, weight, (s, s), padding)
    residual = rng.standard_normal(y.shape).astype(np.float32)

    def body(a, b, *rest):
        bias_operand = rest[0] if form != "plain" else None
        v = yolo.conv2d(a, b, bias_operand, strides=(s, s), padding=padding)
        if form in ("silu", "residual", "residual_first"):
            v = yolo.silu(v)
        if form.startswith("residual"):
            v = yolo.add(rest[1], v) if form == "residual_first" else yolo.add(v, rest[1])
        return v

    physical = (y.shape[0], out, *y.shape[1:3])
    types = [image(n, c, h, w), filters(out, c, k, k, layout), vector(out), image(*physical)]
    inputs = [x, physical_weight(weight, layout), bias, residual]
    count = {"plain": 2, "bias": 3, "silu": 3}.get(form, 4)
    got = lowered(body, types[:count], inputs[:count], y.shape)
    bound = (c * k * k + 2) * EPSILON * (size + abs(bias))
    if form != "plain":
        y = y + bias
    if form in ("silu", "residual", "residual_first"):
        y = silu(y)
        bound = SILU_SLOPE * bound + 8 * EPSILON * abs(y)
    if form.startswith("residual"):
        y = y + residual
        bound = bound + EPSILON * abs(y)
    check(got, y, bound)


@pytest.mark.parametrize("layout", [Layout.HWIO, Layout.OHWI, Layout.LOGICAL])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(layout: Layout, stride: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 5, 6, 7)).astype(np.float32)
    weight = rng.standard_normal((7, 1, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(7).astype(np.float32)
    padding = (1, 1, 1, 1)
    y, size = conv_reference(x, weight, (stride, stride), padding, groups=7)
    got = lowered(
        lambda a, b, c: yolo.silu(
            yolo.conv2d(a, b, c, strides=(stride, stride), padding=padding, groups=7)
        ),
        [image(2, 7, 5, 6), filters(7, 1, 3, 3, layout), vector(7)],
        [x, physical_weight(weight, layout), bias],
        y.shape,
    )
    bound = SILU_SLOPE * 11 * EPSILON * (size + abs(bias)) + 8 * EPSILON * abs(silu(y + bias))
    check(got, silu(y + bias), bound)


def test_several_sources_one_upsampled() -> None:
    rng = np.random.default_rng(3)
    a = rng.standard_normal((1, 3, 4, 5)).astype(np.float32)
    b = rng.standard_normal((1, 6, 8, 2)).astype(np.float32)
    c = rng.standard_normal((1, 6, 8, 3)).astype(np.float32)
    weight = rng.standard_normal((6, 10, 1, 1)).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    x = np.concatenate([a.repeat(2, 1).repeat(2, 2), b, c], axis=3)
    y, size = conv_reference(x, weight, (1, 1), (0, 0, 0, 0))
    got = lowered(
        lambda p, q, r, w, v: yolo.conv2d(yolo.concat([yolo.upsample(p), q, r]), w, v),
        [
            image(1, 5, 3, 4),
            image(1, 2, 6, 8),
            image(1, 3, 6, 8),
            filters(6, 10, 1, 1, Layout.HWIO),
            vector(6),
        ],
        [a, b, c, physical_weight(weight, Layout.HWIO), bias],
        y.shape,
    )
    check(got, y + bias, 12 * EPSILON * (size + abs(bias)))


@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_first_layer_reads_bytes(scale: float) -> None:
    """Values above 127 too: the bytes are unsigned."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 256, (1, 6, 8, 3), dtype=np.uint8)
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    y, size = conv_reference(x * scale, weight, (2, 2), (1, 1, 1, 1))
    got = lowered(
        lambda a, w: yolo.conv2d(
            yolo.normalize(a, scale=scale), w, strides=(2, 2), padding=(1, 1, 1, 1)
        ),
        [
            image(1, 3, 6, 8, ir.IntegerType.get_unsigned(8)),
            filters(4, 3, 3, 3, Layout.HWIO),
        ],
        [x, physical_weight(weight, Layout.HWIO)],
        y.shape,
    )
    check(got, y, 31 * EPSILON * size)


def test_float_image_of_scale_one_needs_no_operation() -> None:
    x = np.random.default_rng(2).standard_normal((1, 4, 4, 3)).astype(np.float32)
    got = lowered(lambda a: yolo.normalize(a, scale=1.0), [image(1, 3, 4, 4)], [x], (1, 4, 4, 3))
    np.testing.assert_array_equal(got, x)


def test_batch_norm() -> None:
    """A tiny variance, so that a wrong epsilon or place of it shows."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    gamma, beta, mean = (rng.standard_normal(5).astype(np.float32) for _ in range(3))
    variance = np.array([1e-8, 1e-3, 0.5, 1, 30], np.float32)
    centred = x.astype(np.float64) - mean
    gain = gamma / np.sqrt(variance.astype(np.float64) + 1e-3)
    got = lowered(
        lambda a, *p: yolo.batch_norm(a, *p, epsilon=1e-3),
        [image(2, 5, 3, 4), *[vector(5)] * 4],
        [x, gamma, beta, mean, variance],
        x.shape,
    )
    size = abs(gain) * (abs(x) + abs(mean)) + abs(beta)
    check(got, centred * gain + beta, 8 * EPSILON * size)


def test_pools_of_negative_input_chained_and_concatenated() -> None:
    """Padding counts as minus infinity: a zero there would win over every input."""
    rng = np.random.default_rng(1)
    x = -1 - rng.random((1, 6, 5, 4)).astype(np.float32)

    def pool(a):
        return yolo.max_pool2d(a, kernel=(5, 5), padding=(2, 2, 2, 2))

    def body(a):
        b = pool(a)
        c = pool(b)
        return yolo.concat([b, c, pool(c)])

    got = lowered(body, [image(1, 4, 6, 5)], [x], (1, 6, 5, 12))
    want, current = [], x
    for _ in range(3):
        padded = np.pad(current, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(1, 2))
        current = windows.max(axis=(-2, -1))
        want.append(current)
    np.testing.assert_array_equal(got, np.concatenate(want, axis=3))


@pytest.mark.parametrize("size", [1.0, 8.0])
def test_attention_with_position_encoding(size: float) -> None:
    """Large activations too: the softmax must not overflow."""
    n, h, w, heads, kd, hd = 2, 3, 4, 2, 4, 6
    depth = 2 * kd + hd
    rng = np.random.default_rng(4)
    qkv = (size * rng.standard_normal((n, h, w, heads * depth))).astype(np.float32)
    pe = rng.standard_normal((heads * hd, 1, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(heads * hd).astype(np.float32)
    scale = kd**-0.5

    def body(x, weight, b):
        y = yolo.attention(x, heads=heads, key_dim=kd, head_dim=hd, scale=scale)
        parts = [yolo.slice_(x, offset=i * depth + 2 * kd, size=hd) for i in range(heads)]
        v = yolo.concat(parts)
        p = yolo.conv2d(v, weight, b, padding=(1, 1, 1, 1), groups=heads * hd)
        return yolo.add(y, p)

    got = lowered(
        body,
        [
            image(n, heads * depth, h, w),
            filters(heads * hd, 1, 3, 3, Layout.HWIO),
            vector(heads * hd),
        ],
        [qkv, physical_weight(pe, Layout.HWIO), bias],
        (n, h, w, heads * hd),
    )
    t = qkv.astype(np.float64).reshape(n, h * w, heads, depth)
    q, k, v = t[..., :kd], t[..., kd : 2 * kd], t[..., 2 * kd :]
    scores = np.einsum("nqad,nkad->naqk", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("naqk,nkad->nqad", weights, v).reshape(n, h, w, heads * hd)
    values = v.reshape(n, h, w, heads * hd)
    encoded, magnitude = conv_reference(values, pe, (1, 1), (1, 1, 1, 1), groups=heads * hd)
    # a weight's relative error is the absolute error of its score, twice (its own and the
    # largest's), and that of exp and of the sum over positions
    error = 2 * (kd + 2) * EPSILON * np.einsum("nqad,nkad->naqk", abs(q), abs(k)).max() * scale
    bound = (2 * error + (2 * h * w + 8) * EPSILON) * abs(values).max()
    bound = bound + 11 * EPSILON * (magnitude + abs(bias)) + 2 * EPSILON * abs(attended)
    check(got, attended + encoded + bias, bound)


DETECTIONS = [
    # batch, classes, max_det, what the logits are
    (1, 5, 7, "distinct"),
    (2, 80, 20, "distinct"),
    (1, 1, 84, "distinct"),
    (2, 3, 11, "few values"),
    (1, 4, 30, "equal"),
    (1, 2, 9, "signed zeros"),
    (1, 3, 1, "distinct"),
]


@pytest.mark.parametrize(("n", "classes", "max_det", "kind"), DETECTIONS)
def test_detect(n: int, classes: int, max_det: int, kind: str) -> None:
    sides, strides = [(8, 8), (4, 4), (2, 2)], [8, 16, 32]
    rng = np.random.default_rng(classes)
    boxes = [rng.normal(1, 2, (n, h, w, 4)).astype(np.float32) for h, w in sides]
    make = {
        "distinct": lambda shape: rng.normal(-4, 3, shape),
        "few values": lambda shape: rng.integers(-2, 2, shape) / 2,
        "equal": lambda shape: np.full(shape, -0.5),
        "signed zeros": lambda shape: rng.choice([0.0, -0.0, -1.0], shape),
    }[kind]
    logits = [make((n, h, w, classes)).astype(np.float32) for h, w in sides]
    got = lowered(
        lambda *m: yolo.detect(m[:3], m[3:], strides=strides, max_det=max_det),
        [image(n, 4, h, w) for h, w in sides] + [image(n, classes, h, w) for h, w in sides],
        [*boxes, *logits],
        (n, max_det, 6),
    )
    want = detect_reference(boxes, logits, strides, max_det)
    np.testing.assert_array_equal(got[..., 5], want[..., 5])
    extent = 32 * (8.5 + max(abs(b).max() for b in boxes))
    check(got[..., :4], want[..., :4], np.full_like(want[..., :4], 3 * EPSILON * extent))
    # exp's argument is exact; exp, the sum and the quotient round
    check(got[..., 4], want[..., 4], 8 * EPSILON * want[..., 4])


@pytest.mark.parametrize(
    ("n", "classes", "max_det", "kind"),
    [(2, 5, 4, "distinct"), (1, 3, 3, "few values"), (1, 4, 4, "equal"), (1, 2, 7, "signed zeros"),
     (1, 1, 9, "distinct")],
)  # fmt: skip
def test_detection_in_two_stages(n: int, classes: int, max_det: int, kind: str) -> None:
    """Bit for bit what one stage gives."""
    sides, strides = [(6, 5), (3, 3), (2, 2)], [8, 16, 32]
    rng = np.random.default_rng(classes)
    make = {
        "distinct": lambda shape: rng.normal(-4, 3, shape),
        "few values": lambda shape: rng.integers(-2, 2, shape) / 2,
        "equal": lambda shape: np.full(shape, -0.5),
        "signed zeros": lambda shape: rng.choice([0.0, -0.0, -1.0], shape),
    }[kind]
    boxes = [rng.normal(1, 2, (n, h, w, 4)).astype(np.float32) for h, w in sides]
    logits = [make((n, h, w, classes)).astype(np.float32) for h, w in sides]
    types = [[image(n, channels, h, w) for h, w in sides] for channels in (4, classes)]
    whole = lowered(
        lambda *m: yolo.detect(m[:3], m[3:], strides=strides, max_det=max_det),
        [*types[0], *types[1]],
        [*boxes, *logits],
        (n, max_det, 6),
    )
    rows = lowered(
        lambda *m: yolo.candidates(m[:2], m[2:], strides=strides[:2], max_det=max_det),
        [*types[0][:2], *types[1][:2]],
        [*boxes[:2], *logits[:2]],
        (n, max_det, 8),
    )
    both = lowered(
        lambda *m: yolo.merge_detections(*m, stride=strides[2]),
        [ir.RankedTensorType.get([n, max_det, 8], ir.F32Type.get()), types[0][2], types[1][2]],
        [rows, boxes[2], logits[2]],
        (n, max_det, 6),
    )
    np.testing.assert_array_equal(both, whole)
    assert (rows[..., 7] >= rows[..., 6]).all()


def test_functions_keep_attributes_and_parameters() -> None:
    module = build(
        lambda *m: yolo.detect(m[:3], m[3:], strides=[8, 16, 32], max_det=5),
        [image(1, c, s, s) for c in (4, 2) for s in (4, 2, 1)],
        family="detect",
    )
    LowerToLinalg().run(module, PassContext())
    attributes = module.body.operations[0].operation.attributes
    assert ir.StringAttr(attributes["yolo.family"]).value == "detect"
    assert ir.IntegerAttr(attributes["yolo.max_det"]).value == 5
    assert str(attributes["yolo.strides"]) == "array<i64: 8, 16, 32>"


def test_logical_activations_are_refused() -> None:
    module = build(
        lambda a: yolo.upsample(a, loc=ir.Location.name("model.11")),
        [ir.RankedTensorType.get([1, 4, 2, 2], ir.F32Type.get())],
    )
    with pytest.raises(UserError, match=r"model\.11.*NHWC.*yolo-layout-propagation"):
        LowerToLinalg().run(module, PassContext())


def test_other_groups_are_refused() -> None:
    module = build(
        lambda a, w: yolo.conv2d(a, w, groups=2, loc=ir.Location.name("model.1.conv")),
        [image(1, 4, 2, 2), filters(4, 2, 1, 1, Layout.HWIO)],
    )
    with pytest.raises(UnsupportedError, match=r"model\.1\.conv.*2 groups over 4 channels"):
        LowerToLinalg().run(module, PassContext())


def test_an_op_outside_a_dispatch_is_refused() -> None:
    module = build(lambda a: yolo.silu(a, loc=ir.Location.name("model.0.act")), [image(1, 4, 2, 2)])
    del module.body.operations[0].operation.attributes["yolo.family"]
    with pytest.raises(UserError, match=r"model\.0\.act.*lies in no dispatch"):
        LowerToLinalg().run(module, PassContext())
