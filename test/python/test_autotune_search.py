"""The tuner against a fake GPU: finds the best, the same way each time, through interruptions."""

from __future__ import annotations

import dataclasses
import logging
import math
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from autotune_fakes import Clock, FakeBuilder, FakeMeasure, ShufflingBuilder, part, unit, workload

from yolomlir.autotune import report, signature, space
from yolomlir.autotune.build import Built, Job
from yolomlir.autotune.database import Database, WinnerRecord
from yolomlir.autotune.measure import Timing
from yolomlir.autotune.network_stage import Alternatives, exchange, most_modest, share_of_gpu
from yolomlir.autotune.search import NOISE, Plan, Progress
from yolomlir.autotune.session import TuningResult, tune
from yolomlir.autotune.workload import Workload
from yolomlir.codegen.gpu.kernel import Launch
from yolomlir.codegen.gpu.tile import plain
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.target import target_named

FEW = Plan(first=4, random=2, batch=4, patience=1, most=16, rounds=1)


def run(
    load: Workload,
    *,
    measure: FakeMeasure | None = None,
    builder: FakeBuilder | None = None,
    database: Database | None = None,
    clock: Clock | None = None,
    plan: Plan = FEW,
    budget: float = 1e9,
    **options: object,
) -> TuningResult:
    return tune(
        load,
        budget=budget,
        measure=measure or FakeMeasure(load),
        builder=builder or FakeBuilder(),
        database=database or Database("sm_90", "Fake GPU"),
        clock=clock or Clock(),
        plan=plan,
        assembler="13.0",
        **options,  # type: ignore[arg-type]
    )


def tiles(result: TuningResult) -> dict[str, str]:
    return {row.function: row.tile for row in result.rows}


def test_it_finds_much_of_what_there_is_to_find() -> None:
    load = part(8)
    measure = FakeMeasure(load)
    result = run(load, measure=measure, plan=Plan(rounds=1))
    assert {r.function for r in result.rows} == set(load.cases)
    for row in result.rows:
        case = load.cases[row.function]
        everything = [measure.us(case, space.key_of(t)) for t in space.ranked(case.problem)]
        assert row.us == measure.us(case, row.tile) <= row.default_us
        assert row.us < 1.08 * min(everything), row.function
        assert row.candidates <= Plan().most + 1
    gained = 1 - sum(r.us for r in result.rows) / sum(r.default_us for r in result.rows)
    assert gained > 0.03  # candidates differ by up to a tenth at random: half the mean of that


def test_the_order_in_which_workers_finish_changes_nothing() -> None:
    load = part(6)
    expected = run(load)
    for seed in range(3):
        builder = ShufflingBuilder(seed)
        assert tiles(run(load, builder=builder)) == tiles(expected)
        builder.close()


def test_a_second_run_takes_everything_from_the_database(tmp_path: Path) -> None:
    load, path = part(5), tmp_path / "db.jsonl"
    first = run(load, database=Database.open("sm_90", "Fake GPU", path))
    measure, builder = FakeMeasure(load), FakeBuilder()
    again = Database.open("sm_90", "Fake GPU", path)
    second = run(load, measure=measure, builder=builder, database=again)
    assert tiles(second) == tiles(first)
    assert measure.timed == measure.checked == builder.jobs == []
    assert second.measured == 0
    assert all(row.from_database for row in second.rows)


class _KilledError(Exception):
    pass


class _Dying(FakeMeasure):
    """A run that is killed after so many measurements."""

    def __init__(self, load: Workload, lives: int) -> None:
        super().__init__(load)
        self.lives = lives

    def time(self, case, built, samples):  # type: ignore[no-untyped-def]
        if len(self.timed) >= self.lives:
            raise _KilledError
        return super().time(case, built, samples)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    load, path = part(6), tmp_path / "db.jsonl"
    whole = FakeMeasure(load)
    expected = run(load, measure=whole)
    with pytest.raises(_KilledError):
        run(load, measure=_Dying(load, 40), database=Database.open("sm_90", "Fake GPU", path))
    path.write_bytes(path.read_bytes()[:-7])  # in the middle of a line
    rest = FakeMeasure(load)
    result = run(load, measure=rest, database=Database.open("sm_90", "Fake GPU", path))
    assert tiles(result) == tiles(expected)
    # Every function's reference may be measured again, and the line that was lost.
    assert len(rest.timed) <= len(whole.timed) - 40 + len(load.cases) + 1


