"""Attention kernels in the simulator, against float64 within derived tolerances."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_dispatches import (
    HALF_STEP,
    HALF_UNIT,
    START_ALONE,
    TARGETS,
    UNIT,
    Run,
    activation,
    assembled,
    check_assembles,
    cluster_barriers,
    conv_attributes,
    depthwise_terms,
    function,
    halved,
    kernel_of,
    stored_half,
    weight,
)
from simulated_launch import assert_close, round_to_tf32

from yolomlir.codegen.gpu.attention import AttentionTile
from yolomlir.diagnostics import UnsupportedError

pytestmark = pytest.mark.usefixtures("context")


@dataclass(frozen=True)
class Case:
    heads: int
    height: int
    width: int
    batch: int = 1
    key_dim: int = 32
    head_dim: int = 64
    position: bool = True
    scale: float = 32**-0.5

    @property
    def depth(self) -> int:
        return 2 * self.key_dim + self.head_dim

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.height, self.width, self.channels

    def text(self) -> str:
        size = (self.height, self.width)
        x = activation(self.batch, self.heads * self.depth, *size)
        y = activation(self.batch, self.channels, *size)
        attributes = (
            f"{{heads = {self.heads} : i64, key_dim = {self.key_dim} : i64, "
            f"head_dim = {self.head_dim} : i64, scale = {self.scale!r} : f64}}"
        )
        if not self.position:
            line = f'%y = "yolo.attention"(%a0) {attributes} : ({x}) -> {y}'
            return function("attention", [x], [line], y)
        lines = [f'%m = "yolo.attention"(%a0) {attributes} : ({x}) -> {y}']
        one, joined = activation(self.batch, self.head_dim, *size), "%s0"
        for i in range(self.heads):
            offset = i * self.depth + 2 * self.key_dim
            lines.append(
                f'%s{i} = "yolo.slice"(%a0) {{offset = {offset} : i64, '
                f"size = {self.head_dim} : i64}} : ({x}) -> {one}"
            )
        for i in range(1, self.heads):
            before, after = (activation(self.batch, self.head_dim * k, *size) for k in (i, i + 1))
            lines.append(f'%c{i} = "yolo.concat"({joined}, %s{i}) : ({before}, {one}) -> {after}')
            joined = f"%c{i}"
        w, bias = weight(self.channels, 1, 3, 3), f"tensor<{self.channels}xf32>"
        conv = conv_attributes(3, 1, self.channels)
        lines += [
            f'%p = "yolo.conv2d"({joined}, %a1, %a2) {conv} : ({y}, {w}, {bias}) -> {y}',
            f'%y = "yolo.add"(%m, %p) : ({y}, {y}) -> {y}',
        ]
        return function("attention", [x, w, bias], lines, y)


@dataclass
class Reference:
    value: np.ndarray
    tolerance: np.ndarray


def attend(case: Case, qkv: np.ndarray, precision: str, rounds: int) -> Reference:
    """softmax(q k^T scale) v in float64, of inputs rounded as the precision says, and its error.

    A score is a sum of key_dim products (3 key_dim at fp32) in float32, each addition off by at
    most 2^-23 of the sum of sizes (tensor cores truncate); three TF32 products miss 2^-21 of the
    true one. An exponent x - m costs 2^-24 of the spread of the scores, an ex2.approx 2^-22, once
    and once more for each of `rounds` rescalings. At tf32 and fp16 a weight is rounded to 2^-11
    before it meets its value; at fp16 one below 2^-14 of its warp's largest by 2^-25 of that, so of
    the total. A weight's relative error counts twice: in the sum and in the total.
    """
    n, tokens = case.batch, case.height * case.width
    x = round_to_tf32(qkv) if precision == "tf32" else qkv
    by_head = x.astype(np.float64).reshape(n, tokens, case.heads, case.depth).transpose(0, 2, 1, 3)
    q, k, v = np.split(by_head, [case.key_dim, 2 * case.key_dim], 3)
    scores = q @ k.transpose(0, 1, 3, 2) * case.scale
    sizes = np.abs(q) @ np.abs(k).transpose(0, 1, 3, 2) * case.scale
    shifted = scores - scores.max(3, keepdims=True)
    weights = np.exp(shifted)
    weights /= weights.sum(3, keepdims=True)
    products = 3 * case.key_dim + 4 if precision == "fp32" else case.key_dim
    spread = -shifted.min(3, keepdims=True)
    per_weight = (products + 2) * 2.0**-23 * sizes + 2.0**-23 * spread + (rounds + 2) * 2.0**-22
    per_weight = np.expm1(per_weight.max(3, keepdims=True))
    sums = (3 * tokens + 4 if precision == "fp32" else tokens) + rounds
    rounding = 0.0 if precision == "fp32" else HALF_UNIT
    relative = rounding + 2.02 * per_weight + 2 * sums * 2.0**-23
    value, size = weights @ v, weights @ np.abs(v)
    small = np.abs(v).sum(2, keepdims=True) * HALF_STEP if precision == "fp16" else 0.0
    both = (value, relative * size + small)
    return Reference(*(a.transpose(0, 2, 1, 3).reshape(case.out_shape) for a in both))


def run(
    case: Case, precision: str = "tf32", tile: AttentionTile | None = None, *,
    magnitude: float = 1.0, target: str = "sm_90", **options,
) -> Run:  # fmt: skip
    rng = np.random.default_rng(3)
    shape = (case.batch, case.height, case.width, case.heads * case.depth)
    qkv = rng.standard_normal(shape, np.float32) * np.float32(magnitude)
    w = rng.standard_normal((3, 3, case.channels), np.float32)
    bias = rng.standard_normal(case.channels, np.float32)
    text, half = case.text(), precision == "fp16"
    if half:
        text, qkv, w = halved(text), qkv.astype(np.float16), w.astype(np.float16)
    kernel = kernel_of(text, target=target, precision=precision, tile=tile)
    operands = [qkv, w, bias] if case.position else [qkv]
    simulated = Run(kernel, operands, case.out_shape, extra=8 if half else 4)
    result = simulated(**options)
    warps = kernel.launch.block[0] // 32
    rounds = warps + -(-case.height * case.width // 8 // warps) + 1
    want = attend(case, qkv, precision, rounds)
    value, tolerance = want.value, want.tolerance
    if case.position:
        values = qkv.reshape(*shape[:3], case.heads, case.depth)[..., 2 * case.key_dim :]
        total, size = depthwise_terms(values.reshape(case.out_shape), w, 1, 1)
        value = value + total + bias
        tolerance = tolerance + 11 * UNIT * (size + np.abs(bias))
    # The normalisation's reciprocal and the last addition.
    tolerance = tolerance + 4 * UNIT * (np.abs(want.value) + np.abs(value))
    tolerance = stored_half(value, tolerance) if half else tolerance
    if options.get("blocks") is not None:
        done = ~np.isnan(result.value)
        assert_close(result.value[done], value[done], tolerance[done])
    else:
        assert_close(result.value, value, tolerance)
    assert not result.report.bank_conflicts
    return simulated


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1),
        Case(2, 3, 5),
        Case(1, 7, 9),
        Case(1, 4, 8, batch=2),
        Case(1, 5, 27, position=False),
        Case(2, 2, 9, key_dim=16, head_dim=32, scale=0.25),
    ],
    ids=str,
)
def test_geometries(case, precision):
    if precision == "fp16" and case.key_dim % 32:
        case = dataclasses.replace(case, key_dim=2 * case.key_dim, head_dim=2 * case.head_dim)
    run(case, precision)


@pytest.mark.parametrize(
    "tile",
    [AttentionTile(1, 1, 2), AttentionTile(2, 1, 8), AttentionTile(1, 2, 4),
     AttentionTile(2, 2, 1), AttentionTile(1, 1, 16), AttentionTile(1, 1, 2, 2),
     AttentionTile(2, 2, 2, 4), AttentionTile(1, 1, 1, 8), AttentionTile(2, 1, 13, 2),
     AttentionTile(1, 1, 2, 2, release_early=True)],
    ids=str,
)  # fmt: skip
def test_tiles(tile):
    run(Case(1, 5, 9), tile=tile)
    run(Case(1, 2, 8), tile=tile)
    half = dataclasses.replace(tile, key_tiles=2 * tile.key_tiles)
    run(Case(1, 5, 9), "fp16", half)
    run(Case(1, 2, 8), "fp16", half)


@pytest.mark.parametrize("width", [40, 20])
@pytest.mark.parametrize("keys", [2, 4])
def test_float16_maps_that_tiles_do_not_divide(width, keys):
    run(Case(1, 3, width), "fp16", AttentionTile(2, keys, 4))


def test_products_of_float16_take_two_tiles_of_keys():
    with pytest.raises(UnsupportedError, match="2 tiles of keys"):
        kernel_of(halved(Case(1, 2, 2).text()), precision="fp16", tile=AttentionTile(1, 1, 2))


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_large_activations_do_not_overflow(precision):
    """Scores of thousands: exp without the maximum's subtraction is infinite."""
    run(Case(1, 6, 7), precision, magnitude=40.0)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_network_size(precision):
    """400 tokens, a multiple of neither 64 nor 128: the first, the last and another block."""
    run(Case(2, 20, 20), precision, blocks=3)


