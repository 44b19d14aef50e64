"""One way to run a program, whatever it was compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.plan import Step


class Executor(Protocol):
    """A loaded program. `run` may be called from several threads; each call is one inference."""

    def run(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name, new arrays; `inputs` are physical (N, H, W, C), of the plan's types."""

    def trace(self, inputs: dict[str, NDArray[Any]]) -> Iterator[tuple[Step, list[NDArray[Any]]]]:
        """One inference step by step: each step with copies of its results, in logical order."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""


@runtime_checkable
class DeviceExecutor(Executor, Protocol):
    """An executor that also takes and gives arrays in GPU memory."""

    def input_buffer(self) -> NDArray[Any]:
        """A new array for the input in memory that the GPU fetches without another copy."""

    def run_device(self, image: Any, *, stream: int | None = None) -> Any:
        """One inference on the caller's stream; the result lies in GPU memory."""


@runtime_checkable
class TimedExecutor(Executor, Protocol):
    """An executor that can tell the parts of an inference apart."""

    def run_parts(self, inputs: dict[str, NDArray[Any]]) -> dict[str, float]:
        """One inference: milliseconds of `enqueue`, `h2d`, `gpu` and `d2h`."""


def open_executor(program: Program, *, threads: int | None = None) -> Executor:
    """Load a program where it can run. Raises UserError when this machine cannot run it."""
    if program.target == "cpu":
        from yolomlir.runtime.cpu import CpuExecutor

        return CpuExecutor(program, threads=threads)
    if program.target.startswith("sm_"):
        from yolomlir.runtime.cuda import CudaExecutor

        return CudaExecutor(program)
    raise UserError(f"program for target '{program.target}', which this yolomlir does not run")
