"""Runs a program on the CPU: object code, an arena, and a team of threads. No MLIR.

Between two inferences the threads sleep; during one they never leave compiled code.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from yolomlir.arguments import whole
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cpu_driver import (
    BEGIN_OFFSET,
    COUNTER_STRIDE,
    DRIVER,
    END_OFFSET,
    ENTRY,
    BarrierRecord,
    StepRecord,
    target_machine,
)
from yolomlir.runtime.plan import Argument, Plan, Step, View
from yolomlir.runtime.window import logical_window
from yolomlir.settings import settings

ALIGNMENT = 64
"""Of the arena, weights and temporaries: a cache line, and the widest vector."""
MOST_THREADS = 1024
"""More than that, or than there are CPUs, is a mistake that would fill the memory."""
_RUN = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
Array = NDArray[Any]


class CpuExecutor:
    """A loaded program. `run` is one inference on the whole team; callers from several threads take
    turns. `with CpuExecutor(program) as e: …` or `close()` ends the threads."""

    def __init__(self, program: Program, *, threads: int | None = None) -> None:
        """threads: 1 or more; by default the settings'. Raises UserError where this CPU cannot run
        the program's code."""
        _check_host(program)
        self.plan = program.plan
        self.threads = _checked_threads(settings().num_threads if threads is None else threads)
        self._code = _Code(program)
        try:
            self._memory = _Memory(program, self._code, self.threads)
        except MemoryError as error:
            shape = "x".join(map(str, next(iter(self.plan.inputs.values())).shape))
            message = f"not enough memory for images of {shape}: {error}"
            raise UserError(message, hint="smaller images or a smaller batch") from error
        self._lock = threading.Lock()
        self._team: _Team | None = None
        self._closed = False

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Outputs by name, new arrays, in physical order; so are the inputs, N, H, W, C.

        Raises UserError for a missing or unknown input, another shape or another type.
        """
        with self._lock:
            self._accept(inputs)
            self._current_team().run()
            return {name: view.copy() for name, view in self._memory.outputs.items()}

    def run_timed(self, inputs: dict[str, Array]) -> NDArray[np.int64]:
        """One inference like `run`; when each step began and ended, [steps, 2], in clock ticks.

        A step begins when its first block is taken and ends when its last thread is done. A tick is
        the processor's time-stamp counter's; compare it with another clock over several runs.
        """
        with self._lock:
            self._accept(inputs)
            self._current_team().run()
            return self._memory.ticks()

    def trace(self, inputs: dict[str, Array]) -> Iterator[tuple[Step, list[Array]]]:
        """One inference on this thread, step by step: each step with copies of its results.

        Results are in logical order (N, C, H, W). They are read before the next step runs, so that
        the reuse of their memory does not show.
        """
        with self._lock:
            self._accept(inputs)
            memory = self._memory
            memory.reset()
            for index, step in enumerate(self.plan.steps):
                begin, end = memory.phases[index], memory.phases[index + 1]
                self._code.run(
                    ctypes.addressof(memory.steps) + begin * ctypes.sizeof(StepRecord),
                    end - begin,
                    memory.counters.ctypes.data + begin * COUNTER_STRIDE,
                    memory.barrier,
                    1,
                    0,
                    memory.workspace.ctypes.data,
                    memory.scratch[0].ctypes.data,
                )
                yield step, [logical_window(memory.arena, view).copy() for view in step.results]

    def _accept(self, inputs: dict[str, Array]) -> None:
        """Check the inputs and put them where the program reads them."""
        arrays = {name: _checked(name, view, inputs) for name, view in self.plan.inputs.items()}
        unknown = sorted(set(inputs) - set(arrays))
        if unknown:
            raise UserError(f"unknown input '{unknown[0]}'", hint=f"inputs: {', '.join(arrays)}")
        if self._closed:
            raise UserError("the executor is closed")
        for name, array in arrays.items():
            np.copyto(self._memory.inputs[name], array)

    def close(self) -> None:
        """End the threads and free the memory; a second call does nothing."""
        with self._lock:
            self._closed = True
            if self._team is not None:
                self._team.close()
            self._team = None

    def __enter__(self) -> CpuExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current_team(self) -> _Team:
        """The team; a new one in a forked child, where the parent's threads do not exist."""
        if self._team is None or self._team.process != os.getpid():
            self._team = _Team(self._code.run, self._memory, self.threads)
        return self._team


