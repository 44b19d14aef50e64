"""Stand-ins for the GPU and the compiler, and a small workload, for the tests of the tuner."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from yolomlir.autotune import space
from yolomlir.autotune.build import Built, Job
from yolomlir.autotune.cost_model import Constants
from yolomlir.autotune.measure import CandidateError, Timing
from yolomlir.autotune.workload import Case, Workload, collect
from yolomlir.codegen.gpu.kernel import Launch
from yolomlir.codegen.gpu.tile import plain
from yolomlir.compiler import CompileOptions
from yolomlir.frontend.seeded import seeded_checkpoint

TRUE = Constants(
    start=2500, port_bytes=40, l2_bytes=30, latency=900, mma_peak=500, step=90, instruction=3.5,
    output=7, cluster=1500,
)  # fmt: skip
"""The fake GPU's constants: others than the tuner assumes, so that it has something to find."""


@cache
def workload(
    target: str = "sm_90", side: int = 64, level: int = 2, precision: str = "tf32"
) -> Workload:
    """YOLO26n with untrained weights at a small size; not to be changed.

    level: 2 has the most convolutions, and depthwise ones, by themselves; 3 has chains.
    """
    options = CompileOptions(
        target=target, height=side, width=side, level=level, precision=precision
    )
    return collect(seeded_checkpoint("n", 80, 0, fused=True), options)


def part(names: int, *, skip: int = 0) -> Workload:
    """The first few functions of the workload."""
    whole = workload()
    chosen = list(whole.cases)[skip : skip + names]
    cases = {name: whole.cases[name] for name in chosen}
    return Workload(whole.target, whole.precision, whole.scale, whole.plan, whole.weights, cases)


def unit(*parts: str) -> float:
    """A number from 0 to 1 that depends on the texts alone."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return int(digest[:8], 16) / 2**32


class FakeMeasure:
    """Times by another cost model, with noise that depends on the candidate alone.

    wrong: keys whose output differs. broken: keys that cannot be run.
    """

    device = "Fake GPU"

    def __init__(self, load: Workload) -> None:
        self.load = load
        self.timed: list[tuple[str, str]] = []
        self.checked: list[tuple[str, str]] = []
        self.wrong: set[str] = set()
        self.broken: set[str] = set()
        self.networks = 0
        self._known: dict[tuple[str, str], float] = {}

    def us(self, case: Case, key: str) -> float:
        """Microseconds of a candidate, always the same, however it is launched."""
        tile = plain(space.tile_of(case.problem.family, key))
        key = space.key_of(tile)
        if (case.name, key) not in self._known:
            self._known[case.name, key] = self._us(case, key)
        return self._known[case.name, key]

    def _us(self, case: Case, key: str) -> float:
        problem = case.problem
        noise = 1 + 0.1 * unit(case.name, key)
        if problem.family != "conv2d":
            return 2 * noise
        tile = space.tile_of("conv2d", key)
        return space.predicted_us(problem, [tile], TRUE)[0] * noise

    def check(self, case: Case, built: Built) -> str | None:
        self.checked.append((case.name, built.key))
        return "differs" if built.key in self.wrong else None

    def time(self, case: Case, built: Built, samples: int) -> Timing:
        if built.key in self.broken:
            raise CandidateError("cannot be launched")
        self.timed.append((case.name, built.key))
        return Timing(self.us(case, built.key), 0.01)

    def network(self, chosen: Mapping[str, Built], samples: int) -> Timing:
        self.networks += 1
        steps = [s for s in self.load.plan.steps if s.kernel in chosen]
        return Timing(sum(self.us(self.load.cases[s.kernel], chosen[s.kernel].key) for s in steps))

    def compare(
        self, one: Mapping[str, Built], other: Mapping[str, Built], rounds: int
    ) -> tuple[float, float]:
        return self.network(one, rounds).us, self.network(other, rounds).us

    def close(self) -> None:
        pass


class FakeBuilder:
    """Builds nothing, at once. faults: keys that do not build."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.faults: set[str] = set()

    def results(self, job: Job) -> list[Built]:
        return [
            Built(job.function, job.family, key, fault="does not assemble")
            if key in self.faults
            else Built(job.function, job.family, key, self._launch(job, key))
            for key in job.keys
        ]

    def _launch(self, job: Job, key: str) -> Launch:
        carveout = space.tile_of(job.family, key).carveout
        return Launch(job.function, (1, 1, 1), (32, 1, 1), 0, (), carveout=carveout)

    def submit(self, job: Job) -> Future[list[Built]]:
        self.jobs.append(job)
        future: Future[list[Built]] = Future()
        future.set_result(self.results(job))
        return future

    def close(self) -> None:
        pass


class ShufflingBuilder(FakeBuilder):
    """Ends jobs in another order than they were begun."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(6)

    def submit(self, job: Job) -> Future[list[Built]]:
        self.jobs.append(job)
        return self._pool.submit(self._late, job, self._random.random() * 0.004)

    def _late(self, job: Job, seconds: float) -> list[Built]:
        time.sleep(seconds)
        return self.results(job)

    def close(self) -> None:
        self._pool.shutdown()


class Clock:
    """Seconds that pass only when somebody looks: `step` each time."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
