"""`yolomlir demo`: the whole chain on a packaged photo, with no download."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from yolomlir.cli.options import (
    add_compile_options,
    add_device_option,
    device_target,
    image_side_check,
)
from yolomlir.cli.predict import add_prediction_options, check_outputs, predict
from yolomlir.cli.progress import progress_bar

_SHOWN = 5
"""Detections of random weights that are shown: all of them mean equally little."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "demo",
        help="run the whole chain on a packaged photo, without a download",
        description="Compile YOLO26n and run it on a packaged photo. Without --weights the weights "
        "are random: the detections mean nothing, and only show that everything works.",
    )
    parser.add_argument("--weights", help="a checkpoint, so that the detections mean something")
    add_prediction_options(parser)
    parser.set_defaults(save=Path("runs/demo"))
    add_compile_options(parser)
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    image_side_check(args.imgsz)
    target = device_target(args.device)
    check_outputs(args)
    from yolomlir.api import compile
    from yolomlir.frontend.download import resolve_weights
    from yolomlir.frontend.seeded import seeded_checkpoint
    from yolomlir.vision.demo import demo_image

    if args.weights is None:
        print(
            "yolomlir: these weights are random, not trained: the detections mean nothing. "
            "Pass --weights for real ones.",
            file=sys.stderr,
        )
        args.conf, args.max_det = 0.0, min(args.max_det or _SHOWN, _SHOWN)
    weights = resolve_weights(args.weights) if args.weights else seeded_checkpoint("n", 80, 0)
    with progress_bar() as progress:
        model = compile(
            weights,
            target=target,
            precision=args.precision,
            imgsz=args.imgsz,
            threads=args.threads,
            cache=not args.no_cache,
            progress=progress,
        )
    with model:
        return predict(model, [demo_image()], args)
