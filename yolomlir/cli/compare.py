"""`yolomlir compare MODEL --against …`: two runs side by side, and the first layer that differs."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from yolomlir.api import Model
from yolomlir.cli.model import open_model
from yolomlir.cli.options import add_compile_options, add_device_option, seed
from yolomlir.cli.progress import console
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.compare import EDGES, Comparison, LayerComparison, compare
from yolomlir.evaluate.environment import environment
from yolomlir.evaluate.graph import Graph
from yolomlir.evaluate.outputs import check_writable, print_table, write_json
from yolomlir.evaluate.subjects import (
    FRAMEWORKS,
    OnnxRuntimeSubject,
    ProgramSubject,
    Subject,
    TorchSubject,
    weights_of,
)
from yolomlir.frontend.download import is_name, resolve_weights

_SHOWN = 10
_HEADER = ("layer", "shape", "difference", "own error", "tolerance", "ratio")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "compare",
        help="compare two runs, layer by layer, and name the first that differs",
        description="Run a model and something else on the same images. Tolerances are derived "
        "from each layer's size, values and precision. Exit code 1 when the two differ.",
    )
    parser.add_argument(
        "model", help="a .safetensors, .pt or .ylm file, or a name: yolo26n, seeded:n"
    )
    parser.add_argument(
        "--against",
        default="reference",
        metavar="WHAT",
        help="reference (float64, default), onnxruntime, torch, cpu, a .ylm file or a checkpoint",
    )
    parser.add_argument("--layers", action="store_true", help="compare every layer's values")
    parser.add_argument("--all", action="store_true", help="print every layer, not the worst ten")
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="image to run on (default: a packaged photo)",
    )
    parser.add_argument(
        "--noise", type=seed, metavar="SEED", help="run on an image of random pixels instead"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="the checkpoint that a .ylm model was compiled from, or its name",
    )
    parser.add_argument(
        "--conf", type=float, default=0.25, metavar="P", help="least score of detections (0.25)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    add_compile_options(parser)
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when both agree, 1 when they differ."""
    check_writable(args.json)
    path = resolve_weights(args.model)
    with open_model(path, args) as model:
        images = _images(args, model)
        other, graph = _other(args, path, model)
        try:
            result = compare(
                ProgramSubject(
                    f"{Path(path).name} ({model.target}, {model.info.precision})", model
                ),
                other,
                graph,
                images,
                layers=args.layers,
                confidence=args.conf,
            )
        finally:
            if isinstance(other, ProgramSubject):
                other.model.close()
    if args.json:
        write_json(args.json, {**result.to_dict(), "environment": environment()})
    _print(console(), result, every=args.all)  # last: its reader may go away
    return 0 if result.agrees else 1


def _other(
    args: argparse.Namespace, path: str | Path, model: Model
) -> tuple[Subject | None, Graph]:
    """What to compare with (None: the exact reference), and the weights that count as right."""
    info = model.info
    size = (info.height, info.width)
    known = resolve_weights(args.weights) if args.weights else path
    if args.against == "reference":
        return None, weights_of(model, known)
    if args.against in FRAMEWORKS:
        graph = weights_of(model, known)
        if args.against == "torch":
            return TorchSubject(graph, info.max_det), graph
        return OnnxRuntimeSubject(graph, info.max_det, args.threads), graph
    if args.against == "cpu":
        if Path(str(known)).suffix == ".ylm":
            raise UserError("--against cpu compiles the checkpoint", hint="give it as --weights")
        other = open_model(
            known, args, target="cpu", precision="fp32", imgsz=size, max_det=info.max_det
        )
        return ProgramSubject("cpu", other), weights_of(other, known)
    if not Path(args.against).is_file() and not is_name(args.against):
        raise UserError(
            "is neither a file nor something to compare with",
            where=f"--against {args.against}",
            hint=f"reference, cpu, {', '.join(FRAMEWORKS)}, a .ylm file or a checkpoint",
        )
    second = resolve_weights(args.against)
    other = open_model(second, args, imgsz=size, max_det=info.max_det)
    if (other.info.height, other.info.width) != size or other.info.scale != info.scale:
        raise UserError(
            f"is YOLO26{other.info.scale} at {other.info.height}x{other.info.width}; the model is "
            f"YOLO26{info.scale} at {info.height}x{info.width}",
            where=args.against,
        )
    return ProgramSubject(second.name, other), weights_of(other, second)


def _images(args: argparse.Namespace, model: Model) -> NDArray[np.uint8]:
    """What both run on, [N, H, W, 3]."""
    from yolomlir.vision.demo import demo_image
    from yolomlir.vision.letterbox import letterbox
    from yolomlir.vision.sources import SourceError, open_sources

    size = model.info.height, model.info.width
    if args.noise is not None:
        random = np.random.default_rng(args.noise)
        return random.integers(0, 256, (1, *size, 3), dtype=np.uint8)
    images = []
    for frame in open_sources(args.image or [demo_image()]):
        if isinstance(frame, SourceError):
            raise frame
        images.append(letterbox(frame.image, size)[0])
    if len(images) > model.info.batch and args.layers:
        images = images[: model.info.batch]
    return np.stack(images)


# ---- printing -----------------------------------------------------------------------------------


def _print(console: Console, result: Comparison, *, every: bool) -> None:
    console.print(f"{result.first} against {result.second}", highlight=False)
    if result.layers:
        _print_layers(console, result, every)
    verdict = "changed" if result.detections.changed else "unchanged"
    console.print(
        f"detections from {result.confidence} up: {verdict}; {result.detections}\n"
        f"  derived tolerances: {result.box_tolerance_px:.2g} px, {result.score_tolerance:.2g}",
        highlight=False,
    )
    console.print("agree" if result.agrees else "DIFFER", highlight=False)


def _print_layers(console: Console, result: Comparison, every: bool) -> None:
    outside = [layer for layer in result.layers if not layer.agrees]
    shown = list(result.layers)
    if not every:
        shown = outside[:_SHOWN] or sorted(shown, key=lambda x: -x.ratio)[:_SHOWN]
    rows = []
    for layer in shown:
        shape = "x".join(map(str, layer.shape))
        figures = (layer.difference, layer.worst, layer.tolerance, layer.ratio)
        rows.append([layer.name, shape, *(f"{figure:.3g}" for figure in figures)])
    print_table(console, _HEADER, rows, optional=("shape", "difference"))
    count = f"{len(result.layers)} layers compared"
    if result.culprit is None:
        console.print(f"{count}: all within their derived tolerances", highlight=False)
        return
    console.print(f"{count}: {len(outside)} leave their tolerances", highlight=False)
    _print_culprit(console, result.culprit)


def _print_culprit(console: Console, layer: LayerComparison) -> None:
    n, c, h, w = layer.index
    console.print(
        f"first: {layer.name} ({layer.kind})\n"
        f"  worst element: image {n}, channel {c}, row {h}, column {w}: {layer.first:.9g} and "
        f"{layer.second:.9g};\n"
        f"  the layer's own error there is {layer.worst:.3g}, its tolerance {layer.tolerance:.3g}\n"
        "  elements by own error / tolerance:",
        highlight=False,
    )
    most = max(layer.histogram)
    for low, high, count in zip(EDGES, EDGES[1:], layer.histogram, strict=False):
        bar = "#" * round(40 * count / most)
        console.print(f"  {low:>7g} to {high:<7g} {count:>9}  {bar}", highlight=False)


__all__ = ["add_parser", "run"]
