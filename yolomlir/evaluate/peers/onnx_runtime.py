"""ONNX Runtime, on the CPU or on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE
from yolomlir.evaluate.peers.base import Array, CpuPeer, Problem, timed

_CUDA = {
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "cudnn_conv_use_max_workspace": "1",
    "do_copy_in_default_stream": "1",
}


def make(problem: Problem) -> CpuPeer:
    """A session with all graph optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = problem.threads
    if problem.device == "cuda":
        return _on_cuda(problem, options)
    session = onnxruntime.InferenceSession(
        problem.onnx(), options, providers=["CPUExecutionProvider"]
    )
    image = problem.float_image
    return CpuPeer(lambda: session.run(None, {IMAGE: image})[0])


def _on_cuda(problem: Problem, options: Any) -> CpuPeer:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise UserError("this onnxruntime has no CUDA", hint="pip install onnxruntime-gpu")
    tf32 = "0" if problem.precision == "fp32" else "1"
    providers = [("CUDAExecutionProvider", {**_CUDA, "use_tf32": tf32}), "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(problem.onnx(), options, providers=providers)
    if "CUDAExecutionProvider" not in session.get_providers():
        raise UserError("ONNX Runtime fell back to the CPU", hint="is its CUDA version installed?")
    return _BoundPeer(session, problem)


class _BoundPeer(CpuPeer):
    """Input and output stay bound to GPU memory; copies are timed apart."""

    def __init__(self, session: Any, problem: Problem) -> None:
        precision = "fp32" if problem.precision == "fp32" else "tf32"  # the model is not float16
        super().__init__(self._once, precision=precision)
        self._image = problem.float_image
        self._session = session
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        rows = np.zeros((problem.batch, problem.max_det, 6), np.float32)
        self._input = value(self._image, "cuda", 0)
        self._output = value(rows, "cuda", 0)
        self._binding = session.io_binding()
        self._binding.bind_ortvalue_input(IMAGE, self._input)
        self._binding.bind_ortvalue_output(session.get_outputs()[0].name, self._output)

    def _once(self) -> Array:
        self._input.update_inplace(self._image)
        self._network()
        return np.asarray(self._output.numpy())

    def _network(self) -> None:
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The parts by the wall clock, for the API gives no events: each waits for its end."""
        return {
            "wall": timed(self._once, seconds / 2),
            "h2d": timed(lambda: self._input.update_inplace(self._image), seconds / 8),
            "gpu": timed(self._network, seconds / 4),
            "d2h": timed(self._output.numpy, seconds / 8),
        }
