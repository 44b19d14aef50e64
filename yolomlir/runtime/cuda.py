"""Running a GPU program: arena and weights uploaded once, one CUDA graph an inference."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import InternalError, UserError
from yolomlir.runtime import packing
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cuda_driver import (
    Context,
    CudaError,
    DeviceMemory,
    PinnedArray,
    call,
    driver,
    load_function,
    load_module,
    page_locked_array,
)
from yolomlir.runtime.cuda_events import EventGraph, chain_us
from yolomlir.runtime.cuda_graph import KernelGraph, Launch
from yolomlir.runtime.plan import Step, View
from yolomlir.runtime.window import logical_window, span_bytes
from yolomlir.settings import settings

_log = logging.getLogger(__name__)

_ALIGNMENT = 256


@dataclass(frozen=True)
class DeviceArray:
    """A result on the GPU, valid until the model's next inference; no copy is made of it.

    Exposes `__cuda_array_interface__` (CuPy, Numba, `torch.as_tensor`) and DLPack.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    stream: int
    owner: Any

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.stream or 1,
        }

    def _view(self) -> Any:
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        dtype = np.dtype(self.dtype)
        size = int(np.prod(self.shape)) * dtype.itemsize
        buffer = Buffer.from_handle(self.address, size, owner=self)
        return StridedMemoryView.from_buffer(buffer, self.shape, dtype=dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._view().__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("stream", None)  # synchronised by run_device's event on the caller's stream
        return self._view().__dlpack__(**options)


class CudaExecutor:
    """A program on the first GPU. Inferences of one executor run one after the other."""

    def __init__(self, program: Program, *, graph: bool = True) -> None:
        self._plan = program.plan
        self._lock = threading.Lock()
        self._closed = False
        self._one_by_one = settings().cuda_sync
        self._context = Context()
        self._context.make_current()
        self._memory: list[DeviceMemory] = []
        self._pinned: dict[str, PinnedArray] = {}
        self._modules: dict[str, Any] = {}
        self._events: list[Any] = []
        self._elsewhere = False
        self._graph: KernelGraph | None = None
        self._stream = call(driver.cuStreamCreate, 1)  # CU_STREAM_NON_BLOCKING
        self._done = call(driver.cuEventCreate, 2)  # CU_EVENT_DISABLE_TIMING
        try:
            self._load(program)
            if graph and not self._one_by_one:
                self._graph = self._make_graph()
        except BaseException:
            self.close()
            raise

    # ---- loading ----------------------------------------------------------------------------

    def _load(self, program: Program) -> None:
        self._check_target(program)
        self._arena = self._allocate(self._plan.arena_bytes, "activations")
        self._weights = self._upload_weights(program)
        self._launches = [self._launch(step, program) for step in self._plan.steps]
        for name, view in self._plan.outputs.items():
            self._pinned[name] = PinnedArray(_physical(view), view.dtype)
        self._input_address = {n: self._address(v) for n, v in self._plan.inputs.items()}
        self._readers = {name: self._readers_of(view) for name, view in self._plan.inputs.items()}

    def _readers_of(self, view: View) -> list[tuple[int, int]]:
        """The launches that read an input, and the place of its pointer in their arguments."""
        readers = []
        for index, step in enumerate(self._plan.steps):
            place = 0
            for argument in step.arguments:
                if argument.view == view:
                    readers.append((index, place))
                place += 1 if argument.view is None else 2
        return readers

    def _check_target(self, program: Program) -> None:
        device = self._context.device
        exact = f"sm_{device.capability[0]}{device.capability[1]}"
        if program.target == exact:
            return
        chip = int(program.target.removeprefix("sm_"))
        if chip > device.capability[0] * 10 + device.capability[1]:
            raise UserError(
                f"was compiled for {program.target}; this GPU is {device.name} ({exact}), which "
                "is older",
                hint=f"compile with target='{device.target or 'native'}'",
            )
        _log.warning(
            "compiled for %s, running on %s (%s): the driver compiles the kernels' PTX now; "
            "recompile for the best speed",
            program.target,
            device.name,
            exact,
        )

    def _allocate(self, size_bytes: int, what: str) -> DeviceMemory:
        memory = DeviceMemory(size_bytes, what)
        self._memory.append(memory)
        return memory

    def _upload_weights(self, program: Program) -> dict[str, int]:
        """Every weight in one allocation, in its kernel's order; its address by name."""
        orders = packing.orders(program.plan, program.kernels)
        packed = {n: packing.packed(t, orders.get(n, ())) for n, t in program.weights.items()}
        offsets: dict[str, int] = {}
        end = 0
        for name, values in packed.items():
            offsets[name] = end
            end += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._allocate(end, "weights")
        for name, values in packed.items():
            memory.upload(np.ascontiguousarray(values), offsets[name])
        return {name: memory.address + offset for name, offset in offsets.items()}

    def _address(self, view: View) -> int:
        return self._arena.address + view.offset_bytes

    def _launch(self, step: Step, program: Program) -> Launch:
        record = program.kernels[step.kernel]
        if step.kernel not in self._modules:
            exact = program.target == self._context.device.target
            cubin = program.binaries.get(record["cubin"]) if exact else None
            ptx = program.binaries.get(record["ptx"])
            module = load_module(cubin, ptx, self._context.device, step.layer)
            self._modules[step.kernel] = module
        shared_bytes = record["shared_bytes"]
        function = load_function(
            self._modules[step.kernel], record["function"], shared_bytes, step.layer,
            record.get("carveout", 0),
        )  # fmt: skip
        arguments: list[Any] = []
        for argument in step.arguments:
            if argument.view is not None:
                arguments += self._view_arguments(argument.view)
            else:
                arguments.append(ctypes.c_uint64(self._weights[str(argument.weight)]))
        for result in step.results:
            arguments += self._view_arguments(result)
        if record["workspace_bytes"]:
            workspace = self._allocate(record["workspace_bytes"], f"workspace of {step.layer}")
            arguments.append(ctypes.c_uint64(workspace.address))
        return Launch(
            function,
            tuple(record["grid"]),
            tuple(record["block"]),
            shared_bytes,
            arguments,
            bool(record["programmatic"]),
            step.depends,
            step.layer,
        )

    def _view_arguments(self, view: View) -> list[Any]:
        return [ctypes.c_uint64(self._address(view)), ctypes.c_int32(view.pitch)]

    def _make_graph(self) -> KernelGraph | None:
        """The graph; without programmatic edges, or not at all, where the driver refuses it."""
        for programmatic in (True, False):
            try:
                return KernelGraph(self._launches, programmatic=programmatic)
            except CudaError as error:
                kind = "with programmatic edges" if programmatic else "with plain edges"
                _log.warning("the driver refused a CUDA graph %s: %s", kind, error)
        _log.warning("running without a CUDA graph: each kernel is launched by itself")
        return None

    # ---- running ----------------------------------------------------------------------------

    @property
    def uses_graph(self) -> bool:
        """Whether inferences run as a CUDA graph."""
        return self._graph is not None

    def run(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One inference from and to host memory; outputs are new arrays."""
        with self._lock:
            self._require_open()
            self._context.make_current()
            inputs = self._checked(inputs)
            self._copy_in(inputs)
            self._enqueue(self._stream)
            self._copy_out()
            self._wait(self._stream)
            return {name: self._pinned[name].array.copy() for name in self._plan.outputs}

    def input_buffer(self) -> NDArray[Any]:
        """A new array for the input in page-locked memory, which goes to the GPU as it is."""
        with self._lock:
            self._require_open()
            view = next(iter(self._plan.inputs.values()))
            return page_locked_array(_physical(view), view.dtype)

    def run_parts(self, inputs: dict[str, NDArray[Any]]) -> dict[str, float]:
        """One inference like `run` with events around its parts: milliseconds by part.

        `enqueue` is the host's time until everything is submitted; `h2d`, `gpu` and `d2h` are times
        on the GPU; `h2d` has waiting in it where the driver stages pageable memory. The events
        themselves cost some microseconds of the wall clock's time.
        """
        with self._lock:
            self._require_open()
            self._context.make_current()
            inputs = self._checked(inputs)
            while len(self._events) < 4:
                self._events.append(call(driver.cuEventCreate, 0))
            parts: tuple[Callable[[], None], ...] = (
                lambda: self._copy_in(inputs),
                lambda: self._enqueue(self._stream),
                self._copy_out,
            )
            start = time.perf_counter_ns()
            for event, part in zip(self._events, parts, strict=False):
                call(driver.cuEventRecord, event, self._stream)
                part()
            call(driver.cuEventRecord, self._events[3], self._stream)
            enqueue = (time.perf_counter_ns() - start) / 1e6
            self._wait(self._stream)
            times = [
                float(call(driver.cuEventElapsedTime, first, last))
                for first, last in zip(self._events, self._events[1:], strict=False)
            ]
            return {"enqueue": enqueue, **dict(zip(("h2d", "gpu", "d2h"), times, strict=True))}

    def run_events(self, inputs: dict[str, NDArray[Any]], count: int) -> NDArray[np.float64]:
        """Times of every step alone, [count, steps] in microseconds, one step after the other.

        The steps run as a graph of their own, with an event between each two.
        """
        with self._lock:
            self._require_open()
            self._context.make_current()
            self._copy_in(self._checked(inputs))
            graph = EventGraph(self._launches)
            try:
                return np.stack([graph.run(self._stream) for _ in range(count)])
            finally:
                graph.destroy()

    def time_step(self, index: int, length: int = 20, replays: int = 15) -> float:
        """Microseconds of one step's kernel, warm, in a chain of itself; see `chain_us`.

        It reads what the last inference left in the arena: run one first.
        """
        with self._lock:
            self._require_open()
            self._context.make_current()
            self._join()
            return chain_us(self._launches[index], self._stream, length, replays)

    def _checked(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The inputs, dense. Raises InternalError for another shape or type than the plan's."""
        dense = {}
        for name, view in self._plan.inputs.items():
            data = inputs[name]
            if data.shape != _physical(view) or data.dtype != np.dtype(view.dtype):
                raise InternalError(
                    f"the input '{name}' is {data.dtype}{list(data.shape)}; "
                    f"expected {view.dtype}{list(_physical(view))}"
                )
            dense[name] = np.ascontiguousarray(data)
        return dense

    def _copy_in(self, inputs: dict[str, NDArray[Any]]) -> None:
        """Submit the inputs' way to the arena; they must stay until the stream has been waited for.

        The driver fetches page-locked memory as it is, and stages other memory faster than a copy
        into page-locked memory of our own would.
        """
        self._join()
        for name, view in self._plan.inputs.items():
            address = self._address(view)
            self._point_input(name, address)
            data = inputs[name]
            target = driver.CUdeviceptr(address)
            call(driver.cuMemcpyHtoDAsync, target, data.ctypes.data, data.nbytes, self._stream)

    def _copy_out(self) -> None:
        """Submit the outputs' way to pinned memory."""
        for name, view in self._plan.outputs.items():
            staging = self._pinned[name]
            address = driver.CUdeviceptr(self._address(view))
            size = staging.array.nbytes
            call(driver.cuMemcpyDtoHAsync, staging.address, address, size, self._stream)

    def run_device(self, image: Any, *, stream: int | None = None) -> DeviceArray:
        """One inference from and to GPU memory, with no copy, on the caller's stream.

        image: anything with DLPack or `__cuda_array_interface__`, of the plan's type and physical
        shape, contiguous. stream: a CUstream handle; None takes the model's own and waits for it.
        Raises UserError for another array.
        """
        from cuda.core.utils import StridedMemoryView

        with self._lock:
            self._require_open()
            self._context.make_current()
            chosen = self._stream if stream is None else driver.CUstream(stream)
            array = StridedMemoryView.from_any_interface(image, stream_ptr=int(chosen))
            name, view = next(iter(self._plan.inputs.items()))
            _check_device_array(array, view)
            call(driver.cuStreamWaitEvent, chosen, self._done, 0)
            self._point_input(name, array.ptr)
            self._enqueue(chosen)
            call(driver.cuEventRecord, self._done, chosen)
            self._elsewhere = stream is not None
            if stream is None:
                self._wait(chosen)
            result = next(iter(self._plan.outputs.values()))
            shape = _physical(result)
            return DeviceArray(self._address(result), shape, result.dtype, int(chosen), self)

    def _join(self) -> None:
        """Let the model's own stream wait for an inference that is on its way on a caller's: both
        write the one arena."""
        if self._elsewhere:
            call(driver.cuStreamWaitEvent, self._stream, self._done, 0)
            self._elsewhere = False

    def trace(self, inputs: dict[str, NDArray[Any]]) -> Iterator[tuple[Step, list[NDArray[Any]]]]:
        """One inference, kernel by kernel: each step with copies of its results.

        Results are in logical order (N, C, H, W). Each kernel is launched by itself and waited for,
        so that the reuse of its memory does not show.
        """
        with self._lock:
            self._require_open()
            self._context.make_current()
            self._copy_in(self._checked(inputs))
            self._wait(self._stream)
            for step, launch in zip(self._plan.steps, self._launches, strict=True):
                launch.enqueue(self._stream)
                call(driver.cuStreamSynchronize, self._stream, where=step.layer)
                yield step, [self._download(view) for view in step.results]

    def _download(self, view: View) -> NDArray[Any]:
        """A copy of a tensor of the arena, in logical order."""
        span = np.empty(span_bytes(view), np.uint8)
        address = driver.CUdeviceptr(self._address(view))
        call(driver.cuMemcpyDtoH, span.ctypes.data, address, span.nbytes)
        return logical_window(span, view, view.offset_bytes)

    def _point_input(self, name: str, address: int) -> None:
        """Make the kernels that read an input read it at `address`."""
        if self._input_address[name] == address:
            return
        for index, position in self._readers[name]:
            launch = self._launches[index]
            launch.arguments[position].value = address
            if self._graph is not None:
                self._graph.update(index, launch)
        self._input_address[name] = address

    def _enqueue(self, stream: Any) -> None:
        if self._graph is not None:
            self._graph.enqueue(stream)
            return
        for launch in self._launches:
            launch.enqueue(stream)
            if self._one_by_one:
                call(driver.cuStreamSynchronize, stream, where=launch.layer)

    def _wait(self, stream: Any) -> None:
        """Wait for a stream. An error of a kernel comes up here, and nobody knows whose it is."""
        hint = "set YOLOMLIR_CUDA_SYNC=1 to learn which layer's kernel failed"
        call(driver.cuStreamSynchronize, stream, hint=None if self._one_by_one else hint)

    # ---- closing ----------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise UserError("the model is closed", hint="load it again")

    def close(self) -> None:
        """Free everything on the GPU; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._context.make_current()
            call(driver.cuStreamSynchronize, self._stream)
            call(driver.cuEventSynchronize, self._done)  # what runs on a caller's stream
            if self._graph is not None:
                self._graph.destroy()
            for module in self._modules.values():
                call(driver.cuModuleUnload, module)
            for memory in self._memory:
                memory.free()
            for pinned in self._pinned.values():
                pinned.free()
            for event in (self._done, *self._events):
                call(driver.cuEventDestroy, event)
            call(driver.cuStreamDestroy, self._stream)
            self._context.release()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _physical(view: View) -> tuple[int, ...]:
    """The shape in memory of a whole (not sliced) view."""
    if len(view.shape) != 4:
        return view.shape
    n, c, h, w = view.shape
    return (n, h, w, c)


def _check_device_array(array: Any, view: View) -> None:
    expected = _physical(view)
    if not array.is_device_accessible:
        raise UserError("the image is not in GPU memory", hint="call the model with a host array")
    if tuple(array.shape) != expected or np.dtype(array.dtype) != np.dtype(view.dtype):
        raise UserError(
            f"the image is {array.dtype}{list(array.shape)}; "
            f"expected {view.dtype}{list(expected)} (N, H, W, C)"
        )
    if array.strides is not None:
        dense = np.cumprod([1, *expected[:0:-1]])[::-1]
        if any(s != d for s, d, n in zip(array.strides, dense, expected, strict=True) if n > 1):
            raise UserError("the image is not contiguous", hint="pass image.contiguous()")
