"""The search space: columns agree with the code generator's rules, keys last, order is fixed."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from autotune_fakes import workload

from yolomlir.autotune import space, untuned
from yolomlir.autotune.cost_model import DEFAULT, Device, Features, predict_us
from yolomlir.autotune.space import Problem
from yolomlir.codegen.gpu import conv2d_kinds, conv2d_space
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.codegen.gpu.conv2d_tile import ConvTile, objection
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.diagnostics import UserError
from yolomlir.target import TARGETS

SHAPES = (
    ConvShape(1, 80, 80, 128, 40, 40, 128, 3, 3, 2, 2, 1, 1),
    ConvShape(1, 640, 640, 3, 320, 320, 16, 3, 3, 2, 2, 1, 1, source_vector=0),
    ConvShape(1, 20, 20, 512, 20, 20, 256, 1, 1),
    ConvShape(2, 13, 7, 38, 13, 7, 30, 3, 3, 1, 1, 1, 1, source_vector=2),
    ConvShape(1, 80, 80, 16, 80, 80, 4, 1, 1),
    ConvShape(1, 80, 80, 128, 40, 40, 128, 3, 3, 2, 2, 1, 1, source_vector=8, dtype="float16"),
    ConvShape(1, 64, 64, 3, 32, 32, 16, 3, 3, 2, 2, 1, 1, source_vector=0, dtype="float16"),
)


def name_of(shape: ConvShape) -> str:
    """Of a shape in a test's name."""
    return f"k{shape.k}n{shape.out_channels}{shape.dtype}"


def random_tiles(shape: ConvShape, count: int, seed: int) -> ConvTiles:
    """Tiles of options that mostly do not go together."""
    random = np.random.default_rng(seed)
    values: dict[str, tuple[int, ...]] = {
        "block_m": (16, 32, 48, 64, 128, 256), "block_n": (8, 16, 24, 40, 64, 80, 128),
        "block_k": (8, 16, 24, 32, 64, 128, 256), "warps_m": (1, 2, 3, 4, 8),
        "warps_n": (1, 2, 4, 5), "warps_k": (1, 2, 4, 8), "stages": (1, 2, 3, 4, 6, 8),
        "cluster_k": (1, 2, 3, 4, 8), "cluster_m": (0, 0, 0, 1, 2, 3, 4),
    }  # fmt: skip
    columns = {
        field.name: random.choice(values.get(field.name, (0, 1)), count)
        for field in dataclasses.fields(ConvTile)
        if field.name != "carveout"  # no option of the kernel
    }
    return ConvTiles(shape, columns)


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_columns_judge_like_the_code_generator(
    shape: ConvShape, target: str, precision: str
) -> None:
    gpu = TARGETS[target]
    listed = conv2d_space.flags(conv2d_space.pipelines(conv2d_space.geometries(shape, gpu)))
    random = np.random.default_rng(1)
    some = listed.where(random.integers(0, len(listed), 200))
    for tiles in (some, random_tiles(shape, 400, 2)):
        judged = conv2d_space.legal(tiles, gpu, precision)
        rules = [objection(tiles.tile(i), shape, gpu, precision) for i in range(len(tiles))]
        wrong = [i for i, rule in enumerate(rules) if (rule is None) != judged[i]]
        assert not wrong, f"{tiles.tile(wrong[0])}: {rules[wrong[0]]}"
    assert judged.any() or shape.source_vector == 0
    assert not judged.all()


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_columns_follow_from_options_as_in_a_tile(shape: ConvShape) -> None:
    tiles = random_tiles(shape, 300, 3)
    for row in range(len(tiles)):
        tile = tiles.tile(row)
        assert tiles.k_tiles[row] == tile.k_tiles(shape)
        assert tiles.blocks[row] == np.prod(tile.grid(shape))
        assert tiles.shared_bytes[row] == tile.shared_bytes(shape)
        assert bool(tiles.unrolled[row]) == tile.unrolled(shape)
        assert bool(tiles.is_staged[row]) == tile.is_staged
        assert tuple(c[row] for c in tiles.copies) == tile.copies(shape)


def test_the_space_names_no_tile_twice() -> None:
    gpu = TARGETS["sm_90"]
    for shape in SHAPES[2:]:
        tiles = conv2d_space.flags(conv2d_space.pipelines(conv2d_space.geometries(shape, gpu)))
        rows = np.stack(list(tiles.columns.values()), axis=1)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_default_tiles_of_a_network_take_no_second() -> None:
    for known in (untuned.default_tile, untuned.best_gathered, conv2d_kinds.window_tiles):
        known.cache_clear()
    problems = {c.problem for c in workload().cases.values() if c.problem.family == "conv2d"}
    begin = time.process_time()
    for problem in problems:
        tile = space.default(problem)
        assert space.illegal(problem, tile) is None
    assert len(problems) > 30
    assert time.process_time() - begin < 2.0  # half of what the whole pass pipeline may take


