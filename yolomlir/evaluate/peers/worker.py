"""The process that builds and times one engine: commands in on stdin, answers out, a line each.

`python -m yolomlir.evaluate.peers.worker FOLDER NAME`. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.peers.base import PEERS, Peer, Problem

OURS = "yolomlir"


class Worker:
    """Answers `build`, `time` and `memory`."""

    def __init__(self, problem: Problem, name: str) -> None:
        self.problem = problem
        self.name = name
        self.peer: Peer | None = None

    def build(self) -> dict[str, Any]:
        """Make the engine and run it once; its rows lie in the folder."""
        target, options = f"{__package__}.ours:make", {}
        if self.name != OURS:
            kind = PEERS[self.name]
            target, options = kind.make, dict(kind.options)
        module, _, function = target.partition(":")
        make = getattr(importlib.import_module(module), function)
        before = _gpu_used_mb(self.problem)
        start = time.perf_counter()
        self.peer = make(self.problem, **options)
        rows = self.peer.run()
        seconds = time.perf_counter() - start
        path = Path(self.problem.folder) / f"rows-{os.getpid()}.npy"
        np.save(path, rows)
        after = _gpu_used_mb(self.problem)
        return {
            "build_s": seconds,
            "rows": str(path),
            "precision": self.peer.precision,
            "notes": self.peer.notes,
            "gpu_mb": None if before is None or after is None else after - before,
        }

    def time(self, seconds: float) -> dict[str, Any]:
        """Warm up for a fifth of the time, then measure."""
        if self.peer is None:
            raise RuntimeError("build comes first")
        self.peer.time(seconds / 5)
        return {"samples": self.peer.time(seconds)}

    def memory(self) -> dict[str, Any]:
        """The most memory that this process has used."""
        return {"peak_mb": _peak_mb()}


def _peak_mb() -> float | None:
    """VmHWM on Linux, where ru_maxrss begins at what the parent had; ru_maxrss elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _gpu_used_mb(problem: Problem) -> float | None:
    """Memory in use on the whole GPU; a difference of two readings is one engine's."""
    if problem.device != "cuda":
        return None
    from yolomlir.runtime.cuda_driver import call, driver

    _context().make_current()
    free, total = call(driver.cuMemGetInfo)
    return float(total - free) / 1e6


@cache
def _context() -> Any:
    """The GPU's primary context. It is kept: an engine must not find it destroyed."""
    from yolomlir.runtime.cuda_driver import Context

    return Context()


def main(folder: str, name: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(Problem.load(folder), name)
    for line in sys.stdin:
        request = json.loads(line)
        command = getattr(worker, request.pop("command"))
        try:
            answer = command(**request)
        except Exception as error:  # whatever an engine raises is the parent's to report
            # A UserError is an engine that lacks something here; the rest are failures.
            absent = isinstance(error, UserError)
            answer = {"error": f"{type(error).__name__}: {error}", "absent": absent}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if worker.peer is not None:
        worker.peer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
