"""Every convolution of a model beside cuDNN's fastest algorithm for it, measured in one run.

`python -m yolomlir.tools.conv_against_cudnn WEIGHTS|seeded:n [--precision tf32] [--json FILE]`

Ours has bias, SiLU and residual in the kernel; cuDNN's is the bare convolution, the faster of NCHW
and channels-last, as PyTorch's benchmark mode picks it. Both are timed as a launch of a chain of 20
in a CUDA graph, warm, the median of 15 replays. Needs a CUDA GPU and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.compiler import PRECISIONS, CompileOptions, compile_checkpoint
from yolomlir.diagnostics import UserError, YolomlirError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import resolve_weights
from yolomlir.runtime.artifact import Program

CHAIN = 20
REPLAYS = 15


@dataclass(frozen=True)
class Convolution:
    """One convolution op: sizes in elements, padding top, left, bottom, right."""

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    groups: int


@dataclass(frozen=True)
class Row:
    """One kernel: launches in the model, microseconds a launch of ours and of cuDNN's fastest."""

    kernel: str
    launches: int
    ours_us: float
    cudnn_us: float


def convolutions(text: str) -> dict[str, Convolution]:
    """The convolution of each dispatch function of an optimised module, by the function's name."""
    found = {}
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        for view in module.body.operations:
            ops = list(yolo.ops_in(view.operation, "yolo.conv2d"))
            if "yolo.family" not in view.operation.attributes or len(ops) != 1:
                continue
            if yolo.string(view.operation, "yolo.family") in ("conv2d", "depthwise"):
                found[yolo.string(view.operation, "sym_name")] = _convolution(ops[0])
    return found


def _convolution(op: ir.Operation) -> Convolution:
    batch, channels, height, width = yolo.shape_of(op.operands[0])
    out, _, kernel_h, kernel_w = yolo.shape_of(op.operands[1])
    stride_h, stride_w = yolo.integers(op, "strides")
    top, left, bottom, right = yolo.integers(op, "padding")
    return Convolution(
        batch, channels, height, width, out, (kernel_h, kernel_w), (stride_h, stride_w),
        (top, left, bottom, right), yolo.integer(op, "groups"),
    )  # fmt: skip


def measure(program: Program, precision: str) -> list[Row]:
    """A row a convolution kernel of the program, slowest relative to cuDNN first."""
    from yolomlir.runtime.cuda import CudaExecutor

    shapes = convolutions(program.ir)
    rows = []
    rng = np.random.default_rng(0)
    view = program.plan.inputs["image"]
    n, channels, height, width = view.shape
    image = rng.integers(0, 256, (n, height, width, channels), dtype=np.uint8)
    with CudaExecutor(program) as executor:
        executor.run({"image": image})
        for name, shape in shapes.items():
            steps = [i for i, s in enumerate(program.plan.steps) if s.kernel == name]
            if not steps:
                continue
            ours = statistics.median(executor.time_step(i, CHAIN, REPLAYS) for i in steps)
            rows.append(Row(name, len(steps), ours, cudnn_us(shape, precision)))
    return sorted(rows, key=lambda row: row.cudnn_us / row.ours_us)


def cudnn_us(shape: Convolution, precision: str) -> float:
    """Microseconds of cuDNN's fastest algorithm, the better of NCHW and channels-last.

    At `fp16` its input, weight and result are float16.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("torch is not installed", hint="pip install torch") from error
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    top, left, bottom, right = shape.padding
    if (top, left) != (bottom, right):
        raise UserError(f"padding {shape.padding} is not symmetric; cuDNN has no such convolution")
    per_group = shape.channels // shape.groups
    x, w = (
        torch.randn(size, device="cuda", dtype=torch.half if precision == "fp16" else torch.float)
        for size in (
            (shape.batch, shape.channels, shape.height, shape.width),
            (shape.out_channels, per_group, *shape.kernel),
        )
    )
    times = []
    for layout in (torch.contiguous_format, torch.channels_last):
        a, b = x.to(memory_format=layout), w.to(memory_format=layout)

        def run(a: Any = a, b: Any = b) -> None:
            torch.nn.functional.conv2d(a, b, None, shape.strides, (top, left), 1, shape.groups)

        times.append(_graph_us(torch, run))
    return min(times)


def _graph_us(torch: Any, run: Callable[[], None]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CHAIN):
            run()
    samples = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / CHAIN)
    return float(statistics.median(samples[3:]))


def report(rows: list[Row]) -> str:
    """A table, the sums over launches, and how many are slower than cuDNN."""
    lines = [f"{'kernel':64} {'launches':>8} {'ours us':>8} {'cuDNN us':>9} {'ratio':>6}"]
    lines += [
        f"{r.kernel[:64]:64} {r.launches:8} {r.ours_us:8.2f} {r.cudnn_us:9.2f} "
        f"{r.cudnn_us / r.ours_us:6.2f}"
        for r in rows
    ]
    ours = sum(r.ours_us * r.launches for r in rows)
    cudnn = sum(r.cudnn_us * r.launches for r in rows)
    slower = sum(r.ours_us > r.cudnn_us for r in rows)
    lines.append(f"sum over launches: ours {ours:.1f} us, cuDNN {cudnn:.1f} us")
    lines.append(f"slower than cuDNN: {slower} of {len(rows)} kernels")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("weights", help="a checkpoint, or seeded:n for untrained weights")
    parser.add_argument("--precision", choices=PRECISIONS["gpu"], default="tf32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    args = parser.parse_args(argv)
    try:
        from yolomlir.runtime.cuda_driver import require_device

        device = require_device()
        if device.target is None:
            raise UserError(f"{device.name} is no GPU that yolomlir targets")
        checkpoint = load_checkpoint(resolve_weights(args.weights))
        options = CompileOptions(target=device.target, precision=args.precision, level=2)
        artifact = compile_checkpoint(checkpoint, options)
        rows = measure(artifact.programs[device.target], args.precision)
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    except YolomlirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{device.name}, {args.precision}")
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
