"""Chains whose first stage reads a window of its input, in the simulator, against float64."""

from __future__ import annotations

import pytest
from chain_cases import ChainCase, Link, Part
from chain_forms import C3K2_END, DEPTHWISE, DIVISIBLE_DEPTHWISE, DOWN, STORED_WINDOW, WINDOWS
from chain_kernels import kernel_of, run, shape_of_case
from gpu_dispatches import assembled

from yolomlir.autotune import space
from yolomlir.codegen.gpu.chain_space import tile_space
from yolomlir.codegen.gpu.chain_tile import ChainTile, objection, plan
from yolomlir.codegen.gpu.chain_window import Window, window_of
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


TILES = [
    ChainTile(16, 1, 4, 8, 4, rows=4),
    ChainTile(32, 1, 4, 2, 2, rows=4),
    ChainTile(32, 1, 4, 8, 12, rows=2),
    ChainTile(64, 1, 8, 1, 3, rows=8),
    ChainTile(64, 2, 4, 8, 12, rows=4),
    ChainTile(128, 1, 8, 16, 4, rows=8),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", [DOWN, C3K2_END], ids=["down", "block"])
def test_windows_agree_with_float64(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8)


@pytest.mark.parametrize("case", WINDOWS, ids=range(len(WINDOWS)))
def test_every_form_of_a_window_agrees_with_float64(case):
    run(case, ChainTile(16, 1, 4, 8, 4, rows=4), extra=8)
    run(case, ChainTile(64, 1, 8, 2, 2, rows=4))


@pytest.mark.parametrize("case", [c for c in WINDOWS if c.channels % 8 == 0], ids=str)
def test_every_form_of_a_float16_window_agrees_with_float64(case):
    """Whose pixels are whole chunks of 8 channels."""
    run(case, ChainTile(16, 1, 4, 8, 4, rows=4), "fp16", extra=8)
    run(case, ChainTile(64, 1, 8, 2, 2, rows=4), "fp16", extra=8)


@pytest.mark.parametrize("case", [DOWN, C3K2_END, WINDOWS[0]], ids=["down", "block", "narrow"])
def test_fp32_has_float32_errors(case):
    run(case, ChainTile(32, 1, 8, 1, 2, rows=4), precision="fp32", extra=0)


@pytest.mark.parametrize("case", DEPTHWISE, ids=range(len(DEPTHWISE)))
def test_depthwise_windows_agree_with_float64(case):
    run(case, ChainTile(16, 1, 4, 2, 3, rows=4))
    run(case, ChainTile(64, 1, 8, 8, 12, rows=8), precision="fp32", extra=8)
    run(case, ChainTile(32, 1, 4, 2, 3, rows=4), precision="fp16", extra=8)


def test_a_depthwise_window_is_divided_among_blocks():
    run(DIVISIBLE_DEPTHWISE, ChainTile(32, 2, 4, 2, 3, rows=4))


# ---- layout and tiles ---------------------------------------------------------------------------


def layout(channels: int, columns: int, stride: int, kernel: int, dtype: str = "float32") -> Window:
    size = 16 * stride
    shape = ConvShape(
        1, size, 32 * stride, channels, 16, 32, 8, kernel, kernel, stride, stride, 1, 1,
        dtype=dtype,
    )  # fmt: skip
    return window_of(shape, 4, columns, channels, padded=True)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [4, 8, 16, 32])
@pytest.mark.parametrize("channels", [4, 8, 16, 24, 64])
def test_a_matrix_meets_every_bank_once(channels, columns, stride):
    """Also where its eight pixels are of two rows, and at every tap: it only shifts them."""
    for chunk, dtype in ((4, "float32"), (8, "float16")):
        window = layout(channels, columns, stride, 3, dtype)
        for first in range(0, 4 * columns, 8):
            assert len({window.pixel(first + i) // chunk % 8 for i in range(8)}) == 8


@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [4, 8])
def test_taps_lie_where_the_columns_do(columns, stride, kernel):
    """Every input pixel has a place of its own in its row; taps of neighbours share them."""
    window = layout(8, columns, stride, kernel)
    places: dict[int, int] = {}
    for column in range(columns):
        for kw in range(kernel):
            place = window.pixel(column) + window.tap(0, kw)
            assert places.setdefault(column * stride + kw, place) == place
    assert set(places) <= set(range(window.width))
    assert max(places) == window.width - 1
    assert len(set(places.values())) == len(places)
    assert max(places.values()) + window.pitch <= window.row_pitch


@pytest.mark.parametrize("case", [DOWN, STORED_WINDOW], ids=["stride 2", "stride 1"])
@pytest.mark.parametrize("tile", [TILES[0], TILES[3]], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_fragments_are_read_without_bank_conflicts(case, tile, precision):
    _, report = run(case, tile, precision, extra=0)
    assert report.operations["nvgpu.ldmatrix"] > 0
    assert not [b for b in report.bank_conflicts if "ldmatrix" in b.op]


LARGE = [
    ChainCase(320, 320, 16, (Link(32), Link(32, (Part(32, 0),))), kernel=3, stride=2),
    ChainCase(160, 160, 8, (Link(16, add="argument"), Link(64, (Part(32), Part(16, 0)))), kernel=3),
    ChainCase(160, 160, 64, (Link(64), Link(64, (Part(64, 0),))), kernel=3, stride=2),
    ChainCase(80, 80, 80, (Link(80), Link(80, (Part(80, 0),))), kernel=3, depthwise=True),
]


@pytest.mark.parametrize("name", ["sm_90", "sm_120"])
@pytest.mark.parametrize("case", LARGE, ids=["down", "block", "wide", "depthwise"])
def test_candidates_assemble(case, name):
    """Within the target's limits, and without spills."""
    target, shape = target_named(name), shape_of_case(case)
    tiles = [t for t in tile_space(shape, target, "tf32") if t.rows]
    assert len(tiles) == len(set(tiles)) >= 20
    for tile in (tiles[0], tiles[len(tiles) // 2], tiles[-1]):
        assert plan(tile, shape).shared_bytes <= target.shared_memory_bytes
        assembled(kernel_of(case, tile, name), name)


@pytest.mark.parametrize(
    ("case", "tile", "reason"),
    [
        (DOWN, ChainTile(16, 1, 4, rows=3), "rows = 3"),
        (DOWN, ChainTile(16, 1, 4, rows=8), "rows = 8"),
        (ChainCase(4, 4, 8, DOWN.links), ChainTile(16, 1, 4, rows=4), "more than one tap"),
        (ChainCase(4, 4, 6, DOWN.links, kernel=3), ChainTile(16, 1, 4, rows=4), "not 6 channels"),
        (LARGE[2], ChainTile(128, 1, 8, 16, 4, rows=8), "bytes of shared memory"),
    ],
)
def test_an_illegal_window_says_why(case, tile, reason):
    assert reason in (objection(tile, shape_of_case(case), target_named("sm_120"), "tf32") or "")


def test_a_tile_without_rows_is_what_it_was():
    """Tables and databases from before have no such option."""
    tile = space.tile_of("chain", "block_m=64,cluster_n=1,warps=4,step_kib=16,slots=2")
    assert tile == ChainTile(64, 1, 4, 16, 2, rows=0)
    assert space.tile_of("chain", space.key_of(tile)) == tile


def test_an_image_is_not_joined_to_the_next():
    """Rectangles of one image never read another, whatever their edges."""
    case = ChainCase(5, 5, 8, (Link(8), Link(8, (Part(8, 0),))), kernel=3, batch=3)
    run(case, ChainTile(32, 1, 4, 8, 4, rows=8))
