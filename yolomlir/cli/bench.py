"""`yolomlir bench MODEL --against …`: our programs beside other engines, checked, then timed."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from yolomlir.api import check_artifact, choose_program, compile_artifact, native_target
from yolomlir.cli.options import add_compile_options, add_device_option, device_target, whole
from yolomlir.cli.progress import console, progress_bar
from yolomlir.compiler import PRECISIONS, CompileOptions
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.bench_report import markdown, plot, print_benchmark
from yolomlir.evaluate.benchmark import BenchmarkResult, Candidate, benchmark, candidates_named
from yolomlir.evaluate.graph import Graph, graph_of
from yolomlir.evaluate.outputs import check_picture, check_writable, write_json, write_text
from yolomlir.evaluate.peers.base import Problem
from yolomlir.evaluate.peers.worker import OURS
from yolomlir.evaluate.program_graph import graph_of_program
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights
from yolomlir.runtime.artifact import SUFFIX, Artifact, ModelInfo
from yolomlir.settings import settings
from yolomlir.target import target_named
from yolomlir.vision.demo import demo_image
from yolomlir.vision.letterbox import letterbox
from yolomlir.vision.sources import SourceError, open_sources


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="time a model beside other engines",
        description="Time a model beside other engines, each in a process of its own, on the same "
        "input, checked against a float64 reference, in interleaved rounds.",
    )
    parser.add_argument(
        "model", help="a .safetensors, .pt or .ylm file, or a name: yolo26n, seeded:n"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=["all"],
        metavar="ENGINE",
        help="all (default), none, torch, torch-eager, torchscript, torch-compile, "
        "torch-channels-last, onnxruntime, onnxruntime-cuda, tensorrt, tensorrt-rtx, openvino, "
        "mnn, ncnn",
    )
    parser.add_argument("--image", metavar="FILE", help="the input (default: a packaged photo)")
    parser.add_argument("--batch", type=whole, metavar="N", help="images at once (1)")
    parser.add_argument("--rounds", type=whole, default=10, metavar="N", help="rounds (10)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="S", help="an engine's turn in a round (0.5)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", metavar="FILE", help="write the table")
    parser.add_argument(
        "--onnx", metavar="FILE", help="write the ONNX model that other engines are given"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the times (.png, .svg)")
    add_compile_options(parser)
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; 0, or 1 when an engine failed or gave other detections."""
    if not 0 < args.seconds <= 600:
        raise UserError(f"--seconds {args.seconds}: expected more than 0 and at most 600")
    check_writable(args.json, args.markdown, args.onnx)
    check_picture(args.plot)
    others = [] if args.against == ["none"] else args.against
    candidates_named(others, "cpu", ["fp32"])  # unknown names are refused before the compile
    ours, graph, artifact = _ours(args)
    if args.onnx:
        _write_onnx(args.onnx, graph, artifact.info)
    info, (target,) = artifact.info, list(artifact.programs)[:1]
    device = "cpu" if target == "cpu" else "cuda"
    problem = Problem(
        folder="",
        height=info.height,
        width=info.width,
        batch=info.batch,
        max_det=info.max_det,
        threads=args.threads or settings().num_threads,
        device=device,
        precision=info.precision,
    )
    with progress_bar() as progress:
        result = benchmark(
            [*ours, *candidates_named(others, device, [c.precision for c in ours])],
            problem,
            graph,
            _image(args.image, (info.height, info.width), info.batch),
            rounds=args.rounds,
            seconds=args.seconds,
            progress=progress,
        )
    _report(args, result)
    return 1 if any(e.state in ("failed", "wrong") for e in result.engines) else 0


def _report(args: argparse.Namespace, result: BenchmarkResult) -> None:
    if args.json:
        write_json(args.json, result.to_dict())
    if args.markdown:
        write_text(args.markdown, markdown(result))
    if args.plot:
        plot(result, args.plot)
    print_benchmark(console(), result)  # last: its reader may go away


def _write_onnx(path: str, graph: Graph, info: ModelInfo) -> None:
    from yolomlir.evaluate.onnx_model import build_onnx

    model = build_onnx(
        graph, batch=info.batch, height=info.height, width=info.width, max_det=info.max_det
    )
    try:
        Path(path).write_bytes(model)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error


def _ours(args: argparse.Namespace) -> tuple[list[Candidate], Graph, Artifact]:
    """The model compiled for every precision of its target, the network with weights, and one."""
    path = resolve_weights(args.model)
    if Path(path).suffix == SUFFIX:
        artifact = Artifact.load(path)
        wanted = device_target(args.device)
        name = choose_program(artifact, None if wanted == "native" else wanted, path)
        program = artifact.programs[name]
        precision = str(program.metadata.get("precision", artifact.info.precision))
        info = replace(artifact.info, precision=precision)
        given = (args.imgsz, args.precision, args.batch, args.max_det, None)
        check_artifact(info, Path(path), *given)
        artifact = replace(artifact, info=info, programs={name: program})
        ours = Candidate(OURS, artifact.info.precision, artifact)
        return [ours], graph_of_program(program, artifact.info), artifact
    checkpoint = load_checkpoint(path)
    target = device_target(args.device)
    target = native_target() if target == "native" else target
    precisions = (args.precision,) if args.precision else PRECISIONS[target_named(target).kind]
    artifacts = {p: _compile(path, args, target, p) for p in precisions}
    notes = "" if args.no_cache else "built with what the caches had; --no-cache builds anew"
    candidates = [Candidate(OURS, p, a, seconds, notes) for p, (a, seconds) in artifacts.items()]
    return candidates, graph_of(checkpoint), artifacts[precisions[0]][0]


def _compile(
    path: Any, args: argparse.Namespace, target: str, precision: str
) -> tuple[Artifact, float]:
    """What is compiled, and in how many seconds."""
    height, width = args.imgsz or (640, 640)
    options = CompileOptions(
        target=target,
        precision=precision,
        height=height,
        width=width,
        batch=args.batch or CompileOptions.batch,
        max_det=args.max_det or CompileOptions.max_det,
    ).resolved()
    with progress_bar() as progress:
        start = time.perf_counter()
        artifact = compile_artifact(path, options, cache=not args.no_cache, progress=progress)
        return artifact, time.perf_counter() - start


def _image(source: str | None, size: tuple[int, int], batch: int) -> np.ndarray[Any, Any]:
    """The input, [N, H, W, 3]: one picture, as often as there are images in a batch."""
    frame = next(iter(open_sources([source or demo_image()])))
    if isinstance(frame, SourceError):
        raise frame
    return np.repeat(letterbox(frame.image, size)[0][None], batch, axis=0)
