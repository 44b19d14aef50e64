"""`python -m yolomlir.autotune.model_check`: is the cost model right about the whole space?

Held-out measurements say how well it orders tiles that a search measured. Here tiles that no search
asked for count as well: for each convolution the model's first tiles are taken from all there are,
by constants that were fitted without its shape, and measured in turns with the fastest tiles known.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from yolomlir.autotune import calibration, fitting, space
from yolomlir.autotune.build import Builder, Built, ProcessBuilder, jobs_of, prefer_toolkit
from yolomlir.autotune.cost_model import Constants, Device
from yolomlir.autotune.database import Database
from yolomlir.autotune.measure import CandidateError, CudaMeasure, Measure
from yolomlir.autotune.workload import Case, Workload, collect
from yolomlir.compiler import PRECISIONS, CompileOptions
from yolomlir.diagnostics import UserError, YolomlirError
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.target import target_named

logger = logging.getLogger(__name__)

TOP = 8
"""The model's first tiles that are measured."""
_KNOWN = 3
"""The fastest known ones that are measured with them: one alone may owe its place to noise."""
_ROUNDS, _SAMPLES = 3, 5
_CLOSE = 1.05


@dataclass(frozen=True)
class Checked:
    """One function. us: of the fastest of the model's tiles. best_us: of the fastest of all that
    were measured here. new: whether that one is a tile that no search had measured."""

    function: str
    signature: str
    us: float
    best_us: float
    tiles: int
    new: bool

    @property
    def close(self) -> bool:
        """Whether the model's first tiles have one within 5 % of the fastest."""
        return self.us <= _CLOSE * self.best_us


def held_out_constants(
    database: Database, precision: str, folds: int = 5
) -> tuple[dict[str, Constants], Constants]:
    """Constants by shape (`repr`), fitted without it; and those for shapes nobody measured."""
    data = calibration.measured_convolutions(database, precision)
    device = Device.of(target_named(database.target))
    found: dict[str, Constants] = {}
    names = sorted({d.name for d in data})
    for fold in range(folds):
        out = set(names[fold::folds])
        constants = fitting.fit([d for d in data if d.name not in out], device)
        found.update(dict.fromkeys(out, constants))
    return found, fitting.fit(data, device)


def check_model(
    workload: Workload, database: Database, builder: Builder, measure: Measure,
    constants: tuple[dict[str, Constants], Constants],
) -> list[Checked]:  # fmt: skip
    """Measure the model's first tiles of every convolution that the database knows.

    Functions are matched by signature: what is known of one may be of another compiler version.
    """
    known = _known(database)
    by_shape, rest = constants
    wanted: dict[str, tuple[list[str], list[str]]] = {}
    for name, case in workload.cases.items():
        if case.problem.family != "conv2d" or case.signature not in known:
            continue
        fitted = by_shape.get(repr(case.problem.shape), rest)
        first = list(space.ranked_keys(case.problem, fitted)[:TOP])
        times = known[case.signature]
        wanted[name] = first, sorted(times, key=lambda key: (times[key], key))[:_KNOWN]
    futures = []
    for name, (first, fastest) in wanted.items():
        case = workload.cases[name]
        keys = list(dict.fromkeys([space.key_of(space.default(case.problem)), *first, *fastest]))
        jobs = jobs_of(name, "conv2d", case.text, keys, case.problem.target, case.problem.precision)
        futures.append((case, [builder.submit(job) for job in jobs]))
    found = []
    for case, waiting in futures:
        built = [b for future in waiting for b in future.result()]
        item = _checked(case, built, wanted[case.name], set(known[case.signature]), measure)
        if item is not None:
            found.append(item)
    return found


def _known(database: Database) -> dict[str, dict[str, float]]:
    """Times by signature and tile."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for key, case in database.cases.items():
        records = database.times.get(key, {}).values()
        found[case.signature].update({r.tile: r.us for r in records if not r.fault})
    return {signature: times for signature, times in found.items() if times}


def _checked(
    case: Case, built: list[Built], wanted: tuple[list[str], list[str]], seen: set[str],
    measure: Measure,
) -> Checked | None:  # fmt: skip
    first, fastest = wanted
    good = {}
    for candidate in built:  # the default tile's output, the reference, comes first
        fault = candidate.fault or measure.check(case, candidate)
        if fault:
            logger.info("%s: %s: %s", case.name, candidate.key, fault)
        elif candidate.key in first or candidate.key in fastest:
            good[candidate.key] = candidate
    samples: dict[str, list[float]] = {key: [] for key in good}
    for _ in range(_ROUNDS):
        for key, candidate in good.items():
            try:
                samples[key].append(measure.time(case, candidate, _SAMPLES).us)
            except CandidateError as error:
                logger.info("%s: %s: %s", case.name, key, error)
    us = {key: statistics.median(values) for key, values in samples.items() if values}
    ours = [us[key] for key in first if key in us]
    if not ours:
        logger.warning("%s: none of the model's first tiles can be run", case.name)
    if not us:
        return None
    best = min(us, key=lambda key: (us[key], key))
    mine = min(ours, default=float("inf"))
    return Checked(case.name, case.signature, mine, us[best], len(us), best not in seen)


def summary(found: Iterable[Checked]) -> str:
    """One line: the share of functions with a close tile, and by how much the model is off."""
    rows = list(found)
    if not rows:
        return "nothing was measured"
    losses = sorted(r.us / r.best_us - 1 for r in rows)
    close = sum(r.close for r in rows)
    return (
        f"{len(rows)} convolutions: the model's first {TOP} of all tiles have one within 5 % of "
        f"the fastest known for {close} ({100 * close / len(rows):.0f} %); median loss "
        f"{100 * statistics.median(losses):.1f} %, worst {100 * losses[-1]:.0f} %; "
        f"{sum(r.new for r in rows)} fastest ones were new"
    )


def main(argv: list[str] | None = None) -> int:
    """Check it on this machine's GPU; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measurements", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--scales", nargs="+", default=["n"], help="n, s, …: untrained weights")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS["gpu"])
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        _run(args)
    except YolomlirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    from yolomlir.runtime.cuda_driver import require_device

    device = require_device()
    if device.target is None:
        raise UserError(f"{device.name} is no GPU that yolomlir targets")
    if not args.measurements.is_file():
        raise UserError("no such file", where=str(args.measurements))
    prefer_toolkit()
    database = Database.open(device.target, device.name, args.measurements)
    constants = held_out_constants(database, args.precision)
    every: list[Checked] = []
    builder = ProcessBuilder()
    try:
        for scale in args.scales:
            options = CompileOptions(target=device.target, precision=args.precision, level=2)
            workload = collect(seeded_checkpoint(scale, 80, 0, fused=True), options)
            with CudaMeasure(workload) as measure:
                found = check_model(workload, database, builder, measure, constants)
            print(f"scale {scale}: {summary(found)}", flush=True)
            every += found
            lines = [json.dumps({"scale": scale, **asdict(item)}) for item in found]
            with args.out.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
    finally:
        builder.close()
    print(f"all: {summary(every)}")


if __name__ == "__main__":
    sys.exit(main())
