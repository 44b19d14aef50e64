"""`llvm`: structs, pointers, raw loads and stores, intrinsics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.simulator.arith_ops import elementwise
from yolomlir.simulator.atomics import LLVM_ATOMICS, atomic_update
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import Value, element_of, vector_shape
from yolomlir.simulator.math_ops import (
    fused_multiply_add,
    population_count,
    reciprocal_square_root,
)
from yolomlir.simulator.memory import load, store
from yolomlir.simulator.pointers import address_space, reference_at

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

_SMALLEST_NORMAL = np.float32(2.0**-126)


def flush_subnormals(value: Value) -> Value:
    """What `.ftz` does to inputs and results: subnormal float32 become zero of the same sign."""
    small = np.abs(value) < _SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), value), value)[()]


def _flushed(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *v: flush_subnormals(function(*(flush_subnormals(x) for x in v)))


def _through_float64(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda v: function(np.asarray(v, np.float64)).astype(np.asarray(v).dtype)[()]


_exp2 = _through_float64(np.exp2)
_log2 = _through_float64(np.log2)


def permute_bytes(low: Value, high: Value, order: Value) -> Value:
    """`prmt` in its default mode: byte i of the result is the one of the eight of `low` and `high`
    that the low bits of nibble i of `order` name, or its sign in all bits where bit 3 is set."""
    both = np.asarray(low, np.uint32) | (np.asarray(high, np.uint32).astype(np.uint64) << 32)
    result = np.uint32(0)
    for i in range(4):
        nibble = (np.asarray(order, np.uint32) >> (4 * i)) & 15
        byte = ((both >> ((nibble & 7) * 8).astype(np.uint64)) & 0xFF).astype(np.uint32)
        signs = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        result = result | (np.where(nibble & 8, signs, byte) << np.uint32(8 * i))
    return np.asarray(result, np.uint32).view(np.int32)[()]


INTRINSICS: dict[str, Callable[..., Value]] = {
    "llvm.nvvm.ex2.approx.ftz.f": _flushed(_exp2),
    "llvm.nvvm.ex2.approx.f": _exp2,
    "llvm.nvvm.lg2.approx.ftz.f": _flushed(_log2),
    "llvm.nvvm.lg2.approx.f": _log2,
    "llvm.nvvm.rcp.approx.ftz.f": _flushed(lambda v: np.float32(1) / v),
    "llvm.nvvm.rcp.rn.f": lambda v: np.float32(1) / v,
    "llvm.nvvm.rsqrt.approx.ftz.f": _flushed(reciprocal_square_root),
    "llvm.nvvm.rsqrt.approx.f": reciprocal_square_root,
    "llvm.nvvm.sqrt.approx.ftz.f": _flushed(np.sqrt),
    "llvm.nvvm.sqrt.approx.f": np.sqrt,
    "llvm.nvvm.sqrt.rn.f": np.sqrt,
    "llvm.nvvm.tanh.approx.f": _through_float64(np.tanh),
    "llvm.nvvm.fmin.f": np.fmin,
    "llvm.nvvm.fmax.f": np.fmax,
    "llvm.nvvm.fma.rn.f": fused_multiply_add,
    "llvm.fma.f32": fused_multiply_add,
    "llvm.fmuladd.f32": fused_multiply_add,
    "llvm.sqrt.f32": np.sqrt,
    "llvm.fabs.f32": np.abs,
    "llvm.exp2.f32": np.exp2,
    "llvm.minnum.f32": np.fmin,
    "llvm.maxnum.f32": np.fmax,
    "llvm.minimum.f32": np.minimum,
    "llvm.maximum.f32": np.maximum,
    "llvm.floor.f32": np.floor,
    "llvm.ceil.f32": np.ceil,
    "llvm.rint.f32": np.rint,
    "llvm.copysign.f32": np.copysign,
    "llvm.nvvm.prmt": permute_bytes,
    "llvm.ctpop.i32": lambda v: population_count(v, 32),
}
"""Intrinsics by name; approximate ones are given exactly (rounded once), `.ftz` ones flush."""

_FENCES = ("llvm.nvvm.membar.", "llvm.nvvm.fence.")


@operation("llvm.call_intrinsic")
def _intrinsic(op: Any, scope: Scope) -> Step | None:
    name = ir.StringAttr(op.attributes["intrin"]).value
    if name.startswith(_FENCES):
        return None
    if name not in INTRINSICS:
        raise InternalError(
            f"the simulator does not know the intrinsic '{name}'",
            where=scope.site.location,
            hint="add it to INTRINSICS in yolomlir/simulator/llvm_ops.py",
        )
    return elementwise(op, scope, INTRINSICS[name])


@operation("llvm.fence", "llvm.intr.assume")
def _nothing(op: Any, scope: Scope) -> None:
    del op, scope


# ---- values -------------------------------------------------------------------------------------


def _empty(type_: Any) -> Value:
    text = str(type_)
    if text.startswith("!llvm.struct"):
        return tuple(_empty(ir.Type.parse(t)) for t in _fields(text))
    element, shape = element_of(type_), vector_shape(type_)
    if shape is not None:
        return np.zeros((1, *shape), element.register)
    return element.register.type(0)


def _fields(text: str) -> list[str]:
    """The member types of `!llvm.struct<(a, b)>`."""
    inner = text[text.index("(") + 1 : text.rindex(")")]
    fields, depth, start = [], 0, 0
    for i, c in enumerate(inner):
        depth += (c in "<(") - (c in ">)")
        if c == "," and depth == 0:
            fields.append(inner[start:i])
            start = i + 1
    return [f.strip() for f in [*fields, inner[start:]] if f.strip()]


@operation("llvm.mlir.undef", "llvm.mlir.poison", "llvm.mlir.zero", "ub.poison")
def _undefined(op: Any, scope: Scope) -> None:
    """Undefined values are zeros, as whatever else they might be."""
    scope.constant(op.results[0], _empty(op.results[0].type))


@operation("llvm.extractvalue")
def _extract(op: Any, scope: Scope) -> Step:
    path = list(ir.DenseI64ArrayAttr(op.attributes["position"]))
    source, result = scope.use(op.operands[0]), scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        value = lanes.registers[source]
        for position in path:
            value = value[position]
        lanes.registers[result] = value

    return step


def _replaced(struct: Value, path: list[int], value: Value) -> Value:
    if not path:
        return value
    items = list(struct)
    items[path[0]] = _replaced(items[path[0]], path[1:], value)
    return tuple(items)


@operation("llvm.insertvalue")
def _insert(op: Any, scope: Scope) -> Step:
    path = list(ir.DenseI64ArrayAttr(op.attributes["position"]))
    return elementwise(op, scope, lambda struct, value: _replaced(struct, path, value))


# ---- pointers -----------------------------------------------------------------------------------


@operation("llvm.inttoptr", "llvm.ptrtoint")
def _pointer_cast(op: Any, scope: Scope) -> Step:
    target = element_of(op.results[0].type)
    return elementwise(op, scope, lambda v: np.asarray(v).astype(target.register)[()])


@operation("llvm.addrspacecast")
def _space_cast(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, lambda v: v)


@operation("llvm.getelementptr")
def _element_pointer(op: Any, scope: Scope) -> Step:
    static = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
    if len(static) != 1:
        raise InternalError("only flat pointer arithmetic is simulated", where=scope.site.text())
    size = element_of(ir.TypeAttr(op.attributes["elem_type"]).value).size_bytes
    slots = scope.uses(list(op.operands))
    result = scope.define(op.results[0])

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        index = registers[slots[1]] if len(slots) > 1 else np.int64(static[0])
        registers[result] = registers[slots[0]] + np.asarray(index, np.int64)[()] * size

    return step


def _access(type_: Any, op: Any) -> tuple[Any, int, tuple[int, ...] | None, int]:
    """(element, elements or 0 for a scalar, vector shape, alignment)."""
    element, shape = element_of(type_), vector_shape(type_)
    count = int(np.prod(shape)) if shape is not None else 0
    align = max(1, count) * element.size_bytes
    if "alignment" in op.attributes:
        align = ir.IntegerAttr(op.attributes["alignment"]).value
    return element, count, shape, max(align, element.size_bytes)


@operation("llvm.load")
def _load(op: Any, scope: Scope) -> Step:
    pointer, result = scope.use(op.operands[0]), scope.define(op.results[0])
    space = address_space(op.operands[0].type)
    element, count, shape, align = _access(op.results[0].type, op)
    scope.note_access(max(1, count) * element.size_bytes)
    site = scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_at(lanes, lanes.registers[pointer], space, element)
        value = load(lanes, reference, reference.address, count, align, site)
        lanes.registers[result] = value if shape is None else np.reshape(value, (-1, *shape))

    return step


@operation("llvm.store")
def _store(op: Any, scope: Scope) -> Step:
    value, pointer = scope.uses(list(op.operands))
    space = address_space(op.operands[1].type)
    element, count, _, align = _access(op.operands[0].type, op)
    scope.note_access(max(1, count) * element.size_bytes)
    site = scope.site

    def step(lanes: Lanes) -> None:
        reference = reference_at(lanes, lanes.registers[pointer], space, element)
        rows = lanes.registers[value]
        rows = rows.reshape(-1, count) if count else rows
        store(lanes, reference, reference.address, rows, count, align, site)

    return step


@operation("llvm.atomicrmw")
def _atomic(op: Any, scope: Scope) -> Step:
    pointer, value = scope.uses(list(op.operands))
    space = address_space(op.operands[0].type)
    kind = ir.IntegerAttr(op.attributes["bin_op"]).value
    if kind not in LLVM_ATOMICS:
        raise InternalError(f"atomicrmw kind {kind} is not simulated", where=scope.site.text())
    update = LLVM_ATOMICS[kind]
    element = element_of(op.results[0].type)
    scope.note_access(element.size_bytes)
    result = scope.define(op.results[0])
    site = scope.site

    def step(lanes: Lanes) -> None:
        registers = lanes.registers
        reference = reference_at(lanes, registers[pointer], space, element)
        registers[result] = atomic_update(
            lanes, reference, reference.address, registers[value], update, site
        )

    return step


_ARITHMETIC: dict[str, Callable[..., Value]] = {
    "llvm.add": np.add,
    "llvm.sub": np.subtract,
    "llvm.mul": np.multiply,
    "llvm.and": np.bitwise_and,
    "llvm.or": np.bitwise_or,
    "llvm.xor": np.bitwise_xor,
    "llvm.shl": np.left_shift,
    "llvm.fadd": np.add,
    "llvm.fsub": np.subtract,
    "llvm.fmul": np.multiply,
    "llvm.fdiv": np.divide,
    "llvm.fneg": np.negative,
    "llvm.intr.fma": fused_multiply_add,
    "llvm.intr.fmuladd": fused_multiply_add,
    "llvm.intr.exp2": np.exp2,
    "llvm.intr.fabs": np.abs,
    "llvm.intr.maxnum": np.fmax,
    "llvm.intr.minnum": np.fmin,
    "llvm.intr.maximum": np.maximum,
    "llvm.intr.minimum": np.minimum,
    "llvm.intr.sqrt": np.sqrt,
}


@operation(*_ARITHMETIC)
def _arithmetic(op: Any, scope: Scope) -> Step:
    return elementwise(op, scope, _ARITHMETIC[op.name])
