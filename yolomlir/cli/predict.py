"""`yolomlir predict WEIGHTS SOURCE…`: detections as a table, JSON, annotated images."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from yolomlir.api import DEFAULT_CONFIDENCE, Model, compile
from yolomlir.cli.options import add_compile_options, add_device_option, device_target
from yolomlir.cli.progress import progress_bar
from yolomlir.diagnostics import UserError
from yolomlir.frontend.download import resolve_weights
from yolomlir.results import Result
from yolomlir.vision.sources import SourceError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "predict",
        help="detect objects in images, folders, globs, URLs and videos",
        description="Detect objects. Prints a table; writes JSON and annotated images on request.",
    )
    parser.add_argument(
        "weights", help="a .safetensors, .pt or .ylm file, or a model name such as yolo26n"
    )
    parser.add_argument(
        "sources", nargs="+", metavar="source", help="image, folder, glob, URL, video"
    )
    add_prediction_options(parser)
    add_compile_options(parser)
    add_device_option(parser)


def add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about what is kept and where it is written."""
    parser.add_argument(
        "--conf",
        type=float,
        default=DEFAULT_CONFIDENCE,
        metavar="P",
        help=f"least score, 0..1 (default: {DEFAULT_CONFIDENCE})",
    )
    parser.add_argument(
        "--classes", nargs="+", metavar="CLASS", help="keep only these classes: names or indices"
    )
    parser.add_argument("--json", metavar="FILE", help="write detections as JSON; - for stdout")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write annotated images there")


def run(args: argparse.Namespace) -> int:
    """Run it; 0, or 1 when some source could not be read."""
    with progress_bar() as progress:
        model = compile(
            resolve_weights(args.weights),
            target=device_target(args.device),
            precision=args.precision,
            imgsz=args.imgsz,
            max_det=args.max_det,
            threads=args.threads,
            cache=not args.no_cache,
            progress=progress,
        )
    with model:
        return predict(model, args.sources, args)


def predict(model: Model, sources: list[Any], args: argparse.Namespace) -> int:
    """Predict and report as `args` asks; shared with `demo`."""
    _check_outputs(args)
    failed = 0
    records: list[dict[str, Any]] = []
    console = Console(stderr=args.json == "-")
    with ExitStack() as stack:
        saver = stack.enter_context(_saver(args.save)) if args.save else None
        results = model.predict_many(
            sources,
            conf=args.conf,
            classes=args.classes,
            max_det=min(args.max_det, model.info.max_det),
        )
        for result in results:
            if isinstance(result, SourceError):
                print(f"yolomlir: error: {result}", file=sys.stderr)
                failed += 1
                continue
            records.append(result.to_dict())
            _print_result(console, result)
            if saver:
                console.print(f"  saved {saver.save(result)}", highlight=False)
    if args.json:
        _write_json(args.json, records)
    if failed and not records:
        return 2
    return 1 if failed else 0


def _saver(folder: Path) -> Any:
    from yolomlir.vision.drawing import AnnotatedImages

    return AnnotatedImages(folder)


def _check_outputs(args: argparse.Namespace) -> None:
    """Fail before the work, not after it, when an output cannot be written."""
    if args.json and args.json != "-":
        try:
            with open(args.json, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=args.json) from error
    if args.save:
        try:
            args.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot be made: {error.strerror}", where=args.save) from error


def _print_result(console: Console, result: Result) -> None:
    title = f"{result.name}  {result.width}x{result.height}"
    if not result.detections:
        console.print(f"{title}: no detections", highlight=False, markup=False)
        return
    table = Table(title=title, title_justify="left", box=None)
    for column in ("class", "score", "x1", "y1", "x2", "y2"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for d in result:
        table.add_row(d.class_name, f"{d.score:.3f}", *(f"{v:.1f}" for v in d.box))
    console.print(table)


def _write_json(path: str, records: list[dict[str, Any]]) -> None:
    text = json.dumps(records, indent=1)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error
