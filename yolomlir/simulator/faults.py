"""What the simulator raises, and the place in the IR that it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from yolomlir.diagnostics import InternalError

FaultKind = Literal[
    "out-of-bounds",
    "misaligned",
    "uninitialised",
    "in-flight",
    "race",
    "programmatic-launch",
    "divergence",
    "barrier",
    "arithmetic",
    "read-only",
    "written-twice",
    "not-written",
    "bank-conflict",
    "endless-loop",
]
"""Every kind of fault a kernel can have; docs/simulator.md explains each."""

FAULT_KINDS: tuple[str, ...] = get_args(FaultKind)
_TEXT_LIMIT = 200


class SimulationError(InternalError):
    """A kernel did something that a GPU would not do, or would do differently each time.

    Attributes:
        location: the op's MLIR location, without the `loc(...)` around it.
        kind: one of `FAULT_KINDS`.
        message: what happened, with threads, addresses and the other op where there is one.
    """

    def __init__(self, location: str, kind: FaultKind, message: str, *, op: str = "") -> None:
        self.location = location
        self.kind = kind
        where = f"{location}: {op}" if op else location
        super().__init__(f"[{kind}] {message}", where=where)


@dataclass(frozen=True, eq=False)
class Site:
    """One op of the kernel: where it came from and its number in program order."""

    index: int
    name: str
    op: Any = field(repr=False)

    @property
    def location(self) -> str:
        """The op's location as text."""
        return location_text(self.op.location)

    def fault(self, kind: FaultKind, message: str) -> SimulationError:
        """The error to raise for a fault of this op."""
        return SimulationError(self.location, kind, message, op=self.text())

    @property
    def label(self) -> str:
        """The op's number and name."""
        return f"operation {self.index} '{self.name}'"

    def text(self) -> str:
        """The op as printed, cut for a message; its label where it has regions.

        Printing an op numbers its whole function: for faults, not for statistics.
        """
        if len(list(self.op.regions)):
            return self.label
        printed = " ".join(str(self.op).split())
        if len(printed) > _TEXT_LIMIT:
            printed = printed[:_TEXT_LIMIT] + "…"
        return f"operation {self.index} `{printed}`"


def location_text(location: Any) -> str:
    """An MLIR location as text: `"model.3.conv"` or `"file.mlir":7:5`, without `loc(…)`."""
    text = str(location)
    if text.startswith("loc(") and text.endswith(")"):
        return text[4:-1]
    return text
