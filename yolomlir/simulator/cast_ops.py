"""Conversions of `arith`: width, sign, integer to float and back, bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.arith_ops import elementwise
from yolomlir.simulator.decode import Scope, Step, operation
from yolomlir.simulator.elements import Element, Value, element_of, round_bf16


def resize_signed(value: Value, source: Element, target: Element) -> Value:
    """Sign-extend or truncate an integer."""
    if source.name == "i1":
        return -value.astype(target.register)
    if target.name == "i1":
        return (value & value.dtype.type(1)).astype(np.bool_)
    return value.astype(target.register)


def resize_unsigned(value: Value, source: Element, target: Element) -> Value:
    """Zero-extend or truncate an integer."""
    if target.name == "i1":
        return (value & value.dtype.type(1)).astype(np.bool_)
    return value.view(source.unsigned).astype(target.register)


def _elements(op: Any) -> tuple[Element, Element]:
    return element_of(op.operands[0].type), element_of(op.results[0].type)


@operation("arith.index_cast", "arith.extsi", "llvm.sext")
def _signed(op: Any, scope: Scope) -> Step:
    source, target = _elements(op)
    if source.register == target.register:
        return elementwise(op, scope, lambda v: v)
    return elementwise(op, scope, lambda v: resize_signed(v, source, target))


@operation("arith.index_castui", "arith.extui", "arith.trunci", "llvm.zext", "llvm.trunc")
def _unsigned(op: Any, scope: Scope) -> Step:
    source, target = _elements(op)
    return elementwise(op, scope, lambda v: resize_unsigned(v, source, target))


def _check_rounding(op: Any, scope: Scope) -> None:
    if "roundingmode" in op.attributes and "to_nearest_even" not in str(
        op.attributes["roundingmode"]
    ):
        raise InternalError("only rounding to nearest even is simulated", where=scope.site.text())


@operation("arith.extf", "arith.truncf")
def _float_width(op: Any, scope: Scope) -> Step:
    _check_rounding(op, scope)
    _, target = _elements(op)
    if target.name == "bf16":
        return elementwise(op, scope, round_bf16)
    return elementwise(op, scope, lambda v: v.astype(target.register))


@operation("arith.sitofp")
def _from_signed(op: Any, scope: Scope) -> Step:
    source, target = _elements(op)
    sign = -1 if source.name == "i1" else 1
    return elementwise(
        op, scope, target.rounded(lambda v: v.astype(target.register) * target.register.type(sign))
    )


@operation("arith.uitofp")
def _from_unsigned(op: Any, scope: Scope) -> Step:
    source, target = _elements(op)
    return elementwise(
        op, scope, target.rounded(lambda v: v.view(source.unsigned).astype(target.register))
    )


@operation("arith.fptosi")
def _to_signed(op: Any, scope: Scope) -> Step:
    _, target = _elements(op)
    return elementwise(op, scope, lambda v: np.trunc(v).astype(target.register))


@operation("arith.fptoui")
def _to_unsigned(op: Any, scope: Scope) -> Step:
    _, target = _elements(op)
    return elementwise(
        op, scope, lambda v: np.trunc(v).astype(target.unsigned).view(target.register)
    )


def reinterpret(value: Value, source: Element, target: Element) -> Value:
    """The bits of one type as another of the same width; on the last axis for another width."""
    raw = np.ascontiguousarray(source.to_memory(value)).view(target.memory)
    result = target.from_memory(raw)
    return result.reshape(())[()] if np.ndim(value) == 0 else result


@operation("arith.bitcast", "llvm.bitcast")
def _bitcast(op: Any, scope: Scope) -> Step:
    source, target = _elements(op)
    if source.name not in ("bf16", "i1") and target.name != "bf16":
        return elementwise(op, scope, lambda v: v.view(target.register))
    return elementwise(op, scope, lambda v: reinterpret(v, source, target))
