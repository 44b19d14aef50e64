"""`yolo-fuse-pointwise` on the whole network: what it fuses, and that the meaning stays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from yolomlir.dialects import yolo
from yolomlir.passes.base import PassContext
from yolomlir.passes.outlining import dispatches, functions

from yolomlir.arena_interpreter import ORDERS, Arena, run_plan
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import ImportedModel, import_model
from yolomlir.interpreter import interpret
from yolomlir.pipeline import Pipeline, pipeline_for
from yolomlir.target import target_named

SLOW_ELSEWHERE = "yolo-assign-tiles"


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with yolo.new_context(), ir.Location.unknown():
        yield


def _optimised(
    scale: str, shape: tuple[int, int], target: str, level: int
) -> tuple[ImportedModel, PassContext]:
    model = import_model(seeded_checkpoint(scale, 80, 0), height=shape[0], width=shape[1])
    passes = PassContext(weights=model.weights, target=target_named(target))
    steps = Pipeline.parse(pipeline_for(passes.target.kind, level)).steps
    Pipeline([s for s in steps if s.name != SLOW_ELSEWHERE]).run(model.module, passes)
    return model, passes


def test_launches_of_the_smallest_network() -> None:
    """99 without chains. Every stage of a chain is a convolution; no result is stored twice."""
    model, passes = _optimised("n", (640, 640), "sm_90", 3)
    counts = passes.statistics["yolo-fuse-pointwise"]
    calls = dispatches(model.module)
    assert len(calls) <= 65
    assert len(calls) + counts["fused"] == 99
    table = functions(model.module)
    chains = [table[yolo.callee(c)] for c in calls if yolo.callee(c).startswith("chain_")]
    assert len(chains) == counts["chains"] >= 20
    for function in chains:
        block = function.regions[0].blocks[0]
        returned = block.operations[-1].operation.operands
        assert 1 <= len(returned) == len(set(returned))
    attention = [c for c in calls if "128x20x20_128_add_then_256_silu_then_128_add" in str(c)]
    assert len(attention) == 2
    assert all(len(c.results) == 1 for c in attention)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_chains_mean_what_the_network_means(target: str) -> None:
    """On a small image, through the arena in orders that a graph may run; order of sums apart."""
    shape = (64, 96)
    plain, _ = _optimised("n", shape, target, 2)
    model, passes = _optimised("n", shape, target, 3)
    assert passes.statistics["yolo-fuse-pointwise"]["chains"] >= 15
    image = np.random.default_rng(1).integers(0, 256, (1, 3, *shape), dtype=np.uint8)
    expected = interpret(plain.module, [image], plain.weights)[0]
    plan = build_plan(model.module)
    arena = Arena(plan.arena_bytes)
    for order in ORDERS:
        got = run_plan(
            model.module, plan, {"image": image}, model.weights, order=order, arena=arena
        )
        np.testing.assert_array_equal(got["detections"], expected)


def test_a_cpu_program_has_no_chains() -> None:
    assert pipeline_for("cpu", 3) == pipeline_for("cpu", 2)
