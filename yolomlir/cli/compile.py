"""`yolomlir compile WEIGHTS -o model.ylm`: one file that runs elsewhere, or the IR at a level."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from yolomlir.api import compile_artifact, native_target
from yolomlir.cli.options import add_compile_options
from yolomlir.cli.progress import progress_bar
from yolomlir.compiler import LEVELS, CompileOptions, emit
from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights
from yolomlir.target import TARGETS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a checkpoint to one .ylm file",
        description="Compile a checkpoint to one .ylm file, or print its IR.",
    )
    parser.add_argument("weights", help="a .safetensors or .pt file, or a name such as yolo26n")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the .ylm file to write")
    parser.add_argument(
        "--target",
        default="native",
        metavar="TARGET",
        help=f"native (default), {', '.join(TARGETS)}",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images at once (1)")
    parser.add_argument(
        "--input", choices=("uint8", "float32"), default="uint8", help="pixel type (uint8)"
    )
    parser.add_argument(
        "-O", dest="level", type=int, choices=(0, 1, 2), default=2, help="optimisation level (2)"
    )
    parser.add_argument("--emit", choices=LEVELS, help="print the IR at this level instead")
    parser.add_argument(
        "--plot-memory", type=Path, metavar="FILE", help="draw the arena over time (.png, .svg)"
    )
    add_compile_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    height, width = args.imgsz
    options = CompileOptions(
        target=native_target() if args.target == "native" else args.target,
        precision=args.precision,
        height=height,
        width=width,
        batch=args.batch,
        max_det=args.max_det,
        input_dtype=args.input,
        level=args.level,
    ).resolved()
    weights = resolve_weights(args.weights)
    if args.emit:
        _write_text(args.output, emit(load_checkpoint(weights), options, args.emit))
        return 0
    if args.output is None and args.plot_memory is None:
        raise UserError("nothing to do", hint="give -o FILE, --emit LEVEL or --plot-memory FILE")
    with progress_bar() as progress:
        artifact = compile_artifact(weights, options, cache=not args.no_cache, progress=progress)
    if args.plot_memory:
        from yolomlir.codegen.memory_plot import plot_memory

        plot_memory(artifact.programs[options.target].plan, args.plot_memory)
    if args.output:
        artifact.save(args.output)
        size = args.output.stat().st_size / 1e6
        Console().print(
            f"{args.output}: {options.target}, {options.precision}, {height}x{width}, "
            f"batch {options.batch}, {size:.1f} MB",
            highlight=False,
        )
    return 0


def _write_text(output: Path | None, text: str) -> None:
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=output) from error
