"""Max pool kernels in the simulator: maxima are exact, so results must be equal."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_dispatches import (
    TARGETS,
    Run,
    activation,
    check_assembles,
    function,
    halved,
    kernel_of,
    pool_attributes,
)
from simulated_launch import round_to_tf32

from yolomlir.codegen.gpu.max_pool import MaxPoolTile
from yolomlir.diagnostics import UnsupportedError

pytestmark = pytest.mark.usefixtures("context")


def pool(x: np.ndarray, kernel: int, stride: int, padding: int) -> np.ndarray:
    """The maximum over windows of N x H x W x C; padding counts as minus infinity."""
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded = np.pad(x, pads, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (1, 2))
    return windows[:, ::stride, ::stride].max((-2, -1))


def chained_text(x: tuple[int, int, int, int], kernel: int, count: int) -> str:
    """SPPF's form: `count` pools, each of the one before, concatenated. x: N, H, W, C."""
    n, height, width, channels = x
    one = activation(n, channels, height, width)
    attributes = pool_attributes(kernel, 1, kernel // 2)
    lines, joined = [], "%p0"
    for i in range(count):
        source = "%a0" if i == 0 else f"%p{i - 1}"
        lines.append(f'%p{i} = "yolo.max_pool2d"({source}) {attributes} : ({one}) -> {one}')
    for i in range(1, count):
        before, after = (activation(n, channels * k, height, width) for k in (i, i + 1))
        lines.append(f'%c{i} = "yolo.concat"({joined}, %p{i}) : ({before}, {one}) -> {after}')
        joined = f"%c{i}"
    lines[-1] = lines[-1].replace(f"{joined} =", "%y =")
    return function("max_pool", [one], lines, activation(n, channels * count, height, width))


def single_text(x: tuple[int, ...], kernel: int, stride: int, padding: int) -> str:
    n, height, width, channels = x
    rows, columns = ((s + 2 * padding - kernel) // stride + 1 for s in (height, width))
    types = activation(n, channels, height, width), activation(n, channels, rows, columns)
    line = (
        f'%y = "yolo.max_pool2d"(%a0) {pool_attributes(kernel, stride, padding)} '
        f": ({types[0]}) -> {types[1]}"
    )
    return function("max_pool", types[:1], [line], types[1])


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """All negative, so that a pad of 0 would show."""
    return -np.abs(np.random.default_rng(seed).standard_normal(shape, np.float32)) - 1


def check_chained(
    shape, *, kernel=5, count=3, target="sm_90", tile=None, half=False, extra=4, alignments=(),
    **options,
) -> None:  # fmt: skip
    text = chained_text(shape, kernel, count)
    x = values(shape)
    if half:
        text, x = halved(text), x.astype(np.float16)
    want, last = [], x
    for _ in range(count):
        last = pool(last, kernel, 1, kernel // 2)
        want.append(last)
    expected = np.concatenate(want, 3)
    precision = "fp16" if half else "tf32"
    made = kernel_of(text, target=target, tile=tile, precision=precision, alignments=alignments)
    run = Run(made, [x], expected.shape, extra=extra)
    np.testing.assert_array_equal(run(**options).value, expected)


@pytest.mark.parametrize(
    "shape",
    [(1, 9, 7, 8), (2, 5, 6, 12), (1, 13, 11, 5), (1, 1, 1, 4), (1, 3, 20, 16), (1, 20, 2, 3)],
    ids=str,
)
def test_three_chained_pools(shape):
    check_chained(shape)
    check_chained(shape, half=True, extra=8)


@pytest.mark.parametrize("extra", [1, 2, 4, 8])
def test_accesses_of_float16_as_wide_as_rows_are_aligned(extra):
    check_chained((1, 6, 7, 16), half=True, extra=extra, alignments=[2 * extra] * 2)


@pytest.mark.parametrize("tile", [(3, 4), (1, 9), (10, 10), (16, 2)])
def test_tiles_that_do_not_divide_the_map(tile):
    check_chained((1, 10, 9, 8), tile=MaxPoolTile(*tile, channels=4, threads=64))
    check_chained((1, 7, 10, 12), tile=MaxPoolTile(*tile, channels=8, threads=96))
    check_chained((1, 7, 10, 24), tile=MaxPoolTile(*tile, channels=16, threads=96), half=True,
                  extra=8)  # fmt: skip


@pytest.mark.parametrize("width", [40, 20])
@pytest.mark.parametrize("columns", [16, 32, 64])
def test_float16_widths_that_tiles_do_not_divide(width, columns):
    check_chained((1, 3, width, 8), tile=MaxPoolTile(2, columns, 8, 64), half=True, extra=8)


def test_random_shapes_of_float16():
    rng = np.random.default_rng(11)
    for _ in range(8):
        batch, height, width, channels = (int(v) for v in rng.integers(1, (3, 14, 14, 30)))
        tile = MaxPoolTile(int(rng.integers(1, 8)), int(rng.integers(1, 8)), 8, 64)
        check_chained((batch, height, width, channels), tile=tile, half=True, extra=8)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    check_chained((1, 8, 8, 8), target=target)


@pytest.mark.parametrize(("extra", "bytes_"), [(2, 8), (1, 4)])
def test_rows_less_aligned_than_their_channels(extra, bytes_):
    x = values((1, 6, 5, 8))
    want = pool(x, 3, 1, 1)
    for alignments in ([bytes_, 0], [0, bytes_]):
        kernel = kernel_of(single_text(x.shape, 3, 1, 1), alignments=alignments)
        np.testing.assert_array_equal(Run(kernel, [x], x.shape, extra=extra)().value, want)


def test_chains_of_other_lengths_and_windows():
    check_chained((1, 8, 7, 4), kernel=3, count=2)
    check_chained((1, 8, 7, 4), kernel=7, count=1)
    check_chained((1, 6, 7, 4), kernel=3, count=4)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2), (4, 1, 1)]
)
def test_single_pools(kernel, stride, padding):
    for shape in ((1, 13, 11, 8), (2, 8, 9, 3)):
        x = values(shape, seed=kernel)
        want = pool(x, kernel, stride, padding)
        text = single_text(shape, kernel, stride, padding)
        run = Run(kernel_of(text), [x], want.shape)
        np.testing.assert_array_equal(run().value, want)