def test_with_time_left_it_searches_further_until_that_brings_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is tried at random must not depend on the compiler's sources, which keys do.
    monkeypatch.setattr(signature, "code_fingerprint", lambda: "always the same")
    load = part(8)
    measures = {rounds: FakeMeasure(load) for rounds in (1, 2, 8)}
    found = {rounds: Database("sm_90", "Fake GPU") for rounds in measures}
    results = {
        rounds: run(
            load, measure=measure, database=found[rounds],
            plan=dataclasses.replace(FEW, rounds=rounds),
        )
        for rounds, measure in measures.items()
    }  # fmt: skip
    sums = {
        rounds: math.fsum(min(t.us for t in times.values()) for times in database.times.values())
        for rounds, database in found.items()
    }  # of the fastest: which of those within the noise of it wins goes by name
    assert sums[8] <= sums[2] < sums[1]
    most = {rounds: max(r.candidates for r in result.rows) for rounds, result in results.items()}
    assert most[1] <= 16 + 1
    assert most[2] <= 24 + 1
    assert most[8] < 16 + 7 * 8  # it saw that nothing more came


def test_it_stops_when_the_time_is_up() -> None:
    load = part(10)
    clock, measure = Clock(step=0.05), FakeMeasure(load)
    result = run(load, clock=clock, measure=measure, budget=2.0)
    assert clock.now < 4.0  # the rest settles what was found
    assert 0 < len(result.rows) <= 10
    assert len(result.rows) + len(result.missing) == 10
    assert result.missing
    assert "not reached in time" in "\n".join(report.summary(result))


def test_what_a_compile_takes_is_looked_at_first() -> None:
    """So that what was measured elsewhere, or for another size, is where a search begins."""
    load = part(6)
    builder = FakeBuilder()
    run(load, builder=builder)
    for case in load.cases.values():
        first = next(job.keys for job in builder.jobs if job.function == case.name)
        assert space.key_of(space.with_carveout(case.tile, 0)) in first[:2]
    assert any(plain(c.tile) != space.default(c.problem) for c in load.cases.values())


def test_with_little_time_every_function_gets_a_first_look_before_any_gets_a_second() -> None:
    load = part(6)
    builder = FakeBuilder()
    run(load, builder=builder)
    first_batches: dict[str, int] = dict.fromkeys(load.cases, 0)
    for job in builder.jobs:
        if first_batches[job.function] == 0:
            most = FEW.first + FEW.random + 2
            seen_twice = [n for n, count in first_batches.items() if count > most]
            assert not seen_twice
        first_batches[job.function] += len(job.keys)


def test_a_wrong_kernel_never_wins() -> None:
    load = part(3)
    measure = FakeMeasure(load)
    honest = run(load)
    changed = [r for r in honest.rows if r.tile != r.default_tile]
    assert changed
    measure.wrong = {row.tile for row in changed}
    database = Database("sm_90", "Fake GPU")
    result = run(load, measure=measure, database=database)
    assert not measure.wrong & set(tiles(result).values())
    assert not measure.wrong & {key for _, key in measure.timed}
    faults = {r.tile: r.fault for t in database.times.values() for r in t.values() if r.fault}
    assert faults
    assert set(faults.values()) == {"differs"}


def test_the_default_tile_is_checked_first() -> None:
    load = part(6)
    builder, measure = ShufflingBuilder(7), FakeMeasure(load)
    run(load, measure=measure, builder=builder)
    builder.close()
    first: dict[str, str] = {}
    for name, key in measure.checked:
        first.setdefault(name, key)
    assert first == {n: space.key_of(space.default(c.problem)) for n, c in load.cases.items()}


def test_candidates_that_do_not_build_or_launch_are_passed_over() -> None:
    load = part(4)
    best = run(load)
    builder, measure = FakeBuilder(), FakeMeasure(load)
    changed = [r for r in best.rows if r.tile != r.default_tile]
    builder.faults = {changed[0].tile}
    measure.broken = {r.tile for r in changed[1:]}
    result = run(load, builder=builder, measure=measure)
    assert len(result.rows) == 4
    assert not (builder.faults | measure.broken) & set(tiles(result).values())


def test_a_function_whose_default_fails_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    load = part(2)
    name, case = next(iter(load.cases.items()))
    measure = FakeMeasure(load)
    measure.wrong = {space.key_of(space.default(case.problem))}
    result = run(load, measure=measure)
    assert "the default tile differs" in caplog.text
    assert name not in tiles(result) or tiles(result)[name] not in measure.wrong


