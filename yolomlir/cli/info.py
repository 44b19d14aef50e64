"""`yolomlir info [FILE]`: what a checkpoint or artifact holds, and what this machine can run."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from yolomlir import __version__
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights
from yolomlir.runtime.artifact import SUFFIX, Artifact
from yolomlir.runtime.device import cuda_device


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "info",
        help="describe a model file, or this machine",
        description="Describe a checkpoint or .ylm file; without one, this machine.",
    )
    parser.add_argument("file", nargs="?", help="a .safetensors, .pt or .ylm file, or a model name")


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    if args.file is None:
        _show(_machine())
    elif Path(args.file).suffix == SUFFIX:
        _show(_artifact(Artifact.load(args.file)))
    else:
        _show(_checkpoint(resolve_weights(args.file)))
    return 0


def _show(rows: list[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table, highlight=False)


def _machine() -> list[tuple[str, str]]:
    rows = [("yolomlir", __version__)]
    for package in ("xtc-mlir-python-bindings", "llvmlite", "cuda-bindings", "nvidia-nvjitlink"):
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    device = cuda_device()
    if isinstance(device, str):
        rows.append(("GPU", f"none: {device}"))
    else:
        driver = ".".join(map(str, device.driver))
        rows.append(("GPU", f"{device.name}, target {device.target}, driver for CUDA {driver}"))
    return rows


def _checkpoint(path: Path) -> list[tuple[str, str]]:
    from yolomlir.frontend.names import class_names
    from yolomlir.frontend.yolo26 import infer_architecture

    checkpoint = load_checkpoint(path)
    architecture = infer_architecture(checkpoint)
    names = class_names(checkpoint, architecture.classes)
    parameters = sum(t.size for t in checkpoint.tensors.values())
    return [
        ("file", str(path)),
        ("model", f"yolo26{architecture.scale}, detection"),
        ("classes", f"{architecture.classes}: {_shorten(list(names))}"),
        ("batch norm", "folded" if architecture.fused else "not folded"),
        ("tensors", f"{len(checkpoint.tensors)}, {parameters:,} values"),
    ]


def _artifact(artifact: Artifact) -> list[tuple[str, str]]:
    info = artifact.info
    rows = [
        ("model", f"yolo26{info.scale}, detection, from {info.source or 'memory'}"),
        ("classes", f"{info.classes}: {_shorten(list(info.names))}"),
        ("input", f"{info.batch} x {info.height} x {info.width} x 3, {info.input_dtype}"),
        ("output", f"{info.batch} x {info.max_det} x 6"),
        ("precision", info.precision),
        ("compiled by", ", ".join(f"{k} {v}" for k, v in artifact.versions.items())),
    ]
    for target, program in artifact.programs.items():
        arena = program.plan.arena_bytes / 1e6
        steps = len(program.plan.steps)
        kernels = len(program.kernels)
        rows.append((target, f"{steps} launches of {kernels} kernels, arena {arena:.1f} MB"))
    return rows


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
