"""PyTorch: eager, TorchScript, torch.compile, and channels-last (on CUDA under a CUDA graph)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from yolomlir.evaluate.peers.base import COLUMNS, Array, CpuPeer, Problem, timed
from yolomlir.evaluate.torch_model import build_torch, in_half

_WARM_UP = 10


def make(problem: Problem, mode: str) -> CpuPeer:
    """The module in one of the modes `eager`, `script`, `compile`, `channels-last`.

    At `fp16` everything but decoding and selection is float16, the copy in and out float32.
    """
    torch.set_num_threads(problem.threads)
    tf32 = problem.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    module = build_torch(
        problem.graph, height=problem.height, width=problem.width, max_det=problem.max_det
    )
    if problem.precision == "fp16":
        module = in_half(module)
    image = torch.from_numpy(problem.float_image)
    on_cuda = problem.device == "cuda"
    if on_cuda:
        module = module.cuda()
    if mode == "channels-last":
        module = module.to(memory_format=torch.channels_last)
    example = image.cuda() if on_cuda else image
    if mode == "channels-last":
        example = example.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, notes = _prepared(module, mode, example, on_cuda)
    if not on_cuda:
        return CpuPeer(lambda: _call(function, example).numpy(), problem.precision, notes)
    return _CudaPeer(function, image, example, problem, notes)


def _call(function: Callable[[Any], Any], image: Any) -> Any:
    with torch.inference_mode():
        return function(image)


def _prepared(
    module: Any, mode: str, example: Any, on_cuda: bool
) -> tuple[Callable[[Any], Any], str]:
    """The function to time, warm, and what to say of it."""
    function: Callable[[Any], Any] = module
    notes = ""
    if mode == "script":
        function = torch.jit.freeze(torch.jit.trace(module, example))
    if mode == "compile":
        notes = "reduce-overhead" if on_cuda else "default mode"
        function = torch.compile(module, mode="reduce-overhead" if on_cuda else "default")
    for _ in range(_WARM_UP if on_cuda else 2):
        function(example)
    if mode == "channels-last" and on_cuda:
        return _captured(function, example), "CUDA graph"
    return function, notes


def _captured(function: Callable[[Any], Any], example: Any) -> Callable[[Any], Any]:
    """The function as a CUDA graph on its static input."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(example)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(example)

    def replay(_: Any) -> Any:
        graph.replay()
        return result

    return replay


class _CudaPeer(CpuPeer):
    """Pinned host memory to and from a static input on the GPU, events around each part."""

    def __init__(
        self, function: Any, image: Any, example: Any, problem: Problem, notes: str
    ) -> None:
        super().__init__(self._once, precision=problem.precision, notes=notes)
        self._function = function
        self._host = image.contiguous(
            memory_format=torch.channels_last
            if example.is_contiguous(memory_format=torch.channels_last)
            and not example.is_contiguous()
            else torch.contiguous_format
        ).pin_memory()
        self._device = example
        self._rows = torch.empty((problem.batch, problem.max_det, 6)).pin_memory()

    def _once(self) -> Array:
        with torch.inference_mode():
            self._device.copy_(self._host, non_blocking=True)
            self._rows.copy_(self._function(self._device), non_blocking=True)
            torch.cuda.synchronize()
        return np.array(self._rows)

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The wall clock; the parts by CUDA events, in inferences of their own."""
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        columns["wall"] = timed(self._once, seconds / 2)
        timed(lambda: self._parts(columns), seconds / 2)
        return columns

    def _parts(self, columns: dict[str, list[float]]) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.inference_mode():
            start = time.perf_counter_ns()
            events[0].record()
            self._device.copy_(self._host, non_blocking=True)
            events[1].record()
            rows = self._function(self._device)
            events[2].record()
            self._rows.copy_(rows, non_blocking=True)
            events[3].record()
            columns["enqueue"].append((time.perf_counter_ns() - start) / 1e6)
            torch.cuda.synchronize()
        for name, first, last in zip(("h2d", "gpu", "d2h"), events, events[1:], strict=False):
            columns[name].append(first.elapsed_time(last))
