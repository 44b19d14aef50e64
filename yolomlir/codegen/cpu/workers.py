"""Compiling kernels in processes of their own: MLIR holds the interpreter's lock, and may abort.

`multiprocessing` would run the user's script again in every worker (spawn) or fork a process that
has threads; a worker here is a plain interpreter that reads jobs from a pipe.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from yolomlir.codegen.cpu.isa import Isa
from yolomlir.codegen.cpu.kernel import KernelSource
from yolomlir.codegen.cpu.lower import CompiledKernel, compile_kernel
from yolomlir.diagnostics import InternalError

Job = tuple[KernelSource, Isa, str]
_SIZE = struct.Struct("<Q")
_COMMAND = "from yolomlir.codegen.cpu import workers; workers.serve()"


def compile_all(
    jobs: Sequence[Job], processes: int, done: Callable[[int, CompiledKernel], None]
) -> None:
    """Compile every job; `done(index, kernel)` is called from one thread at a time.

    Raises InternalError that names the kernel where one cannot be compiled.
    """
    processes = min(processes, len(jobs))
    if processes <= 1:
        for index, job in enumerate(jobs):
            done(index, compile_kernel(*job))
        return
    queue, lock = list(enumerate(jobs)), threading.Lock()
    queue.reverse()
    failures: list[Exception] = []

    def work() -> None:
        try:
            with _Worker() as worker:
                while True:
                    with lock:
                        if not queue or failures:
                            return
                        index, job = queue.pop()
                    kernel = worker.compile(job)
                    with lock:
                        done(index, kernel)
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

    def compile(self, job: Job) -> CompiledKernel:
        """The kernel. Raises InternalError where it cannot be compiled or the process ends."""
        stdin, stdout = self._pipes
        try:
            _send(stdin, job)
            answer = _receive(stdout)
        except (EOFError, OSError) as error:
            self._process.wait()
            self._messages.seek(0)
            text = self._messages.read().decode(errors="replace").strip()
            last = text.splitlines()[-1] if text else "no message"
            raise InternalError(f"the compiler aborted: {last}", where=job[0].name) from error
        if isinstance(answer, CompiledKernel):
            return answer
        raise InternalError(f"cannot be compiled: {answer}", where=job[0].name)


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
    """A worker's life: jobs from standard input, kernels or error texts to standard output."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    while True:
        try:
            job = _receive(jobs)
        except EOFError:
            return
        try:
            _send(answers, compile_kernel(*job))
        except Exception as error:
            _send(answers, f"{type(error).__name__}: {error}")
