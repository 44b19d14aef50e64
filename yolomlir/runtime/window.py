"""A tensor of a plan as a numpy array over the memory that it lies in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.runtime.plan import View


def span_bytes(view: View) -> int:
    """Bytes from a view's first element to the end of its last."""
    shape, strides, item = _strided(view)
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + item


def logical_window(memory: NDArray[np.uint8], view: View, base_bytes: int = 0) -> NDArray[Any]:
    """The tensor in logical order (N, C, H, W), not copied.

    memory: bytes of the arena from `base_bytes` on.
    """
    shape, strides, _ = _strided(view)
    begin = view.offset_bytes - base_bytes
    place = memory[begin : begin + span_bytes(view)]
    window = np.ndarray(shape, view.dtype, buffer=place.data, strides=strides)
    return np.moveaxis(window, -1, 1) if len(shape) == 4 else window


def _strided(view: View) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Physical shape, strides and element size, in bytes."""
    item = np.dtype(view.dtype).itemsize
    shape = view.shape
    if len(shape) == 4:
        shape = (shape[0], shape[2], shape[3], shape[1])
    strides = [item]
    step = view.pitch * item
    for size in reversed(shape[1:-1]):
        strides.insert(0, step)
        step *= size
    if len(shape) > 1:
        strides.insert(0, step)
    return shape, tuple(strides), item
