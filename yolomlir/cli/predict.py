"""`yolomlir predict WEIGHTS SOURCE…`: detections as a table, JSON, annotated images."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolomlir.cli.options import (
    add_compile_options,
    add_device_option,
    device_target,
    image_side_check,
    probability,
)
from yolomlir.cli.progress import console, progress_bar
from yolomlir.diagnostics import UserError
from yolomlir.files import replacing
from yolomlir.results import DEFAULT_CONFIDENCE

if TYPE_CHECKING:
    from rich.console import Console

    from yolomlir.api import Model
    from yolomlir.results import Result
    from yolomlir.vision.decode import SourceError
    from yolomlir.vision.drawing import AnnotatedImages


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "predict",
        help="detect objects in images, folders, globs, URLs and videos",
        description="Detect objects. Prints a table; writes JSON and annotated images on request. "
        "Exit code: 0, 1 when some source could not be read, 2 when none could.",
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
        type=probability,
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
    image_side_check(args.imgsz)
    target = device_target(args.device)
    check_outputs(args)
    errors = _unreadable(args.sources)
    if len(errors) == len(args.sources):
        for error in errors:
            _complain(error)
        return 2
    from yolomlir.api import compile
    from yolomlir.frontend.download import resolve_weights

    with progress_bar() as progress:
        model = compile(
            resolve_weights(args.weights),
            target=target,
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
    report = _Report(args)
    results = model.predict_many(
        sources, conf=args.conf, classes=_classes(args.classes, model), max_det=args.max_det
    )
    try:
        for result in results:
            report.add(result)
    except KeyboardInterrupt:
        report.write_json()  # an hour of video is not lost to Ctrl-C
        raise
    report.write_json()
    if report.failed and not report.records:
        return 2
    return 1 if report.failed else 0


class _Report:
    """What comes out: a table and annotated images at once, JSON at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.json: str | None = args.json
        self.records: list[dict[str, Any]] = []
        self.failed = 0
        self._console = console(stderr=args.json == "-")
        self._saver = _saver(args.save) if args.save else None

    def add(self, result: Result | SourceError) -> None:
        if isinstance(result, UserError):
            self.failed += 1
            _complain(result)
            return
        self.records.append(result.to_dict())
        _print_result(self._console, result)
        if self._saver:
            self._console.print(f"  saved {self._saver.save(result)}", markup=False, soft_wrap=True)

    def write_json(self) -> None:
        if self.json is None:
            return
        text = json.dumps(self.records, indent=1) + "\n"
        if self.json == "-":
            sys.stdout.write(text)
        else:
            _replace_file(self.json, text)


def _complain(error: UserError) -> None:
    print(f"yolomlir: error: {' '.join(str(error).splitlines())}", file=sys.stderr)


def _classes(given: list[str] | None, model: Model) -> list[str] | None:
    """Class names and indices; `a,b` is two unless a class has that name."""
    if given is None:
        return None
    names = model.info.names
    return [c for text in given for c in ([text] if text in names else text.split(",")) if c]


def _unreadable(sources: list[str]) -> list[UserError]:
    """Errors of the sources that plainly are not there, found before the model is compiled."""
    from yolomlir.vision.decode import SourceError
    from yolomlir.vision.sources import is_url, list_files

    errors: list[UserError] = []
    for source in sources:
        if is_url(source) or not source or "\0" in source:
            continue
        try:
            if not any(os.path.lexists(path) for path in list_files(source)):
                errors.append(SourceError(source, "no such file", hint="check the path"))
        except (SourceError, OSError) as error:
            errors.append(error if isinstance(error, UserError) else _os_error(error, source))
    return errors


def _os_error(error: OSError, where: object) -> UserError:
    return UserError(f"cannot be read: {error.strerror}", where=where)


def _saver(folder: Path) -> AnnotatedImages:
    from yolomlir.vision.drawing import AnnotatedImages

    return AnnotatedImages(folder)


def check_outputs(args: argparse.Namespace) -> None:
    """Fail before the work, not after it, when an output cannot be written."""
    if args.json and args.json != "-" and not _is_stream(args.json):
        from yolomlir.evaluate.outputs import check_writable

        check_writable(args.json)
    if args.save:
        try:
            args.save.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=args.save):
                pass
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}",
                where=args.save,
                hint="name a folder that you may write to",
            ) from error


def _is_stream(path: str) -> bool:
    """Whether it is a pipe or device, which is written once and not replaced."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)
    except OSError:
        return False


def _replace_file(path: str, text: str) -> None:
    """Write a file whole or not at all: an older one stays until the new one is complete."""
    target = Path(path)
    try:
        if _is_stream(path):
            target.write_text(text, encoding="utf-8")
            return
        with replacing(target) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error


def _print_result(out: Console, result: Result) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{result.name}  {result.width}x{result.height}"
    if not result.detections:
        out.print(f"{title}: no detections", markup=False, soft_wrap=True)
        return
    out.print(title, markup=False, soft_wrap=True)
    table = Table(box=None)
    for column in ("class", "score", "x1", "y1", "x2", "y2"):
        table.add_column(column, justify="left" if column == "class" else "right", no_wrap=True)
    for d in result:
        table.add_row(Text(d.class_name), f"{d.score:.3f}", *(f"{v:.1f}" for v in d.box))
    out.print(table)
