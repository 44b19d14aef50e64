"""How kernels are launched: found by the whole graph's time, kept by keys, records and runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from autotune_fakes import Clock, FakeBuilder, FakeMeasure, unit, workload
from yolomlir.dialects import yolo

from yolomlir.autotune import space
from yolomlir.autotune.build import Built, Job, build
from yolomlir.autotune.database import Database
from yolomlir.autotune.launch_stage import GAIN, choose_launches, with_carveout
from yolomlir.autotune.network_stage import Alternatives
from yolomlir.autotune.search import Plan, Progress
from yolomlir.autotune.session import TuningResult, tune
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv2d_kinds import attribute_of, stated_tile
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import Launch
from yolomlir.diagnostics import UserError

SMALL = "block_m=16,block_n=8,block_k=8"


def built(function: str, *, early: bool = False) -> Built:
    key = space.key_of(ConvTile(16, 8, 8, release_early=early))
    return Built(function, "conv2d", key, Launch(function, (1, 1, 1), (32, 1, 1), 0, ()))


def options(candidate: Built) -> tuple[int, bool]:
    tile = space.tile_of("conv2d", candidate.key)
    assert candidate.launch is not None
    assert tile.carveout == candidate.launch.carveout
    return tile.carveout, tile.release_early


class _Graph:
    """Network times by a rule on the carve-out and release of each function."""

    device = "Fake GPU"

    def __init__(self, us: Callable[[dict[str, tuple[int, bool]]], float]) -> None:
        self.us, self.compared = us, 0

    def compare(
        self, one: Mapping[str, Built], other: Mapping[str, Built], rounds: int
    ) -> tuple[float, float]:
        self.compared += 1
        old, new = ({n: options(b) for n, b in chosen.items()} for chosen in (one, other))
        return self.us(old), self.us(new)


def chosen(
    us: Callable[[dict[str, tuple[int, bool]]], float],
    left: Callable[[], float] = lambda: 1.0,
    fixed: Mapping[str, Built] | None = None,
) -> dict[str, tuple[int, bool]]:
    names = ("a", "b", "c")
    ways = [
        Alternatives(n, (built(n), built(n, early=True)), weight)
        for weight, n in enumerate(names, 1)
        if n not in (fixed or {})
    ]
    measure: Any = _Graph(us)
    found = choose_launches(ways, fixed or {}, measure, left)
    return {name: options(b) for name, b in found.chosen.items()}


def test_a_carve_out_that_helps_only_where_all_have_it_is_found() -> None:
    def us(ways: dict[str, tuple[int, bool]]) -> float:
        return 100 - 3 * (len({carveout for carveout, _ in ways.values()} | {50}) == 1)

    assert chosen(us) == dict.fromkeys("abc", (50, False))


def test_what_helps_one_function_is_found_beside_what_helps_all() -> None:
    best = {"a": (0, False), "b": (100, True), "c": (100, False)}

    def us(ways: dict[str, tuple[int, bool]]) -> float:
        wrong = [(x != y) for name in best for x, y in zip(ways[name], best[name], strict=True)]
        return 100 + sum(wrong)

    assert chosen(us) == best


def test_a_second_pass_finds_what_the_first_made_possible() -> None:
    def us(ways: dict[str, tuple[int, bool]]) -> float:  # c is looked at before a
        return 100 - (ways["a"] == (0, True)) - 2 * (ways["a"][1] and ways["c"][1])

    assert chosen(us)["c"] == (0, True)


def test_noise_changes_nothing() -> None:
    calls = iter(range(10**6))

    def us(ways: dict[str, tuple[int, bool]]) -> float:
        return 100 * (1 + 0.9 * GAIN * (unit(str(next(calls))) - 0.5))

    assert chosen(us) == dict.fromkeys("abc", (0, False))


def test_a_gain_that_is_not_seen_again_is_not_taken() -> None:
    calls = iter(range(10**6))

    def us(ways: dict[str, tuple[int, bool]]) -> float:
        return 100.0 if next(calls) % 4 != 1 else 90.0  # the first comparison's second time

    assert chosen(us) == dict.fromkeys("abc", (0, False))


def test_it_stops_when_the_time_is_up_and_leaves_fixed_functions_alone() -> None:
    def us(ways: dict[str, tuple[int, bool]]) -> float:
        return 100.0 - sum(carveout for carveout, _ in ways.values()) / 100

    assert chosen(us, lambda: 0.0) == dict.fromkeys("abc", (0, False))
    fixed = {"b": with_carveout(built("b"), 25)}
    assert chosen(us, fixed=fixed) == {"a": (100, False), "b": (25, False), "c": (100, False)}


# ---- in a tuning run ----------------------------------------------------------------------------


class _CarvedOut(FakeMeasure):
    """Faster with the larger carve-outs, and where convolutions release their dependents late."""

    def network(self, chosen, samples):  # type: ignore[no-untyped-def]  # a fake's
        plain = super().network(chosen, samples)
        factor = 1.0
        for name, candidate in sorted(chosen.items()):
            tile = space.tile_of(candidate.family, candidate.key)
            factor *= 1 - 0.005 * (tile.carveout == 100)
            factor *= 1 - 0.005 * getattr(tile, "release_early", False) * (unit(name) < 0.5)
        return dataclasses.replace(plain, us=plain.us * factor)


def tuned(measure: FakeMeasure, builder: FakeBuilder, **more: Any) -> TuningResult:
    return tune(
        measure.load, budget=1e9, measure=measure, builder=builder, clock=Clock(),
        plan=Plan(first=2, random=0, batch=2, patience=0, most=4, rounds=1), assembler="13.0",
        **more,
    )  # fmt: skip


def test_a_tuning_run_keeps_them_and_a_second_one_takes_them(tmp_path: Path) -> None:
    load = workload(level=3)
    told: list[Progress] = []
    path = tmp_path / "db.jsonl"
    builder = FakeBuilder()
    first = tuned(
        _CarvedOut(load), builder, database=Database.open("sm_90", "Fake GPU", path),
        report=told.append,
    )  # fmt: skip
    found = {r.function: space.tile_of(r.family, r.tile) for r in first.rows}
    assert {tile.carveout for tile in found.values()} == {100}
    early = {n for n, t in found.items() if getattr(t, "release_early", False) and unit(n) < 0.5}
    able = {n for n, t in found.items() if hasattr(t, "release_early") and unit(n) < 0.5}
    assert early == able
    assert {r.family for r in first.rows if r.function in able} >= {"chain", "conv2d"}
    assert first.network is not None
    assert first.network.launches > 2 * len(found)
    assert first.network.after.us < first.network.before.us
    launches = [p for p in told if p.stage == "launches"]
    assert launches[-1].done == launches[-1].total
    # Nothing was built for a carve-out, nor twice.
    keys = [(job.function, key) for job in builder.jobs for key in job.keys]
    assert len(keys) == len(set(keys))
    assert not any("carveout" in key for _, key in keys)
    entries = first.table().entries["tf32"]
    assert {space.tile_of(n.split()[0], e.tile).carveout for n, e in entries.items()} == {100}

    again = FakeBuilder()
    database = Database.open("sm_90", "Fake GPU", path)
    second = tuned(_CarvedOut(load), again, database=database)
    assert {r.function: r.tile for r in second.rows} == {r.function: r.tile for r in first.rows}
    assert again.jobs == []
    assert all(r.from_database for r in second.rows)


def test_without_a_gain_a_tuning_run_leaves_launches_as_they_are() -> None:
    result = tuned(FakeMeasure(workload()), FakeBuilder(), database=Database("sm_90", "Fake GPU"))
    assert result.network is not None
    assert result.network.launches > 0
    assert not any("carveout" in row.tile for row in result.rows)


# ---- keys, attributes and records ---------------------------------------------------------------


def test_keys_have_it_where_it_is_chosen_and_old_keys_leave_it_to_the_driver() -> None:
    for load in (workload(level=2), workload(level=3)):
        for case in load.cases.values():
            family, tile = case.problem.family, space.default(case.problem)
            assert "carveout" not in space.key_of(tile)
            assert space.tile_of(family, space.key_of(tile)).carveout == 0
            other = space.with_carveout(space.released_otherwise(tile) or tile, 75)
            key = space.key_of(other)
            assert key.endswith("carveout=75")
            assert space.tile_of(family, key) == other
            assert space.illegal(case.problem, other) is None
            reason = space.illegal(case.problem, space.with_carveout(tile, 60))
            assert reason is not None
            assert "carveout = 60" in reason


@pytest.mark.parametrize("level", [2, 3])
def test_a_kernel_of_every_family_says_it_in_its_launch_alone(level: int) -> None:
    load = workload(level=level)
    for family in {c.problem.family for c in load.cases.values()}:
        case = next(c for c in load.cases.values() if c.problem.family == family)
        with yolo.new_context(), ir.Location.unknown():
            module = ir.Module.parse(case.text)
            function = module.body.operations[0]
            kernels = []
            for percent in (0, 100, 60):
                tile = space.with_carveout(space.default(case.problem), percent)
                function.operation.attributes["yolo.tile"] = space.attribute(tile)
                if percent == 60:
                    with pytest.raises(UserError, match="carveout 60"):
                        generate_kernel(function, load.target, precision="tf32")
                    continue
                kernels.append(generate_kernel(function, load.target, precision="tf32"))
            usual, other = kernels
            assert str(usual.module) == str(other.module)
        assert (usual.launch.carveout, other.launch.carveout) == (0, 100)
        assert "carveout" not in usual.launch.to_json()
        assert other.launch.to_json()["carveout"] == 100
        for kernel in kernels:
            assert Launch.from_json(kernel.launch.to_json()) == kernel.launch


def test_the_attribute_of_a_tile_brings_it_back() -> None:
    load = workload(level=3)
    case = next(c for c in load.cases.values() if c.problem.family == "conv2d")
    for key in (f"{SMALL},carveout=50", "block_m=128,cluster_n=1,warps=8,rows=8,release_early=1",
                "block_m=128,cluster_n=1,warps=8,rows=8,release_early=1,carveout=25"):  # fmt: skip
        tile = space.tile_of("conv2d", key)
        with yolo.new_context(), ir.Location.unknown():
            module = ir.Module.parse(case.text)
            function = module.body.operations[0].operation
            function.attributes["yolo.tile"] = attribute_of(tile)
            assert stated_tile(function) == tile
            assert ("carveout" in str(function.attributes["yolo.tile"])) == ("carveout" in key)


def test_a_candidate_from_the_database_is_launched_with_it() -> None:
    load = workload()
    case = next(c for c in load.cases.values() if c.problem.family == "conv2d")
    tile = space.with_carveout(space.default(case.problem), 50)
    job = Job(case.name, "conv2d", case.text, (space.key_of(tile),), load.target, "tf32")
    found = build(job)[0]
    assert found.launch is not None
    assert found.launch.carveout == 50
    usual = build(dataclasses.replace(job, keys=(space.key_of(space.default(case.problem)),)))[0]
    assert with_carveout(usual, 50) == found


# ---- the measurement ----------------------------------------------------------------------------


class _Replayed:
    """A graph that says when it is replayed."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.alive = log, name, True

    def enqueue(self, stream: object) -> None:
        assert self.alive
        self.log.append(self.name)

    def destroy(self) -> None:
        assert self.alive
        self.alive = False