def test_network_size_fp32():
    run(Case(2, 20, 20), "fp32", blocks=2)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    run(Case(1, 3, 7), target=target)
    run(Case(1, 3, 7), "fp16", target=target)


def test_result_does_not_depend_on_the_order_of_warps_and_blocks():
    simulated = run(Case(2, 5, 7))
    first, second = (simulated(seed=s, schedule="warps").value for s in (1, 2))
    np.testing.assert_array_equal(first, second)


def test_result_rounded_for_its_consumer():
    case = Case(1, 3, 4, position=False)
    qkv = np.random.default_rng(0).standard_normal((1, 3, 4, case.depth), np.float32)
    plain, rounded = (
        Run(kernel_of(case.text(), round_result=r), [qkv], case.out_shape)().value
        for r in (False, True)
    )
    np.testing.assert_array_equal(rounded, round_to_tf32(plain))


@pytest.mark.parametrize("tile", [AttentionTile(1, 2, 2), AttentionTile(2, 4, 2, 2)], ids=str)
def test_input_that_is_rounded_already(tile):
    """The same bits as from a kernel that rounds it, which then changes nothing."""
    case = Case(2, 5, 9)
    rng = np.random.default_rng(0)
    qkv = round_to_tf32(rng.standard_normal((1, 5, 9, 2 * case.depth), np.float32))
    w = rng.standard_normal((3, 3, case.channels), np.float32)
    bias = rng.standard_normal(case.channels, np.float32)
    family = 'yolo.family = "attention"'
    texts = (case.text(), case.text().replace(family, family + _ROUNDED))
    first, second = (
        Run(kernel_of(text, tile=tile), [qkv, w, bias], case.out_shape)().value for text in texts
    )
    np.testing.assert_array_equal(first, second)


