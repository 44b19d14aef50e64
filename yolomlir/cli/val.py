"""`yolomlir val WEIGHTS --data …`: COCO's twelve figures of a model on annotated images."""

from __future__ import annotations

import argparse
import hashlib
import logging
from dataclasses import replace
from pathlib import Path

from yolomlir.api import Model, compile
from yolomlir.cli.options import add_compile_options, add_device_option, device_target, whole
from yolomlir.cli.progress import console, progress_bar
from yolomlir.compiler import CompileOptions
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.class_map import CLASS_MAPS
from yolomlir.evaluate.coco import CONFIDENCE, EvaluationSettings
from yolomlir.evaluate.outputs import check_folder, check_picture, check_writable
from yolomlir.evaluate.val import model_digest, run_val
from yolomlir.frontend.download import resolve_weights
from yolomlir.settings import settings

_log = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "val",
        help="score a model on annotated images by the COCO protocol",
        description="Score a model by the COCO protocol. An interrupted run goes on where it was.",
    )
    parser.add_argument(
        "weights", help="a .safetensors, .pt or .ylm file, or a model name such as yolo26n"
    )
    _add_data_options(parser)
    _add_protocol_options(parser)
    _add_output_options(parser)
    add_compile_options(parser)
    add_device_option(parser)


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", metavar="DIR", help="the images of --annotations")
    parser.add_argument("--annotations", metavar="FILE", help="instances_….json in COCO's format")
    parser.add_argument(
        "--data", metavar="DIR|FILE.yaml", help="a COCO folder, or YOLO text labels"
    )
    parser.add_argument("--split", default="val", help="the part of --data (default: val)")
    parser.add_argument(
        "--subset", action="store_true", help="score the images that are there if some are missing"
    )


def _add_protocol_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conf",
        type=float,
        default=CONFIDENCE,
        metavar="P",
        help=f"scores must exceed it (default: {CONFIDENCE}, the protocol's)",
    )
    parser.add_argument(
        "--letterbox",
        choices=("coco", "predict"),
        default="coco",
        help="coco never enlarges after resizing the long side (default); predict as `predict`",
    )
    parser.add_argument(
        "--class-map",
        choices=CLASS_MAPS,
        default="auto",
        help="from class index to category id (default: COCO's ids for 80 classes, else the index)",
    )
    parser.add_argument("--batch", type=whole, metavar="N", help="images a run (1)")
    parser.add_argument("--workers", type=whole, metavar="N", help="threads that decode images")


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write figures and settings")
    parser.add_argument(
        "--save-json", metavar="FILE", help="write the detections in COCO's results format"
    )
    parser.add_argument("--plots", metavar="DIR", help="write precision-recall curves")
    parser.add_argument("--by-class", action="store_true", help="print every class's figures")
    parser.add_argument(
        "--journal", metavar="FILE", help="record detections here, keep them and go on from them"
    )
    parser.add_argument(
        "--no-resume", action="store_true", help="record nothing, and evaluate every image anew"
    )


def run(args: argparse.Namespace) -> int:
    """Run it; 0, or 1 when some image could not be read."""
    _check_arguments(args)
    with progress_bar() as progress:
        model = compile(
            resolve_weights(args.weights),
            target=device_target(args.device),
            precision=args.precision,
            imgsz=args.imgsz,
            batch=args.batch,
            max_det=args.max_det,
            threads=args.threads,
            cache=not args.no_cache,
            progress=progress,
        )
    with model, progress_bar() as progress:
        result = run_val(
            model,
            _settings(args, model),
            name=str(args.weights),
            data=args.data,
            images=args.images,
            annotations=args.annotations,
            split=args.split,
            progress=progress,
        )
    if args.json:
        result.write_json(args.json)
    if args.save_json:
        result.write_detections(args.save_json)
    plots = result.plot(args.plots) if args.plots else []
    result.print(console(), by_class=args.by_class)  # last: its reader may go away
    for path in plots:
        print(f"saved {path}")
    return 1 if result.unreadable else 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Fail before the compile and the evaluation when their inputs or outputs cannot be."""
    if bool(args.data) == bool(args.images or args.annotations) or (
        bool(args.images) != bool(args.annotations)
    ):
        raise UserError(
            "expected either --data DIR|FILE.yaml, or both --images DIR and --annotations FILE.json"
        )
    for source in filter(None, (args.data, args.images, args.annotations)):
        if not Path(source).expanduser().exists():
            raise UserError("no such file or folder", where=source)
    check_writable(args.json, args.save_json)
    if args.plots:
        check_folder(args.plots)
        check_picture(Path(args.plots) / "precision_recall.png")
    _protocol(args).check()


def _protocol(args: argparse.Namespace) -> EvaluationSettings:
    workers = {} if args.workers is None else {"workers": args.workers}
    return EvaluationSettings(
        confidence=args.conf,
        max_det=args.max_det or CompileOptions.max_det,
        letterbox=args.letterbox,
        class_map=args.class_map,
        subset=args.subset,
        journal=Path(args.journal) if args.journal and not args.no_resume else None,
        keep_journal=bool(args.journal),
        **workers,
    )


def _settings(args: argparse.Namespace, model: Model) -> EvaluationSettings:
    protocol = _protocol(args)
    if protocol.journal or args.no_resume:
        return protocol
    journal = _default_journal(args, model)
    try:
        check_folder(journal.parent)
    except UserError as error:  # a cache that cannot be written costs time, and is no error
        _log.warning("a run that is interrupted will begin anew: %s", error)
        return protocol
    return replace(protocol, journal=journal)


def _default_journal(args: argparse.Namespace, model: Model) -> Path:
    """A file of its own for each model and dataset, so that two runs do not disturb each other."""
    parts = [model_digest(model), *map(str, (args.data, args.images, args.annotations, args.split))]
    parts += map(str, (args.conf, args.max_det, args.letterbox, args.subset, Path.cwd()))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return Path(settings().cache_dir) / "val" / f"{name}.jsonl"
