"""Element types: how a value is held in a register (numpy) and in memory (bytes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError

Array: TypeAlias = NDArray[Any]
Value: TypeAlias = Any
"""A register of all lanes: a numpy scalar (the same in every lane), an array of shape (lanes,),
for a vector type (lanes, *shape) or (1, *shape), a tuple for a struct, or a `Reference`."""


def round_bf16(value: Value) -> Value:
    """Float32 rounded to bfloat16 (nearest, ties to even), still held as float32."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(
        0xFFFF0000
    )
    return np.where(np.isnan(value), np.float32(np.nan), rounded.view(np.float32))[()]


def round_tf32(value: Value) -> Value:
    """Float32 rounded to TF32 as `cvt.rna.tf32.f32` does: nearest, ties away from zero."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(value), rounded.view(np.float32), value)[()]


def truncate_tf32(value: Value) -> Value:
    """Float32 as `mma.sync` reads it for TF32: the low 13 bits of the mantissa are dropped."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


@dataclass(frozen=True)
class Element:
    """A scalar type.

    register: the numpy type lanes are held in. memory: the numpy type of its bytes.
    bits: width as MLIR counts it (64 for index).
    """

    name: str
    register: np.dtype[Any]
    memory: np.dtype[Any]
    bits: int

    @property
    def is_float(self) -> bool:
        """Whether arithmetic on it is floating point."""
        return self.register.kind == "f"

    @property
    def size_bytes(self) -> int:
        """Bytes in memory."""
        return self.memory.itemsize

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The unsigned numpy type of the register's width (bool for i1)."""
        if self.register.kind == "b":
            return self.register
        return np.dtype(f"u{self.register.itemsize}")

    def from_memory(self, raw: Array) -> Array:
        """Register values of memory values."""
        if self.name == "bf16":
            widened: Array = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
            return widened
        if self.name == "i1":
            return raw.astype(np.bool_)
        return raw if raw.dtype == self.register else raw.view(self.register)

    def to_memory(self, value: Value) -> Array:
        """Memory values of register values."""
        if self.name == "bf16":
            bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
            return np.asarray(bits >> np.uint32(16), np.uint16)
        return np.asarray(value).astype(self.memory, copy=False)

    def rounded(self, function: Callable[..., Value]) -> Callable[..., Value]:
        """`function` with its float32 results rounded where the type is narrower (bf16)."""
        if self.name != "bf16":
            return function
        return lambda *operands: round_bf16(function(*operands))


def _element(name: str, register: str, memory: str, bits: int) -> Element:
    return Element(name, np.dtype(register), np.dtype(memory), bits)


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        _element("i1", "?", "u1", 1),
        _element("i8", "i1", "i1", 8),
        _element("ui8", "i1", "i1", 8),
        _element("i16", "i2", "i2", 16),
        _element("i32", "i4", "i4", 32),
        _element("i64", "i8", "i8", 64),
        _element("index", "i8", "i8", 64),
        _element("f16", "f2", "f2", 16),
        _element("bf16", "f4", "u2", 16),
        _element("f32", "f4", "f4", 32),
        _element("f64", "f8", "f8", 64),
    )
}
"""Every scalar type the simulator knows, by its MLIR spelling."""


def element_of(type_: Any) -> Element:
    """The element of a scalar, vector, tensor or memref type. Raises InternalError."""
    name = str(type_)
    if name in ELEMENTS:
        return ELEMENTS[name]
    if name.startswith("!llvm.ptr"):
        return ELEMENTS["i64"]
    if isinstance(type_, ir.ShapedType):
        return element_of(type_.element_type)
    raise InternalError(
        f"the simulator does not know the type {name}", hint=f"it knows {', '.join(ELEMENTS)}"
    )


def vector_shape(type_: Any) -> tuple[int, ...] | None:
    """The shape of a vector type; None for another type."""
    if isinstance(type_, ir.VectorType):
        return tuple(ir.VectorType(type_).shape)
    return None


def is_uniform(value: Value) -> bool:
    """Whether a scalar register is held once for all lanes."""
    return not isinstance(value, np.ndarray) or value.ndim == 0


def select(condition: Value, then: Value, other: Value) -> Value:
    """Lane by lane `then` where `condition`, else `other`; for scalars, vectors, structs, refs."""
    if is_uniform(condition):
        return then if condition else other
    if then is other:
        return then
    if isinstance(then, tuple):
        return tuple(select(condition, a, b) for a, b in zip(then, other, strict=True))
    if hasattr(then, "select"):
        return then.select(condition, other)
    rank = max(np.ndim(then), np.ndim(other))
    if rank > condition.ndim:
        condition = condition.reshape(condition.shape + (1,) * (rank - condition.ndim))
    return np.where(condition, then, other)


def lanes_first(values: list[Value], lanes: int) -> Array:
    """Scalars stacked along a new last axis: (lanes, len(values)), or (1, …) when all uniform."""
    if all(is_uniform(v) for v in values):
        return np.stack([np.asarray(v) for v in values])[None]
    out = np.empty((lanes, len(values)), np.asarray(values[0]).dtype)
    for i, value in enumerate(values):
        out[:, i] = value
    return out


def scalar_of(array: Array) -> Value:
    """An array of shape (lanes,), or its only item where it has one for all lanes."""
    return array[0] if array.shape == (1,) else array