def test_two_graphs_are_replayed_in_turns_and_kept_for_the_next_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from yolomlir.autotune import measure

    log: list[str] = []
    graphs: list[_Replayed] = []
    us = {"x": 100.0, "y": 90.0, "z": 110.0}

    made = object.__new__(measure.CudaMeasure)
    made._context = SimpleNamespace(make_current=lambda: None)  # type: ignore[assignment]  # no GPU
    made._events, made._stream, made._graphs = [0, 1], 0, {}
    made._driver = SimpleNamespace(
        cuEventRecord=lambda *args: None, cuEventSynchronize=lambda *args: None,
        cuEventElapsedTime=lambda *args: us[log[-1]] / 1e3,
    )  # fmt: skip
    made._call = lambda function, *args: function(*args)  # type: ignore[assignment]  # no GPU

    def whole(chosen: Mapping[str, Built]) -> _Replayed:
        graphs.append(_Replayed(log, chosen["f"].key))
        return graphs[-1]

    monkeypatch.setattr(made, "_whole_graph", whole)
    x, y, z = ({"f": Built("f", "conv2d", key)} for key in "xyz")
    assert made.compare(x, y, 3) == pytest.approx((100.0, 90.0))
    turns = [name for name, before in zip(log, ["", *log], strict=False) if name != before]
    assert turns == ["x", "y"] * 3
    assert log.count("x") == log.count("y") >= 3 * 40
    assert made.compare(y, z, 1) == pytest.approx((90.0, 110.0))
    assert [(g.name, g.alive) for g in graphs] == [("x", False), ("y", True), ("z", True)]
    # What is measured alone may be unloaded: nothing that launches it stays.
    made._modules = {("f", "y"): ("module", "function")}
    made._driver.cuModuleUnload = lambda module: None
    made._unload(y["f"])
    assert not any(g.alive for g in graphs)


