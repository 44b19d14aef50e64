"""`python -m yolomlir.autotune.device_session`: tune several models on a machine with a GPU and
leave what the package ships: a table, the measurements, fitted constants, a report."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from yolomlir.autotune import calibration, report
from yolomlir.autotune.build import ProcessBuilder, prefer_toolkit
from yolomlir.autotune.constants import constants_text
from yolomlir.autotune.database import Database
from yolomlir.autotune.measure import CudaMeasure
from yolomlir.autotune.search import Progress
from yolomlir.autotune.session import tune
from yolomlir.autotune.tables import Table, load_table
from yolomlir.autotune.workload import collect
from yolomlir.cli.options import image_size
from yolomlir.compiler import PRECISIONS, CompileOptions
from yolomlir.diagnostics import UserError, YolomlirError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights

logger = logging.getLogger(__name__)

_LEAST_SECONDS = 20.0
"""A model is not begun with less time left."""


def main(argv: list[str] | None = None) -> int:
    """Tune; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", nargs="+", required=True, metavar="MODEL",
        help="checkpoints, or seeded:n, seeded:s … for untrained weights of a scale; where two "
        "have the same kernel, the tile of the first stays",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all models")
    parser.add_argument(
        "--first", type=float, default=0.0, metavar="SECONDS",
        help="at most so many seconds for the first model (default: an equal share)",
    )  # fmt: skip
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS["gpu"])
    parser.add_argument("--level", type=int, choices=(2, 3), help="optimisation level")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at once")
    parser.add_argument(
        "--imgsz", type=image_size, default=(640, 640), metavar="SIZE",
        help="image side, or HEIGHTxWIDTH (640)",
    )  # fmt: skip
    parser.add_argument("--layers", nargs="*", help="only layers that begin so")
    parser.add_argument("--workers", type=int, help="compiler processes")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    prefer_toolkit()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        _run(args)
    except YolomlirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    from yolomlir.runtime.cuda_driver import require_device

    end = time.monotonic() + args.budget
    device = require_device()
    if device.target is None:
        raise UserError(f"{device.name} is no GPU that yolomlir targets")
    database = Database.open(device.target, device.name, args.out / "measurements.jsonl")
    path = args.out / f"{device.target}.json"
    known = load_table(path) if path.exists() else None
    fresh: Table | None = None
    builder = ProcessBuilder(args.workers)
    try:
        for number, name in enumerate(args.weights):
            left = end - time.monotonic()
            if left < _LEAST_SECONDS:
                logger.warning("no time left for %s", name)
                break
            share = left / (len(args.weights) - number)
            if number == 0 and args.first:
                share = min(args.first, left)
            found = _tune(name, args, device.target, share, database, builder)
            # A model's graph decided how its kernels are launched: of one that two models have,
            # the tile of the model named first stays.
            fresh = found.merged(fresh) if fresh else found
            (known.merged(fresh) if known else fresh).save(path)
    finally:
        builder.close()
    _calibrate(database, args)


def _tune(
    name: str, args: argparse.Namespace, target: str, seconds: float, database: Database,
    builder: ProcessBuilder,
) -> Table:  # fmt: skip
    started = time.monotonic()
    height, width = args.imgsz
    options = CompileOptions(
        target=target, precision=args.precision, level=args.level, batch=args.batch,
        height=height, width=width,
    )  # fmt: skip
    workload = collect(load_checkpoint(resolve_weights(name)), options, args.layers)
    logger.info("%s: %d functions, ready in %.1f s", name, len(workload.cases), _since(started))
    with CudaMeasure(workload) as measure:
        result = tune(
            workload, budget=seconds - _since(started), measure=measure, builder=builder,
            database=database, report=_Log(),
        )  # fmt: skip
    for line in report.summary(result):
        print(line, flush=True)
    with (args.out / "report.md").open("a", encoding="utf-8") as file:
        file.write(report.markdown(result) + "\n")
    with (args.out / "report.jsonl").open("a", encoding="utf-8") as file:
        file.write(report.as_json(result, indent=None))
    return result.table()


def _calibrate(database: Database, args: argparse.Namespace) -> None:
    try:
        constants, quality = calibration.calibrate(database, args.precision)
    except UserError as error:
        logger.warning("%s", error)
        return
    print(quality)
    text = constants_text(constants, database.device, quality)
    (args.out / "constants.json").write_text(text)


class _Log:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < 5 and progress.done < progress.total:
            return
        self._last = now
        logger.info(
            "%s: %d of %d functions, %d candidates, gain %.1f of %.1f us, %.0f s left",
            progress.stage, progress.done, progress.total, progress.measured, progress.gain_us,
            progress.default_us, progress.seconds_left,
        )  # fmt: skip


def _since(start: float) -> float:
    return time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
