"""`yolomlir tune WEIGHTS`: find the fastest tiles for a model on the GPU at hand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from yolomlir.api import native_target
from yolomlir.autotune.search import Progress as TuningProgress
from yolomlir.autotune.search import Report
from yolomlir.autotune.workload import Workload
from yolomlir.cli.options import add_level_option, image_size, whole
from yolomlir.cli.progress import console
from yolomlir.compiler import PRECISIONS, CompileOptions
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.outputs import check_picture, check_writable, write_text
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights
from yolomlir.target import TARGETS, target_named


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest kernels for a model on this GPU",
        description="Measure candidates for every kernel of a model on the GPU at hand and keep "
        "the fastest in the user's cache, where every later compile finds them. A run that was "
        "interrupted goes on where it stopped.",
    )
    parser.add_argument(
        "weights", help="a .safetensors or .pt file, a name such as yolo26n, or seeded:n"
    )
    gpus = [name for name, target in TARGETS.items() if target.kind == "gpu"]
    parser.add_argument(
        "--target", default="native", metavar="TARGET", help=f"native (default), {', '.join(gpus)}"
    )
    parser.add_argument(
        "--budget", type=seconds, default=60.0, metavar="TIME", help="such as 60s or 5min (60s)"
    )
    parser.add_argument(
        "--layers", nargs="+", metavar="NAME", help="only layers whose names begin so"
    )
    parser.add_argument(
        "--imgsz", type=image_size, default=(640, 640), metavar="SIZE", help="as for compile (640)"
    )
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="images at once (1)")
    parser.add_argument("--precision", choices=PRECISIONS["gpu"], help="default: tf32")
    add_level_option(parser)
    parser.add_argument("--workers", type=whole, metavar="N", help="compiler processes")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write it too: .md or .json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png or .svg")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the winners as a table")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="measure nothing: choose by the cost model, for a GPU that is not here (with --table)",
    )
    parser.add_argument(
        "--fit",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="FILE",
        help="then fit the cost model to all measurements, and write its constants",
    )


def seconds(text: str) -> float:
    """`60`, `60s`, `5min` or `1.5m` as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time such as 60s or 5min")
    return float(found[1]) * (60 if found[2].startswith("m") else 1)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    from yolomlir.autotune import report
    from yolomlir.autotune.build import ProcessBuilder
    from yolomlir.autotune.session import tune
    from yolomlir.autotune.workload import collect

    if args.predict and args.table is None:
        raise UserError("--predict has no result but a table", hint="add --table FILE")
    check_writable(args.report, args.table)
    check_picture(args.plot)
    check_writable(args.fit if str(args.fit) != "-" else None)
    target = args.target if args.predict else _target(args.target)
    height, width = args.imgsz
    options = CompileOptions(
        target=target, precision=args.precision, height=height, width=width, batch=args.batch,
        level=args.level,
    )  # fmt: skip
    workload = collect(load_checkpoint(resolve_weights(args.weights)), options, args.layers)
    if args.predict:
        return _predict(workload, args.table)
    builder = ProcessBuilder(args.workers) if args.workers else None
    try:
        with _progress() as show:
            result = tune(workload, budget=args.budget, builder=builder, report=show)
    finally:
        if builder is not None:
            builder.close()
    if args.report:
        as_json = args.report.suffix == ".json"
        write_text(args.report, report.as_json(result) if as_json else report.markdown(result))
    if args.plot:
        report.plot(result, args.plot)
    if args.table:
        result.table().save(args.table)
    out = console()  # last: its reader may go away
    out.print(report.rich_table(result), highlight=False)
    for line in report.summary(result):
        out.print(line, highlight=False)
    if args.fit:
        _fit(target, result.device, workload.precision, args.fit)
    return 0


def _predict(workload: Workload, path: Path) -> int:
    """Write the model's choice, beside what a table at that path already has."""
    from yolomlir.autotune.build import ProcessBuilder
    from yolomlir.autotune.prediction import predicted_table
    from yolomlir.autotune.tables import load_table

    builder = ProcessBuilder()
    try:
        found = predicted_table(workload, builder)
    finally:
        builder.close()
    before = load_table(path) if path.exists() else None
    (before.merged(found) if before else found).save(path)
    count = sum(len(rows) for rows in found.entries.values())
    console().print(f"{path}: {count} entries, predicted, not measured", highlight=False)
    return 0


def _target(name: str) -> str:
    from yolomlir.runtime.device import cuda_device

    chosen = native_target() if name == "native" else target_named(name).name
    found = cuda_device()
    if isinstance(found, str):
        hint = "--target sm_120 --predict --table FILE chooses by the cost model"
        raise UserError(f"nothing can be tuned here: {found}", hint=hint)
    if chosen == "cpu":
        raise UserError(f"nothing can be tuned here: {found.name} is no target")
    return chosen


def _fit(target: str, device: str, precision: str, file: Path) -> None:
    from yolomlir.autotune.calibration import calibrate
    from yolomlir.autotune.constants import constants_text
    from yolomlir.autotune.database import Database

    constants, quality = calibrate(Database.open(target, device), precision)
    text = constants_text(constants, device, quality)
    if str(file) != "-":
        write_text(file, text)
    console().print(str(quality), highlight=False)
    if str(file) == "-":
        console().print(text, highlight=False)


@contextmanager
def _progress() -> Iterator[Report]:
    """One bar: functions done, candidates measured, gain so far, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    # Where nobody watches, rich would leave an empty line behind.
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bars:
        task = bars.add_task("tuning", total=None, note="")

        def show(progress: TuningProgress) -> None:
            gain = ""
            if progress.default_us:
                share = 100 * progress.gain_us / progress.default_us
                gain = f", {progress.gain_us:.0f} us ({share:.0f} %) gained"
            note = f"{progress.measured} measured{gain}, {progress.seconds_left:.0f} s left"
            bars.update(
                task,
                description=progress.stage,
                completed=progress.done,
                total=progress.total,
                note=note,
            )

        yield show
