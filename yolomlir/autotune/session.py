"""Tuning from beginning to end: a model, a GPU and a budget in; winners, rows and tables out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from yolomlir.autotune import signature, space, tables
from yolomlir.autotune.build import Builder, Built, ProcessBuilder
from yolomlir.autotune.constants import shipped_calibration
from yolomlir.autotune.database import Database, TimeRecord, WinnerRecord
from yolomlir.autotune.launch_stage import choose_launches
from yolomlir.autotune.measure import CudaMeasure, Measure
from yolomlir.autotune.network_stage import (
    SAMPLES,
    Alternatives,
    NetworkResult,
    exchange,
    most_modest,
)
from yolomlir.autotune.search import Plan, Progress, Report, Tuner
from yolomlir.autotune.tables import Table, TableEntry
from yolomlir.autotune.workload import Case, Workload
from yolomlir.diagnostics import UserError

logger = logging.getLogger(__name__)

_SEARCH_SHARE, _LAUNCH_SHARE = 0.6, 0.17
"""Of the budget: for the search, from the start on, and kept for the ways of launching; the rest
measures finalists again and exchanges tiles in the whole graph."""
_CLOSE = 1.05
"""A candidate this much slower than the fastest may still be the better one in the whole graph."""
_MODEST, _MODEST_TRIED = 1.3, 6
"""One so much slower may be as well if it leaves room for what runs beside it; how many of these,
the fastest first, are looked at."""


@dataclass(frozen=True)
class Row:
    """One function's result. us, default_us: of one launch, microseconds."""

    function: str
    family: str
    layer: str
    count: int
    signature: str
    tile: str
    us: float
    default_tile: str
    default_us: float
    candidates: int
    from_database: bool


@dataclass(frozen=True)
class TuningResult:
    """What a tuning run found. network: None where everything was known or no time was left."""

    target: str
    device: str
    precision: str
    scale: str
    rows: list[Row]
    network: NetworkResult | None
    measured: int
    seconds: float
    missing: list[str]
    """Functions for which nothing was measured in time."""

    def table(self) -> Table:
        """The winners as a table to ship."""
        rows = [
            (self.precision, r.signature, TableEntry(r.tile, r.us, r.default_us)) for r in self.rows
        ]
        return tables.table_of(self.target, self.device, tables.MEASURED, rows)


def tune(
    workload: Workload,
    *,
    budget: float,
    measure: Measure | None = None,
    builder: Builder | None = None,
    database: Database | None = None,
    plan: Plan | None = None,
    report: Report | None = None,
    clock: Callable[[], float] = time.monotonic,
    assembler: str | None = None,
) -> TuningResult:
    """Tune every function of a workload that the database does not know, within `budget` seconds.

    measure, builder, database: defaults are the first GPU, worker processes and the user's cache;
    what is given stays open. Raises UserError where there is no GPU of the workload's target.
    """
    started = clock()
    own_measure = measure is None
    measure = measure or _gpu(workload)
    try:
        database = database or Database.open(workload.target.name, measure.device)
        run = _Run(workload, measure, database, assembler or signature.assembler_version())
        if not run.unknown():
            return run.result(None, 0, clock() - started)
        own_builder = builder is None
        builder = builder or ProcessBuilder()
        try:
            deadline = started + budget
            tuner = Tuner(
                workload, builder, measure, database, run.keys,
                budget=max(0.0, started + _SEARCH_SHARE * budget - clock()),
                plan=plan, constants=shipped_calibration().constants, report=report, clock=clock,
            )  # fmt: skip
            tuner.run()
            tuner.settle()
            kept = _LAUNCH_SHARE * budget
            network = _whole_graph(run, tuner, lambda: deadline - clock(), kept, report)
        finally:
            if own_builder:
                builder.close()
        return run.result(network, tuner.measured, clock() - started)
    finally:
        if own_measure:
            measure.close()


