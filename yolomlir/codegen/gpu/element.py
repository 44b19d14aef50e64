"""The element types that kernels multiply: what sizes, vectors and fragments follow from each.

Fragments of the tensor cores are counted in 32-bit registers. `mma.sync` takes two 16-byte chunks
of each row of A at every type (m16n8k8 of TF32, m16n8k16 of float16), a register holds one float32
or two float16, and `ldmatrix` moves rows of 16 bytes. So one kernel serves all types: only the
number of elements in a chunk differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.diagnostics import InternalError

CHUNK_BYTES = 16
"""The widest access, and a row of a matrix of `ldmatrix`."""
_PRODUCT_BYTES = 32
_REGISTER_BYTES = 4


@dataclass(frozen=True)
class Element:
    """A type of activations and weights. name: the dtype; bytes: of an element."""

    name: str
    bytes: int

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK_BYTES // self.bytes

    @property
    def k_step(self) -> int:
        """K of one `mma.sync`: 8 for TF32, 16 for float16."""
        return _PRODUCT_BYTES // self.bytes

    @property
    def packed(self) -> int:
        """Elements of a 32-bit register."""
        return _REGISTER_BYTES // self.bytes

    def widest(self, count: int) -> int:
        """Elements of the widest access (16 bytes or less) that divides rows of `count`."""
        width = self.chunk
        while count % width:
            width //= 2
        return width

    def in_chunk(self, alignment_bytes: int) -> int:
        """Elements that one access of this alignment may have."""
        return min(CHUNK_BYTES, alignment_bytes) // self.bytes


FLOAT32 = Element("float32", 4)
FLOAT16 = Element("float16", 2)
_ELEMENTS = {e.name: e for e in (FLOAT32, FLOAT16)}


def element_named(name: str) -> Element:
    """The element type of a dtype. Raises InternalError for one that kernels do not multiply."""
    if name not in _ELEMENTS:
        raise InternalError(f"kernels multiply {', '.join(_ELEMENTS)}; got '{name}'")
    return _ELEMENTS[name]


def element_of(precision: str) -> Element:
    """What a precision stores activations and weights in."""
    return FLOAT16 if precision == "fp16" else FLOAT32