def test_infinities_and_equal_values():
    x = np.full((1, 6, 6, 4), -np.inf, np.float32)
    x[0, 2, 3] = [-np.inf, np.inf, -3.0e38, 0.0]
    text = single_text(x.shape, 3, 1, 1)
    run = Run(kernel_of(text), [x], x.shape)
    np.testing.assert_array_equal(run().value, pool(x, 3, 1, 1))


def test_result_rounded_for_its_consumer():
    x = values((1, 4, 5, 8))
    kernel = kernel_of(single_text(x.shape, 3, 1, 1), round_result=True)
    want = round_to_tf32(pool(x, 3, 1, 1))
    np.testing.assert_array_equal(Run(kernel, [x], x.shape)().value, want)


def test_chain_that_changes_the_size_is_refused():
    x, y, z = (activation(1, 4, s, s) for s in (9, 4, 3))
    first, second = pool_attributes(3, 2, 0), pool_attributes(2, 1, 0)
    lines = [
        f'%0 = "yolo.max_pool2d"(%a0) {first} : ({x}) -> {y}',
        f'%y = "yolo.max_pool2d"(%0) {second} : ({y}) -> {z}',
    ]
    with pytest.raises(UnsupportedError, match="change the size"):
        kernel_of(function("max_pool", [x], lines, z))


@pytest.mark.parametrize(
    "shape", [(1, 20, 20, 128), (4, 12, 21, 256), (1, 40, 40, 384), (1, 7, 5, 10)], ids=str
)
def test_assembles(shape):
    check_assembles(chained_text(shape, 5, 3))
    check_assembles(halved(chained_text(shape, 5, 3)), precision="fp16")
