"""Rewrites of a kernel, still on tensors, that make its schedule simple."""

from __future__ import annotations

from yolomlir.bindings import arith, ir, linalg, memref, tensor
from yolomlir.codegen.cpu.channels import DENSE, DEPTHWISE, split_ragged_channels
from yolomlir.codegen.cpu.isa import Isa
from yolomlir.dialects import yolo

CONTRACTIONS = ("linalg.conv_2d_nhwc_hwcf",)
_WEIGHT_INPUTS = 2
"""The dimension of an HWIO weight that runs over input channels."""


def prepare(module: ir.Module, isa: Isa) -> None:
    """Every rewrite of this file, and the split of ragged channels."""
    _own_fills(module)
    _add_epilogues(module)
    split_ragged_channels(module, isa)
    _pad_before_converting(module)
    _split_sources(module)
    _split_results(module)
    _transpose_keys(module)
    _reassociate_sums(module)


def users(value: ir.Value) -> list[ir.Operation]:
    """The operations that use a value, one entry a use."""
    return [use.owner.operation for use in value.uses]


def _own_fills(module: ir.Module) -> None:
    """A fill with several users becomes one a user, so that each fuses into its own blocks."""
    for fill in list(yolo.ops_in(module, "linalg.fill")):
        for user in users(fill.results[0])[1:]:
            with ir.InsertionPoint(fill):
                own = fill.clone().operation
            for index, operand in enumerate(user.operands):
                if operand == fill.results[0]:
                    user.operands[index] = own.results[0]


def _add_epilogues(module: ir.Module) -> None:
    """A convolution that no elementwise op follows gets a copy for its epilogue: one schedule."""
    for conv in list(yolo.ops_in(module, "linalg.")):
        if conv.name not in (DENSE, DEPTHWISE):
            continue
        result = conv.results[0]
        following = list(result.uses)
        if len(following) == 1 and _is_epilogue(following[0].owner.operation, result):
            continue
        type_ = ir.RankedTensorType(result.type)
        same = ir.AffineMapAttr.get(ir.AffineMap.get_identity(4))
        kinds = [ir.Attribute.parse("#linalg.iterator_type<parallel>")] * 4
        with ir.InsertionPoint.after(conv), conv.location:
            empty = _value(tensor.empty(list(type_.shape), type_.element_type))
            copy = ir.Operation.create(
                "linalg.generic",
                results=[type_],
                operands=[result, empty],
                attributes={
                    "indexing_maps": ir.ArrayAttr.get([same, same]),
                    "iterator_types": ir.ArrayAttr.get(kinds),
                    "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
                },
                regions=1,
            )
            block = copy.regions[0].blocks.append(*[type_.element_type] * 2)
        with ir.InsertionPoint(block), conv.location:
            linalg.YieldOp([block.arguments[0]])
        for use in following:
            use.owner.operands[use.operand_number] = copy.results[0]


def _is_epilogue(op: ir.Operation, result: ir.Value) -> bool:
    """Whether an op is elementwise over a convolution's result."""
    if op.name != "linalg.generic" or "reduction" in str(op.attributes["iterator_types"]):
        return False
    return list(ir.RankedTensorType(op.results[0].type).shape) == list(
        ir.RankedTensorType(result.type).shape
    )


def _pad_before_converting(module: ir.Module) -> None:
    """Pad bytes, then convert, instead of the reverse: a block's conversion has a static shape.

    The padding is a zero byte, which converts to the zero it was.
    """
    for pad in list(yolo.ops_in(module, "tensor.pad")):
        owner = pad.operands[0].owner
        if isinstance(owner, ir.Block) or owner.name != "linalg.generic":
            continue
        generic = owner.operation
        body = [view.operation.name for view in generic.regions[0].blocks[0].operations]
        if len(users(generic.results[0])) != 1 or body[0] != "arith.uitofp":
            continue
        with ir.InsertionPoint(pad), pad.location:
            padded = _padded_like(pad, generic.operands[0])
            type_ = ir.RankedTensorType(pad.results[0].type)
            empty = tensor.empty(list(type_.shape), type_.element_type)
            converted = ir.Operation.create(
                "linalg.generic",
                results=[type_],
                operands=[padded, empty],
                attributes={key: generic.attributes[key] for key in generic.attributes},
                regions=1,
            )
        generic.regions[0].blocks[0].append_to(converted.regions[0])
        pad.results[0].replace_all_uses_with(converted.results[0])
        pad.erase()
        generic.erase()


def _padded_like(pad: ir.Operation, source: ir.Value) -> ir.Value:
    """`source` padded by zeros as `pad` pads its own source in height and width."""
    type_ = ir.RankedTensorType(source.type)
    shape = [*list(ir.RankedTensorType(pad.results[0].type).shape)[:3], type_.shape[3]]
    element = type_.element_type
    new = ir.Operation.create(
        "tensor.pad",
        results=[ir.RankedTensorType.get(shape, element)],
        operands=[source],
        attributes={key: pad.attributes[key] for key in pad.attributes},
        regions=1,
    )
    index = ir.IndexType.get()
    block = new.regions[0].blocks.append(*[index] * len(shape))
    zero = arith.constant(element, 0 if isinstance(element, ir.IntegerType) else 0.0)
    with ir.InsertionPoint(block):
        tensor.yield_(zero)
    new.move_after(zero.owner)
    return new.results[0]


