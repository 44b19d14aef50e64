"""OpenVINO on the CPU."""

from __future__ import annotations

import io

import numpy as np
import openvino

from yolomlir.evaluate.peers.base import CpuPeer, Problem


def make(problem: Problem) -> CpuPeer:
    """A model compiled for latency, in float32."""
    core = openvino.Core()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": problem.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = core.compile_model(core.read_model(io.BytesIO(problem.onnx())), "CPU", settings)
    request = model.create_infer_request()
    image = problem.float_image
    return CpuPeer(lambda: np.asarray(request.infer([image], share_inputs=True)[0]))
