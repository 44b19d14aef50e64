"""Candidates to machine code, in worker processes that start once and keep what they parsed."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from yolomlir.autotune import space
from yolomlir.codegen.gpu.kernel import Launch
from yolomlir.diagnostics import YolomlirError
from yolomlir.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A candidate ready to load, or why there is none (`fault`)."""

    function: str
    family: str
    key: str
    launch: Launch | None = None
    cubin: bytes = b""
    registers: int = 0
    spill_bytes: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class Job:
    """Candidates of one function for one worker. text: at the linalg level. keys: of the tiles."""

    function: str
    family: str
    text: str
    keys: tuple[str, ...]
    target: Target
    precision: str


class Builder(Protocol):
    """Whoever turns jobs into candidates; the order in which they end does not matter."""

    def submit(self, job: Job) -> Future[list[Built]]:
        """Begin a job; one result a key, in the order of the keys."""

    def close(self) -> None:
        """Give up what has not begun and stop."""


class ProcessBuilder:
    """Worker processes. count: of them; default one a core but one, which measures."""

    def __init__(self, count: int | None = None) -> None:
        from yolomlir.codegen.workers import available_cores

        self.count = count or max(1, available_cores() - 1)
        prefer_toolkit()
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        # Not fork: a forked MLIR context would wait for threads that do not exist in the child.
        return ProcessPoolExecutor(
            self.count, mp_context=multiprocessing.get_context("spawn"), initializer=_warm_up
        )

    def submit(self, job: Job) -> Future[list[Built]]:
        """Begin a job in one of the workers; in new ones where a job has ended the old ones."""
        try:
            return self._pool.submit(build, job)
        except BrokenProcessPool:
            logger.warning("a compiler process ended: starting them again")
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._start()
            return self._pool.submit(build, job)

    def close(self) -> None:
        """Cancel what waits and end the workers; what runs is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def prefer_toolkit() -> None:
    """Let nvJitLink be found in a toolkit at its usual place where pip has installed none."""
    usual = Path("/usr/local/cuda")
    if usual.is_dir() and not os.environ.get("CUDA_HOME") and not os.environ.get("CUDA_PATH"):
        os.environ["CUDA_HOME"] = str(usual)


def build(job: Job) -> list[Built]:
    """Build a job in this process. A candidate that fails has a fault; nothing is raised for it."""
    return [_candidate(job, key) for key in job.keys]


_state: dict[str, Any] = {}


def _warm_up() -> None:
    """What every worker needs once: the bindings, a context, the assembler."""
    from yolomlir.codegen.gpu import conv2d, generate, ptx  # noqa: F401
    from yolomlir.dialects import yolo

    _state["context"] = yolo.new_context()
    _state["context"].enable_multithreading(False)  # the workers fill the cores already
    ptx._nvjitlink()


def _candidate(job: Job, key: str) -> Built:
    from yolomlir.bindings import ir
    from yolomlir.codegen.gpu.generate import generate_kernel
    from yolomlir.codegen.gpu.ptx import assemble

    if "context" not in _state:
        _warm_up()
    try:
        with _state["context"], ir.Location.unknown():
            module = ir.Module.parse(job.text)
            function = module.body.operations[0]
            tile = space.tile_of(job.family, key)
            function.operation.attributes["yolo.tile"] = space.attribute(tile)
            kernel = generate_kernel(
                function, job.target, precision=job.precision, name=job.function
            )
            text = _ptx(kernel.module, job.target)
        cubin = assemble(text, job.target.chip)
    except (YolomlirError, ir.MLIRError) as error:
        return Built(job.function, job.family, key, fault=str(error))
    fault = f"{cubin.spill_bytes} bytes of spills" if cubin.spill_bytes else None
    return Built(
        job.function, job.family, key, kernel.launch, cubin.code, cubin.registers,
        cubin.spill_bytes, fault,
    )  # fmt: skip


def _ptx(module: Any, target: Target) -> str:
    """PTX of a module that nobody needs afterwards: lowered in place, not a copy as in `to_ptx`."""
    from yolomlir.bindings import gpu, passmanager
    from yolomlir.codegen.gpu.ptx import _TO_PTX, pipeline

    passmanager.PassManager.parse(pipeline(target)).run(module.operation)
    passmanager.PassManager.parse(_TO_PTX).run(module.operation)
    for op in module.body.operations:
        if op.operation.name == "gpu.binary":
            data = gpu.ObjectAttr(op.operation.attributes["objects"][0]).object
            return bytes(data).rstrip(b"\0").decode()
    raise YolomlirError("no gpu.binary came out of the PTX pipeline")


def jobs_of(
    function: str, family: str, text: str, keys: Sequence[str], target: Target, precision: str,
    *, size: int = 2,
) -> list[Job]:  # fmt: skip
    """A function's candidates as jobs of at most `size`: small, so that no worker is left with a
    long rest at the end."""
    return [
        Job(function, family, text, tuple(keys[i : i + size]), target, precision)
        for i in range(0, len(keys), size)
    ]