def test_a_candidate_that_ends_the_gpus_context_is_not_tried_again(tmp_path: Path) -> None:
    load, path = part(2), tmp_path / "db.jsonl"
    victim = next(r.tile for r in run(load).rows if r.tile != r.default_tile)

    class Fatal(FakeMeasure):
        def check(self, case, built):  # type: ignore[no-untyped-def]
            if built.key == victim:
                raise InternalError("illegal address")
            return super().check(case, built)

    with pytest.raises(UserError, match="run the same command again") as error:
        run(load, measure=Fatal(load), database=Database.open("sm_90", "Fake GPU", path))
    assert victim in str(error.value)
    again = run(load, measure=Fatal(load), database=Database.open("sm_90", "Fake GPU", path))
    assert len(again.rows) == 2
    assert victim not in tiles(again).values()


class _Crashing(FakeBuilder):
    """The compiler's process ends on one candidate, and takes the pool with it."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.victim = victim

    def submit(self, job: Job) -> Future[list[Built]]:
        if self.victim not in job.keys:
            return super().submit(job)
        self.jobs.append(job)
        future: Future[list[Built]] = Future()
        future.set_exception(BrokenProcessPool("gone"))
        return future


def test_a_candidate_that_ends_the_compiler_is_found_and_left_out() -> None:
    load = part(2)
    victim = next(r.tile for r in run(load).rows if r.tile != r.default_tile)
    database, builder = Database("sm_90", "Fake GPU"), _Crashing(victim)
    result = run(load, builder=builder, database=database)
    assert len(result.rows) == 2
    faults = [r for t in database.times.values() for r in t.values() if r.fault]
    assert {(r.tile, r.fault) for r in faults} == {(victim, "the compiler ended its process")}


def _code(key: str) -> str:
    """What the machine code of `_Alike` depends on: the pixels of a block, in tiles of any kind."""
    return key.split(",")[0]


class _Alike(FakeBuilder):
    """Machine code that many tiles share."""

    def results(self, job: Job) -> list[Built]:
        return [dataclasses.replace(b, cubin=_code(b.key).encode()) for b in super().results(job)]


def test_equal_machine_code_is_timed_once() -> None:
    load = part(4)
    measure, database = FakeMeasure(load), Database("sm_90", "Fake GPU")
    run(load, measure=measure, builder=_Alike(), database=database)
    quick = {(n, _code(k)) for n, k in measure.timed}
    known = sum(len(times) for times in database.times.values())
    assert len(quick) < known / 2  # far fewer codes than candidates
    for times in database.times.values():
        by_code: dict[str, set[float]] = {}
        for record in times.values():
            if not record.final:
                by_code.setdefault(_code(record.tile), set()).add(record.us)
        assert all(len(us) == 1 for us in by_code.values())


class _Even(FakeMeasure):
    """All candidates within the noise of each other."""

    def us(self, case, key):  # type: ignore[no-untyped-def]
        return 3.0 * (1 + 0.3 * NOISE * (super().us(case, key) % 1))


def test_ties_go_to_the_default_tile() -> None:
    load = part(4)
    result = run(load, measure=_Even(load))
    assert all(row.tile == row.default_tile for row in result.rows)


def test_stale_entries_are_reported_and_tuned_again(caplog: pytest.LogCaptureFixture) -> None:
    load = part(2)
    database = Database("sm_90", "Fake GPU")
    run(load, database=database)
    old = {key: dataclasses.replace(case, key=f"old {key}") for key, case in database.cases.items()}
    stale = Database("sm_90", "Fake GPU")
    for key, case in old.items():
        stale.add(case)
        winner = database.winners[key]
        stale.add(WinnerRecord(case.key, winner.tile, 0.1, 0.2, winner.default_tile))
    result = run(load, database=stale)
    assert "2 entries of the tuning database are of another version" in caplog.text
    assert all(row.us > 0.1 for row in result.rows)
    assert not any(row.from_database for row in result.rows)


def test_progress_tells_of_gain_and_time_left() -> None:
    load = part(3)
    told: list[Progress] = []
    run(load, report=told.append, clock=Clock(step=0.001), budget=100.0)
    assert {p.stage for p in told} == {"searching", "settling"}
    assert told[-1].done == told[-1].total == 3
    gains = [p.gain_us / p.default_us for p in told if p.default_us]
    assert gains[-1] > 0
    assert all(0 <= p.seconds_left <= 100 for p in told)
    left = [p.seconds_left for p in told]
    assert left == sorted(left, reverse=True)


# ---- the whole graph ----------------------------------------------------------------------------


def test_the_whole_graph_is_the_judge_at_the_end() -> None:
    load = workload()

    class Crowded(FakeMeasure):
        """In the graph some tiles get in the way of others, which nothing tells of when alone."""

        def network(self, chosen, samples):  # type: ignore[no-untyped-def]  # a fake's
            plain = super().network(chosen, samples)
            return Timing(plain.us + sum(3 * unit(b.key, "crowd") for b in chosen.values()))

    database = Database("sm_90", "Fake GPU")
    result = run(
        load,
        measure=Crowded(load),
        database=database,
        plan=Plan(first=5, random=1, batch=3, patience=0, most=8),
    )
    assert result.network is not None
    assert result.network.after.us < result.network.before.us
    assert tiles(result) == result.network.chosen
    assert len(database.winners) == len(load.cases)


class _Graph:
    """Network times from a table of (function, key) costs and an interaction."""

    device = "Fake GPU"

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs = costs

    def network(self, chosen, samples):  # type: ignore[no-untyped-def]  # a fake's
        us = 100 + sum(self.costs[b.key] for b in chosen.values())
        if {b.key for b in chosen.values()} >= {"a1", "b1"}:
            us += 10  # they are good alone, and bad together
        return Timing(us)


def alternatives(*names: str) -> list[Alternatives]:
    return [
        Alternatives(n, tuple(Built(n, "conv2d", f"{n}{i}") for i in range(2)), weight)
        for weight, n in enumerate(names, 1)
    ]


def test_exchanges_are_kept_only_where_they_help_the_whole() -> None:
    costs = {"a0": 0.0, "a1": -5.0, "b0": 0.0, "b1": -4.0, "c0": 0.0, "c1": -0.1}
    found = exchange(alternatives("b", "a", "c"), _Graph(costs), lambda: 1.0)  # type: ignore[arg-type]
    assert found.chosen == {"a": "a1", "b": "b0", "c": "c0"}  # c1 gains less than the noise
    assert (found.before.us, found.after.us, found.tried) == (100.0, 95.0, 3)


def test_exchanges_stop_when_the_time_is_up() -> None:
    left = iter([1.0, 0.0])
    costs = {f"{n}{i}": -5.0 * i for n in "abc" for i in range(2)}
    found = exchange(alternatives("a", "b", "c"), _Graph(costs), lambda: next(left))  # type: ignore[arg-type]
    assert found.tried == 1
    assert found.chosen == {"c": "c1", "a": "a0", "b": "b0"}


def taking(key: str, blocks: int, shared_bytes: int = 0, registers: int = 32) -> Built:
    launch = Launch("f", (blocks, 1, 1), (128, 1, 1), shared_bytes, ())
    return Built("f", "conv2d", key, launch, registers=registers)


def test_a_share_of_the_gpu_is_of_what_is_taken_most() -> None:
    target = target_named("sm_90")
    room = target.shared_memory_per_sm_bytes
    half = target.multiprocessors // 2
    assert share_of_gpu(taking("a", half, room), target) == 0.5
    assert share_of_gpu(taking("a", half, room // 2), target) == pytest.approx(0.25, rel=0.01)
    assert share_of_gpu(taking("a", half, 0, registers=256), target) == 0.25  # half its registers
    assert share_of_gpu(taking("a", half), target) == 0.5 * 128 / target.threads_per_sm
    assert share_of_gpu(taking("a", 100 * half, room), target) == 1


def test_the_most_modest_alternative_is_tried_as_well() -> None:
    target = target_named("sm_90")
    room, blocks = target.shared_memory_per_sm_bytes, target.multiprocessors
    winner = taking("w", blocks, room // 2)
    others = [
        taking("a", blocks, room // 3),
        taking("b", blocks, room // 8),
        taking("c", blocks, room),
    ]
    assert most_modest(winner, others, target) == (others[1],)
    assert most_modest(winner, [others[2]], target) == ()
    assert most_modest(winner, [], target) == ()
    assert most_modest(others[1], [winner, others[0]], target) == ()


# ---- the report ---------------------------------------------------------------------------------


def test_reports_say_what_was_gained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    result = run(part(4))
    text = report.markdown(result)
    assert text.count("\n| model.") == 4
    assert "Fake GPU, sm_90, yolo26n, tf32" in text
    default = sum(r.count * r.default_us for r in result.rows)
    assert f"{default:.1f} us by default" in text
    assert '"device": "Fake GPU"' in report.as_json(result)
    assert report.rich_table(result).row_count == 4
    entry = result.table().find("tf32", result.rows[0].signature)
    assert entry is not None
    assert entry.tile == result.rows[0].tile
    pytest.importorskip("matplotlib")
    report.plot(result, tmp_path / "gain.png")
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")