def _checked_threads(threads: object) -> int:
    """The number of threads as an `int`. Raises UserError for what cannot be one."""
    most = max(MOST_THREADS, os.cpu_count() or 1)
    number = whole("threads", threads, 1)
    if number > most:
        raise UserError(f"threads is {number}; it must be at most {most}")
    return number


def _check_host(program: Program) -> None:
    """Refuse code for another kind of machine, or with instructions this CPU lacks."""
    triple = binding.get_process_triple()
    wanted = str(program.metadata.get("triple", triple))
    hint = "compile the model on this machine"
    if wanted != triple:
        raise UserError(f"the program is compiled for {wanted}; this is {triple}", hint=hint)
    have = {f"+{name}" for name, present in binding.get_host_cpu_features().items() if present}
    missing = sorted(set(program.metadata.get("features", ())) - have)
    if missing:
        names = ", ".join(name[1:] for name in missing[:5])
        cpu = program.metadata.get("cpu", "another CPU")
        raise UserError(f"the program is compiled for {cpu}; this CPU lacks {names}", hint=hint)


def _checked(name: str, view: View, inputs: dict[str, Array]) -> Array:
    """The input of that name, if it is what the view holds."""
    if name not in inputs:
        raise UserError(f"input '{name}' is missing")
    array, shape = inputs[name], _physical(view)
    if tuple(array.shape) != shape:
        raise UserError(f"input '{name}' has shape {tuple(array.shape)}; expected {shape}")
    if array.dtype != np.dtype(view.dtype):
        raise UserError(f"input '{name}' is {array.dtype}; expected {view.dtype}")
    return array


def _physical(view: View) -> tuple[int, ...]:
    if len(view.shape) != 4:
        return tuple(view.shape)
    n, c, h, w = view.shape
    return (n, h, w, c)


class _Code:
    """The program's object code, loaded, and the addresses of its functions."""

    def __init__(self, program: Program) -> None:
        machine = target_machine()
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        for name, data in program.binaries.items():
            if name.endswith(".o"):
                self._engine.add_object_file(binding.ObjectFileRef.from_data(data))
        if DRIVER not in program.binaries:
            raise InternalError(f"the program has no {DRIVER}")
        self._engine.finalize_object()
        self.run = _RUN(self.address(ENTRY))
        self.kernels = program.kernels

    def address(self, symbol: str) -> int:
        """Where a function lies. Raises InternalError for one that is not there."""
        address = int(self._engine.get_function_address(symbol))
        if not address:
            raise InternalError(f"the object code has no '{symbol}'")
        return address


