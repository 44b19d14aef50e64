"""`arith`: integers that wrap, floats that round, comparisons, select."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import Element, Value, element_of, select, vector_shape

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

Function = Callable[..., Value]


def elementwise(op: Any, scope: Scope, function: Function) -> Step:
    """The step that applies `function` to the operands of an op with one result."""
    slots = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    if len(slots) == 1:
        only = slots[0]

        def unary(lanes: Lanes) -> None:
            registers = lanes.registers
            registers[result] = function(registers[only])

        return unary
    if len(slots) == 2:
        first, second = slots

        def binary(lanes: Lanes) -> None:
            registers = lanes.registers
            registers[result] = function(registers[first], registers[second])

        return binary

    def general(lanes: Lanes) -> None:
        lanes.registers[result] = function(*(lanes.registers[s] for s in slots))

    return general


@operation("arith.constant", "llvm.mlir.constant")
def _constant(op: Any, scope: Scope) -> None:
    scope.constant(op.results[0], constant_value(op.attributes["value"], op.results[0].type))


def constant_value(attribute: Any, type_: Any) -> Value:
    """A numpy scalar, or an array of shape (1, *vector shape), of a constant's attribute."""
    element = element_of(type_)
    shape = vector_shape(type_)
    if shape is None:
        return element.register.type(attribute.value)
    if element.name == "f16":  # whose items have no Python form
        return np.array(attribute, element.register).reshape(1, *shape)
    values = [attribute[i] for i in range(len(attribute))]
    return np.array(values, element.register).reshape(1, *shape)


# ---- floats -------------------------------------------------------------------------------------


def minnum(a: Value, b: Value) -> Value:
    """The smaller number; a NaN loses."""
    return np.fmin(a, b)


def maxnum(a: Value, b: Value) -> Value:
    """The larger number; a NaN loses."""
    return np.fmax(a, b)


_FLOAT: dict[str, Function] = {
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.remf": np.fmod,
    "arith.negf": np.negative,
    "arith.minimumf": np.minimum,
    "arith.maximumf": np.maximum,
    "arith.minnumf": minnum,
    "arith.maxnumf": maxnum,
}


@operation(*_FLOAT)
def _float(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, element_of(op.results[0].type).rounded(_FLOAT[op.name]))


# ---- integers -----------------------------------------------------------------------------------


def _on_unsigned(function: Function, element: Element) -> Function:
    unsigned, signed = element.unsigned, element.register

    def wrapped(a: Value, b: Value) -> Value:
        return function(a.view(unsigned), b.view(unsigned)).view(signed)

    return wrapped


def _truncated_quotient(a: Value, b: Value) -> Value:
    return (a - np.fmod(a, b)) // b


def _ceiling_quotient(a: Value, b: Value) -> Value:
    return a // b + (np.fmod(a, b) != 0).astype(a.dtype)


_WRAPPING: dict[str, Function] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
}
_UNSIGNED: dict[str, Function] = {
    "arith.shrui": np.right_shift,
    "arith.minui": np.minimum,
    "arith.maxui": np.maximum,
}
_DIVISIONS: dict[str, Function] = {
    "arith.divsi": _truncated_quotient,
    "arith.remsi": np.fmod,
    "arith.floordivsi": np.floor_divide,
    "arith.ceildivsi": _ceiling_quotient,
}
_UNSIGNED_DIVISIONS: dict[str, Function] = {
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.ceildivui": _ceiling_quotient,
}
_ON_BITS: dict[str, Function] = {
    "arith.addi": np.logical_xor,
    "arith.subi": np.logical_xor,
    "arith.minsi": np.logical_or,
    "arith.maxsi": np.logical_and,
}
"""What differs for i1, whose true is -1 when signed."""


@operation(*_WRAPPING)
def _wrapping(op: Any, scope: Scope) -> Step:
    function = _WRAPPING[op.name]
    if element_of(op.results[0].type).name == "i1":
        function = _ON_BITS.get(op.name, function)
    return elementwise(op, scope, function)


@operation(*_UNSIGNED)
def _unsigned(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, _on_unsigned(_UNSIGNED[op.name], element_of(op.results[0].type)))


