"""Names of dispatch functions: readable and lasting for tables, exact for the database.

Both are taken from the `yolo` level, where tiles are assigned. Together with the sources of
lowering and code generation (`code_fingerprint`), a function's text decides its linalg form and
its kernel.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yolomlir
from yolomlir.autotune.sizes import Size
from yolomlir.autotune.space import SPACE_VERSION
from yolomlir.bindings import SUPPORTED_LLVM, ir
from yolomlir.diagnostics import InternalError
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout

_TILE = "yolo.tile"
_SOURCES = ("codegen/gpu/*.py", "codegen/linalg*.py", "passes/lower_to_linalg.py")
_WEIGHTS = (Layout.OHWI, Layout.HWIO)
_DTYPES = {"f32": "", "ui8": "u8", "si8": "i8", "f16": "f16"}
_IMAGES = re.compile(r"[ ,](\d+)x\d+x(\d+)x(\d+)")


def function_text(function: ir.Operation) -> str:
    """The function in canonical form: without its name, tile and locations."""
    text = str(function.get_asm(use_local_scope=True, enable_debug_info=False))
    name = yolo.string(function, "sym_name")
    text = text.replace(f"@{name}(", "@dispatch(", 1)
    return re.sub(r",? ?yolo\.tile = \{[^}]*\}", "", text, count=1).strip()


@dataclass(frozen=True)
class Form:
    """A function without its size: what it has in common with those of other images.

    size: the function's own, which is that of the first image tensor that it reads.
    """

    size: Size
    _family: str
    _operands: tuple[_Tensor, ...]
    _ops: str
    _results: tuple[_Tensor, ...]

    @classmethod
    def of(cls, function: ir.Operation) -> Form:
        """The form of a dispatch function at the `yolo` level."""
        block = function.regions[0].blocks[0]
        operands = tuple(_Tensor.of(value.type) for value in block.arguments)
        *inner, end = (view.operation for view in block.operations)
        first = next((t.shape for t in operands if t.is_image and len(t.shape) == 4), None)
        if first is None:
            raise InternalError(f"{yolo.string(function, 'sym_name')} reads no image tensor")
        return cls(
            Size(first[0], *first[2:]),
            yolo.string(function, "yolo.family"),
            operands,
            " ".join(_op(op) for op in inner),
            tuple(_Tensor.of(value.type) for value in end.operands),
        )

    def at(self, size: Size) -> str:
        """The signature of such a function whose first image tensor has this size."""
        operands, results = (
            ",".join(t.text(self.size, size) for t in tensors)
            for tensors in (self._operands, self._results)
        )
        return f"{self._family} {operands} > {self._ops} > {results}"


@dataclass(frozen=True)
class _Tensor:
    """shape: N, C, H, W of an image tensor; N and others of a list of boxes."""

    shape: tuple[int, ...]
    dtype: str
    is_image: bool

    @classmethod
    def of(cls, type_: ir.Type) -> _Tensor:
        tensor = ir.RankedTensorType(type_)
        shape = tuple(tensor.shape)
        is_image = len(shape) > 2 and Layout.of(type_) not in _WEIGHTS
        return cls(shape, _DTYPES.get(str(tensor.element_type), "?"), is_image)

    def text(self, own: Size, wanted: Size) -> str:
        shape = list(self.shape)
        if self.is_image:
            shape[0] = wanted.images
        if self.is_image and len(shape) == 4:
            shape[2] = shape[2] * wanted.height // own.height
            shape[3] = shape[3] * wanted.width // own.width
        return "x".join(map(str, shape)) + self.dtype


def signature(function: ir.Operation) -> str:
    """Family, operands, ops with what changes them, result, as one readable line.

    Such as `conv2d 1x64x160x160,64x64x3x3,64 > conv2d[padding=1;strides=2] silu >
    1x64x80x80`. It has all that decides which tile is best and nothing that a small change of the
    compiler alters.
    """
    form = Form.of(function)
    return form.at(form.size)


def size_in(text: str) -> Size:
    """The size of the function of a signature, as `Form` has it."""
    found = _IMAGES.search(text.partition(" > ")[0])
    if found is None:
        raise ValueError(f"'{text}' reads no image tensor")
    return Size(*map(int, found.groups()))


def entry_key(text: str, target: str, device: str, precision: str, assembler: str) -> str:
    """The database's key: a digest of everything that can change which tile is fastest."""
    parts = (
        text, target, device, precision, assembler,
        str(SPACE_VERSION), code_fingerprint(), SUPPORTED_LLVM,
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def text_digest(text: str) -> str:
    """Of a function alone: the same in entries that other parts of the key tell apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_fingerprint() -> str:
    """A digest of the sources between a function and its machine code."""
    digest = hashlib.sha256()
    for root in map(Path, yolomlir.__path__):
        for pattern in _SOURCES:
            for file in sorted(root.glob(pattern)):
                digest.update(file.name.encode())
                digest.update(file.read_bytes())
    # The passes lie beside the package in a checkout, and inside it when installed.
    from yolomlir.passes import lower_to_linalg

    digest.update(Path(lower_to_linalg.__file__).read_bytes())
    return digest.hexdigest()[:16]


@cache
def assembler_version() -> str:
    """nvJitLink's, or `none` where there is none."""
    from yolomlir.codegen.gpu.ptx import _nvjitlink
    from yolomlir.diagnostics import UserError

    try:
        return ".".join(str(part) for part in _nvjitlink().version())
    except UserError:
        return "none"


def _op(op: ir.Operation) -> str:
    options = []
    for name in op.attributes:
        text = _plain(op.attributes[name])
        if (name, text) not in _USUAL:
            options.append(f"{name}={text}")
    kind = op.name.removeprefix("yolo.")
    return f"{kind}[{';'.join(sorted(options))}]" if options else kind


_USUAL = {("strides", "1"), ("groups", "1"), ("padding", "0"), ("scale", "1.0")}


def _plain(attribute: ir.Attribute) -> str:
    """Numbers and words, without types; one number for several equal ones."""
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        values = [str(int(v)) for v in attribute]
        return values[0] if len(set(values)) == 1 else " ".join(values)
    if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr, ir.StringAttr, ir.BoolAttr)):
        return str(attribute.value)
    return re.sub(r"\s+", " ", str(attribute))
