"""`yolomlir compile WEIGHTS -o model.ylm`: one file that runs elsewhere, or the IR at a level."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from yolomlir.cli.options import add_compile_options, add_level_option, whole
from yolomlir.cli.progress import console, progress_bar
from yolomlir.compiler import LEVELS, CompileOptions, emit, merge, recompile
from yolomlir.diagnostics import UserError
from yolomlir.progress import ProgressCallback
from yolomlir.runtime.artifact import SUFFIX, Artifact
from yolomlir.target import TARGETS, target_named

_STANDARD_OUTPUT = Path("-")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a checkpoint to one .ylm file",
        description="Compile a checkpoint to one .ylm file, or print its IR. A .ylm file can be "
        "compiled again for another GPU.",
    )
    parser.add_argument(
        "weights", help="a .safetensors, .pt or .ylm file, a name such as yolo26n, or seeded:n"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file to write; - prints IR"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="TARGET",
        help=f"native (default), {', '.join(TARGETS)}; several times for one file for all of them",
    )
    parser.add_argument(
        "--batch", type=whole, default=1, metavar="N", help="images at once (default: 1)"
    )
    parser.add_argument(
        "--input", choices=("uint8", "float32"), default="uint8", help="pixel type (default: uint8)"
    )
    add_level_option(parser)
    parser.add_argument("--emit", choices=LEVELS, help="print the IR at this level instead")
    parser.add_argument(
        "--plot-memory", type=Path, metavar="FILE", help="draw the arena over time (.png, .svg)"
    )
    add_compile_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    targets = _targets(args.target or ["native"])
    if not (args.emit or args.output or args.plot_memory):
        raise UserError("nothing to do", hint="give -o FILE, --emit LEVEL or --plot-memory FILE")
    if args.emit and len(targets) > 1:
        message = f"--emit {args.emit} prints one target's IR; got {', '.join(targets)}"
        raise UserError(message, hint="give one --target")
    options = [_options(args, target) for target in targets]
    from yolomlir.evaluate.outputs import check_picture, check_writable, write_text

    if args.output == _STANDARD_OUTPUT:
        if not args.emit:
            raise UserError("an artifact goes into a file", hint="give -o FILE.ylm")
        args.output = None
    _check_output(args)
    check_writable(args.output)
    check_picture(args.plot_memory)
    if args.emit:
        text = _emit(args, options[0])
        if args.output is None:
            print(text)
        else:
            write_text(args.output, text + "\n")
        return 0
    with progress_bar() as progress:
        artifact = _artifact(args, options, progress)
    if args.plot_memory:
        from yolomlir.codegen.memory_plot import plot_memory

        plot_memory(next(iter(artifact.programs.values())).plan, args.plot_memory)
    if args.output:
        artifact.save(args.output)
        _summarise(artifact, args.output)
    return 0


def _check_output(args: argparse.Namespace) -> None:
    """Refuse a name by which the file would not be found to be compiled, or lost its source."""
    if args.output is None:
        return
    if not args.emit and args.output.suffix != SUFFIX:
        message = f"a compiled model's name ends in {SUFFIX}"
        raise UserError(message, where=args.output, hint=f"-o {args.output.with_suffix(SUFFIX)}")
    source = Path(args.weights)
    if source.suffix == SUFFIX or not (source.exists() and args.output.exists()):
        return
    if source.samefile(args.output):
        raise UserError("is the checkpoint itself", where=args.output, hint="give another name")


def _targets(given: list[str]) -> list[str]:
    """The targets, each once, in the order given. Raises UserError for an unknown one."""
    from yolomlir.api import native_target

    names = [name for text in given for name in text.split(",")]
    found = [native_target() if n == "native" else target_named(n).name for n in names]
    return list(dict.fromkeys(found))


def _options(args: argparse.Namespace, target: str) -> CompileOptions:
    options = CompileOptions(
        target=target,
        precision=args.precision,
        batch=args.batch,
        input_dtype=args.input,
        level=args.level,
    )
    if args.imgsz is not None:
        options = replace(options, height=args.imgsz[0], width=args.imgsz[1])
    if args.max_det is not None:
        options = replace(options, max_det=args.max_det)
    return options.resolved()


def _artifact(
    args: argparse.Namespace, options: list[CompileOptions], progress: ProgressCallback
) -> Artifact:
    from yolomlir.api import compile_artifact
    from yolomlir.frontend.download import resolve_weights

    path = resolve_weights(args.weights)
    if path.suffix != SUFFIX:
        cache = not args.no_cache
        return merge([compile_artifact(path, o, cache=cache, progress=progress) for o in options])
    _refuse_changes(args, path)
    whole_file = Artifact.load(path)
    return merge([recompile(whole_file, o.target, progress=progress) for o in options])


def _emit(args: argparse.Namespace, options: CompileOptions) -> str:
    from yolomlir.frontend.checkpoint import load_checkpoint
    from yolomlir.frontend.download import resolve_weights

    path = resolve_weights(args.weights)
    if path.suffix != SUFFIX:
        return emit(load_checkpoint(path), options, args.emit)
    _refuse_changes(args, path)
    programs = Artifact.load(path).programs
    if args.emit != "optimized" or (not args.target and len(programs) > 1):
        raise UserError(
            f"holds the optimised IR of {', '.join(programs)}",
            where=path,
            hint="--emit optimized --target TARGET prints it",
        )
    if args.target and options.target not in programs:
        raise UserError(f"has no program for {options.target}", where=path)
    name = options.target if args.target else next(iter(programs))
    return programs[name].ir


def _refuse_changes(args: argparse.Namespace, path: Path) -> None:
    """A compiled file keeps its shape: only the target can change."""
    fixed = {
        "--imgsz": args.imgsz,
        "--max-det": args.max_det,
        "--precision": args.precision,
        "--batch": args.batch if args.batch != 1 else None,
        "--input": args.input if args.input != "uint8" else None,
        "-O": args.level,
    }
    for option, value in fixed.items():
        if value is not None:
            raise UserError(
                f"is compiled already: {option} can no longer change",
                where=path,
                hint="compile the checkpoint with it",
            )


def _summarise(artifact: Artifact, path: Path) -> None:
    info = artifact.info
    precisions = {str(p.metadata.get("precision")) for p in artifact.programs.values()}
    console().print(
        f"{path}: {', '.join(artifact.programs)}, {' and '.join(sorted(precisions))}, "
        f"{info.height}x{info.width}, batch {info.batch}, {path.stat().st_size / 1e6:.1f} MB",
        markup=False,
        soft_wrap=True,
    )
