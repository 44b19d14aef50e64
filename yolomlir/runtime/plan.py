"""The executable plan: what a runtime does for one inference, with no MLIR left in it.

The compiler makes a plan from the lowest `yolo` level (`yolomlir.codegen.build_plan`), an artifact
stores it as JSON, and the CPU and CUDA runtimes execute it. Addresses: an activation is an NHWC
view of the arena; element (n, h, w, c) of a view lies `offset_bytes + size * (((n * H + h) * W + w)
* pitch + c)` bytes from the arena's start, `size` being an element's of its `dtype`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class View:
    """Where a tensor lies in the arena.

    shape: logical (N, C, H, W for 4-D). pitch: elements between neighbours in W (the channel count
    of the buffer it is a slice of); for tensors that are not 4-D, the last dimension's size.
    """

    offset_bytes: int
    pitch: int
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Argument:
    """One argument of a step: `view` for an activation, `weight` for a name in the store."""

    view: View | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Step:
    """One kernel launch.

    kernel: a key of the artifact's kernels. arguments: the callee's operands in order, then
    `results` its results. depends: indices of the steps whose results it reads or whose buffers it
    reuses (true, anti and output dependencies; transitively reduced).
    """

    kernel: str
    layer: str
    arguments: tuple[Argument, ...]
    results: tuple[View, ...]
    depends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A whole inference. `inputs` and `outputs` are views of the arena, by name."""

    arena_bytes: int
    inputs: dict[str, View]
    outputs: dict[str, View]
    steps: tuple[Step, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises KeyError or TypeError for another structure."""

        def view(d: dict[str, Any]) -> View:
            return View(**{**d, "shape": tuple(d["shape"])})

        def argument(d: dict[str, Any]) -> Argument:
            return Argument(view(d["view"]) if d["view"] else None, d["weight"])

        steps = tuple(
            Step(
                s["kernel"],
                s["layer"],
                tuple(argument(a) for a in s["arguments"]),
                tuple(view(r) for r in s["results"]),
                tuple(s["depends"]),
            )
            for s in data["steps"]
        )
        return Plan(
            data["arena_bytes"],
            {k: view(v) for k, v in data["inputs"].items()},
            {k: view(v) for k, v in data["outputs"].items()},
            steps,
            data["metadata"],
        )