_ROUNDED = ", yolo.tf32_rounded = array<i64: 0>"


def test_not_a_number_is_not_lost():
    """Neither where the input is rounded by an addition nor in the weights' rounding."""
    case = Case(1, 2, 4, position=False)
    for precision, channel in (("fp32", 0), ("fp32", 70), ("tf32", 40), ("tf32", 100)):
        qkv = np.random.default_rng(0).standard_normal((1, 2, 4, case.depth), np.float32)
        qkv[0, 1, 2, channel] = np.nan
        kernel = kernel_of(case.text(), precision=precision, tile=AttentionTile(1, 1, 2))
        value = Run(kernel, [qkv], case.out_shape)().value
        assert np.isnan(value[0, 1, 2]).any() or np.isnan(value).all()


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_blocks_of_a_cluster_wait_for_bytes_alone(target, precision):
    text = Case(1, 4, 8).text()
    text = halved(text) if precision == "fp16" else text
    kernel = kernel_of(text, target=target, precision=precision, tile=AttentionTile(1, 2, 4, 2))
    ptx = assembled(kernel, target)
    assert cluster_barriers(ptx) == START_ALONE
    assert "complete_tx::bytes.v4.b32" in ptx
    assert "complete_tx::bytes.v2.b32" in ptx


def test_clusters_need_a_target_that_has_them():
    with pytest.raises(UnsupportedError, match="cluster"):
        kernel_of(Case(1, 2, 2).text(), target="sm_80", tile=AttentionTile(cluster=2))


def test_head_that_fragments_cannot_hold_is_refused():
    with pytest.raises(UnsupportedError, match="key_dim 24"):
        kernel_of(Case(1, 2, 2, key_dim=24).text())


def test_rows_that_are_not_aligned_are_refused():
    with pytest.raises(UnsupportedError, match="16 bytes"):
        kernel_of(Case(1, 2, 2).text(), alignments=[8, 0, 0, 0])


def test_enough_blocks():
    """At least 50 blocks at 640 x 640, scale n."""
    grid = kernel_of(Case(2, 20, 20).text()).launch.grid
    assert grid[0] * grid[1] * grid[2] >= 50


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize(
    "case", [Case(2, 20, 20), Case(6, 20, 20, batch=16), Case(4, 12, 21), Case(1, 1, 3)], ids=str
)
def test_assembles(case, precision):
    text = halved(case.text()) if precision == "fp16" else case.text()
    check_assembles(text, precision=precision)
