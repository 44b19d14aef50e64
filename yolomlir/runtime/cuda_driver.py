"""Thin wrappers of the CUDA driver API: errors that name what failed, memory, modules."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import InternalError, UserError
from yolomlir.runtime.device import CudaDevice, cuda_device

try:
    from cuda.bindings import driver as driver
except ImportError as error:
    raise UserError(
        "the CUDA bindings are not installed", hint="pip install 'yolomlir[cuda]'"
    ) from error


class CudaError(InternalError):
    """A CUDA call failed. status: the driver's name of the error."""

    def __init__(
        self, function: str, status: Any, where: object = None, hint: str | None = None
    ) -> None:
        _, text = driver.cuGetErrorString(status)
        meaning = text.decode() if text else "unknown error"
        self.status = status.name
        message = f"{function} failed: {status.name}, {meaning}"
        super().__init__(message, where=where, hint=hint)


def call(function: Any, *args: Any, where: object = None, hint: str | None = None) -> Any:
    """Call the driver; the result without its status. Raises CudaError naming `where`."""
    status, *values = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(function.__name__, status, where, hint)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def require_device() -> CudaDevice:
    """The GPU. Raises UserError with the reason when there is none."""
    found = cuda_device()
    if isinstance(found, str):
        raise UserError(found, hint="compile and run for the CPU with target='cpu'")
    return found


class Context:
    """The first GPU's primary context, shared with other libraries of the process."""

    def __init__(self) -> None:
        self.device = require_device()
        self._device = call(driver.cuDeviceGet, 0)
        self.handle = call(driver.cuDevicePrimaryCtxRetain, self._device)

    def make_current(self) -> None:
        """Bind the context to the calling thread."""
        call(driver.cuCtxSetCurrent, self.handle)

    def release(self) -> None:
        """Give up this reference to the primary context."""
        call(driver.cuDevicePrimaryCtxRelease, self._device)


class DeviceMemory:
    """One allocation on the GPU, zeroed."""

    def __init__(self, size_bytes: int, what: str) -> None:
        self.size_bytes = max(size_bytes, 1)
        try:
            self._pointer = call(driver.cuMemAlloc, self.size_bytes)
        except CudaError as error:
            if error.status != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise UserError(
                f"the GPU has no {self.size_bytes / 1e6:.1f} MB left for the {what}",
                hint="compile with a smaller batch or image, or free other models",
            ) from error
        self.address = int(self._pointer)
        call(driver.cuMemsetD8, self._pointer, 0, self.size_bytes)

    def upload(self, data: NDArray[Any], offset_bytes: int = 0) -> None:
        """Copy a contiguous array to the allocation; returns when it is there."""
        address = driver.CUdeviceptr(self.address + offset_bytes)
        call(driver.cuMemcpyHtoD, address, data.ctypes.data, data.nbytes)

    def free(self) -> None:
        """Free it; a second call does nothing."""
        if self._pointer is not None:
            call(driver.cuMemFree, self._pointer)
            self._pointer = None


class PinnedArray:
    """A page-locked host array, so that copies to and from it are asynchronous."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.address = int(call(driver.cuMemHostAlloc, size_bytes, 0))
        self.buffer = (ctypes.c_byte * size_bytes).from_address(self.address)
        view = np.frombuffer(memoryview(self.buffer), dtype)
        self.array: NDArray[Any] = view.reshape(tuple(shape))

    def free(self) -> None:
        """Free it; the array must not be used again."""
        if self.address:
            call(driver.cuMemFreeHost, self.address)
            self.address = 0


def page_locked_array(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """A zeroed array in page-locked memory, which is freed with the last array that looks at it."""
    context = Context()
    context.make_current()
    try:
        pinned = PinnedArray(shape, dtype)
    except CudaError:
        context.release()
        raise
    pinned.array[...] = 0
    # Not at exit: the driver may be gone by then, and the memory goes with the process.
    weakref.finalize(pinned.buffer, _free_page_locked, context, pinned.address).atexit = False
    return pinned.array


def _free_page_locked(context: Context, address: int) -> None:
    """Wherever the garbage collector happens to run: that thread keeps its own context."""
    call(driver.cuCtxPushCurrent, context.handle)
    call(driver.cuMemFreeHost, address)
    call(driver.cuCtxPopCurrent)
    context.release()


def load_module(cubin: bytes | None, ptx: bytes | None, device: CudaDevice, where: str) -> Any:
    """Load a kernel's machine code, or let the driver compile its PTX.

    Raises UserError when neither can run on this GPU or driver, saying why and what to do.
    """
    if cubin is not None:
        try:
            return call(driver.cuModuleLoadData, cubin, where=where)
        except CudaError as error:
            if error.status != "CUDA_ERROR_NO_BINARY_FOR_GPU" or ptx is None:
                raise
    if ptx is None:
        raise UserError(f"no machine code for {device.name} in the artifact", where=where)
    try:
        return call(driver.cuModuleLoadData, ptx.rstrip(b"\0") + b"\0", where=where)
    except CudaError as error:
        if error.status not in ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_INVALID_PTX"):
            raise
        found = re.search(rb"\.version\s+(\S+)", ptx)
        version = found[1].decode() if found else "unknown"
        supported = ".".join(map(str, device.driver))
        raise UserError(
            f"the kernels are PTX {version}, which the driver (CUDA {supported}) cannot compile "
            f"for {device.name}",
            where=where,
            hint="update the NVIDIA driver, or compile for this GPU with a pip-installed "
            f"nvidia-nvjitlink no newer than CUDA {supported}",
        ) from error


def load_function(module: Any, name: str, shared_bytes: int, where: str, carveout: int = 0) -> Any:
    """A kernel of a module, allowed `shared_bytes` of dynamic shared memory.

    carveout: percent of an SM's memory that it prefers to have as shared memory, the rest being
    L1; 0 leaves it to the driver.
    """
    function = call(driver.cuModuleGetFunction, module, name.encode(), where=where)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared_bytes:
        call(driver.cuFuncSetAttribute, function, attribute, shared_bytes, where=where)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    if carveout:
        call(driver.cuFuncSetAttribute, function, attribute, carveout, where=where)
    return function
