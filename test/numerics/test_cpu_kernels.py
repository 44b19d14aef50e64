"""Kernels of the CPU backend against float64: ragged shapes, gaps between pixels, all families.

Bounds are those of test_lower_to_linalg: gamma = (K + 2) 2^-24 of the sum of magnitudes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu_dispatch import run_dispatch
from linalg_cases import (
    EPSILON,
    SILU_SLOPE,
    check,
    conv_reference,
    detect_reference,
    filters,
    image,
    physical_weight,
    silu,
    vector,
)
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout

from yolomlir.bindings import ir
from yolomlir.codegen.cpu import isa, math_expansion, program, tiles
from yolomlir.codegen.cpu.isa import Isa

EXP_ERROR = 4 * EPSILON
"""Relative: the polynomial's own rounding steps."""


@pytest.fixture(autouse=True)
def _context(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    with yolo.new_context(), ir.Location.unknown():
        yield


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


CONVOLUTIONS = [
    # n, h, w, c, out, kernel, stride, padding
    (1, 20, 20, 8, 16, 3, 1, (1, 1, 1, 1)),
    (1, 8, 40, 5, 80, 1, 1, (0, 0, 0, 0)),
    (2, 7, 9, 3, 5, 3, 2, (1, 1, 1, 1)),
    (1, 5, 13, 7, 3, 1, 1, (0, 0, 0, 0)),
    (3, 19, 19, 4, 33, 3, 1, (1, 1, 1, 1)),
    (1, 6, 29, 2, 83, 1, 1, (0, 0, 0, 0)),
    (1, 4, 31, 16, 24, 3, 2, (1, 1, 1, 1)),
    (1, 1, 1, 6, 1, 1, 1, (0, 0, 0, 0)),
    (1, 3, 37, 3, 4, 3, 1, (1, 1, 1, 1)),
    (1, 9, 10, 6, 12, 5, 1, (2, 2, 2, 2)),
    (1, 2, 2, 4, 8, 3, 2, (1, 1, 1, 1)),
    (1, 6, 8, 4, 64, 3, 1, (0, 2, 1, 0)),
    (1, 4, 10, 24, 24, 3, 1, (1, 1, 1, 1)),
    (1, 3, 5, 4, 101, 1, 1, (0, 0, 0, 0)),
    (2, 6, 6, 3, 31, 3, 2, (1, 1, 1, 1)),
    (1, 4, 5, 4, 16, 1, 1, (1, 1, 1, 1)),
    (1, 2, 3, 4, 8, 3, 1, (3, 0, 5, 4)),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("form", ["bias", "silu", "residual"])
def test_convolution(case, form: str) -> None:
    n, h, w, c, out, k, s, padding = case
    rng = np.random.default_rng(h * w + out)
    x, weight, bias = f32(rng, n, h, w, c), f32(rng, out, c, k, k), f32(rng, out)
    y, size = conv_reference(x, weight, (s, s), padding)
    residual = f32(rng, *y.shape)

    def body(a, b, v, *rest):
        y = yolo.conv2d(a, b, v, strides=(s, s), padding=padding)
        y = y if form == "bias" else yolo.silu(y)
        return yolo.add(y, rest[0]) if rest else y

    types = [image(n, c, h, w), filters(out, c, k, k, Layout.HWIO), vector(out)]
    operands = [("x", x), ("w", physical_weight(weight, Layout.HWIO)), ("w", bias)]
    if form == "residual":
        types.append(image(y.shape[0], out, *y.shape[1:3]))
        operands.append(("x", residual))
    got = run_dispatch(body, types, operands, y.shape)
    y = y + bias
    bound = (c * k * k + 2) * EPSILON * (size + abs(bias))
    if form != "bias":
        y, bound = silu(y), SILU_SLOPE * bound + (EXP_ERROR + 8 * EPSILON) * abs(silu(y))
    if form == "residual":
        y = y + residual
        bound = bound + EPSILON * abs(y)
    check(got, y, bound)


OTHER_MACHINES = [{"cores": 16}, {"cores": 64}, {"features": ("+avx2",)}, {"features": ()}]


@pytest.mark.parametrize("change", OTHER_MACHINES)
@pytest.mark.parametrize("case", CONVOLUTIONS[:6])
def test_tiles_of_other_machines(case, change, monkeypatch) -> None:
    """Many cores, which get blocks of channels where there are few rows; shorter vectors."""
    machine = dataclasses.replace(isa.host(), **change)
    monkeypatch.setattr(program, "host", lambda: machine)
    n, h, w, c, out, k, s, padding = case
    rng = np.random.default_rng(h * w + out)
    x, weight, bias = f32(rng, n, h, w, c), f32(rng, out, c, k, k), f32(rng, out)
    y, size = conv_reference(x, weight, (s, s), padding)
    got = run_dispatch(
        lambda a, b, v: yolo.conv2d(a, b, v, strides=(s, s), padding=padding),
        [image(n, c, h, w), filters(out, c, k, k, Layout.HWIO), vector(out)],
        [("x", x), ("w", physical_weight(weight, Layout.HWIO)), ("w", bias)],
        y.shape,
        threads=3,
    )
    check(got, y + bias, (c * k * k + 2) * EPSILON * (size + abs(bias)))


@pytest.mark.parametrize("out", [16, 21])
def test_convolution_without_bias(out: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = f32(rng, 1, 6, 10, 8), f32(rng, out, 8, 3, 3)
    y, size = conv_reference(x, weight, (1, 1), (1, 1, 1, 1))
    got = run_dispatch(
        lambda a, b: yolo.conv2d(a, b, padding=(1, 1, 1, 1)),
        [image(1, 8, 6, 10), filters(out, 8, 3, 3, Layout.HWIO)],
        [("x", x), ("w", physical_weight(weight, Layout.HWIO))],
        y.shape,
    )
    check(got, y, 74 * EPSILON * size)


def test_several_sources_without_bias() -> None:
    rng = np.random.default_rng(0)
    a, b, weight = f32(rng, 1, 4, 10, 3), f32(rng, 1, 4, 10, 5), f32(rng, 16, 8, 1, 1)
    y, size = conv_reference(np.concatenate([a, b], 3), weight, (1, 1), (0, 0, 0, 0))
    got = run_dispatch(
        lambda p, q, w: yolo.conv2d(yolo.concat([p, q]), w),
        [image(1, 3, 4, 10), image(1, 5, 4, 10), filters(16, 8, 1, 1, Layout.HWIO)],
        [("x", a), ("x", b), ("w", physical_weight(weight, Layout.HWIO))],
        y.shape,
    )
    check(got, y, 10 * EPSILON * size)


@pytest.mark.parametrize("shape", [(1, 20, 20, 80), (2, 5, 7, 3), (1, 1, 11, 24), (1, 6, 4, 83)])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise(shape: tuple[int, ...], stride: int) -> None:
    n, h, w, c = shape
    rng = np.random.default_rng(c)
    x, weight, bias = f32(rng, *shape), f32(rng, c, 1, 3, 3), f32(rng, c)
    y, size = conv_reference(x, weight, (stride, stride), (1, 1, 1, 1), groups=c)
    got = run_dispatch(
        lambda a, b, v: yolo.silu(
            yolo.conv2d(a, b, v, strides=(stride, stride), padding=(1, 1, 1, 1), groups=c)
        ),
        [image(n, c, h, w), filters(c, 1, 3, 3, Layout.HWIO), vector(c)],
        [("x", x), ("w", physical_weight(weight, Layout.HWIO)), ("w", bias)],
        y.shape,
    )
    want = silu(y + bias)
    bound = SILU_SLOPE * 11 * EPSILON * (size + abs(bias)) + (EXP_ERROR + 8 * EPSILON) * abs(want)
    check(got, want, bound)


@pytest.mark.parametrize(("h", "w"), [(6, 8), (10, 14), (2, 2)])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("out", [6, 37])
def test_several_sources_one_upsampled(h: int, w: int, kernel: int, out: int) -> None:
    rng = np.random.default_rng(h)
    a, b, c = f32(rng, 1, h // 2, w // 2, 5), f32(rng, 1, h, w, 2), f32(rng, 1, h, w, 3)
    weight, bias, residual = (
        f32(rng, out, 10, kernel, kernel),
        f32(rng, out),
        f32(rng, 1, h, w, out),
    )
    x = np.concatenate([a.repeat(2, 1).repeat(2, 2), b, c], axis=3)
    padding = (kernel // 2,) * 4
    y, size = conv_reference(x, weight, (1, 1), padding)
    got = run_dispatch(
        lambda p, q, r, wt, v, z: yolo.add(
            yolo.conv2d(yolo.concat([yolo.upsample(p), q, r]), wt, v, padding=padding), z
        ),
        [
            image(1, 5, h // 2, w // 2),
            image(1, 2, h, w),
            image(1, 3, h, w),
            filters(out, 10, kernel, kernel, Layout.HWIO),
            vector(out),
            image(1, out, h, w),
        ],
        [
            ("x", a),
            ("x", b),
            ("x", c),
            ("w", physical_weight(weight, Layout.HWIO)),
            ("w", bias),
            ("x", residual),
        ],
        y.shape,
    )
    want = y + bias + residual
    terms = 10 * kernel * kernel + 3
    check(got, want, terms * EPSILON * (size + abs(bias) + abs(residual)))


@pytest.mark.parametrize(("h", "w", "out"), [(64, 96, 16), (6, 10, 16), (32, 32, 24)])
def test_first_layer_reads_bytes(h: int, w: int, out: int) -> None:
    rng = np.random.default_rng(h)
    x = rng.integers(0, 256, (1, h, w, 3), dtype=np.uint8)
    weight, bias = f32(rng, out, 3, 3, 3), f32(rng, out)
    y, size = conv_reference(x / 255, weight, (2, 2), (1, 1, 1, 1))
    got = run_dispatch(
        lambda a, b, v: yolo.conv2d(
            yolo.normalize(a, scale=1 / 255), b, v, strides=(2, 2), padding=(1, 1, 1, 1)
        ),
        [
            image(1, 3, h, w, ir.IntegerType.get_unsigned(8)),
            filters(out, 3, 3, 3, Layout.HWIO),
            vector(out),
        ],
        [("x", x), ("w", physical_weight(weight, Layout.HWIO)), ("w", bias)],
        y.shape,
        gap=0,
    )
    check(got, y + bias, 31 * EPSILON * (size + abs(bias)))


@pytest.mark.parametrize("shape", [(1, 20, 20, 32), (2, 7, 9, 24), (1, 3, 5, 7)])
def test_pools_of_negative_input(shape: tuple[int, ...]) -> None:
    n, h, w, c = shape
    x = -1 - np.random.default_rng(1).random(shape).astype(np.float32)

    def pool(a):
        return yolo.max_pool2d(a, kernel=(5, 5), padding=(2, 2, 2, 2))

    def body(a):
        b = pool(a)
        d = pool(b)
        return yolo.concat([b, d, pool(d)])

    got = run_dispatch(body, [image(n, c, h, w)], [("x", x)], (n, h, w, 3 * c))
    want, current = [], x
    for _ in range(3):
        padded = np.pad(current, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(1, 2))
        current = windows.max(axis=(-2, -1))
        want.append(current)
    np.testing.assert_array_equal(got, np.concatenate(want, axis=3))


@pytest.mark.parametrize(
    ("n", "h", "w", "size"), [(1, 20, 20, 1.0), (2, 3, 5, 8.0), (1, 5, 7, 1.0)]
)
def test_attention(n: int, h: int, w: int, size: float) -> None:
    heads, kd, hd = 2, 8, 16
    depth = 2 * kd + hd
    rng = np.random.default_rng(h)
    qkv = (size * rng.standard_normal((n, h, w, heads * depth))).astype(np.float32)
    pe, bias = f32(rng, heads * hd, 1, 3, 3), f32(rng, heads * hd)
    scale = kd**-0.5

    def body(x, weight, b):
        y = yolo.attention(x, heads=heads, key_dim=kd, head_dim=hd, scale=scale)
        v = yolo.concat([yolo.slice_(x, offset=i * depth + 2 * kd, size=hd) for i in range(heads)])
        p = yolo.conv2d(v, weight, b, padding=(1, 1, 1, 1), groups=heads * hd)
        return yolo.add(y, p)

    got = run_dispatch(
        body,
        [
            image(n, heads * depth, h, w),
            filters(heads * hd, 1, 3, 3, Layout.HWIO),
            vector(heads * hd),
        ],
        [("x", qkv), ("w", physical_weight(pe, Layout.HWIO)), ("w", bias)],
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
    error = 2 * (kd + 2) * EPSILON * np.einsum("nqad,nkad->naqk", abs(q), abs(k)).max() * scale
    bound = (2 * error + (2 * h * w + 8) * EPSILON + EXP_ERROR) * abs(values).max()
    bound = bound + 11 * EPSILON * (magnitude + abs(bias)) + 2 * EPSILON * abs(attended)
    check(got, attended + encoded + bias, bound)


DETECTIONS = [
    (1, 80, 300, "distinct"),
    (2, 3, 50, "few values"),
    (1, 1, 84, "signed zeros"),
    (2, 5, 1, "distinct"),
]


@pytest.mark.parametrize(("n", "classes", "max_det", "kind"), DETECTIONS)
def test_detect(n: int, classes: int, max_det: int, kind: str) -> None:
    sides, strides = [(16, 24), (8, 12), (4, 6)], [8, 16, 32]
    rng = np.random.default_rng(classes)
    boxes = [rng.normal(1, 2, (n, h, w, 4)).astype(np.float32) for h, w in sides]
    make = {
        "distinct": lambda shape: rng.normal(-4, 3, shape),
        "few values": lambda shape: rng.integers(-2, 2, shape) / 2,
        "signed zeros": lambda shape: rng.choice([0.0, -0.0, -1.0], shape),
    }[kind]
    logits = [make((n, h, w, classes)).astype(np.float32) for h, w in sides]
    got = run_dispatch(
        lambda *m: yolo.detect(m[:3], m[3:], strides=strides, max_det=max_det),
        [image(n, 4, h, w) for h, w in sides] + [image(n, classes, h, w) for h, w in sides],
        [("x", a) for a in [*boxes, *logits]],
        (n, max_det, 6),
    )
    want = detect_reference(boxes, logits, strides, max_det)
    np.testing.assert_array_equal(got[..., 5], want[..., 5])
    extent = 32 * (24.5 + max(abs(b).max() for b in boxes))
    check(got[..., :4], want[..., :4], np.full_like(want[..., :4], 3 * EPSILON * extent))
    check(got[..., 4], want[..., 4], (EXP_ERROR + 8 * EPSILON) * want[..., 4])


def _repeat(x: np.ndarray) -> np.ndarray:
    return x.repeat(2, 1).repeat(2, 2)


ELEMENTWISE = {
    "silu": (yolo.silu, 1, lambda a: silu(a.astype(np.float64))),
    "add": (yolo.add, 2, lambda a, b: a.astype(np.float64) + b),
    "concat": (lambda a, b: yolo.concat([a, b]), 2, lambda a, b: np.concatenate([a, b], axis=3)),
    "slice": (lambda a: yolo.slice_(a, offset=3, size=5), 1, lambda a: a[..., 3:8]),
    "upsample": (yolo.upsample, 1, _repeat),
}


@pytest.mark.parametrize("name", list(ELEMENTWISE))
@pytest.mark.parametrize("shape", [(1, 6, 10, 16), (2, 3, 5, 9)])
def test_one_op_alone(name: str, shape: tuple[int, ...]) -> None:
    """The family `elementwise`: copies and activations that nothing fused."""
    body, count, reference = ELEMENTWISE[name]
    rng = np.random.default_rng(3)
    inputs = [f32(rng, *shape) for _ in range(count)]
    n, h, w, c = shape
    want = reference(*inputs)
    got = run_dispatch(body, [image(n, c, h, w)] * count, [("x", a) for a in inputs], want.shape)
    check(got, want, (EXP_ERROR + 8 * EPSILON) * abs(want))


def test_convolutions_one_after_the_other() -> None:
    """Two convolutions and a residual across both in one dispatch."""
    rng = np.random.default_rng(9)
    x, first, second = f32(rng, 1, 8, 10, 16), f32(rng, 8, 16, 3, 3), f32(rng, 16, 8, 1, 1)
    b, v = f32(rng, 8), f32(rng, 16)

    def body(a, w, p, u, q):
        hidden = yolo.silu(yolo.conv2d(a, w, p, padding=(1, 1, 1, 1)))
        return yolo.add(yolo.conv2d(hidden, u, q), a)

    got = run_dispatch(
        body,
        [
            image(1, 16, 8, 10),
            filters(8, 16, 3, 3, Layout.HWIO),
            vector(8),
            filters(16, 8, 1, 1, Layout.HWIO),
            vector(16),
        ],
        [
            ("x", x),
            ("w", physical_weight(first, Layout.HWIO)),
            ("w", b),
            ("w", physical_weight(second, Layout.HWIO)),
            ("w", v),
        ],
        x.shape,
    )
    y, size = conv_reference(x, first, (1, 1), (1, 1, 1, 1))
    hidden = silu(y + b)
    error = SILU_SLOPE * 146 * EPSILON * (size + abs(b)) + (EXP_ERROR + 8 * EPSILON) * abs(hidden)
    z, size = conv_reference(hidden, second, (1, 1), (0, 0, 0, 0))
    carried, _ = conv_reference(error, abs(second), (1, 1), (0, 0, 0, 0))
    want = z + v + x
    check(got, want, carried + 12 * EPSILON * (size + abs(v) + abs(x)))


def test_silu_over_the_whole_range() -> None:
    """Huge, tiny and special values through the expansion of exp."""
    x = np.concatenate([np.linspace(-100, 100, 4001), [-3e38, 3e38, 0.0, -0.0, 1e-38, 88.4, -88.4]])
    x = np.resize(x.astype(np.float32), (1, 4, 16, 64))
    x[0, 0, 0, 0] = np.nan
    got = run_dispatch(yolo.silu, [image(1, 64, 4, 16)], [("x", x)], x.shape)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        want = wide / (1 + np.exp(-wide))
    assert np.isnan(got[0, 0, 0, 0])
    got[0, 0, 0, 0] = want[0, 0, 0, 0] = 0
    # below -88.37 exp is held at e^88.37, so silu is at most |x| e^-88.37 away from nothing
    held = abs(wide) * 5e-39
    check(got, want, (EXP_ERROR + 8 * EPSILON) * abs(want) + np.nan_to_num(held))


def test_exp_polynomial_is_accurate_to_far_below_float32() -> None:
    r = np.linspace(-np.log(2) / 2, np.log(2) / 2, 20001)
    value = np.polynomial.Polynomial(math_expansion.coefficients())(r)
    assert np.max(abs(value / np.exp(r) - 1)) < 3e-9


@pytest.mark.parametrize(
    "vectors_of", [Isa("avx512", 16, 32), Isa("avx2", 8, 16), Isa("neon", 4, 32)]
)
@pytest.mark.parametrize("channels", [1, 3, 4, 8, 16, 64, 80, 81, 83, 128])
@pytest.mark.parametrize("width", [1, 7, 13, 20, 23, 31, 40, 84])
def test_register_tiles_divide_and_fit(vectors_of: Isa, channels: int, width: int) -> None:
    tile = tiles.register_tile(width, channels, vectors_of)
    assert width % tile.pixels == 0
    assert channels % tile.channels == 0
    vectors = -(-tile.channels // vectors_of.lanes)
    assert tile.pixels == 1 or tile.pixels * vectors + vectors + 2 <= vectors_of.registers


def test_pixels_that_share_a_cache_set_stay_few() -> None:
    machine = Isa("avx512", 16, 32)
    assert tiles.register_tile(40, 512, machine).pixels > 8
    assert tiles.register_tile(40, 512, machine, pixel_bytes=4096).pixels <= 8
    assert tiles.register_tile(40, 512, machine, pixel_bytes=4096 + 64).pixels > 8


def test_blocks_grow_with_cores_and_cover_the_output() -> None:
    few, many = (Isa("avx512", 16, 32, cores) for cores in (2, 32))
    assert tiles.wanted_blocks(few) < tiles.wanted_blocks(many) == 128
    tile = tiles.RegisterTile(10, 32)
    assert tiles.channels_per_block(256, tile, 1) == 256
    assert tiles.channels_per_block(256, tile, 4) == 64
    assert tiles.channels_per_block(256, tile, 99) == 32
    assert tiles.rows_per_block(1, 160, 20, row_bytes=1000) == 8
    assert tiles.rows_per_block(1, 160, 20, row_bytes=100_000, stride=2, halo=1) == 1
