"""From a checkpoint to a module of the `yolo` dialect, YOLO26 detection at any scale."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from yolomlir.bindings import func, ir
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.matching import Architecture, check_weights, infer_architecture
from yolomlir.frontend.names import class_names
from yolomlir.frontend.network import (
    BATCH_NORM_EPSILON,
    HEAD,
    SCALES,
    STRIDES,
    Conv,
    Network,
    parameters,
)
from yolomlir.frontend.weights import WeightStore

__all__ = ["Architecture", "ImportedModel", "import_model", "infer_architecture"]

logger = logging.getLogger(__name__)

INPUT_SCALE = {"uint8": 1 / 255, "float32": 1.0}
"""What `yolo.normalize` multiplies by: pixels are 0 to 255 in uint8 and 0 to 1 in float32."""


@dataclass(frozen=True)
class ImportedModel:
    """A network as its checkpoint says it.

    module: NCHW, not optimised. weights: float32, in logical order, under the checkpoint's keys.
    names: a name a class.
    """

    module: ir.Module
    weights: WeightStore
    scale: str
    classes: int
    names: tuple[str, ...]


def import_model(
    checkpoint: Checkpoint,
    *,
    height: int = 640,
    width: int = 640,
    batch: int = 1,
    max_det: int = 300,
    input_dtype: str = "uint8",
    scale: str | None = None,
) -> ImportedModel:
    """Build `@main` in the current context (`with yolo.new_context(): …`).

    The argument is [batch, 3, height, width], physically NHWC, RGB, `input_dtype` uint8 (0 to 255)
    or float32 (0 to 1); the result [batch, rows, 6], rows being `max_det`, or the number of anchors
    where that is smaller. Scale and class count come from the weights' shapes; `scale` only asserts
    what the checkpoint has to be. Raises UserError for a checkpoint or option that does not fit.
    """
    _check_options(height, width, batch, max_det, input_dtype, scale)
    architecture = infer_architecture(checkpoint, scale)
    size = SCALES[architecture.scale]
    expected = parameters(size, architecture.classes, fused=architecture.fused)
    check_weights(checkpoint, expected, architecture)
    anchors = sum((height // s) * (width // s) for s in STRIDES)
    if max_det > anchors:
        logger.info("max_det %d is lowered to %d, the number of anchors", max_det, anchors)
    store = WeightStore(
        {key: np.ascontiguousarray(checkpoint.tensors[key], np.float32) for key in expected}
    )
    with ir.Location.name("main"):
        module = ir.Module.create()
        _set_attributes(module, architecture.scale, architecture.classes)
        _build_main(
            module,
            Network(_Emitter(fused=architecture.fused), size, architecture.classes),
            shape=(batch, 3, height, width),
            input_dtype=input_dtype,
            max_det=min(max_det, anchors),
        )
    names = class_names(checkpoint, architecture.classes)
    return ImportedModel(module, store, architecture.scale, architecture.classes, names)


def _check_options(
    height: int, width: int, batch: int, max_det: int, input_dtype: str, scale: str | None
) -> None:
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % STRIDES[-1]:
            nearest = max(round(size / STRIDES[-1]), 1) * STRIDES[-1]
            raise UserError(
                f"input {name} is {size}; it must be a positive multiple of {STRIDES[-1]}",
                hint=f"{nearest} is the nearest",
            )
    if batch < 1:
        raise UserError(f"batch is {batch}; it must be at least 1")
    if max_det < 1:
        raise UserError(f"max_det is {max_det}; it must be at least 1")
    if input_dtype not in INPUT_SCALE:
        known = ", ".join(INPUT_SCALE)
        raise UserError(f"unknown input type '{input_dtype}'", hint=f"one of: {known}")
    if scale is not None and scale not in SCALES:
        raise UserError(f"unknown scale '{scale}'", hint=f"one of: {', '.join(SCALES)}")


def _set_attributes(module: ir.Module, scale: str, classes: int) -> None:
    text = ir.StringAttr.get
    attributes = module.operation.attributes
    attributes["yolo.model"] = ir.DictAttr.get(
        {
            "scale": text(scale),
            "classes": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), classes),
            "task": text("detect"),
        }
    )
    attributes["yolo.precision"] = text("fp32")


def _build_main(
    module: ir.Module,
    network: Network[ir.Value],
    *,
    shape: Sequence[int],
    input_dtype: str,
    max_det: int,
) -> None:
    element = ir.IntegerType.get_unsigned(8) if input_dtype == "uint8" else ir.F32Type.get()
    image = ir.RankedTensorType.get(list(shape), element, Layout.NHWC.attribute)
    rows = ir.RankedTensorType.get([shape[0], max_det, 6], ir.F32Type.get())
    with ir.InsertionPoint(module.body):
        main = func.FuncOp("main", ir.FunctionType.get([image], [rows]))
        block = main.add_entry_block()
    with ir.InsertionPoint(block):
        loc = ir.Location.name("images")
        x = yolo.normalize(block.arguments[0], scale=INPUT_SCALE[input_dtype], loc=loc)
        head = network.forward(yolo.convert_layout(x, Layout.LOGICAL, loc=loc))
        detections = yolo.detect(
            head.boxes,
            head.classes,
            strides=STRIDES,
            max_det=max_det,
            loc=ir.Location.name(HEAD),
        )
        func.ReturnOp([detections])


class _Emitter:
    """`Operations` whose values are MLIR values: every call appends `yolo` ops."""

    def __init__(self, *, fused: bool) -> None:
        self.fused = fused

    def channels(self, x: ir.Value) -> int:
        return int(yolo.shape_of(x)[1])

    def conv(self, conv: Conv, x: ir.Value) -> ir.Value:
        loc = ir.Location.name(conv.name)
        biased = self.fused or conv.norm is None
        w = yolo.weight(f"{conv.name}.weight", conv.weight_shape, loc=loc)
        bias = yolo.weight(f"{conv.name}.bias", [conv.outputs], loc=loc) if biased else None
        y = yolo.conv2d(
            x,
            w,
            bias,
            strides=(conv.stride, conv.stride),
            padding=(conv.kernel // 2,) * 4,
            groups=conv.groups,
            loc=loc,
        )
        if not biased and conv.norm is not None:
            y = self._batch_norm(conv.norm, y)
        return y if conv.act is None else yolo.silu(y, loc=ir.Location.name(conv.act))

    def _batch_norm(self, name: str, x: ir.Value) -> ir.Value:
        loc = ir.Location.name(name)
        gamma, beta, mean, variance = (
            yolo.weight(f"{name}.{part}", [self.channels(x)], loc=loc)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return yolo.batch_norm(x, gamma, beta, mean, variance, epsilon=BATCH_NORM_EPSILON, loc=loc)

    def add(self, name: str, lhs: ir.Value, rhs: ir.Value) -> ir.Value:
        return yolo.add(lhs, rhs, loc=ir.Location.name(name))

    def concat(self, name: str, xs: Sequence[ir.Value]) -> ir.Value:
        return yolo.concat(xs, loc=ir.Location.name(name))

    def slice(self, name: str, x: ir.Value, offset: int, size: int) -> ir.Value:
        return yolo.slice_(x, offset=offset, size=size, loc=ir.Location.name(name))

    def max_pool(self, name: str, x: ir.Value, kernel: int) -> ir.Value:
        return yolo.max_pool2d(
            x,
            kernel=(kernel, kernel),
            padding=(kernel // 2,) * 4,
            loc=ir.Location.name(name),
        )

    def upsample(self, name: str, x: ir.Value) -> ir.Value:
        return yolo.upsample(x, factor=2, loc=ir.Location.name(name))

    def attention(self, name: str, qkv: ir.Value, heads: int) -> ir.Value:
        per_head = self.channels(qkv) // heads
        return yolo.attention(
            qkv,
            heads=heads,
            key_dim=per_head // 4,
            head_dim=per_head // 2,
            scale=(per_head // 4) ** -0.5,
            loc=ir.Location.name(name),
        )
