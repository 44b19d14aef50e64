"""MNN on the CPU, on a model that its own converter made of the ONNX one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import MNN
import MNN.expr
import MNN.nn
import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE
from yolomlir.evaluate.onnx_model import OUTPUT
from yolomlir.evaluate.peers.base import Array, CpuPeer, Problem


def make(problem: Problem) -> CpuPeer:
    """A module with float32 arithmetic (`precision: high`)."""
    source = Path(problem.folder) / "mnn.onnx"
    target = source.with_suffix(".mnn")
    source.write_bytes(problem.onnx())
    converter = Path(sys.executable).with_name("mnnconvert")
    command = (
        [str(converter)] if converter.exists() else [sys.executable, "-m", "MNN.tools.mnnconvert"]
    )
    command += ["-f", "ONNX", "--modelFile", str(source), "--MNNModel", str(target)]
    done = subprocess.run([*command, "--bizCode", "yolomlir"], capture_output=True, text=True)
    if not target.is_file():
        raise UserError(f"mnnconvert failed: {(done.stdout + done.stderr).strip()[-300:]}")
    settings = {"backend": "CPU", "precision": "high", "numThread": problem.threads}
    runtime = MNN.nn.create_runtime_manager((settings,))
    module = MNN.nn.load_module_from_file(
        str(target), [IMAGE], [OUTPUT], runtime_manager=runtime, shape_mutable=False
    )
    pixels = problem.float_image
    image = MNN.expr.const(pixels, list(pixels.shape), MNN.expr.data_format.NCHW)

    def run() -> Array:
        return np.array(module.forward([image])[0].read())

    return CpuPeer(run)
