"""What an op of the `yolo` dialect says: shapes, element types, attributes, its layer."""

from __future__ import annotations

from collections.abc import Iterator

from yolomlir.bindings import ir

DISPATCH = "yolo.dispatch"
"""Unit attribute of a `func.call` that is one kernel launch."""


def shape_of(value: ir.Value) -> list[int]:
    """The logical shape of a tensor value."""
    return list(ir.RankedTensorType(value.type).shape)


def element_of(value: ir.Value) -> str:
    """The element type of a tensor value as MLIR prints it: `f32`, `f16`, `ui8`."""
    return str(ir.RankedTensorType(value.type).element_type)


def integers(op: ir.Operation, name: str) -> list[int]:
    """A dense array attribute of integers."""
    return [int(v) for v in ir.DenseI64ArrayAttr(op.attributes[name])]


def integer(op: ir.Operation, name: str) -> int:
    """An integer attribute."""
    return int(ir.IntegerAttr(op.attributes[name]).value)


def real(op: ir.Operation, name: str) -> float:
    """A float attribute."""
    return float(ir.FloatAttr(op.attributes[name]).value)


def string(op: ir.Operation, name: str) -> str:
    """A string attribute."""
    return str(ir.StringAttr(op.attributes[name]).value)


def callee(op: ir.Operation) -> str:
    """The name of the function that a dispatch calls."""
    return str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)


def is_dispatch(op: ir.Operation) -> bool:
    """Whether an op is one kernel launch."""
    return op.name == "func.call" and DISPATCH in op.attributes


def layer_of(location: ir.Location) -> str:
    """The layer a location names (`model.2.m.0.cv1.conv`), else the location as MLIR prints it."""
    if location.is_a_name():
        return str(location.name_str)
    if location.is_a_fused():
        for part in location.locations:
            layer = layer_of(part)
            if not layer.startswith("loc("):
                return layer
    return str(location)


def ops_in(module: ir.Module | ir.Operation, name: str = "yolo.") -> Iterator[ir.Operation]:
    """Every operation, in order, regions before what follows, whose name starts with `name`."""
    root = module.operation if isinstance(module, ir.Module) else module
    for region in root.regions:
        for block in region:
            for view in list(block.operations):
                op = view.operation
                if op.name.startswith(name):
                    yield op
                yield from ops_in(op, name)
