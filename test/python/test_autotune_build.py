"""Candidates really compiled: through worker processes, in place, faults and all."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path

import pytest
from autotune_fakes import FakeMeasure, part, workload

from yolomlir.autotune import build as build_module
from yolomlir.autotune import space
from yolomlir.autotune.build import Built, Job, ProcessBuilder, build, jobs_of
from yolomlir.autotune.database import Database
from yolomlir.autotune.measure import _exact, tolerance
from yolomlir.autotune.search import Plan
from yolomlir.autotune.session import tune
from yolomlir.autotune.workload import Case
from yolomlir.codegen.gpu.ptx import assemble

pytest.importorskip("cuda.bindings.nvjitlink", reason="nvJitLink is not installed")

LEVEL = {"chain": 3}
"""The optimisation level that makes a family's functions, where it is not 2."""


def job(case: Case, *keys: str, target: str = "sm_90") -> Job:
    load = workload(target, level=LEVEL.get(case.problem.family, 2))
    problem = load.cases[case.name].problem
    return Job(case.name, problem.family, case.text, keys, problem.target, problem.precision)


def first(family: str) -> Case:
    load = workload(level=LEVEL.get(family, 2))
    return next(c for c in load.cases.values() if c.problem.family == family)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_candidates_of_every_family_assemble(target: str) -> None:
    for family in ("conv2d", "depthwise", "max_pool", "attention", "chain"):
        case = first(family)
        problem = workload(target, level=LEVEL.get(family, 2)).cases[case.name].problem
        keys = [space.key_of(t) for t in (space.default(problem), space.ranked(problem)[-1])]
        for built in build(job(case, *keys, target=target)):
            assert built.fault is None or "spills" in built.fault, built
            assert built.launch is not None
            assert built.launch.function == case.name
            assert built.cubin.startswith(b"\x7fELF")
            assert built.registers > 0
        assert built.key == keys[-1]


def test_a_tile_decides_the_kernel() -> None:
    case = first("conv2d")
    one, *rest = space.ranked(case.problem)
    two = next(t for t in rest if t.block_m != one.block_m)
    built = build(job(case, space.key_of(one), space.key_of(two)))
    assert built[0].cubin != built[1].cubin
    assert built[0] == build(job(case, space.key_of(one)))[0]  # the same every time


def test_faults_are_reported_and_the_others_go_on() -> None:
    case = first("conv2d")
    good = space.key_of(space.default(case.problem))
    illegal = "block_m=256,block_n=128,block_k=128,stages=8"
    built = build(job(case, illegal, "nonsense=1", good))
    assert "illegal tile" in str(built[0].fault)
    assert "is not a tile of family" in str(built[1].fault)
    assert built[2].fault is None
    assert [b.launch is None for b in built] == [True, True, False]


def test_jobs_are_small_and_whole() -> None:
    case = first("conv2d")
    problem = case.problem
    jobs = jobs_of("f", "conv2d", "text", list("abcde"), problem.target, "tf32", size=2)
    assert [j.keys for j in jobs] == [("a", "b"), ("c", "d"), ("e",)]


def test_a_toolkit_is_found_where_nothing_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(build_module, "Path", lambda path: tmp_path)
    build_module.prefer_toolkit()
    assert os.environ["CUDA_HOME"] == str(tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/theirs")
    build_module.prefer_toolkit()
    assert os.environ["CUDA_HOME"] == "/theirs"


def test_tuning_with_the_real_compiler(tmp_path: Path) -> None:
    load = part(2, skip=2)
    path = tmp_path / "db.jsonl"
    builder = ProcessBuilder(1)
    try:
        result = tune(
            load, budget=1e6, measure=FakeMeasure(load), builder=builder,
            database=Database.open("sm_90", "Fake GPU", path), assembler="13.0",
            plan=Plan(first=2, random=0, batch=2, patience=0, most=4),
        )  # fmt: skip
    finally:
        builder.close()
    assert len(result.rows) == 2
    assert all(row.us <= row.default_us for row in result.rows)
    again = Database.open("sm_90", "Fake GPU", path)
    assert len(again.winners) == 2


class _Dead:
    """A process pool of which a worker has ended."""

    def submit(self, *_: object) -> Future[list[Built]]:
        from concurrent.futures.process import BrokenProcessPool

        raise BrokenProcessPool("gone")

    def shutdown(self, **_: object) -> None:
        pass


class _Alive(_Dead):
    def submit(self, *_: object) -> Future[list[Built]]:
        future: Future[list[Built]] = Future()
        future.set_result([])
        return future


def test_ended_workers_are_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools = iter([_Dead(), _Alive()])
    monkeypatch.setattr(ProcessBuilder, "_start", lambda self: next(pools))
    builder = ProcessBuilder(1)
    assert builder.submit(job(first("conv2d"))).result() == []
    assert "a compiler process ended" in caplog.text


def test_the_data_make_sums_exact() -> None:
    activations, weights = _exact((4, 4608), "a", 0.25), _exact((4608, 8), "w", 2.0**-6)
    assert set((activations * 4).ravel() % 1) == {0.0}
    exact = activations.astype("float64") @ weights.astype("float64")
    for order in range(3):
        shuffled = _order(4608, order)
        found = (activations[:, shuffled] @ weights[shuffled]).astype("float64")
        assert (found == exact).all()
    assert (activations == _exact((4, 4608), "a", 0.25)).all()
    assert tolerance(first("conv2d"), 4.0) == 0.0
    assert tolerance(first("attention"), 4.0) == 4.0 / 512


def _order(count: int, seed: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.random.default_rng(seed).permutation(count)


def test_the_ptx_of_a_candidate_is_the_compilers() -> None:
    """Lowering in place, as the tuner does, gives what a compile gives."""
    from yolomlir.dialects import yolo

    from yolomlir.bindings import ir
    from yolomlir.codegen.gpu.generate import generate_kernel
    from yolomlir.codegen.gpu.ptx import to_ptx

    case = first("conv2d")
    tile = space.default(case.problem)
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(case.text)
        function = module.body.operations[0]
        function.operation.attributes["yolo.tile"] = space.attribute(tile)
        kernel = generate_kernel(function, case.problem.target, precision="tf32", name=case.name)
        ptx = to_ptx(kernel.module, case.problem.target)
    built = build(job(case, space.key_of(tile)))[0]
    assert re.search(r"\.target sm_90", ptx)
    assert built.cubin == assemble(ptx, "sm_90").code
    assert built.launch == kernel.launch
