"""Names and families of the functions that dispatches call: what they compute on which shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from yolomlir.dialects import yolo

from yolomlir.bindings import ir

CONV2D = "conv2d"
CHAIN = "chain"
DEPTHWISE = "depthwise"
MAX_POOL = "max_pool"
ATTENTION = "attention"
DETECT = "detect"
MERGE = "merge_detections"
ELEMENTWISE = "elementwise"
"""What no other family takes: ops that no convolution absorbed, and copies for lack of a view."""


def shape_text(value: ir.Value) -> str:
    """`64x160x160` for one image, `4x64x160x160` for a batch."""
    shape = yolo.shape_of(value)
    return "x".join(str(size) for size in (shape[1:] if shape[0] == 1 else shape))


def _window(kernel: Sequence[int], strides: Sequence[int]) -> str:
    stride = str(strides[0]) if strides[0] == strides[1] else f"{strides[0]}x{strides[1]}"
    return f"{kernel[0]}x{kernel[1]}s{stride}"


def conv_name(ops: Sequence[ir.Operation]) -> tuple[str, str]:
    """Family and name of a function of a convolution and what it absorbed.

    `conv2d_3x3s2_64x160x160_64_silu`: kernel, stride, input, output channels, epilogue. A body that
    reads several sources, or an enlarged one, says so: `…_from_256up2_128`.
    """
    conv = next(op for op in ops if op.name == "yolo.conv2d")
    x, w = conv.operands[0], conv.operands[1]
    groups, channels, out = yolo.integer(conv, "groups"), yolo.shape_of(x)[1], yolo.shape_of(w)[0]
    depthwise = groups == channels == out and groups > 1
    family = DEPTHWISE if depthwise else CONV2D
    window = _window(yolo.shape_of(w)[2:], yolo.integers(conv, "strides"))
    parts = [family, window, shape_text(x)]
    if not depthwise:
        parts.append(str(out))
    if groups > 1 and not depthwise:
        parts.append(f"g{groups}")
    parts += [op.name.split(".")[1] for op in ops if op.name in ("yolo.silu", "yolo.add")]
    read = sources(ops, x)
    if read:
        parts.append(f"from_{read}")
    return family, "_".join(parts)


def sources(ops: Sequence[ir.Operation], value: ir.Value) -> str:
    """What a value is made of by `ops`: `256up2_128`; "" where it comes from elsewhere."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.operation not in ops:
        return ""
    op = owner.operation
    if op.name == "yolo.concat":
        leaves = (sources(ops, v) or str(yolo.shape_of(v)[1]) for v in op.operands)
        return "_".join(leaves)
    if op.name == "yolo.upsample":
        x = op.operands[0]
        inner = sources(ops, x) or str(yolo.shape_of(x)[1])
        return f"{inner}up{yolo.integer(op, 'factor')}"
    if op.name == "yolo.normalize":
        return sources(ops, op.operands[0])
    return ""


def pool_name(pools: Sequence[ir.Operation]) -> str:
    """`max_pool_5x5s1_128x20x20`, and `_chain3` for three in a row."""
    first = pools[0]
    window = _window(yolo.integers(first, "kernel"), yolo.integers(first, "strides"))
    chain = f"_chain{len(pools)}" if len(pools) > 1 else ""
    return f"{MAX_POOL}_{window}_{shape_text(first.operands[0])}{chain}"


def attention_name(attention: ir.Operation, encoded: bool) -> str:
    """`attention_2x32x64_256x20x20_pe`: heads, key and head dimension, qkv, positional encoding."""
    dims = "x".join(str(yolo.integer(attention, a)) for a in ("heads", "key_dim", "head_dim"))
    name = f"{ATTENTION}_{dims}_{shape_text(attention.operands[0])}"
    return f"{name}_pe" if encoded else name


def detect_name(detect: ir.Operation) -> str:
    """`detect_8400x80_300`: anchors, classes, rows; so, too, `candidates_…`, `merge_detections_…`,
    of the anchors whose maps it reads."""
    maps = [v for v in detect.operands if len(yolo.shape_of(v)) == 4]
    anchors = sum(prod(yolo.shape_of(v)[2:]) for v in maps[: len(maps) // 2])
    batch, classes = yolo.shape_of(maps[-1])[:2]
    images = f"{batch}x" if batch > 1 else ""
    rows = yolo.shape_of(detect.results[0])[1]
    return f"{detect.name.split('.')[1]}_{images}{anchors}x{classes}_{rows}"


def op_name(op: ir.Operation) -> str:
    """`silu_64x80x80`: an op alone and its result's shape."""
    return f"{op.name.split('.')[1]}_{shape_text(op.results[0])}"
