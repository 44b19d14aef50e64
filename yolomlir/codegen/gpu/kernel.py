"""What a code generator hands on: the kernel's module and how to launch it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yolomlir.bindings import ir

ACTIVATION = "activation"
WEIGHT = "weight"
SCRATCH = "scratch"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, in the order of the ABI.

    role: `activation` (a pointer and an i32 pitch in elements), `weight` or `scratch` (a pointer).
    dtype: `float32`, `float16` or `uint8`. alignment_bytes: what the pointer and, for an
    activation, the pitch in bytes must be multiples of. tf32: the kernel takes the values as
    already rounded to nearest TF32 (low 13 bits zero), so whoever packs the weights rounds them.
    dense: the kernel takes the pitch to be the channels, and aligns the pointer alone. packed: of a
    weight, the `runtime.packing.Order` that whoever uploads it brings its elements into; empty for
    the order that they have.
    """

    role: str
    dtype: str = "float32"
    alignment_bytes: int = 4
    tf32: bool = False
    dense: bool = False
    packed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """How to launch a kernel: sizes are in blocks, threads and bytes.

    shared_bytes: dynamic shared memory a block. workspace_bytes: scratch in global memory, passed
    as the last pointer when it is not 0. programmatic: the kernel waits for its predecessors
    itself (`griddepcontrol.wait`), so it may follow them by a programmatic edge. carveout: percent
    of an SM's memory that it prefers to have as shared memory; 0 leaves that to the driver.
    """

    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    workspace_bytes: int = 0
    programmatic: bool = False
    carveout: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists, without a `carveout` of 0."""
        data = dataclasses.asdict(self)
        if not self.carveout:
            del data["carveout"]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Launch:
        """The inverse of `to_json`. Raises KeyError or TypeError for another structure."""
        sizes = {key: tuple(data[key]) for key in ("grid", "block", "cluster")}
        parameters = tuple(
            Parameter(**{**p, "packed": tuple(p.get("packed", ()))}) for p in data["parameters"]
        )
        return Launch(**{**data, **sizes, "parameters": parameters})


@dataclass(frozen=True)
class Kernel:
    """A module that holds one `gpu.module` with one kernel, and its launch."""

    module: ir.Module
    launch: Launch
