"""`yolomlir predict WEIGHTS SOURCE…`: detections as a table, JSON, annotated images."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolomlir.cli.options import (
    add_compile_options,
    add_device_option,
    device_target,
    image_side_check,
    probability,
    whole,
)
from yolomlir.cli.progress import progress_bar
from yolomlir.cli.report import Report, complain
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.outputs import check_folder, check_writable
from yolomlir.results import DEFAULT_CONFIDENCE

if TYPE_CHECKING:
    from yolomlir.api import Model
    from yolomlir.vision.live import LiveSource


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "predict",
        help="detect objects in images, folders, globs, URLs, videos, cameras and streams",
        description="Detect objects. Prints a table, or a line a frame of a camera or stream; "
        "writes JSON and annotated images on request. "
        "Exit code: 0, 1 when some source could not be read, 2 when none could, 130 after Ctrl-C, "
        "143 after SIGTERM; both keep what was done.",
    )
    parser.add_argument(
        "weights", help="a .safetensors, .pt or .ylm file, or a model name such as yolo26n"
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="source",
        help="image, folder, glob, URL, video; a camera: camera:0, /dev/video0, or 0; a stream: "
        "rtsp://, rtmp://, udp://, tcp://, or http:// of MJPEG or HLS. Of a camera or stream the "
        "newest frame is taken; those that come in meanwhile are dropped",
    )
    add_prediction_options(parser)
    parser.add_argument(
        "--frames",
        type=whole,
        metavar="N",
        help="stop after N frames of each video, camera or stream",
    )
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
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write detections as JSON; - for stdout; FILE.jsonl gets an object a line, at once",
    )
    parser.add_argument("--save", metavar="DIR", type=Path, help="write annotated images there")


def run(args: argparse.Namespace) -> int:
    """Run it; 0, or 1 when some source could not be read."""
    image_side_check(args.imgsz)
    target = device_target(args.device)
    check_outputs(args)
    live = _check_order(args)
    errors = _unreadable(args.sources)
    if len(errors) == len(args.sources):
        for error in errors:
            complain(error)
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
        return predict(model, args.sources, args, frames=args.frames, live=live)


def predict(
    model: Model,
    sources: list[Any],
    args: argparse.Namespace,
    *,
    frames: int | None = None,
    live: bool = False,
) -> int:
    """Predict and report as `args` asks; shared with `demo`."""
    from yolomlir.cli.main import interruption_code
    from yolomlir.vision.live import exit_without_waiting

    report = Report(args.json, args.save, live=live)
    results = model.predict_many(
        sources,
        conf=args.conf,
        classes=_classes(args.classes, model),
        max_det=args.max_det,
        frames=frames,
    )
    with closing(results):
        try:
            for result in results:
                report.add(result)
        except KeyboardInterrupt as error:
            report.finish()  # an hour of video is not lost to Ctrl-C
            results.close()
            exit_without_waiting(interruption_code(error))
            raise
        except Exception:
            if report.results:
                report.finish()  # nor to a full disk
            raise
        report.finish()
    code = 0 if not report.failed else 1 if report.results else 2
    exit_without_waiting(code)
    return code


def _classes(given: list[str] | None, model: Model) -> list[str] | None:
    """Class names and indices; `a,b` is two unless a class has that name."""
    if given is None:
        return None
    names = model.info.names
    found = [c for text in given for c in ([text] if text in names else text.split(",")) if c]
    if not found:
        raise UserError(f"--classes {' '.join(given)}: names no class", hint="such as person,dog")
    return found


def _unreadable(sources: list[str]) -> list[UserError]:
    """Errors of the sources that plainly are not there, found before the model is compiled."""
    from yolomlir.vision.decode import SourceError
    from yolomlir.vision.live import check_live, live_source
    from yolomlir.vision.sources import is_url, list_files

    errors: list[UserError] = []
    for source in sources:
        if is_url(source) or not source or "\0" in source:
            continue
        try:
            if (live := live_source(source)) is not None:
                check_live(live)
            elif not any(os.path.lexists(path) for path in list_files(source)):
                errors.append(SourceError(source, "no such file", hint="check the path"))
        except (SourceError, OSError) as error:
            errors.append(error if isinstance(error, UserError) else _os_error(error, source))
    return errors


def _check_order(args: argparse.Namespace) -> bool:
    """Whether there is a camera or stream. Raises UserError where others would wait for its end."""
    live = [name for name in args.sources if _live(name)]
    if live and args.frames is None and live[0] != args.sources[-1]:
        raise UserError(
            "may never end: what is named after it would not be read",
            where=live[0],
            hint="name it last, or stop it with --frames N",
        )
    return bool(live)


def _live(source: str) -> LiveSource | None:
    from yolomlir.vision.decode import SourceError
    from yolomlir.vision.live import live_source

    try:
        return live_source(source)
    except SourceError:
        return None  # reported with what else is not there


def _os_error(error: OSError, where: object) -> UserError:
    return UserError(f"cannot be read: {error.strerror}", where=where)


def check_outputs(args: argparse.Namespace) -> None:
    """Fail before the work, not after it, when an output cannot be written."""
    if args.json != "-":
        check_writable(args.json or None)
    if args.save:
        check_folder(args.save)