def _gpu(workload: Workload) -> CudaMeasure:
    from yolomlir.runtime.cuda_driver import require_device

    device = require_device()
    if device.target != workload.target.name:
        raise UserError(
            f"the GPU here, {device.name}, is a {device.target}; nothing can be measured for "
            f"{workload.target.name}",
            hint="yolomlir tune --target native tunes for the GPU at hand",
        )
    return CudaMeasure(workload)


class _Run:
    """The keys of a workload in a database, and the result from them."""

    def __init__(
        self, workload: Workload, measure: Measure, database: Database, assembler: str
    ) -> None:
        self.workload, self.measure, self.database = workload, measure, database
        self.keys = {
            name: signature.entry_key(
                case.yolo_text, workload.target.name, measure.device, workload.precision, assembler
            )
            for name, case in workload.cases.items()
        }
        self._known = {name for name, key in self.keys.items() if key in database.winners}
        stale = [
            name
            for name, case in workload.cases.items()
            if database.stale(signature.text_digest(case.yolo_text), self.keys[name])
        ]
        if stale:
            logger.warning(
                "%d entries of the tuning database are of another version of the compiler, the "
                "assembler or the search space: tuning them again",
                len(stale),
            )

    def unknown(self) -> list[str]:
        """Functions that the database has no winner for."""
        return [name for name in self.keys if name not in self._known]

    def winner(self, name: str) -> WinnerRecord | None:
        """The database's winner of a function."""
        return self.database.winners.get(self.keys[name])

    def result(self, network: NetworkResult | None, measured: int, seconds: float) -> TuningResult:
        """Rows of all functions, the heaviest first."""
        rows, missing = [], []
        for name, case in self.workload.cases.items():
            winner = self.winner(name)
            if winner is None:
                missing.append(name)
            else:
                rows.append(self._row(case, winner))
        rows.sort(key=lambda r: (-r.count * r.default_us, r.function))
        w = self.workload
        return TuningResult(
            w.target.name, self.measure.device, w.precision, w.scale, rows, network, measured,
            seconds, missing,
        )  # fmt: skip

    def _row(self, case: Case, winner: WinnerRecord) -> Row:
        times = self.database.times.get(winner.key, {})
        return Row(
            case.name, case.problem.family, case.layer, case.count, case.signature, winner.tile,
            winner.us, winner.default_tile, winner.default_us, len(times),
            case.name in self._known,
        )  # fmt: skip


def _whole_graph(
    run: _Run, tuner: Tuner, time_left: Callable[[], float], kept_seconds: float,
    report: Report | None,
) -> NetworkResult | None:  # fmt: skip
    """Exchange tiles in the whole graph, where every step has a winner, then choose how they are
    launched, for which some of the time is kept, and record what changed."""
    plan = run.workload.plan
    if any(s.kernel not in run.keys or run.winner(s.kernel) is None for s in plan.steps):
        return None
    if time_left() <= 0:
        return None
    wanted = {name: _close(run, tuner, name) for name in run.keys}
    slower = {name: _slower(run, tuner, name) for name in run.keys}
    tuner.complete({name: [*keys, *slower[name]] for name, keys in wanted.items()})
    alternatives = []
    for name, keys in wanted.items():
        kept = tuner.built[name]
        candidates = tuple(kept[key] for key in keys if key in kept)
        if not candidates or candidates[0].key != keys[0]:
            return None
        others = [kept[key] for key in slower[name] if key in kept]
        candidates += most_modest(candidates[0], others, run.workload.target)
        winner = run.winner(name)
        assert winner is not None
        weight = run.workload.cases[name].count * winner.us
        alternatives.append(Alternatives(name, candidates, weight))

    def tell(stage: str) -> Callable[[int, int], None]:
        def told(done: int, total: int) -> None:
            if report is not None:
                report(Progress(stage, done, total, tuner.measured, 0.0, 0.0, time_left()))

        return told

    siblings = tuner.begin(_siblings(run, alternatives))
    network = exchange(
        alternatives, run.measure, lambda: time_left() - kept_seconds, tell("whole graph")
    )
    tuner.collect(siblings, lambda: time_left() - kept_seconds / 2)
    network = _launches(run, tuner, alternatives, network, time_left, tell("launches"))
    for name, key in network.chosen.items():
        winner = run.winner(name)
        if winner is not None and winner.tile != key:
            record = _alone(tuner, name, key)
            run.database.add(replace(winner, tile=key, us=record.us if record else winner.us))
    return network


