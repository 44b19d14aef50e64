"""Kernel records of NVIDIA's CUPTI, read through ctypes: what runs when, inside a CUDA graph too.

Needs the library of the pip package `nvidia-cuda-cupti` (PyTorch brings it along) or of a CUDA
toolkit. It must be started before the graph that it watches is instantiated.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolomlir.diagnostics import InternalError

_CONCURRENT_KERNEL = 10  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
_KINDS = (3, _CONCURRENT_KERNEL)
_BUFFER_BYTES = 4 << 20
_START, _END, _STREAM, _NAME, _GRAPH_NODE = 16, 24, 48, 104, 144
"""Offsets in CUpti_ActivityKernel9 to 13 (CUDA 12 and 13), which only append fields."""

_REQUESTED = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_COMPLETED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


@dataclass(frozen=True)
class KernelRecord:
    """One execution of a kernel. start_ns, end_ns: of the GPU's clock. graph_node: 0 outside."""

    name: str
    start_ns: int
    end_ns: int
    stream: int
    graph_node: int


def find_library() -> Path | None:
    """Where CUPTI is, or None."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    roots += [Path("/usr/local/cuda/extras/CUPTI"), Path("/usr/local/cuda")]
    patterns = ("cu*/lib/libcupti.so.*", "cuda_cupti/lib/libcupti.so.*", "lib64/libcupti.so.*")
    for root in roots:
        for pattern in patterns:
            found = [p for p in sorted(root.glob(pattern)) if p.suffix[1:].isdigit()]
            if found:
                return found[-1]
    return None


class Cupti:
    """A recording. Use it as `with Cupti(path) as cupti:` around everything on the GPU."""

    def __init__(self, library: Path) -> None:
        """Raises InternalError where CUPTI refuses, as when another profiler is attached."""
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise InternalError(f"CUPTI cannot be loaded: {error}") from error
        self._records: list[KernelRecord] = []
        self._buffers: dict[int, Any] = {}
        # The library keeps pointers to these for as long as it is loaded.
        self._callbacks = _REQUESTED(self._give_buffer), _COMPLETED(self._take_buffer)
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        self._call("cuptiActivityEnable", _CONCURRENT_KERNEL)
        self._open = True

    def records(self) -> list[KernelRecord]:
        """The kernels that ended since the last call; the caller has waited for them."""
        self._call("cuptiActivityFlushAll", 1)
        found, self._records = self._records, []
        return found

    def close(self) -> None:
        """Stop recording; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._call("cuptiActivityDisable", _CONCURRENT_KERNEL)
        self._call("cuptiActivityFlushAll", 1)

    def __enter__(self) -> Cupti:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(status, ctypes.byref(text))
            raise InternalError(f"{name} failed: {(text.value or b'').decode()} ({status})")

    def _give_buffer(self, buffer: Any, size: Any, most: Any) -> None:
        memory = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()  # aligned to 8, as CUPTI wants
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], most[0] = address, _BUFFER_BYTES, 0

    def _take_buffer(self, context: Any, stream: Any, buffer: int, size: int, valid: int) -> None:
        if buffer and valid:
            self._records += self._read(buffer, valid)
        self._buffers.pop(buffer, None)

    def _read(self, buffer: int, valid: int) -> Iterator[KernelRecord]:
        record = ctypes.c_void_p()
        following = self._library.cuptiActivityGetNextRecord
        while True:
            status = following(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status or not record.value:
                return
            if ctypes.c_uint32.from_address(record.value).value in _KINDS:
                yield _kernel(record.value)


def _kernel(address: int) -> KernelRecord:
    data = ctypes.string_at(address, _GRAPH_NODE + 8)

    def number(offset: int, code: str = "Q") -> int:
        return int(struct.unpack_from(code, data, offset)[0])

    pointer = number(_NAME)
    name = ctypes.string_at(pointer).decode() if pointer else ""
    return KernelRecord(
        name, number(_START), number(_END), number(_STREAM, "I"), number(_GRAPH_NODE)
    )
