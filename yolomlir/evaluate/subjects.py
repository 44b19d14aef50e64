"""What can be compared: our programs, other runtimes, the exact reference; each run is a `Run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from yolomlir.api import Model
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE, Graph, graph_of
from yolomlir.evaluate.program_graph import graph_of_program
from yolomlir.evaluate.step_layers import split_results, step_layers
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.runtime.artifact import SUFFIX

Array = NDArray[Any]
FRAMEWORKS = ("onnxruntime", "torch")
"""Other runtimes whose layers can be read."""


@dataclass(frozen=True)
class Run:
    """One run on some images.

    precision: of products; None for the exact reference, which has no rounding. rows: [N, rows, 6].
    layers: values by layer, [N, C, H, W]; empty where they were not asked for.
    """

    name: str
    precision: str | None
    rows: Array
    layers: Mapping[str, Array]


class Subject(Protocol):
    """Something that runs the network."""

    def run(self, images: NDArray[np.uint8], layers: bool) -> Run:
        """Run it on [N, H, W, 3] RGB pixels. layers: keep every layer's value."""


@dataclass(frozen=True)
class ProgramSubject:
    """A compiled model, on whatever it was compiled for."""

    name: str
    model: Model

    def run(self, images: NDArray[np.uint8], layers: bool) -> Run:
        """Run it; with layers a kernel at a time."""
        info = self.model.info
        batch = images if info.input_dtype == "uint8" else images.astype(np.float32) / 255
        if not layers:
            return Run(self.name, info.precision, self.model(batch), {})
        program = self.model.artifact.programs[self.model.target]
        graph = program_structure(self.model)
        values: dict[str, Array] = {}
        rows = np.empty(0)
        known = step_layers(program, graph)
        for (_, results), described in zip(self.model.trace(batch), known, strict=True):
            values |= split_results(described, results, graph)
            rows = results[0]
        kept = {name: value[: len(images)] for name, value in values.items()}
        return Run(self.name, info.precision, rows[: len(images)], kept)


@dataclass(frozen=True)
class OnnxRuntimeSubject:
    """ONNX Runtime on the CPU, on the same weights."""

    graph: Graph
    max_det: int
    threads: int | None = None
    name: str = "onnxruntime"

    def run(self, images: NDArray[np.uint8], layers: bool) -> Run:
        """Run it; layers become outputs of the model."""
        from yolomlir.evaluate.onnx_model import build_onnx

        try:
            import onnxruntime
        except ImportError as error:
            raise UserError(
                "ONNX Runtime is not installed", hint="pip install 'yolomlir[bench]'"
            ) from error
        n, height, width, _ = images.shape
        model = build_onnx(
            self.graph, batch=n, height=height, width=width, max_det=self.max_det, layers=layers
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads or 0
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        values = dict(zip(names, session.run(None, {IMAGE: float_images(images)}), strict=True))
        return Run(self.name, "fp32", values.pop("output0"), values)


@dataclass(frozen=True)
class TorchSubject:
    """PyTorch in eager mode on the CPU, on the same weights."""

    graph: Graph
    max_det: int
    name: str = "torch"

    def run(self, images: NDArray[np.uint8], layers: bool) -> Run:
        """Run it; with layers node by node."""
        try:
            import torch
        except ImportError as error:
            raise UserError("PyTorch is not installed", hint="pip install torch") from error
        from yolomlir.evaluate.torch_model import build_torch, run_layers

        height, width = images.shape[1:3]
        module = build_torch(self.graph, height=height, width=width, max_det=self.max_det)
        rows, values = run_layers(module, torch.from_numpy(float_images(images)))
        return Run(self.name, "fp32", rows, values if layers else {})


def float_images(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[N, H, W, 3] pixels as [N, 3, H, W] in 0..1, what other runtimes are given."""
    pixels = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32)
    return np.asarray(pixels / 255, np.float32)


def program_structure(model: Model) -> Graph:
    """The network of a compiled model, without weights."""
    from yolomlir.evaluate.graph import network_graph

    return network_graph(model.info.scale, model.info.classes)


def weights_of(model: Model, path: str | Path | None) -> Graph:
    """The network with weights: of a checkpoint where there is one, else of the compiled model."""
    if path is not None and Path(path).suffix != SUFFIX:
        return graph_of(load_checkpoint(path))
    return graph_of_program(model.artifact.programs[model.target], model.info)


def checkpoint_or_none(path: str | Path) -> Checkpoint | None:
    """The checkpoint at a path, or None for a compiled model."""
    return None if Path(path).suffix == SUFFIX else load_checkpoint(path)
