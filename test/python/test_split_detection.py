"""Detection in two stages in the whole network: same rows, and a first stage that is early."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from yolomlir.dialects import yolo
from yolomlir.passes.base import PassContext
from yolomlir.passes.outlining import functions

from yolomlir.autotune import space
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import ImportedModel, import_model
from yolomlir.interpreter import interpret
from yolomlir.pipeline import Pipeline, pipeline_for
from yolomlir.runtime.plan import Plan
from yolomlir.target import target_named

SPLIT = "yolo-split-detection"
LAST_LEVEL = ("model.21", "model.22", "model.23.cv2.2", "model.23.one2one_cv2.2")


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with yolo.new_context(), ir.Location.unknown():
        yield


def optimized(
    level: int, *, split: bool, precision: str = "", **options: int
) -> tuple[ImportedModel, PassContext]:
    model = import_model(seeded_checkpoint("n", 80, 0), **options)
    steps = Pipeline.parse(pipeline_for("gpu", level, precision)).steps
    left_out = {"yolo-assign-tiles"} | (set() if split else {SPLIT})
    passes = PassContext(weights=model.weights, target=target_named("sm_90"))
    Pipeline([s for s in steps if s.name not in left_out]).run(model.module, passes)
    return model, passes


@pytest.mark.parametrize("max_det", [1, 12, 100])
def test_the_network_finds_the_same(max_det: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, (1, 3, 64, 96), dtype=np.uint8)
    rows = []
    for split in (False, True):
        model, passes = optimized(2, split=split, height=64, width=96, max_det=max_det)
        assert passes.statistics.get(SPLIT, {}).get("split", 0) == split
        rows.append(interpret(model.module, [image], model.weights)[0])
    np.testing.assert_array_equal(*rows)


def before(plan: Plan, index: int) -> set[int]:
    """The steps that come before one in every order."""
    found: set[int] = set()
    for other in plan.steps[index].depends:
        found |= {other} | before(plan, other)
    return found


@pytest.mark.parametrize("precision", ["", "fp16"])
@pytest.mark.parametrize("level", [2, 3])
def test_the_first_stage_does_not_wait_for_the_last_level(level: int, precision: str) -> None:
    """Neither by its operands nor by memory; and nothing but the second stage waits for it."""
    model, _ = optimized(level, split=True, precision=precision, height=640, width=640)
    plan = build_plan(model.module)
    names = [step.kernel.partition("_")[0] for step in plan.steps]
    first = names.index("candidates")
    assert names[-1] == "merge"
    earlier = before(plan, first)
    late = [i for i, s in enumerate(plan.steps) if s.layer.startswith(LAST_LEVEL)]
    assert late
    assert not earlier & set(late)
    waits = [i for i in range(len(plan.steps)) if first in before(plan, i)]
    assert waits == [len(plan.steps) - 1]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_both_stages_have_tiles(target: str) -> None:
    model, passes = optimized(2, split=True, height=640, width=640)
    Pipeline.parse("yolo-lower-to-linalg").run(model.module, passes)
    table = functions(model.module)
    merge = "merge_detections"
    families = {"candidates_8000x80_300": "detect", f"{merge}_400x80_300": merge}
    for name, family in families.items():
        problem = space.problem_of(table[name], target_named(target), "tf32")
        assert problem.family == family
        tiles = space.ranked(problem)
        assert len(tiles) > 8
        assert space.default(problem) in tiles
        for tile in tiles:
            assert space.tile_of(family, space.key_of(tile)) == tile
