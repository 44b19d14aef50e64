"""`yolo-lower-to-linalg`: every dispatch's function to linalg on tensors, in physical shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout, physical_shape
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import func, ir, tensor
from yolomlir.codegen.linalg_ops import FunctionLowering, element_text
from yolomlir.diagnostics import InternalError, UserError

FAMILY = "yolo.family"
"""Attribute of a private function that is the body of a dispatch."""
_PARAMETERS = {
    "yolo.attention": ("heads", "key_dim", "head_dim", "scale"),
    "yolo.detect": ("strides", "max_det"),
    "yolo.candidates": ("strides", "max_det"),
    "yolo.merge_detections": ("stride",),
}
"""Attributes of ops that a code generator wants and linalg does not show; kept on the function."""
_KEPT = ("yolo.weight", "func.call", "func.return")
"""Ops of a calling function that stay, with physical types."""
_CHANNELS = 3
"""The channel dimension of a physical activation."""


@dataclass(frozen=True)
class LowerToLinalg(Pass):
    """Rewrite every function of a dispatch to linalg on tensors in physical shapes.

    A convolution becomes `tensor.pad`, a named linalg op into a fill of 0 and one elementwise
    `linalg.generic` for bias, SiLU and residual; the forms are in docs/architecture.md, section 4.
    `@main` keeps its calls, `yolo.weight` and attributes, with physical types; its views become
    `tensor.extract_slice` and `tensor.concat`. Parameters of `attention` and `detect` stay as
    `yolo.heads`, `yolo.max_det`, … on their functions.

    Every `yolo` op but `yolo.weight` and views has to lie in a private function with `yolo.family`,
    and activations have to be NHWC. Afterwards there is no encoding, and of the dialect only
    `yolo.weight` and attributes.

    Before:
        %1 = "yolo.silu"(%0) : (tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>) -> …

    After:
        %1 = linalg.generic {…} ins(%0 : tensor<1x4x4x8xf32>) … { negf, exp, addf, divf }

    Statistics:
        functions: functions of dispatches rewritten.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-lower-to-linalg | FileCheck %s

        // CHECK: func.func private @silu(%[[X:.*]]: tensor<1x4x4x8xf32>) -> tensor<1x4x4x8xf32>
        // CHECK: linalg.generic
        // CHECK: math.exp
        !silu = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        func.func private @silu(%x: !silu) -> !silu attributes {yolo.family = "elementwise"} {
          %0 = "yolo.silu"(%x) : (!silu) -> !silu
          return %0 : !silu
        }
    """

    name: ClassVar[str] = "yolo-lower-to-linalg"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Rewrite `module` in place. Raises UserError where an op has no lowering or place."""
        with module.context:
            for view in list(module.body.operations):
                function = view.operation
                if function.name != "func.func":
                    continue
                if FAMILY in function.attributes:
                    _lower_function(function)
                    context.count(self, "functions")
                elif function.regions[0].blocks:
                    _lower_caller(function)


def _lower_function(function: ir.Operation) -> None:
    """Replace one dispatch function by its linalg form; its attributes and location stay."""
    text = FunctionLowering(function).text()
    try:
        parsed = ir.Module.parse(text)
    except ir.MLIRError as error:
        name = yolo.string(function, "sym_name")
        raise InternalError(f"the linalg form does not parse: {error}", where=name) from error
    lowered = parsed.body.operations[0].operation
    for key in function.attributes:
        if key not in ("function_type", "sym_name", "sym_visibility", "arg_attrs"):
            lowered.attributes[key] = function.attributes[key]
    for view in function.regions[0].blocks[0].operations:
        for key in _PARAMETERS.get(view.operation.name, ()):
            lowered.attributes[f"yolo.{key}"] = view.operation.attributes[key]
    lowered.detach_from_parent()
    ir.InsertionPoint(function).insert(lowered)
    function.erase()


def _physical_type(type_: ir.Type, where: str) -> ir.Type:
    if not isinstance(type_, ir.RankedTensorType):
        raise UserError(f"{type_} is not a ranked tensor", where=where)
    element = ir.Type.parse(element_text(type_))
    return ir.RankedTensorType.get(physical_shape(type_), element)


def _lower_caller(function: ir.Operation) -> None:
    """Rebuild a function that only calls dispatches, with physical types."""
    source = function.regions[0].blocks[0]
    returned = source.operations[len(source.operations) - 1].operation
    name = yolo.string(function, "sym_name")
    arguments = [_physical_type(a.type, name) for a in source.arguments]
    results = [_physical_type(v.type, name) for v in returned.operands]
    with ir.InsertionPoint(function):
        new = func.FuncOp(name, (arguments, results), loc=function.location)
    for key in function.attributes:
        if key not in ("function_type", "sym_name"):
            new.operation.attributes[key] = function.attributes[key]
    block = new.add_entry_block()
    values = dict(zip(source.arguments, block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for view in source.operations:
            _lower_call(view.operation, values)
    function.erase()


def _lower_call(op: ir.Operation, values: dict[ir.Value, ir.Value]) -> None:
    """Rebuild one op of a calling function, and map its results."""
    operands = [values[v] for v in op.operands]
    if op.name in ("yolo.slice", "yolo.concat"):
        values[op.results[0]] = _lower_view(op, operands)
        return
    where = yolo.layer_of(op.location)
    if op.name not in _KEPT:
        hint = "run yolo-form-dispatches first"
        raise UserError(f"'{op.name}' lies in no dispatch", where=where, hint=hint)
    types = [_physical_type(v.type, where) for v in op.results]
    attributes = {key: op.attributes[key] for key in op.attributes}
    new = ir.Operation.create(
        op.name, results=types, operands=operands, attributes=attributes, loc=op.location
    )
    values.update(zip(op.results, new.results, strict=True))


def _lower_view(op: ir.Operation, operands: list[ir.Value]) -> ir.Value:
    """A channel slice or concatenation of NHWC activations as `tensor` ops."""
    result = _physical_type(op.results[0].type, yolo.layer_of(op.location))
    if Layout.of(op.results[0].type) is not Layout.NHWC:
        raise UserError(
            f"'{op.name}' on {op.results[0].type}; a view is of NHWC activations",
            where=yolo.layer_of(op.location),
            hint="run yolo-layout-propagation first",
        )
    if op.name == "yolo.concat":
        return tensor.concat(result, _CHANNELS, operands, loc=op.location)
    offsets = [0, 0, 0, yolo.integer(op, "offset")]
    return tensor.extract_slice(
        result,
        operands[0],
        [],
        [],
        [],
        static_offsets=offsets,
        static_sizes=list(ir.RankedTensorType(result).shape),
        static_strides=[1, 1, 1, 1],
        loc=op.location,
    )