def _split_sources(module: ir.Module) -> None:
    """A convolution of a concat becomes a chain, one convolution a source, so nothing is copied.

    The sum over input channels is the sum over the sources' channels: each adds to the
    accumulator of the one before, with its slice of the weights.
    """
    for concat in list(yolo.ops_in(module, "tensor.concat")):
        pad = _only_user(concat, ("tensor.pad",))
        conv = _only_user(pad or concat, CONTRACTIONS)
        if conv is None:
            continue
        with ir.InsertionPoint(conv), conv.location:
            total, first = conv.operands[2], 0
            for source in list(concat.operands):
                channels = ir.RankedTensorType(source.type).shape[3]
                part = conv.clone()
                part.operands[0] = source if pad is None else _padded_like(pad, source)
                part.operands[1] = _input_slice(conv.operands[1], first, channels)
                part.move_before(conv)
                part.operands[2] = total
                total, first = part.results[0], first + channels
        conv.results[0].replace_all_uses_with(total)
        conv.erase()
        if pad is not None:
            pad.erase()
        concat.erase()


def _only_user(op: ir.Operation, names: tuple[str, ...]) -> ir.Operation | None:
    """The user of an op's result, if there is one only and it has one of these names."""
    using = users(op.results[0])
    return using[0] if len(using) == 1 and using[0].name in names else None


def _input_slice(weight: ir.Value, first: int, channels: int) -> ir.Value:
    type_ = ir.RankedTensorType(weight.type)
    sizes = list(type_.shape)
    sizes[_WEIGHT_INPUTS] = channels
    offsets = [0] * len(sizes)
    offsets[_WEIGHT_INPUTS] = first
    return tensor.extract_slice(
        ir.RankedTensorType.get(sizes, type_.element_type),
        weight,
        [],
        [],
        [],
        static_offsets=offsets,
        static_sizes=sizes,
        static_strides=[1] * len(sizes),
    )


def _split_results(module: ir.Module) -> None:
    """A concat that is the result is written part by part straight into its slices of memory."""
    for store in list(yolo.ops_in(module, "bufferization.materialize_in_destination")):
        owner = store.operands[0].owner
        if isinstance(owner, ir.Block) or owner.name != "tensor.concat":
            continue
        concat, destination, first = owner.operation, store.operands[1], 0
        for part in list(concat.operands):
            sizes = list(ir.RankedTensorType(part.type).shape)
            with ir.InsertionPoint(store), store.location:
                offsets = [0] * (len(sizes) - 1) + [first]
                view = memref.subview(destination, offsets, sizes, [1] * len(sizes))
                written = store.clone()
            written.operands[0], written.operands[1] = part, _value(view)
            written.move_before(store)
            first += sizes[-1]
        store.erase()
        concat.erase()


def _value(op: ir.OpView | ir.Value) -> ir.Value:
    return op if isinstance(op, ir.Value) else op.results[0]


def _transpose_keys(module: ir.Module) -> None:
    """Attention's keys with their tokens innermost: the scores' vectors run over tokens.

    Applies to a contraction of two operands whose second has a reduced dimension innermost.
    """
    for op in list(yolo.ops_in(module, "linalg.generic")):
        maps = [ir.AffineMapAttr(a).value for a in _array(op, "indexing_maps")]
        kinds = [str(a) for a in _array(op, "iterator_types")]
        if len(maps) != 3 or not any("reduction" in k for k in kinds):
            continue
        dims = [[_position(e) for e in m.results] for m in maps]
        order = dims[2] + [d for d in dims[1] if d not in dims[2]]
        if not dims[1] or "reduction" not in kinds[dims[1][-1]] or dims[2][-1] not in dims[1]:
            continue
        last = dims[2][-1]
        target = [d for d in order if d in dims[1] and d != last] + [last]
        _transpose_operand(op, maps, dims[1], target)


def _transpose_operand(
    op: ir.Operation, maps: list[ir.AffineMap], current: list[int], target: list[int]
) -> None:
    """Give operand 1 of a generic the order of dimensions `target`."""
    permutation = [current.index(d) for d in target]
    source = op.operands[1]
    type_ = ir.RankedTensorType(source.type)
    shape = [type_.shape[p] for p in permutation]
    with ir.InsertionPoint(op), op.location:
        empty = tensor.empty(shape, type_.element_type)
        moved = linalg.transpose(source, outs=[empty], permutation=permutation)
    count = maps[1].n_dims
    maps[1] = ir.AffineMap.get(count, 0, [ir.AffineDimExpr.get(d) for d in target])
    op.attributes["indexing_maps"] = ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps])
    op.operands[1] = _value(moved)


def _reassociate_sums(module: ir.Module) -> None:
    """Let LLVM sum in vectors where no schedule does: reductions that are no contractions."""
    for op in yolo.ops_in(module, "linalg.generic"):
        body = [view.operation for view in op.regions[0].blocks[0].operations]
        reduces = "reduction" in str(op.attributes["iterator_types"])
        if reduces and len(body) == 2 and body[0].name in ("arith.addf", "arith.maximumf"):
            body[0].attributes["fastmath"] = ir.Attribute.parse("#arith.fastmath<reassoc>")


def _array(op: ir.Operation, name: str) -> list[ir.Attribute]:
    return list(ir.ArrayAttr(op.attributes[name]))


def _position(expression: ir.AffineExpr) -> int:
    """The dimension of a plain dimension expression, else -1."""
    if isinstance(expression, ir.AffineDimExpr):
        return int(expression.position)
    return -1
