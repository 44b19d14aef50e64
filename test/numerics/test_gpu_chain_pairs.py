"""Chains that begin with several convolutions of more than one tap, in the simulator, against
float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chain_cases import ChainCase, Link, Part
from chain_forms import BOTTLENECK, BOTTLENECK_AND_C3K2_END, PAIRS, STORED_PAIR
from chain_kernels import kernel_of, run, shape_of_case
from gpu_dispatches import assembled
from yolomlir.dialects import yolo

from yolomlir.autotune import levels, space
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain import parse
from yolomlir.codegen.gpu.chain_space import default_tile, likely_tiles, tile_space
from yolomlir.codegen.gpu.chain_tile import ChainTile, objection, plan
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.compiler import CompileOptions, emit
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


TILES = [
    ChainTile(16, 1, 4, 8, 4, rows=4),
    ChainTile(32, 1, 4, 2, 2, rows=4),
    ChainTile(32, 1, 8, 8, 12, rows=2),
    ChainTile(64, 1, 8, 1, 3, rows=8),
    ChainTile(128, 1, 8, 16, 4, rows=8),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", [BOTTLENECK, BOTTLENECK_AND_C3K2_END], ids=["bottleneck", "block"])
def test_pairs_agree_with_float64(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8)


@pytest.mark.parametrize("case", PAIRS, ids=range(len(PAIRS)))
def test_every_form_of_a_pair_agrees_with_float64(case):
    run(case, ChainTile(16, 1, 4, 8, 4, rows=4), extra=8)
    run(case, ChainTile(64, 1, 8, 2, 2, rows=4))


@pytest.mark.parametrize("case", [BOTTLENECK_AND_C3K2_END, STORED_PAIR], ids=["block", "stored"])
@pytest.mark.parametrize("tile", [ChainTile(16, 2, 4, 2, 3, rows=4), ChainTile(32, 2, 8, 8, 12, 4)])
def test_pairs_divided_among_blocks_agree_with_float64(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8)


def test_four_blocks_share_a_pair():
    case = ChainCase(
        5, 6, 32, (Link(32), Link(32, (Part(32, 0),), add="argument", kernel=3)), kernel=3
    )
    run(case, ChainTile(16, 4, 8, 4, 3, rows=4))
    run(case, ChainTile(16, 4, 8, 16, 12, rows=4), "fp16", extra=8)


@pytest.mark.parametrize("case", [BOTTLENECK, PAIRS[1]], ids=["bottleneck", "larger"])
def test_fp32_has_float32_errors(case):
    run(case, ChainTile(32, 1, 8, 1, 2, rows=4), precision="fp32", extra=0)


# ---- widths that no tile divides ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "tile"),
    [
        (40, ChainTile(64, 1, 8, 8, 4, rows=4)),  # 16 columns: two and a half tiles
        (40, ChainTile(128, 1, 8, 16, 12, rows=4)),  # 32: one and a quarter
        (20, ChainTile(32, 2, 8, 8, 4, rows=4)),  # 8: two and a half
        (20, ChainTile(128, 1, 8, 16, 4, rows=8)),  # 16: one and a quarter
        (20, ChainTile(256, 1, 16, 8, 4, rows=8)),  # 32: less than one
    ],
    ids=str,
)
def test_widths_that_no_tile_divides(width, tile):
    links = (Link(16), Link(16, (Part(16, 0),), add="argument", kernel=3))
    case = ChainCase(5, width, 16, links, kernel=3)
    run(case, tile)
    run(case, tile, "fp16", extra=8)


# ---- tiles --------------------------------------------------------------------------------------

LARGE = {
    "first": ChainCase(
        160, 160, 16,
        (
            Link(8),
            Link(16, (Part(8, 0),), add="argument", kernel=3),
            Link(64, (Part(32), Part(16, 1))),
        ),
        kernel=3,
    ),
    "wide": ChainCase(
        20, 20, 64, (Link(64), Link(64, (Part(64, 0),), add="argument", kernel=3)), kernel=3
    ),
}  # fmt: skip
"""Pairs of YOLO26n: of the most pixels, and of the most channels."""


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_tiles_have_keys(case, name):
    """That databases and tables have; of tiles that make one kernel only one is searched."""
    target, shape = target_named(name), shape_of_case(case)
    tiles = list(tile_space(shape, target, "tf32"))
    assert all(tile.rows for tile in tiles)
    keys = [space.key_of(tile) for tile in tiles]
    assert len(set(keys)) == len(keys) >= 20
    assert [space.tile_of("chain", key) for key in keys] == tiles
    likely = likely_tiles(shape, target, "tf32", count=1000)
    kernels = [_kernel(tile, shape) for tile in likely]
    assert len(set(kernels)) == len(kernels)
    assert set(kernels) == {_kernel(tile, shape) for tile in tiles}
    problem = space.Problem("chain", shape, target, "tf32")
    assert likely[0] == space.default(problem)
    assert all(space.illegal(problem, tile) is None for tile in tiles)


def _kernel(tile, shape):
    work = plan(tile, shape)
    return tile.block_m, tile.cluster_n, tile.warps, tile.rows, work.ring, work.stages


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (ChainTile(64, 1, 8, 8, 4), "rows = 0 leaves no window"),
        (ChainTile(64, 1, 8, 8, 4, rows=3), "rows = 3"),
        (ChainTile(256, 4, 16, 32, 12, rows=16), "bytes of shared memory"),
    ],
)
def test_an_illegal_tile_of_a_pair_says_why(tile, reason):
    shape, target = shape_of_case(LARGE["wide"]), target_named("sm_90")
    assert reason in (objection(tile, shape, target, "tf32") or "")
    problem = space.Problem("chain", shape, target, "tf32")
    assert reason in (space.illegal(problem, tile) or "")


# ---- the pairs of YOLO26n -----------------------------------------------------------------------


def measured_pairs(precision: str) -> Iterator[ir.Operation]:
    """The functions that a compile for an H200 makes of pairs, with their tiles."""
    options = CompileOptions(target="sm_90", precision=precision, level=3)
    module = ir.Module.parse(emit(seeded_checkpoint("n", 80, 0), options, "linalg"))
    for view in module.body.operations:
        function = view.operation
        if yolo.string(function, "sym_name").startswith("chain_") and parse(function).inner:
            yield view


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize("name", ["sm_90", "sm_120"])
def test_the_widest_pair_assembles(name, precision):
    """With the tile that it has without measurements."""
    case = LARGE["wide"]
    tile = default_tile(shape_of_case(case, precision), target_named(name), precision)
    assembled(kernel_of(case, tile, name, precision), name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("precision", "count"), [("tf32", 5), ("fp16", 9)])
def test_measured_pairs_assemble(precision, count):
    """For an H200 as they ship, and for an RTX 50 as a program for an H200 is compiled again."""
    assert levels.measured_pairs("sm_90", "n", precision, 640, 640, 1)
    found = 0
    for view in measured_pairs(precision):
        assembled(generate_kernel(view, target_named("sm_90"), precision=precision), "sm_90")
        other = target_named("sm_120")
        tile = default_tile(parse(view.operation), other, precision)
        view.operation.attributes["yolo.tile"] = to_attribute(tile)
        assembled(generate_kernel(view, other, precision=precision), "sm_120")
        found += 1
    assert found == count