@operation(*_DIVISIONS, *_UNSIGNED_DIVISIONS)
def _division(op: Any, scope: Scope) -> Step:
    function = _DIVISIONS.get(op.name)
    if function is None:
        function = _on_unsigned(_UNSIGNED_DIVISIONS[op.name], element_of(op.results[0].type))
    numerator, divisor = scope.uses(list(op.operands))
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        by = registers[divisor]
        if np.any(lanes.active(by) == 0):
            raise site.fault("arithmetic", "division by zero")
        registers[result] = function(registers[numerator], by)

    return step


@operation("arith.mulsi_extended", "arith.mului_extended", "arith.addui_extended")
def _extended(op: Any, scope: Scope) -> Step:
    element = element_of(op.operands[0].type)
    if element.bits > 32:
        raise InternalError(
            f"{op.name} of {element.name} is not simulated", where=scope.site.text()
        )
    signed = op.name == "arith.mulsi_extended"
    narrow = element.register if signed else element.unsigned
    wide = np.dtype(np.int64 if signed else np.uint64)
    multiply = op.name != "arith.addui_extended"
    first, second = scope.uses(list(op.operands))
    low, high = scope.defines(list(op.results))

    def step(lanes: Lanes) -> None:
        a = lanes.registers[first].view(narrow).astype(wide)
        b = lanes.registers[second].view(narrow).astype(wide)
        full = a * b if multiply else a + b
        lanes.registers[low] = full.astype(element.unsigned).view(element.register)
        upper = full >> wide.type(element.bits)
        lanes.registers[high] = upper.astype(element.register) if multiply else upper != 0

    return step


# ---- comparisons and select ---------------------------------------------------------------------

_INTEGER_PREDICATES: list[tuple[Function, bool]] = [
    (np.equal, False),
    (np.not_equal, False),
    (np.less, False),
    (np.less_equal, False),
    (np.greater, False),
    (np.greater_equal, False),
    (np.less, True),
    (np.less_equal, True),
    (np.greater, True),
    (np.greater_equal, True),
]
"""eq ne slt sle sgt sge ult ule ugt uge: the comparison and whether it is unsigned."""


@operation("arith.cmpi")
def _cmpi(op: Any, scope: Scope) -> Step:
    element = element_of(op.operands[0].type)
    function, unsigned = _INTEGER_PREDICATES[ir.IntegerAttr(op.attributes["predicate"]).value]
    if element.name == "i1" and not unsigned:
        return elementwise(op, scope, lambda a, b: function(-(a * np.int8(1)), -(b * np.int8(1))))
    if not unsigned:
        return elementwise(op, scope, function)
    kind = element.unsigned
    return elementwise(op, scope, lambda a, b: function(a.view(kind), b.view(kind)))


def _unordered(a: Value, b: Value) -> Value:
    return np.isnan(a) | np.isnan(b)


_ORDERED: list[Function] = [
    np.equal,
    np.greater,
    np.greater_equal,
    np.less,
    np.less_equal,
    lambda a, b: (a < b) | (a > b),
]
_OR_UNORDERED: list[Function] = [
    lambda a, b: ~((a < b) | (a > b)),
    lambda a, b: ~(a <= b),
    lambda a, b: ~(a < b),
    lambda a, b: ~(a >= b),
    lambda a, b: ~(a > b),
    np.not_equal,
]
_FLOAT_PREDICATES: list[Function] = [
    lambda a, b: np.zeros(np.broadcast(a, b).shape, np.bool_)[()],
    *_ORDERED,
    lambda a, b: ~_unordered(a, b),
    *_OR_UNORDERED,
    _unordered,
    lambda a, b: np.ones(np.broadcast(a, b).shape, np.bool_)[()],
]
"""false, oeq ogt oge olt ole one, ord, ueq ugt uge ult ule une, uno, true."""


@operation("arith.cmpf")
def _cmpf(op: Any, scope: Scope) -> Step:
    return elementwise(
        op, scope, _FLOAT_PREDICATES[ir.IntegerAttr(op.attributes["predicate"]).value]
    )


@operation("arith.select")
def _select(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, select)
