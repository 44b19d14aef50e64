"""TensorRT and TensorRT-RTX: an engine built from the ONNX model, under a CUDA graph."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE
from yolomlir.evaluate.onnx_model import OUTPUT
from yolomlir.evaluate.peers.base import COLUMNS, Array, Problem, timed
from yolomlir.runtime.cuda_driver import Context, DeviceMemory, PinnedArray, call, driver

_WORKSPACE_BYTES = 4 << 30
_CAPTURE_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def make(problem: Problem, module: str = "tensorrt") -> TensorRtPeer:
    """Build the engine with the builder's highest effort; TF32, float16 as the problem says."""
    return TensorRtPeer(problem, importlib.import_module(module))


def _engine(problem: Problem, rt: Any) -> Any:
    logger = rt.Logger(rt.Logger.ERROR)
    builder = rt.Builder(logger)
    network = builder.create_network(0)
    parser = rt.OnnxParser(network, logger)
    if not parser.parse(problem.onnx()):
        errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
        raise UserError(f"TensorRT cannot parse the model: {'; '.join(errors)[:300]}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(rt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    if hasattr(config, "builder_optimization_level"):
        config.builder_optimization_level = 5
    if hasattr(rt.BuilderFlag, "TF32"):
        flag = config.clear_flag if problem.precision == "fp32" else config.set_flag
        flag(rt.BuilderFlag.TF32)
    if problem.precision == "fp16" and _has_half(rt):
        config.set_flag(rt.BuilderFlag.FP16)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError("TensorRT cannot build an engine")
    return rt.Runtime(logger).deserialize_cuda_engine(plan)


def _has_half(rt: Any) -> bool:
    """Whether the builder may choose float16 of itself, layer by layer."""
    return hasattr(rt.BuilderFlag, "FP16")


class TensorRtPeer:
    """Pinned host memory to and from fixed GPU buffers; enqueued as a graph where it can be."""

    def __init__(self, problem: Problem, rt: Any) -> None:
        half = problem.precision == "fp16"
        self.precision = "tf32" if half and not _has_half(rt) else problem.precision
        self._context = Context()
        self._context.make_current()
        self._engine = _engine(problem, rt)
        self._execution = self._engine.create_execution_context()
        image = problem.float_image
        rows = (problem.batch, problem.max_det, 6)
        self._in = PinnedArray(image.shape, "float32")
        self._in.array[...] = image
        self._out = PinnedArray(rows, "float32")
        self._device_in = DeviceMemory(self._in.array.nbytes, "TensorRT's input")
        self._device_out = DeviceMemory(self._out.array.nbytes, "TensorRT's output")
        self._execution.set_tensor_address(IMAGE, self._device_in.address)
        self._execution.set_tensor_address(OUTPUT, self._device_out.address)
        self._stream = call(driver.cuStreamCreate, 1)
        self._events = [call(driver.cuEventCreate, 0) for _ in range(4)]
        self._graph = self._captured()
        self.notes = "CUDA graph" if self._graph is not None else "without a CUDA graph"

    def _captured(self) -> Any:
        """The engine as a graph; None where it cannot be captured."""
        self._execution.execute_async_v3(int(self._stream))
        call(driver.cuStreamSynchronize, self._stream)
        call(driver.cuStreamBeginCapture, self._stream, _CAPTURE_THREAD_LOCAL)
        done = self._execution.execute_async_v3(int(self._stream))
        status, graph = driver.cuStreamEndCapture(self._stream)
        if not done or status != driver.CUresult.CUDA_SUCCESS:
            return None
        return call(driver.cuGraphInstantiate, graph, 0)

    def _copy_in(self) -> None:
        address = driver.CUdeviceptr(self._device_in.address)
        size = self._in.array.nbytes
        call(driver.cuMemcpyHtoDAsync, address, self._in.address, size, self._stream)

    def _network(self) -> None:
        if self._graph is not None:
            call(driver.cuGraphLaunch, self._graph, self._stream)
            return
        self._execution.execute_async_v3(int(self._stream))

    def _copy_out(self) -> None:
        address = driver.CUdeviceptr(self._device_out.address)
        size = self._out.array.nbytes
        call(driver.cuMemcpyDtoHAsync, self._out.address, address, size, self._stream)

    def run(self) -> Array:
        """One inference from host memory to host memory."""
        self._copy_in()
        self._network()
        self._copy_out()
        call(driver.cuStreamSynchronize, self._stream)
        return np.array(self._out.array)

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The wall clock; the parts by CUDA events, in inferences of their own."""
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        columns["wall"] = timed(self.run, seconds / 2)
        timed(lambda: self._parts(columns), seconds / 2)
        return columns

    def _parts(self, columns: dict[str, list[float]]) -> None:
        start = time.perf_counter_ns()
        parts = (self._copy_in, self._network, self._copy_out)
        for event, part in zip(self._events, parts, strict=False):
            call(driver.cuEventRecord, event, self._stream)
            part()
        call(driver.cuEventRecord, self._events[3], self._stream)
        columns["enqueue"].append((time.perf_counter_ns() - start) / 1e6)
        call(driver.cuStreamSynchronize, self._stream)
        for name, first, last in zip(
            ("h2d", "gpu", "d2h"), self._events, self._events[1:], strict=False
        ):
            columns[name].append(float(call(driver.cuEventElapsedTime, first, last)))

    def close(self) -> None:
        """Free the buffers; the engine goes with the process."""
        self._device_in.free()
        self._device_out.free()
        self._in.free()
        self._out.free()
        self._context.release()