# ---- the runtime --------------------------------------------------------------------------------


@pytest.mark.parametrize(("carveout", "expected"), [(0, None), (50, 50)])
def test_the_runtime_asks_the_driver_for_it(
    monkeypatch: pytest.MonkeyPatch, carveout: int, expected: int | None
) -> None:
    reason = "needs the CUDA bindings"
    cuda_driver = pytest.importorskip("yolomlir.runtime.cuda_driver", reason=reason)
    made: list[Any] = []
    monkeypatch.setattr(cuda_driver, "call", lambda function, *args, **where: made.append(args))
    cuda_driver.load_function(None, "kernel", 1024, "layer", carveout)
    kinds = cuda_driver.driver.CUfunction_attribute
    asked = {args[1]: args[2] for args in made if len(args) == 3}
    wanted = {kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: 1024}
    if expected is not None:
        wanted[kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = expected
    assert asked == wanted


@pytest.mark.parametrize(("more", "expected"), [({}, 0), ({"carveout": 100}, 100)])
def test_the_runtime_takes_it_from_the_record(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, int], expected: int
) -> None:
    """Records that were written before there was such a thing have none."""
    from types import SimpleNamespace

    cuda = pytest.importorskip("yolomlir.runtime.cuda", reason="needs the CUDA bindings")
    asked: list[Any] = []
    monkeypatch.setattr(cuda, "load_module", lambda *args: "module")
    monkeypatch.setattr(cuda, "load_function", lambda *args: asked.append(args))
    made = object.__new__(cuda.CudaExecutor)
    made._modules = {}
    made._context = SimpleNamespace(device=SimpleNamespace(target="sm_90"))
    record = {
        "function": "k", "shared_bytes": 16, "grid": [1, 1, 1], "block": [32, 1, 1],
        "workspace_bytes": 0, "programmatic": True, "cubin": "k.cubin", "ptx": "k.ptx", **more,
    }  # fmt: skip
    program = SimpleNamespace(target="sm_90", kernels={"k": record}, binaries={})
    step = SimpleNamespace(kernel="k", layer="model.0", arguments=[], results=[], depends=())
    made._launch(step, program)
    assert asked == [("module", "k", 16, "model.0", expected)]