def _aligned(size: int) -> Array:
    """Zeroed bytes that begin on a cache line; pages never touched take no memory."""
    block = np.zeros(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    aligned: Array = block[start : start + size]
    return aligned


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Memory:
    """Arena, weights, temporaries, and the tables that the driver reads."""

    def __init__(self, program: Program, code: _Code, threads: int) -> None:
        plan, records = program.plan, program.kernels.values()
        self.arena = _aligned(plan.arena_bytes)
        self.workspace = _aligned(max((r["workspace_bytes"] for r in records), default=0))
        self.scratch = [
            _aligned(max((r["scratch_bytes"] for r in records), default=0)) for _ in range(threads)
        ]
        self._weights = _pack(program.weights)
        self.inputs = {n: self._view(v) for n, v in plan.inputs.items()}
        self.outputs = {n: self._view(v) for n, v in plan.outputs.items()}
        self._tables: list[Any] = []
        self.phases = [0]
        """Where each step's records begin in `steps`, and where the last one's end."""
        self.steps = self._steps(plan, code)
        self._threads = threads
        self.counters = _aligned(COUNTER_STRIDE * threads * max(1, len(self.steps)))
        self._barrier = _aligned(ctypes.sizeof(BarrierRecord))

    @property
    def barrier(self) -> int:
        """The address of the barrier."""
        return int(self._barrier.ctypes.data)

    def reset(self) -> None:
        """A new inference: no block is taken yet, nobody waits."""
        ctypes.memset(self.counters.ctypes.data, 0, self.counters.nbytes)

    def ticks(self) -> NDArray[np.int64]:
        """When each step of the last inference began and ended, [steps, 2]."""
        every = self.counters.view(np.int64).reshape(-1, COUNTER_STRIDE // 8)
        lines = every[:: self._threads]
        begins = lines[self.phases[:-1], BEGIN_OFFSET // 8]
        ends = lines[[end - 1 for end in self.phases[1:]], END_OFFSET // 8]
        return np.stack([begins, ends], axis=1)

    def _view(self, view: View) -> Array:
        """A place of the arena as an array, in physical order; a slice of a buffer has gaps."""
        item, shape = np.dtype(view.dtype).itemsize, _physical(view)
        strides = [item]
        for size in reversed([*shape[1:-1], view.pitch]):
            strides.insert(0, strides[0] * size)
        place: Array = np.ndarray(shape, view.dtype, self.arena, view.offset_bytes, tuple(strides))
        return place

    def _steps(self, plan: Plan, code: _Code) -> Any:
        rows = []
        for step in plan.steps:
            pointers = [self._operand(a) for a in step.arguments]
            pointers += [self._address(view) for view in step.results]
            table = (ctypes.c_void_p * len(pointers))(*pointers)
            self._tables.append(table)
            for symbol, blocks in code.kernels[step.kernel]["phases"]:
                rows.append((code.address(symbol), ctypes.addressof(table), blocks))
            self.phases.append(len(rows))
        records = (StepRecord * len(rows))()
        for record, (entry, pointers_at, blocks) in zip(records, rows, strict=True):
            record.entry, record.pointers, record.blocks = entry, pointers_at, blocks
        return records

    def _operand(self, argument: Argument) -> int:
        if argument.view is not None:
            return self._address(argument.view)
        return int(self._weights[str(argument.weight)].ctypes.data)

    def _address(self, view: View) -> int:
        return int(self.arena.ctypes.data) + view.offset_bytes


def _pack(weights: dict[str, Array]) -> dict[str, Array]:
    """The weights in one block of memory, each on a cache line."""
    block = _aligned(sum(_round_up(w.nbytes) for w in weights.values()))
    packed, offset = {}, 0
    for name, weight in weights.items():
        place = block[offset : offset + weight.nbytes].view(weight.dtype).reshape(weight.shape)
        place[...] = weight
        packed[name] = place
        offset += _round_up(weight.nbytes)
    return packed


class _Team:
    """Threads that sleep between inferences. The caller of `run` is one of the team."""

    def __init__(self, function: Any, memory: _Memory, threads: int) -> None:
        self.process = os.getpid()
        self._shared = _Shared(function, memory, threads)
        self._workers = [
            threading.Thread(
                target=_work, args=(self._shared, i), daemon=True, name=f"yolomlir-{i}"
            )
            for i in range(1, threads)
        ]
        self._finalizer = weakref.finalize(self, self._shared.stop)
        for worker in self._workers:
            try:
                worker.start()
            except RuntimeError as error:  # the system has no more
                self._shared.stop()
                raise UserError(f"{threads} threads cannot be started: {error}") from error

    def run(self) -> None:
        """One inference; returns when every thread has left the driver."""
        shared = self._shared
        shared.memory.reset()
        shared.start()
        shared.call(0)
        shared.wait()

    def close(self) -> None:
        """End the threads."""
        self._finalizer()
        for worker in self._workers:
            worker.join()


class _Shared:
    """What a team's threads share. It does not refer to the team, so a team can be collected."""

    def __init__(self, function: Any, memory: _Memory, threads: int) -> None:
        self.memory = memory
        self._function = function
        self._threads = threads
        self._condition = threading.Condition()
        self._round = 0
        self._running = 0
        self._stopped = False

    def call(self, thread: int) -> None:
        """One thread's share of an inference; ctypes releases the interpreter's lock."""
        memory = self.memory
        self._function(
            ctypes.addressof(memory.steps),
            len(memory.steps),
            memory.counters.ctypes.data,
            memory.barrier,
            self._threads,
            thread,
            memory.workspace.ctypes.data,
            memory.scratch[thread].ctypes.data,
        )

    def start(self) -> None:
        """Wake the workers."""
        with self._condition:
            self._running = self._threads - 1
            self._round += 1
            self._condition.notify_all()

    def wait(self) -> None:
        """Until every worker has left the driver."""
        with self._condition:
            while self._running:
                self._condition.wait()

    def next_round(self, last: int) -> int | None:
        """Sleep until an inference after round `last` begins; None when the team ends."""
        with self._condition:
            while self._round == last and not self._stopped:
                self._condition.wait()
            return None if self._stopped else self._round

    def finish(self) -> None:
        """One worker has left the driver."""
        with self._condition:
            self._running -= 1
            self._condition.notify_all()

    def stop(self) -> None:
        """Let the workers end."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()


def _work(shared: _Shared, thread: int) -> None:
    """A worker's life."""
    last = 0
    while True:
        current = shared.next_round(last)
        if current is None:
            return
        last = current
        shared.call(thread)
        shared.finish()
