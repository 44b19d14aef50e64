"""What an engine has to offer to be timed, and what it is given."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from yolomlir.evaluate.graph import Graph, graph_of
from yolomlir.frontend.checkpoint import load_safetensors

Array = NDArray[Any]
COLUMNS = ("wall", "enqueue", "h2d", "gpu", "d2h")
"""What is timed of one inference, in milliseconds: from input to rows in host memory; the host's
part until everything is submitted; on the GPU the copy in, the network, the copy out."""


@dataclass(frozen=True)
class Problem:
    """What every engine runs: network and input lie in `folder`, the sizes are here.

    threads: of the CPU. device: `cpu` or `cuda`. precision: of products, `fp32` or `tf32`, or of
    stored tensors too, `fp16`.
    """

    folder: str
    height: int
    width: int
    batch: int
    max_det: int
    threads: int
    device: str
    precision: str

    def save(self) -> None:
        """Write it to its folder."""
        text = json.dumps(asdict(self))
        (Path(self.folder) / "problem.json").write_text(text, encoding="utf-8")

    @staticmethod
    def load(folder: str) -> Problem:
        """Read it from a folder."""
        text = (Path(folder) / "problem.json").read_text(encoding="utf-8")
        return Problem(**json.loads(text))

    @property
    def image(self) -> NDArray[np.uint8]:
        """The input as pixels, [N, H, W, 3] RGB."""
        return np.asarray(np.load(Path(self.folder) / "image.npy"))

    @property
    def float_image(self) -> NDArray[np.float32]:
        """The input as other engines take it: [N, 3, H, W] in 0..1."""
        pixels = np.ascontiguousarray(self.image.transpose(0, 3, 1, 2), np.float32)
        return np.asarray(pixels / 255, np.float32)

    @property
    def graph(self) -> Graph:
        """The network with its weights, batch norms folded."""
        return graph_of(load_safetensors(Path(self.folder) / "network.safetensors"))

    def onnx(self, *, head_only: bool = False) -> bytes:
        """The network as an ONNX model."""
        from yolomlir.evaluate.onnx_model import build_onnx

        return build_onnx(
            self.graph,
            batch=self.batch,
            height=self.height,
            width=self.width,
            max_det=self.max_det,
            head_only=head_only,
        )


class Peer(Protocol):
    """An engine with the network in it, in the process that times it.

    notes: what is peculiar to it; precision: what its products really are.
    """

    notes: str
    precision: str

    def run(self) -> Array:
        """One inference from host memory to host memory: [N, rows, 6]."""

    def time(self, seconds: float) -> dict[str, list[float]]:
        """Inferences for about so long: milliseconds by column, of those of `COLUMNS` it has."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True)
class PeerKind:
    """An engine by name.

    modules: what must be importable. devices: where it can run. make: `module:function` that takes
    a Problem and gives a Peer; options go to it too. group: names that stand for several. has_half:
    whether it can be asked for float16.
    """

    name: str
    make: str
    modules: tuple[str, ...]
    devices: tuple[str, ...]
    group: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    has_half: bool = False

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"not installed ({module})"
        return None


_HERE = "yolomlir.evaluate.peers"
_TORCH = (
    ("torch-eager", "eager", ("cpu", "cuda")),
    ("torchscript", "script", ("cpu", "cuda")),
    ("torch-compile", "compile", ("cpu", "cuda")),
    ("torch-channels-last", "channels-last", ("cpu", "cuda")),
)
PEERS: dict[str, PeerKind] = {
    kind.name: kind
    for kind in (
        *(
            PeerKind(
                name, f"{_HERE}.pytorch:make", ("torch",), devices, "torch", {"mode": mode}, True
            )
            for name, mode, devices in _TORCH
        ),
        PeerKind("onnxruntime", f"{_HERE}.onnx_runtime:make", ("onnx", "onnxruntime"), ("cpu",)),
        PeerKind(
            "onnxruntime-cuda", f"{_HERE}.onnx_runtime:make", ("onnx", "onnxruntime"), ("cuda",)
        ),
        PeerKind(
            "tensorrt",
            f"{_HERE}.tensor_rt:make",
            ("onnx", "tensorrt"),
            ("cuda",),
            has_half=True,
        ),
        PeerKind(
            "tensorrt-rtx",
            f"{_HERE}.tensor_rt:make",
            ("onnx", "tensorrt_rtx"),
            ("cuda",),
            options={"module": "tensorrt_rtx"},
        ),
        PeerKind("openvino", f"{_HERE}.open_vino:make", ("onnx", "openvino"), ("cpu",)),
        PeerKind("mnn", f"{_HERE}.mnn:make", ("onnx", "MNN"), ("cpu",)),
        PeerKind("ncnn", f"{_HERE}.ncnn:make", ("ncnn",), ("cpu",)),
    )
}
"""Every engine that `--against` knows."""


def timed(function: Callable[[], object], seconds: float) -> list[float]:
    """Call a function for about so long, at least 3 times: milliseconds a call."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter_ns()
        function()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return samples


class CpuPeer:
    """A peer that is a function of nothing: all that there is to time is the wall clock."""

    def __init__(self, run: Callable[[], Array], precision: str = "fp32", notes: str = "") -> None:
        self._run = run
        self.precision = precision
        self.notes = notes

    def run(self) -> Array:
        """One inference."""
        return self._run()

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The wall clock."""
        return {"wall": timed(self._run, seconds)}

    def close(self) -> None:
        """Nothing is held."""


class HeadPeer(CpuPeer):
    """A peer that ends at the head's maps. Decoding in numpy is checked but not timed."""

    def __init__(self, maps: Callable[[], list[Array]], max_det: int, notes: str) -> None:
        super().__init__(self._rows, notes=notes)
        self._maps = maps
        self._max_det = max_det

    def _rows(self) -> Array:
        from yolomlir.evaluate.tolerance import select

        maps = [m.astype(np.float64) for m in self._maps()]
        return select(maps[:3], maps[3:], self._max_det)

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The wall clock, without decoding."""
        return {"wall": timed(self._maps, seconds)}
