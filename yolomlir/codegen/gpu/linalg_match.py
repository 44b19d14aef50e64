"""Reading a dispatch at the linalg level: which argument a value is, its padding, its strides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.element import FLOAT32, Element
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo

Padding = tuple[int, int, int, int]
"""Top, left, bottom, right."""


def walk(function: ir.Operation, name: str) -> Iterator[ir.Operation]:
    """Every op called `name` of the function's body, in order."""
    return (op for op in yolo.ops_in(function, name) if op.name == name)


def only(function: ir.Operation, name: str) -> ir.Operation:
    """The one op called `name`. Raises UnsupportedError where there are none or several."""
    found = list(walk(function, name))
    if len(found) != 1:
        refuse(function, f"holds {len(found)} ops '{name}'; expected one")
    return found[0]


def refuse(op: ir.Operation, message: str) -> NoReturn:
    """Raise UnsupportedError for a dispatch whose body is not of the family's form."""
    raise UnsupportedError(
        f"the dispatch {message}",
        where=yolo.layer_of(op.location),
        hint="docs/architecture.md, section 4, lists the forms that kernels are made from",
    )


def defining(value: ir.Value) -> ir.Operation | None:
    """The op that makes a value; None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def made_by(value: ir.Value, name: str) -> ir.Operation | None:
    """The op that makes a value if it is called `name`."""
    op = defining(value)
    return op if op is not None and op.name == name else None


def argument_number(value: ir.Value) -> int | None:
    """Which argument of the function a value is; None for the result of an op."""
    if defining(value) is not None:
        return None
    return int(ir.BlockArgument(value).arg_number)


def through(value: ir.Value, *names: str) -> ir.Value:
    """The value behind unary ops called `names` (reshapes, transposes)."""
    op = defining(value)
    while op is not None and op.name in names:
        value = op.operands[0]
        op = defining(value)
    return value


def shape(value: ir.Value) -> tuple[int, ...]:
    """The static shape of a tensor value."""
    return tuple(ir.RankedTensorType(value.type).shape)


def dtype_of(value: ir.Value) -> str:
    """The dtype of a tensor value. Raises UnsupportedError for one that kernels do not read."""
    name = str(ir.RankedTensorType(value.type).element_type)
    if name not in _DTYPES:
        raise UnsupportedError(
            f"the dispatch reads elements of type {name}; expected one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


_DTYPES = {"f32": "float32", "f16": "float16", "i8": "uint8", "ui8": "uint8"}


def unpadded(value: ir.Value) -> tuple[ir.Value, Padding]:
    """An NHWC value without the `tensor.pad` around it, and that padding."""
    op = made_by(value, "tensor.pad")
    if op is None:
        return value, (0, 0, 0, 0)
    low = list(ir.DenseI64ArrayAttr(op.attributes["static_low"]))
    high = list(ir.DenseI64ArrayAttr(op.attributes["static_high"]))
    if low[0] or low[3] or high[0] or high[3] or min(*low, *high) < 0:
        refuse(op, f"pads by {low} and {high}; only rows and columns can be padded")
    return op.operands[0], (low[1], low[2], high[1], high[2])


def pair(op: ir.Operation, name: str) -> tuple[int, int]:
    """A `dense<…> : tensor<2xi64>` attribute of a linalg op, such as `strides`."""
    first, second = (int(v) for v in ir.DenseIntElementsAttr(op.attributes[name]))
    return first, second


def vector_width(
    function: ir.Operation, channels: int, numbers: Iterable[int], element: Element = FLOAT32
) -> int:
    """Elements that one access (16 bytes or less) may have of rows of `channels` of all of these
    arguments (the result comes after the last).

    `yolo.alignments` of the function states rows that are less aligned than their channels say.
    """
    stated: list[int] = []
    if "yolo.alignments" in function.attributes:
        stated = [int(v) for v in ir.DenseI64ArrayAttr(function.attributes["yolo.alignments"])]
    known = [stated[n] for n in numbers if n < len(stated) and stated[n]]
    return min(element.widest(channels), element.in_chunk(min([16, *known])))


def constant_float(value: ir.Value) -> float | None:
    """The value of an `arith.constant`; None for anything else."""
    op = made_by(value, "arith.constant")
    return None if op is None else float(ir.FloatAttr(op.attributes["value"]).value)
