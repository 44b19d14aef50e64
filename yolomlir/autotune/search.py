"""The search: for each function its own, interleaved so that compiling never waits for measuring.

A function's search goes by batches: the default tile and the one that a compile takes (measured
already, perhaps, or for another size), with the model's best and a few at random, then neighbours
of the fastest so far, until batches bring nothing. What a batch holds depends only on the
function's own measurements, so that the order in which workers finish changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeVar

from yolomlir.autotune import space
from yolomlir.autotune.build import Builder, Built, Job, jobs_of
from yolomlir.autotune.cost_model import DEFAULT, Constants
from yolomlir.autotune.database import CaseRecord, Database, TimeRecord, WinnerRecord
from yolomlir.autotune.measure import CandidateError, Measure, Timing
from yolomlir.autotune.workload import Case, Workload
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.diagnostics import InternalError, UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

NOISE = 0.01
"""Relative difference under which two times count as equal."""
QUICK_SAMPLES, FINAL_SAMPLES = 5, 9
FINALISTS = 4
"""Candidates that are measured again, in turns, at the end."""
ROUND_GAIN = 0.005
"""Relative gain over all functions from which it pays to search further, while there is time."""
HOPELESS = 1.3
"""A candidate so many times slower than the fastest is no start for further ones."""


@dataclass(frozen=True)
class Plan:
    """How far a search goes. first, random: candidates of the first batch by the model and at
    random. batch: of the later ones. patience: batches in a row that bring no gain. most:
    candidates of a function, half as many more in each further round. rounds: how often, while
    there is time, searches that were done are taken up again."""

    first: int = 10
    random: int = 3
    batch: int = 8
    patience: int = 2
    most: int = 64
    rounds: int = 4


@dataclass
class CaseSearch:
    """The search for one function: what was measured, and what to try next."""

    case: Case
    key: str
    plan: Plan
    constants: Constants
    times: dict[str, TimeRecord] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    without_gain: int = 0
    best_before: float = float("inf")
    waiting: int = 0
    done: bool = False
    extra: int = 0

    def __post_init__(self) -> None:
        self.default_key = space.key_of(space.default(self.case.problem))

    @property
    def default_us(self) -> float:
        """Of the default tile; infinity while it is not measured."""
        return self._us(self.default_key)

    @property
    def best_us(self) -> float:
        """The fastest so far; infinity while there is none."""
        return min((r.us for r in self.times.values() if not r.fault), default=float("inf"))

    @property
    def share(self) -> float:
        """Microseconds of an inference: what a gain here is worth."""
        us = self.best_us
        return self.case.count * (us if us < float("inf") else 1e6)

    def _us(self, key: str) -> float:
        record = self.times.get(key)
        return float("inf") if record is None or record.fault else record.us

    def fastest(self) -> list[str]:
        """Measured keys: the default first among those within the noise of the fastest, the others
        of these by their text, then the slower ones by time."""
        good = [r for r in self.times.values() if not r.fault]
        limit = self.best_us * (1 + NOISE)
        equal = sorted(r.tile for r in good if r.us <= limit)
        equal.sort(key=lambda key: key != self.default_key)
        slower = sorted((r.us, r.tile) for r in good if r.us > limit)
        return equal + [tile for _, tile in slower]

    def finalists(self) -> list[str]:
        """What is measured again at the end: the fastest, and the default tile."""
        good = sorted((r.us, r.tile) for r in self.times.values() if not r.fault)
        return list(dict.fromkeys([*(tile for _, tile in good[:FINALISTS]), self.default_key]))

    def next_batch(self) -> list[str]:
        """Keys to build and measure now; empty (and `done`) when the search is over.

        To be called when every key of the last batch has been recorded.
        """
        if not self.asked:
            return self._ask(self._opening(), self.plan.first + self.plan.random + 2)
        gained = self.best_us < self.best_before * (1 - NOISE)
        self.without_gain = 0 if gained else self.without_gain + 1
        self.best_before = min(self.best_before, self.best_us)
        room = self.plan.most + self.extra - len(self.asked)
        if self.without_gain > self.plan.patience or room <= 0 or self.best_us == float("inf"):
            self.done = True
            return []
        batch = self._ask(self._following(), min(self.plan.batch, room))
        self.done = not batch
        return batch

    def reopen(self) -> None:
        """Go on with a search that was done: there is time for more candidates."""
        self.done, self.without_gain = False, 0
        self.extra += self.plan.most // 2

    def _ask(self, keys: list[str], count: int) -> list[str]:
        """The first of the keys; those that an earlier run measured are not asked for again."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self.asked][:count]
        self.asked.update(fresh)
        return fresh

    def _opening(self) -> list[str]:
        problem = self.case.problem
        first = list(space.ranked_keys(problem, self.constants))
        taken = space.with_carveout(self.case.tile, 0)
        chosen = [self.default_key, space.key_of(taken), *first[: self.plan.first]]
        chosen += [space.key_of(t) for t in space.sample(problem, self.plan.random, self.key)]
        return chosen + first

    def _following(self) -> list[str]:
        """Neighbours of the two fastest, likeliest first, then what the model ranks next."""
        problem = self.case.problem
        family = problem.family
        near: list[str] = []
        for key in self.fastest()[:2]:
            if self._us(key) > HOPELESS * self.best_us:
                continue
            tiles = space.neighbours(problem, space.tile_of(family, key))
            near += [space.key_of(t) for t in self._by_model(tiles)]
        ranked = space.ranked_keys(problem, self.constants)
        fresh_near = [k for k in dict.fromkeys(near) if k not in self.asked]
        fresh_ranked = [k for k in ranked if k not in self.asked]
        share = max(1, 3 * self.plan.batch // 4)
        return fresh_near[:share] + fresh_ranked[: self.plan.batch - share] + fresh_near[share:]

    def _by_model(self, tiles: list[space.Tile]) -> list[space.Tile]:
        if self.case.problem.family != "conv2d" or not tiles:
            return tiles
        us = space.predicted_us(self.case.problem, tiles, self.constants)
        return [tile for _, _, tile in sorted(zip(us, range(len(us)), tiles, strict=True))]


@dataclass(frozen=True)
class Progress:
    """How far tuning is. gain: microseconds an inference, of `default_us`, over the functions whose
    default is measured."""

    stage: str
    done: int
    total: int
    measured: int
    gain_us: float
    default_us: float
    seconds_left: float


Report = Callable[[Progress], None]
Begun = tuple[Job, "Future[list[Built]]"]
"""A job and what will come of it."""


class Tuner:
    """Runs the searches of a workload within a budget.

    builder, measure: who compiles and who times. budget: seconds for the search, from `run` on.
    clock: seconds, for tests.
    """

    def __init__(
        self,
        workload: Workload,
        builder: Builder,
        measure: Measure,
        database: Database,
        keys: dict[str, str],
        *,
        budget: float,
        plan: Plan | None = None,
        constants: Constants = DEFAULT,
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
        ahead: int = 32,
    ) -> None:
        self._workload, self._builder, self._measure = workload, builder, measure
        self._database, self._report, self._clock = database, report, clock
        self._budget, self._ahead = budget, ahead
        self._rounds = (plan or Plan()).rounds
        self.measured = 0
        self.built: dict[str, dict[str, Built]] = {}
        self._codes: dict[object, str] = {}
        self._early: dict[str, list[Built]] = {}
        self.searches: dict[str, CaseSearch] = {}
        self._retried: set[tuple[str, tuple[str, ...]]] = set()
        for name, case in workload.cases.items():
            search = CaseSearch(case, keys[name], plan or Plan(), constants)
            search.done = keys[name] in database.winners
            search.times.update(database.times.get(keys[name], {}))
            self.searches[name] = search

    # ---- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Search until nothing more is found or the time is up."""
        self._end = self._clock() + self._budget
        active = self._active()
        for search in active:
            self._record_case(search)
        before = float("inf")
        for number in range(self._rounds if active else 0):
            if number:
                for search in active:
                    search.reopen()
            self._round(active)
            after = sum(s.share for s in active)
            if after > before * (1 - ROUND_GAIN) or self._clock() >= self._end:
                break
            before = after

    def _round(self, active: list[CaseSearch]) -> None:
        """Search until every function is done or the time is up."""
        queue = [job for search in active for job in self._advance(search)]
        running: dict[Future[list[Built]], Job] = {}
        try:
            while (queue or running) and self._clock() < self._end:
                queue.sort(key=self._priority)
                while queue and len(running) < self._ahead:
                    job = queue.pop(0)
                    running[self._builder.submit(job)] = job
                left = max(0.0, self._end - self._clock())
                finished, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
                for future in sorted(finished, key=lambda f: self._priority(running[f])):
                    queue += self._finish(future, running.pop(future))
                self._tell("searching")
        finally:
            for future in running:
                future.cancel()

    def _active(self) -> list[CaseSearch]:
        return [s for s in self.searches.values() if not s.done]

    def _priority(self, job: Job) -> tuple[float, ...]:
        """Functions that were looked at least first, then those that matter most."""
        search = self.searches[job.function]
        batch = len(search.asked) // search.plan.batch
        return (batch, -search.share)

    def _advance(self, search: CaseSearch) -> list[Job]:
        """Jobs of the search's next batch; what an earlier run measured counts as measured."""
        while not search.done:
            keys = [k for k in search.next_batch() if k not in search.times]
            if keys:
                if search.case.name not in self.built:  # the reference of this process
                    keys = list(dict.fromkeys([search.default_key, *keys]))
                search.waiting = len(keys)
                return _jobs(search.case, keys)
        return []

    def _finish(self, future: Future[list[Built]], job: Job) -> list[Job]:
        search = self.searches[job.function]
        try:
            results = future.result()
        except BrokenProcessPool:
            if (job.function, job.keys) not in self._retried and len(job.keys) == 1:
                self._retried.add((job.function, job.keys))
                return [job]
            if len(job.keys) > 1:  # find the candidate that ended the process
                return [Job(**{**job.__dict__, "keys": (key,)}) for key in job.keys]
            fault = "the compiler ended its process"
            results = [Built(job.function, job.family, key, fault=fault) for key in job.keys]
        for built in self._in_order(search, results):
            if self._clock() >= self._end:
                return []
            self._try(search, built)
            search.waiting -= 1
        return self._advance(search) if search.waiting == 0 else []

    def _in_order(self, search: CaseSearch, results: list[Built]) -> list[Built]:
        """Results that can be tried now: none before the default tile's, which is the reference."""
        name = search.case.name
        if name in self.built:
            return results
        early = self._early.setdefault(name, [])
        early += results
        default = [b for b in early if b.key == search.default_key]
        if not default:
            return []
        del self._early[name]
        self.built[name] = {}
        return default + [b for b in early if b.key != search.default_key]

    def _try(self, search: CaseSearch, built: Built) -> None:
        """Check and time a candidate, and record what came of it."""
        fault = self._fault_of(search, built)
        if fault:
            if built.key == search.default_key:
                logger.warning("%s: the default tile %s", search.case.name, fault)
            self._record(search, TimeRecord(search.key, built.key, fault=str(fault)))
            return
        record = self._same_code(search, built) or self._time(search, built, QUICK_SAMPLES)
        self._record(search, record)
        self.measured += 1
        if not record.fault:
            self._keep(search, built)

    def _same_code(self, search: CaseSearch, built: Built) -> TimeRecord | None:
        """The time of another candidate that became the same machine code; None where there is
        none: options can make no difference for a shape."""
        if not built.cubin:
            return None
        key = (built.function, hashlib.sha256(built.cubin).digest(), built.launch)
        other = search.times.get(self._codes.setdefault(key, built.key))
        if other is None or other.tile == built.key or other.fault:
            return None
        return dataclasses.replace(other, tile=built.key, final=False)

    def _time(self, search: CaseSearch, built: Built, samples: int) -> TimeRecord:
        def measure() -> Timing:
            return self._measure.time(search.case, built, samples)

        try:
            timing = self._guarded(search, built, measure)
        except CandidateError as fault:
            return TimeRecord(search.key, built.key, fault=str(fault))
        return TimeRecord(search.key, built.key, timing.us, timing.spread)

    def _check(self, search: CaseSearch, built: Built) -> str | None:
        return self._measure.check(search.case, built)

    def _guarded(self, search: CaseSearch, built: Built, action: Callable[[], T]) -> T:
        """Do something on the GPU. A failure ends the process's use of it: remember the culprit, so
        that the next run goes on without it."""
        try:
            return action()
        except InternalError as error:
            record = TimeRecord(search.key, built.key, fault=f"ended the GPU's context: {error}")
            self._record(search, record)
            raise UserError(
                f"candidate {built.key} failed on the GPU: {error}",
                where=search.case.layer,
                hint="run the same command again: it goes on without this candidate",
            ) from error

    def _keep(self, search: CaseSearch, built: Built) -> None:
        """Keep the machine code of the fastest, for the last stages."""
        kept = self.built[search.case.name]
        kept[built.key] = built
        fastest = {search.default_key, *search.fastest()[: FINALISTS + 1]}
        for key in [k for k in kept if k not in fastest]:
            del kept[key]

    # ---- the end ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Measure each function's fastest again, in turns, and record the winners."""
        pending = [
            s
            for s in self.searches.values()
            if s.key not in self._database.winners and s.default_us < float("inf")
        ]
        self.complete({s.case.name: s.finalists() for s in pending})
        for number, search in enumerate(pending):
            self._settle(search)
            self._tell("settling", number + 1, len(pending))

    def complete(self, wanted: dict[str, list[str]]) -> None:
        """Build what is wanted of each function and was not kept, all at once."""
        self.collect(self.begin(wanted))

    def begin(self, wanted: dict[str, list[str]]) -> list[Begun]:
        """Begin to build what is wanted of each function and was not kept."""
        jobs: list[Job] = []
        for name, keys in wanted.items():
            kept = self.built.setdefault(name, {})
            search = self.searches[name]
            missing = [k for k in keys if k not in kept]
            if missing and search.default_key not in kept:
                missing.insert(0, search.default_key)
            jobs += _jobs(search.case, list(dict.fromkeys(missing)), size=1)
        return [(job, self._builder.submit(job)) for job in jobs]

    def collect(self, begun: list[Begun], time_left: Callable[[], float] | None = None) -> None:
        """Check and keep what was begun; what is not built in the time left is given up."""
        for job, future in begun:  # in order: a function's default, its reference, comes first
            timeout = None if time_left is None else min(3600.0, max(0.0, time_left()))
            try:
                built = future.result(timeout)[0]
            except FutureTimeoutError:
                future.cancel()
                continue
            fault = self._fault_of(self.searches[job.function], built)
            if fault:
                logger.warning("%s: %s is left out: %s", job.function, built.key, fault)
            else:
                self.built[job.function][built.key] = built

    def _fault_of(self, search: CaseSearch, built: Built) -> str | None:
        """Why a candidate cannot be taken; the default tile can where it spills, too."""
        if built.launch is None or (built.fault and built.key != search.default_key):
            return built.fault or "it was not built"
        return self._guarded(search, built, lambda: self._check(search, built))

    def time_alone(self, name: str, built: Built) -> TimeRecord:
        """The time of a candidate that came up after the search, measured once. Its carve-out is
        none of it."""
        search = self.searches[name]
        if built.key not in search.times:
            timed = self._time(search, built, FINAL_SAMPLES)
            self._record(search, dataclasses.replace(timed, final=not timed.fault))
        return search.times[built.key]

    def _settle(self, search: CaseSearch) -> None:
        kept = self.built[search.case.name]
        finalists = [key for key in search.finalists() if key in kept]
        again: dict[str, list[TimeRecord]] = {key: [] for key in finalists}
        for _ in range(3):
            for key, records in again.items():
                records.append(self._time(search, kept[key], FINAL_SAMPLES))
        for records in again.values():
            middle = sorted(records, key=lambda r: (r.fault == "", r.us))[1]
            self._record(search, dataclasses.replace(middle, final=True))
        final = [r for r in (search.times[key] for key in finalists) if not r.fault]
        if final:
            self._win(search, final)

    def _win(self, search: CaseSearch, final: list[TimeRecord]) -> None:
        limit = min(r.us for r in final) * (1 + NOISE)
        equal = sorted(r.tile for r in final if r.us <= limit)
        tile = search.default_key if search.default_key in equal else equal[0]
        us = search.times[tile].us
        winner = WinnerRecord(search.key, tile, us, search.default_us, search.default_key)
        self._database.add(winner)

    # ---- records ----------------------------------------------------------------------------

    def _record(self, search: CaseSearch, record: TimeRecord) -> None:
        search.times[record.tile] = record
        self._database.add(record)

    def _record_case(self, search: CaseSearch) -> None:
        from yolomlir.autotune.signature import text_digest

        case = search.case
        record = CaseRecord(
            search.key, text_digest(case.yolo_text), case.signature, case.problem.family,
            case.problem.precision, shape_options(case.problem),
        )  # fmt: skip
        if self._database.cases.get(search.key) != record:
            self._database.add(record)

    def _tell(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        if self._report is None:
            return
        known = [s for s in self.searches.values() if s.default_us < float("inf")]
        gain = sum(s.case.count * (s.default_us - s.best_us) for s in known)
        over = sum(s.case.count * s.default_us for s in known)
        finished = sum(s.done for s in self.searches.values())
        self._report(
            Progress(
                stage,
                finished if done is None else done,
                len(self.searches) if total is None else total,
                self.measured,
                gain,
                over,
                max(0.0, self._end - self._clock()),
            )
        )


def _jobs(case: Case, keys: list[str], *, size: int = 2) -> list[Job]:
    problem = case.problem
    return jobs_of(
        case.name, problem.family, case.text, keys, problem.target, problem.precision, size=size
    )


def shape_options(problem: space.Problem) -> dict[str, Any]:
    """A convolution's shape as plain values, from which the model's features are made again."""
    if not isinstance(problem.shape, ConvShape):
        return {}
    return dict(problem.shape.__dict__)
