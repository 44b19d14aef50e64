"""The tuner on a real GPU: checks, timings that repeat, a whole tuning, the same detections."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from yolomlir.autotune import space
from yolomlir.autotune.build import Built, Job, ProcessBuilder, build
from yolomlir.autotune.database import Database
from yolomlir.autotune.measure import CudaMeasure
from yolomlir.autotune.prediction import flops
from yolomlir.autotune.search import Plan
from yolomlir.autotune.session import tune
from yolomlir.autotune.workload import Case, Workload, collect
from yolomlir.compiler import CompileOptions, compile_checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.runtime.device import cuda_target

pytestmark = pytest.mark.device

SIDE = 320


@pytest.fixture(scope="module")
def load() -> Workload:
    target = cuda_target()
    if target is None:
        pytest.skip("there is no GPU that yolomlir targets")
    options = CompileOptions(target=target, height=SIDE, width=SIDE, level=3)
    return collect(seeded_checkpoint("n", 80, 0, fused=True), options)


@pytest.fixture
def measure(load: Workload) -> Iterator[CudaMeasure]:
    with CudaMeasure(load) as found:
        yield found


def job(case: Case, *tiles: space.Tile) -> Job:
    problem = case.problem
    keys = tuple(space.key_of(t) for t in tiles)
    return Job(case.name, problem.family, case.text, keys, problem.target, problem.precision)


def built(case: Case, *tiles: space.Tile) -> list[Built]:
    return build(job(case, *tiles))


def test_tiles_of_every_family_agree(load: Workload, measure: CudaMeasure) -> None:
    seen: dict[str, int] = {}
    for case in load.cases.values():
        family = case.problem.family
        seen[family] = seen.get(family, 0) + 1
        if seen[family] > 6:
            continue
        others = space.sample(case.problem, 3, case.name)
        for candidate in built(case, space.default(case.problem), *others):
            if candidate.fault is None:
                assert measure.check(case, candidate) is None, candidate.key
    families = {"conv2d", "chain", "max_pool", "attention", "detect", "merge_detections"}
    assert set(seen) == families


def test_a_kernel_that_computes_something_else_is_found(
    load: Workload, measure: CudaMeasure
) -> None:
    convolutions = [c for c in load.cases.values() if c.problem.family == "conv2d"]
    case = next(c for c in convolutions if "silu" in c.signature and "3x3" in c.signature)
    (honest,) = built(case, space.default(case.problem))
    assert measure.check(case, honest) is None
    # The same function without its activation: right shapes, right weights, wrong result.
    text = case.text.replace("math.exp", "math.sin")
    (planted,) = built(dataclasses.replace(case, text=text), space.default(case.problem))
    if planted.fault is not None:
        text = case.text.replace("arith.negf", "math.absf")
        (planted,) = built(dataclasses.replace(case, text=text), space.default(case.problem))
    assert planted.fault is None
    assert "differs" in str(measure.check(case, planted))


def test_whole_inferences_leave_the_inputs_of_checks_alone(
    load: Workload, measure: CudaMeasure
) -> None:
    """A candidate may be checked after graphs were timed, against what came out before."""
    builder = ProcessBuilder()
    try:
        begun = {n: builder.submit(job(c, space.default(c.problem))) for n, c in load.cases.items()}
        chosen = {name: future.result()[0] for name, future in begun.items()}
    finally:
        builder.close()
    for name, candidate in chosen.items():
        assert measure.check(load.cases[name], candidate) is None
    measure.network(chosen, 2)
    for name, candidate in chosen.items():
        assert measure.check(load.cases[name], candidate) is None, candidate.key


def test_times_repeat(load: Workload, measure: CudaMeasure) -> None:
    """Of the longest kernel: each launch is timed with its share of the start of the graph."""
    case = max(load.cases.values(), key=lambda c: flops(c.problem))
    (candidate,) = built(case, space.default(case.problem))
    times = [measure.time(case, candidate, 9).us for _ in range(5)]
    assert min(times) > 0.3  # a launch in a graph takes this long with nothing to do
    assert max(times) < 1.05 * min(times)


def test_a_tuning_run_and_what_it_changes(
    load: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yolomlir.runtime.cuda import CudaExecutor

    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    checkpoint = seeded_checkpoint("n", 80, 0, fused=True)
    options = CompileOptions(target=load.target.name, height=SIDE, width=SIDE)
    plain = compile_checkpoint(checkpoint, options)
    builder = ProcessBuilder()
    try:
        plan = Plan(first=3, random=0, batch=3, patience=0, most=8)
        result = tune(load, budget=240, builder=builder, plan=plan)
        assert not result.missing
        again = tune(load, budget=60, builder=builder)
    finally:
        builder.close()
    assert again.measured == 0
    assert [r.tile for r in again.rows] == [r.tile for r in result.rows]
    # The whole graph may prefer what is somewhat slower alone.
    assert sum(r.count * r.us for r in result.rows) <= sum(
        1.02 * r.count * r.default_us for r in result.rows
    )
    assert result.network is not None
    assert result.network.launches > 0
    tuned = compile_checkpoint(checkpoint, options)
    assert len(Database.open(load.target.name, result.device).winners) == len(load.cases)
    image = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    outputs = []
    for artifact in (plain, tuned):
        program = artifact.programs[load.target.name]
        with CudaExecutor(program) as executor:
            name = next(iter(program.plan.inputs))
            outputs.append(next(iter(executor.run({name: image}).values())))
    before, after = (np.sort(o[0, :, 4])[::-1] for o in outputs)
    # Scores differ by the order of float32 sums and what TF32 rounding makes of it, 2**-11 relative
    # a layer at most, over about 25 layers in a row, through a sigmoid whose slope is at most 1/4.
    assert np.abs(before - after).max() < 25 * 2.0**-11 / 4
