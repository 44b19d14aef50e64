"""Dispatch functions to test, their float64 references, and the bounds between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext
from yolomlir.passes.lower_to_linalg import LowerToLinalg

from yolomlir.bindings import func, ir

EPSILON = 2.0**-24
SILU_SLOPE = 1.1


def build(
    body: Callable[..., ir.Value], types: Sequence[ir.Type], family: str = "conv2d"
) -> ir.Module:
    """A module of one dispatch function `f`, whose ops `body(*arguments)` builds."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("f", (list(types), []), visibility="private")
        block = function.add_entry_block()
        with ir.InsertionPoint(block):
            result = body(*block.arguments)
            func.ReturnOp([result])
    type_ = ir.FunctionType.get(list(types), [result.type])
    function.operation.attributes["function_type"] = ir.TypeAttr.get(type_)
    function.operation.attributes["yolo.family"] = ir.StringAttr.get(family)
    yolo.verify(module)
    return module


def image(n: int, c: int, h: int, w: int, element: ir.Type | None = None) -> ir.Type:
    return ir.RankedTensorType.get([n, c, h, w], element or ir.F32Type.get(), Layout.NHWC.attribute)


def filters(
    o: int, i: int, kh: int, kw: int, layout: Layout, element: ir.Type | None = None
) -> ir.Type:
    return ir.RankedTensorType.get([o, i, kh, kw], element or ir.F32Type.get(), layout.attribute)


def vector(c: int) -> ir.Type:
    return ir.RankedTensorType.get([c], ir.F32Type.get())


def lower(body: Callable[..., ir.Value], types: Sequence[ir.Type]) -> ir.Module:
    """The module of one dispatch function `f` at the linalg level."""
    module = build(body, types)
    LowerToLinalg().run(module, PassContext())
    assert module.operation.verify()
    return module


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def conv_reference(x, w, strides, padding, groups: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Convolution of NHWC x with OIHW w in float64, and the same of the magnitudes."""
    t, left, b, r = padding
    x = np.pad(x.astype(np.float64), ((0, 0), (t, b), (left, r), (0, 0)))
    out, _, kh, kw = w.shape
    oh, ow = (x.shape[1] - kh) // strides[0] + 1, (x.shape[2] - kw) // strides[1] + 1
    y = np.zeros((x.shape[0], oh, ow, out))
    size = np.zeros_like(y)
    for i in range(kh):
        for j in range(kw):
            patch = x[:, i : i + oh * strides[0] : strides[0], j : j + ow * strides[1] : strides[1]]
            tap = w[:, :, i, j].astype(np.float64)
            if groups == 1:
                y += patch @ tap.T
                size += abs(patch) @ abs(tap.T)
            else:
                y += patch * tap[:, 0]
                size += abs(patch) * abs(tap[:, 0])
    return y, size


def physical_weight(w: np.ndarray, layout: Layout) -> np.ndarray:
    return np.ascontiguousarray(w.transpose(layout.permutation))


def check(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    """Every element within its bound."""
    assert got.shape == want.shape
    worst = np.max(abs(got - want) - bound)
    assert worst <= 0, f"largest excess over the derived bound: {worst}"


def detect_reference(boxes, logits, strides, max_det: int) -> np.ndarray:
    """Two stable sorts over float64."""
    rows = []
    classes = logits[0].shape[-1]
    for i in range(boxes[0].shape[0]):
        flat = np.concatenate([c[i].reshape(-1, classes) for c in logits]).astype(np.float64)
        decoded = []
        for b, s in zip(boxes, strides, strict=True):
            y, x = np.mgrid[: b.shape[1], : b.shape[2]] + 0.5
            left, top, right, bottom = np.moveaxis(b[i].astype(np.float64), -1, 0)
            corners = np.stack([x - left, y - top, x + right, y + bottom], -1) * s
            decoded.append(corners.reshape(-1, 4))
        corners = np.concatenate(decoded)
        first = np.argsort(-flat.max(1), kind="stable")[:max_det]
        chosen = flat[first].reshape(-1)
        second = np.argsort(-chosen, kind="stable")[:max_det]
        scores = 1 / (1 + np.exp(-chosen[second]))
        where = corners[first[second // classes]]
        rows.append(np.column_stack([where, scores, second % classes]))
    return np.stack(rows)
