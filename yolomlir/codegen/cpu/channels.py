"""Channel counts that do not fill vectors: one convolution becomes two, full vectors and the rest.

LLVM compiles vectors of odd lengths badly, and no tile of full vectors divides 100 or 81 channels.
The split is of output channels, with their weights, bias and residual; each part writes its own
slice of the result, so nothing is computed twice and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.bindings import ir, tensor
from yolomlir.codegen.cpu.isa import Isa
from yolomlir.dialects import yolo

DENSE = "linalg.conv_2d_nhwc_hwcf"
DEPTHWISE = "linalg.depthwise_conv_2d_nhwc_hwc"
_STORE = "bufferization.materialize_in_destination"
_INPUT_OPS = ("tensor.pad", "tensor.concat", "linalg.generic")


def split_ragged_channels(module: ir.Module, isa: Isa) -> None:
    """Split every convolution whose channels are more than a vector but no whole number of them."""
    for op in list(yolo.ops_in(module, "linalg.")):
        if op.name not in (DENSE, DEPTHWISE):
            continue
        channels = _shape(op.results[0])[3]
        full = channels - channels % isa.lanes
        if full in (0, channels):
            continue
        tail = _tail(op)
        if tail is not None:
            _split(op, tail, [(0, full), (full, channels - full)])


def _tail(conv: ir.Operation) -> ir.Operation | None:
    """The op whose result is stored: the epilogue or the convolution itself; None for others."""
    last = conv
    while True:
        users = [use.owner.operation for use in last.results[0].uses]
        if len(users) != 1:
            return None
        if users[0].name == _STORE:
            return last
        if last is not conv or users[0].name != "linalg.generic":
            return None
        last = users[0]


def _split(conv: ir.Operation, tail: ir.Operation, parts: Sequence[tuple[int, int]]) -> None:
    """Replace the convolution and its epilogue by one of each a part, and a concat of the parts."""
    has_epilogue = tail.name == "linalg.generic"
    made = []
    with ir.InsertionPoint(tail), tail.location:
        for first, size in parts:
            part = _conv_part(conv, first, size)
            made.append(_epilogue_part(tail, conv, part, first, size) if has_epilogue else part)
        whole = tensor.concat(tail.results[0].type, 3, made)
    tail.results[0].replace_all_uses_with(whole)
    tail.erase()
    if has_epilogue:
        conv.erase()


def _conv_part(conv: ir.Operation, first: int, size: int) -> ir.Value:
    """Output channels [first, first + size) of a convolution."""
    shape = [*_shape(conv.results[0])[:3], size]
    x, weight, start = conv.operands
    x = _input_part(x, first, size) if conv.name == DEPTHWISE else _own_input(x)
    weight = _channel_slice(weight, first, size)
    fill = start.owner.operation
    out = _clone(fill, [fill.operands[0], _empty(shape, start)], shape)
    return _clone(conv, [x, weight, out], shape)


def _epilogue_part(
    epilogue: ir.Operation, conv: ir.Operation, part: ir.Value, first: int, size: int
) -> ir.Value:
    """The epilogue over a part: every operand has the channels as its last dimension."""
    operands = [
        part if operand == conv.results[0] else _channel_slice(operand, first, size)
        for operand in list(epilogue.operands)[:-1]
    ]
    shape = [*_shape(epilogue.results[0])[:3], size]
    return _clone(epilogue, [*operands, _empty(shape, epilogue.results[0])], shape)


def _own_input(value: ir.Value) -> ir.Value:
    """The same input computed by ops of its own, so that they fuse into their part's blocks."""
    if isinstance(value.owner, ir.Block) or value.owner.name not in _INPUT_OPS:
        return value
    op = value.owner.operation
    inputs = [_own_input(operand) for operand in op.operands]
    own = op.clone().operation
    for index, operand in enumerate(inputs):
        own.operands[index] = operand
    return own.results[0]


def _input_part(value: ir.Value, first: int, size: int) -> ir.Value:
    """Channels of a depthwise convolution's input, sliced before it is padded."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "tensor.pad":
        return _channel_slice(value, first, size)
    pad = value.owner.operation
    source = _channel_slice(pad.operands[0], first, size)
    return _clone(pad, [source], [*_shape(value)[:3], size])


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _empty(shape: Sequence[int], like: ir.Value) -> ir.Value:
    result = tensor.empty(list(shape), ir.RankedTensorType(like.type).element_type)
    return result if isinstance(result, ir.Value) else result.results[0]


def _channel_slice(value: ir.Value, first: int, size: int) -> ir.Value:
    """[first, first + size) of the last dimension."""
    type_ = ir.RankedTensorType(value.type)
    sizes = [*list(type_.shape)[:-1], size]
    return tensor.extract_slice(
        ir.RankedTensorType.get(sizes, type_.element_type),
        value,
        [],
        [],
        [],
        static_offsets=[*[0] * (len(sizes) - 1), first],
        static_sizes=sizes,
        static_strides=[1] * len(sizes),
    )


def _clone(op: ir.Operation, operands: Sequence[ir.Value], shape: Sequence[int]) -> ir.Value:
    """The same op, region included, on other operands and with a result of another shape."""
    element = ir.RankedTensorType(op.results[0].type).element_type
    new = ir.Operation.create(
        op.name,
        results=[ir.RankedTensorType.get(list(shape), element)],
        operands=list(operands),
        attributes={key: op.attributes[key] for key in op.attributes},
        regions=1,
    )
    source = op.regions[0].blocks[0]
    block = new.regions[0].blocks.append(*[a.type for a in source.arguments])
    values = dict(zip(source.arguments, block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for view in source.operations:
            copy = view.operation.clone().operation
            for index, operand in enumerate(copy.operands):
                if operand in values:
                    copy.operands[index] = values[operand]
            values.update(zip(view.operation.results, copy.results, strict=True))
    return new.results[0]
