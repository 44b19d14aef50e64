"""Compiling kernels in processes of their own: MLIR holds the interpreter's lock, and may abort.

`multiprocessing` would run the user's script again in every worker (spawn) or fork a process that
has threads; a worker here is a plain interpreter that reads jobs from a pipe.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from yolomlir.diagnostics import InternalError, YolomlirError

_SIZE = struct.Struct("<Q")
_COMMAND = "from yolomlir.codegen import workers; workers.serve()"


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_all(
    compiler: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    names: Sequence[str],
    processes: int,
    done: Callable[[int, Any], None],
) -> None:
    """Call `compiler(*job)` for every job; `done(index, result)` from one thread at a time.

    compiler: a function of a module, so that a worker can import it. names: what each job compiles,
    for errors. Raises what the compiler raised of ours, and InternalError that names the job where
    it failed otherwise or its process ended.
    """
    processes = min(processes, len(jobs))
    if processes <= 1:
        for index, job in enumerate(jobs):
            done(index, compiler(*job))
        return
    queue, lock = list(enumerate(jobs)), threading.Lock()
    queue.reverse()
    failures: list[Exception] = []

    def work() -> None:
        try:
            with _Worker(compiler) as worker:
                while True:
                    with lock:
                        if not queue or failures:
                            return
                        index, job = queue.pop()
                    result = worker.compile(job, names[index])
                    with lock:
                        done(index, result)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class _Worker:
    """One process; `compile` sends it a job and waits."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self._compiler = (compiler.__module__, compiler.__qualname__)

    def __enter__(self) -> _Worker:
        paths = [p for p in sys.path if p]
        self._messages = tempfile.TemporaryFile()  # a pipe that nobody reads would fill
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._process.wait()
        self._messages.close()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise InternalError("a compiler process has no pipes")
        return process.stdin, process.stdout

    def compile(self, job: tuple[Any, ...], name: str) -> Any:
        """The result. Raises InternalError where the compiler fails or the process ends."""
        stdin, stdout = self._pipes
        try:
            _send(stdin, (self._compiler, job))
            result, error = _receive(stdout)
        except (EOFError, OSError) as cause:
            self._process.wait()
            self._messages.seek(0)
            text = self._messages.read().decode(errors="replace").strip()
            last = text.splitlines()[-1] if text else "no message"
            raise InternalError(f"the compiler aborted: {last}", where=name) from cause
        if isinstance(error, YolomlirError):
            raise error
        if error is not None:
            raise InternalError(f"cannot be compiled: {error}", where=name)
        return result


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(_SIZE.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    size = pipe.read(_SIZE.size)
    if len(size) < _SIZE.size:
        raise EOFError
    return pickle.loads(pipe.read(_SIZE.unpack(size)[0]))


def serve() -> None:
    """A worker's life: jobs from standard input, results or errors to standard output."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    while True:
        try:
            (module, name), job = _receive(jobs)
        except EOFError:
            return
        try:
            _send(answers, (getattr(importlib.import_module(module), name)(*job), None))
        except YolomlirError as error:
            _send(answers, (None, error))
        except Exception as error:
            _send(answers, (None, f"{type(error).__name__}: {error}"))