def _siblings(run: _Run, alternatives: list[Alternatives]) -> dict[str, list[str]]:
    """Of each function the siblings of its candidates, the heaviest function first, and the
    winner's before any other's; none where the winner was known before."""
    unknown = run.unknown() if run.workload.target.programmatic_launch else []
    ordered = sorted(alternatives, key=lambda a: -a.weight)
    names = [a.function for a in ordered if a.function in unknown]
    keys = {a.function: [_siblings_of(run, built) for built in a.candidates] for a in ordered}
    first = {name: list(keys[name][0]) for name in names}
    return {name: [*first[name], *(k for ks in keys[name][1:] for k in ks[:1])] for name in names}


def _siblings_of(run: _Run, built: Built) -> list[str]:
    """Keys of the tiles that do the same work in another way."""
    problem = run.workload.cases[built.function].problem
    tile = space.tile_of(built.family, built.key)
    return [space.key_of(sibling) for sibling in space.siblings(problem, tile)]


def _launches(
    run: _Run, tuner: Tuner, alternatives: list[Alternatives], network: NetworkResult,
    time_left: Callable[[], float], tell: Callable[[int, int], None],
) -> NetworkResult:  # fmt: skip
    """Choose how what came out of the exchange is launched, of what was not known before."""
    unknown = set(run.unknown())
    open_, fixed = [], {}
    for alternative in alternatives:
        name = alternative.function
        kept = tuner.built[name]
        built = kept[network.chosen[name]]
        if name in unknown:
            others = [kept[key] for key in _siblings_of(run, built) if key in kept]
            candidates = (built, *others)
            open_.append(replace(alternative, candidates=candidates))
        else:
            fixed[name] = built
    if not open_ or time_left() <= 0:
        return network
    found = choose_launches(open_, fixed, run.measure, time_left, tell)
    if not found.tried:
        return network
    after = run.measure.network(found.chosen, 2 * SAMPLES)
    chosen = {name: built.key for name, built in found.chosen.items()}
    return replace(network, after=after, chosen=chosen, launches=found.tried)


def _alone(tuner: Tuner, name: str, key: str) -> TimeRecord | None:
    """The time of a tile alone, to which its carve-out makes no difference; None where it fails."""
    family = tuner.searches[name].case.problem.family
    plain = space.key_of(space.with_carveout(space.tile_of(family, key), 0))
    known = tuner.searches[name].times.get(plain)
    if known is None:
        known = tuner.time_alone(name, tuner.built[name][plain])
    return None if known.fault else known


def _close(run: _Run, tuner: Tuner, name: str) -> list[str]:
    """The winner, then what is nearly as fast; only the winner where it was known before."""
    winner = run.winner(name)
    assert winner is not None
    search = tuner.searches[name]
    if name not in run.unknown():
        return [winner.tile]
    near = [
        key
        for key in search.fastest()[:3]
        if search.times[key].final and search.times[key].us <= _CLOSE * winner.us
    ]
    return list(dict.fromkeys([winner.tile, *near]))


def _slower(run: _Run, tuner: Tuner, name: str) -> list[str]:
    """What is slower than these, not by much; nothing where the winner was known before."""
    winner = run.winner(name)
    assert winner is not None
    if name not in run.unknown():
        return []
    search = tuner.searches[name]
    keys = [k for k in search.fastest() if search.times[k].us <= _MODEST * winner.us]
    near = _close(run, tuner, name)
    return [key for key in keys if key not in near][:_MODEST_TRIED]


__all__ = ["Row", "TuningResult", "tune"]