@pytest.mark.parametrize(("level", "pointwise"), [(2, "depthwise"), (3, "chain")])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_keys_bring_back_every_familys_tiles(name: str, level: int, pointwise: str) -> None:
    """At level 3 every depthwise convolution begins a chain."""
    load = workload(name, level=level)
    assert {c.problem.family for c in load.cases.values()} == {
        "conv2d", pointwise, "max_pool", "attention", "detect",
    }  # fmt: skip
    for case in load.cases.values():
        family = case.problem.family
        tiles = [space.default(case.problem), *space.ranked(case.problem)[:5]]
        for tile in tiles:
            again = space.tile_of(family, space.key_of(tile))
            assert again == tile
            assert type(again) is type(tile)
            assert space.illegal(case.problem, tile) is None


def test_every_family_has_tiles_for_float16() -> None:
    load = workload(precision="fp16")
    assert {c.problem.precision for c in load.cases.values()} == {"fp16"}
    for case in load.cases.values():
        assert "f16" in case.signature or case.problem.family == "detect"
        for tile in [space.default(case.problem), *space.ranked(case.problem)[:5]]:
            assert space.illegal(case.problem, tile) is None


def test_a_key_of_another_family_or_time_is_refused() -> None:
    for key in ("pixels=2,threads=64", "block_m=64", "block_m=x,block_n=8,block_k=8", "", "warp=1"):
        with pytest.raises(UserError, match="is not a tile of family 'conv2d'"):
            space.tile_of("conv2d", key)
    with pytest.raises(UserError, match="no tiles are known for family 'fft'"):
        space.tile_of("fft", "n=1")


def test_ranking_is_by_predicted_time_with_variety_among_the_first() -> None:
    problem = Problem("conv2d", SHAPES[0], TARGETS["sm_90"], "tf32")
    ranked = space.ranked(problem)
    assert len(ranked) == len(set(ranked)) == 512
    us = space.predicted_us(problem, list(ranked))
    assert us[0] == min(us)
    blocks = [conv2d_kinds.block_of(t) for t in ranked[:10]]
    assert max(blocks.count(b) for b in blocks) <= 3
    assert space.ranked.__wrapped__(problem) == ranked  # the same without the cache


def test_neighbours_are_legal_and_near() -> None:
    for case in workload().cases.values():
        problem = case.problem
        tile = space.default(problem)
        near = space.neighbours(problem, tile)
        if problem.family != "conv2d":
            continue
        assert near
        assert tile not in near
        for other in near:
            assert space.illegal(problem, other) is None
            changed = [
                f.name
                for f in dataclasses.fields(tile)
                if getattr(tile, f.name) != getattr(other, f.name)
            ]
            assert 1 <= len(changed) <= 2


def test_samples_depend_on_their_seed_alone() -> None:
    problem = Problem("conv2d", SHAPES[3], TARGETS["sm_120"], "tf32")
    assert space.sample(problem, 5, "a") == space.sample(problem, 5, "a")
    assert space.sample(problem, 5, "a") != space.sample(problem, 5, "b")
    assert all(space.illegal(problem, t) is None for t in space.sample(problem, 50, "c"))


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_a_convolution_of_float16_is_predicted_to_be_faster(target: str) -> None:
    """Half the bytes and half the products of TF32, and the same start and end."""
    half = dataclasses.replace(SHAPES[2], source_vector=8, dtype="float16")
    times = []
    for shape, precision in ((SHAPES[2], "tf32"), (half, "fp16")):
        problem = Problem("conv2d", shape, TARGETS[target], precision)
        times.append(space.predicted_us(problem, [space.default(problem)])[0])
    assert times[1] < times[0] < 2 * times[1]


def test_every_legal_tile_has_a_finite_prediction() -> None:
    for name in ("sm_90", "sm_120"):
        gpu = TARGETS[name]
        for shape in SHAPES:
            tiles = conv2d_space.pipelines(conv2d_space.geometries(shape, gpu))
            tiles = tiles.where(conv2d_space.legal(tiles, gpu, "tf32"))
            us = predict_us(Features.of(tiles, "tf32"), Device.of(gpu), DEFAULT)
            assert np.isfinite(us).all()
            assert (us > 0).all()


@pytest.mark.parametrize("family", ["chain", "conv2d", "max_pool"])
def test_siblings_divide_the_work_alike(family: str) -> None:
    """They differ in when dependents are released and in how weights are brought alone."""
    cases = workload("sm_90", level=3).cases.values()
    problem = next(c.problem for c in cases if c.problem.family == family)
    tile = space.default(problem)
    found = space.siblings(problem, tile)
    assert len(set(found)) == len(found) == {"chain": 3, "conv2d": 1, "max_pool": 0}[family]
    for other in found:
        assert space.illegal(problem, other) is None
        changes = {f.name for f in dataclasses.fields(tile)} & {"release_early", "bulk"}
        same = dataclasses.replace(other, **{name: getattr(tile, name) for name in changes})
        assert same == tile != other
