"""Schedules in the transform dialect: which ops share a block, how it is tiled and vectorised.

A kernel is a sequence of groups. A group has a root (the last op: a convolution's epilogue, say),
whose outermost loops become an `scf.forall` of blocks, and everything fused into it. Ops are named
to the script by the attribute `cpu.op`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from yolomlir.bindings import ir, transform_interpreter
from yolomlir.codegen.cpu import tiles
from yolomlir.codegen.cpu.isa import Isa
from yolomlir.codegen.cpu.prepare import users
from yolomlir.diagnostics import InternalError
from yolomlir.dialects import yolo

TAG = "cpu.op"
_HANDLE = "!transform.any_op"
CONV = "linalg.conv_2d_nhwc_hwcf"
DEPTHWISE = "linalg.depthwise_conv_2d_nhwc_hwc"
POOL = "linalg.pooling_nhwc_max"
_READS = ("tensor.expand_shape", "bufferization.to_tensor")
_PITCH = re.compile(r"strided<\[(\d+), 1\]>")
"""The pitch in the type of an operand's memory."""
_CHANNELS_OUTERMOST = [0, 3, 1, 2]
"""The order of a block's loops N, H, W, C: one panel of weights for all pixels of the block."""
_WINDOWS = (CONV, DEPTHWISE, POOL)


class Script:
    """A transform script under construction: methods append ops and return handles."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def _new(self) -> str:
        self._count += 1
        return f"%h{self._count}"

    def match(self, tag: str) -> str:
        """The op of that tag."""
        name = self._new()
        self.lines.append(
            f'{name} = transform.structured.match attributes {{{TAG} = "{tag}"}} in %root '
            f": ({_HANDLE}) -> {_HANDLE}"
        )
        return name

    def match_all(self, op: str) -> str:
        """Every op of that name."""
        name = self._new()
        self.lines.append(
            f'{name} = transform.structured.match ops{{["{op}"]}} in %root '
            f": ({_HANDLE}) -> {_HANDLE}"
        )
        return name

    def forall(self, target: str, sizes: Sequence[int]) -> tuple[str, str]:
        """Tile into an `scf.forall`: the tiled op and the loop."""
        op, loop = self._new(), self._new()
        self.lines.append(
            f"{op}, {loop} = transform.structured.tile_using_forall {target} "
            f"tile_sizes {list(sizes)} : ({_HANDLE}) -> ({_HANDLE}, {_HANDLE})"
        )
        return op, loop

    def loops(
        self, target: str, sizes: Sequence[int], interchange: Sequence[int] | None = None
    ) -> tuple[str, str]:
        """Tile into loops: the tiled op and the innermost loop."""
        op = self._new()
        handles = [self._new() for size in sizes if size]
        order = f" interchange = {list(interchange)}" if interchange else ""
        kinds = ", ".join([_HANDLE] * (len(handles) + 1))
        self.lines.append(
            f"{', '.join([op, *handles])} = transform.structured.tile_using_for {target} "
            f"tile_sizes {list(sizes)}{order} : ({_HANDLE}) -> ({kinds})"
        )
        return op, handles[-1]

    def fuse(self, producer: str, loop: str) -> tuple[str, str]:
        """Compute a producer's tile inside a loop: the fused op and the new loop."""
        op, new = self._new(), self._new()
        self.lines.append(
            f"{op}, {new} = transform.structured.fuse_into_containing_op {producer} into {loop} "
            f": ({_HANDLE}, {_HANDLE}) -> ({_HANDLE}, {_HANDLE})"
        )
        return op, new

    def vectorize_steps(self, window: str, reductions: int) -> None:
        """Loops over a window op's reduction: height and width of the window, input channels."""
        step, _ = self.loops(window, [0, 0, 0, 0, *[1] * reductions])
        self.vectorize(self.decompose(step))

    def decompose(self, target: str) -> str:
        """A 2-D window op whose other window dimension is 1 as its 1-D form."""
        op = self._new()
        self.lines.append(
            f"{op} = transform.structured.decompose {target} : ({_HANDLE}) -> {_HANDLE}"
        )
        return op

    def vectorize(self, target: str) -> None:
        """Vectorise one op of static shape."""
        self.lines.append(f"transform.structured.vectorize {target} : {_HANDLE}")

    def cse(self) -> None:
        """Common subexpressions of the kernel: equal slices of one producer become one use."""
        function = self.match_all("func.func")
        self.lines.append(f"transform.apply_cse to {function} : {_HANDLE}")

    def text(self) -> str:
        """The module that holds the script."""
        body = "\n".join(f"    {line}" for line in [*self.lines, "transform.yield"])
        return (
            "module attributes {transform.with_named_sequence} {\n"
            f"  transform.named_sequence @__transform_main(%root: {_HANDLE}) {{\n{body}\n  }}\n}}\n"
        )


_TO_VECTORS = f"""\
%kernel = transform.structured.match ops{{["func.func"]}} in %root : ({_HANDLE}) -> {_HANDLE}
    transform.apply_patterns to %kernel {{
      transform.apply_patterns.canonicalization
      transform.apply_patterns.linalg.tiling_canonicalization
      transform.apply_patterns.tensor.fold_tensor_empty
      transform.apply_patterns.tensor.fold_tensor_subset_ops_into_vector_transfers
      transform.apply_patterns.vector.cast_away_vector_leading_one_dim
      transform.apply_patterns.vector.transfer_permutation_patterns
      transform.apply_patterns.vector.reduction_to_contract
    }} : {_HANDLE}
    transform.apply_cse to %kernel : {_HANDLE}
    %loops = transform.structured.match ops{{["scf.for"]}} in %kernel : ({_HANDLE}) -> {_HANDLE}
    transform.loop.hoist_loop_invariant_subsets %loops : {_HANDLE}
    transform.apply_patterns to %kernel {{
      transform.apply_patterns.vector.reduction_to_contract
      transform.apply_patterns.vector.lower_contraction lowering_strategy = "outerproduct"
      transform.apply_patterns.vector.lower_outerproduct
      transform.apply_patterns.vector.lower_multi_reduction lowering_strategy = "innerreduction"
    }} : {_HANDLE}"""
"""After it the sums of a register tile are values that loops carry. No canonicalisation follows:
it would take 2-D vectors apart into single elements."""


@dataclass
class _Group:
    """One forall: windows that add to one accumulator, in order, the fill of that accumulator, an
    elementwise epilogue, and the producers of the windows' inputs, the nearest first."""

    windows: list[ir.Operation]
    fill: ir.Operation | None = None
    epilogue: ir.Operation | None = None
    producers: list[ir.Operation] = field(default_factory=list)

    @property
    def root(self) -> ir.Operation:
        """The last op."""
        return self.epilogue or self.windows[-1]


def schedule(module: ir.Module, isa: Isa) -> str:
    """Tile, fuse and vectorise the kernel in place; returns the script."""
    script = Script()
    for group in _groups(module):
        _schedule_window(script, group, isa)
    for region in _regions(module):
        _schedule_region(script, region, isa)
    script.lines.append(_TO_VECTORS)
    run_script(module, script.text())
    return script.text()


def run_script(module: ir.Module, text: str) -> None:
    """Apply a transform script to a module."""
    with module.context:
        script = ir.Module.parse(text)
        sequence = script.body.operations[0]
        transform_interpreter.apply_named_sequence(module.operation, sequence, script)


def shape_of(value: ir.Value) -> list[int]:
    """The static shape of a tensor."""
    return list(ir.RankedTensorType(value.type).shape)


def _tag(op: ir.Operation, tag: str) -> None:
    op.attributes[TAG] = ir.StringAttr.get(tag)


def _tag_of(op: ir.Operation) -> str:
    return str(ir.StringAttr(op.attributes[TAG]).value)


# ---- grouping -----------------------------------------------------------------------------------


def _defining(value: ir.Value) -> ir.Operation | None:
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _groups(module: ir.Module) -> list[_Group]:
    """A group for every chain of window ops, in order; the ops of groups are tagged."""
    groups: list[_Group] = []
    for op in list(yolo.ops_in(module, "linalg.")):
        if op.name not in _WINDOWS or TAG in op.attributes:
            continue
        group = _window_group(op)
        name = f"g{len(groups)}"
        for i, window in enumerate(group.windows):
            _tag(window, f"{name}w{i}")
        for i, producer in enumerate(group.producers):
            _tag(producer, f"{name}p{i}")
        if group.fill is not None:
            _tag(group.fill, f"{name}fill")
        if group.epilogue is not None:
            _tag(group.epilogue, f"{name}root")
        groups.append(group)
    return groups


def _window_group(first: ir.Operation) -> _Group:
    """The windows that add to one accumulator, its fill, epilogue and input producers."""
    windows, fill = [first], _defining(first.operands[2])
    while True:
        following = users(windows[-1].results[0])
        chained = [
            u for u in following if u.name in _WINDOWS and u.operands[2].owner == windows[-1]
        ]
        if len(following) != 1 or not chained:
            break
        windows.append(chained[0])
    following = users(windows[-1].results[0])
    single = len(following) == 1 and _is_elementwise(following[0])
    single = single and shape_of(following[0].results[0]) == shape_of(first.results[0])
    group = _Group(windows, fill, following[0] if single else None)
    for window in reversed(windows):
        _add_producers(group, window)
    return group


def _is_elementwise(op: ir.Operation) -> bool:
    if op.name != "linalg.generic":
        return False
    kinds = ir.ArrayAttr(op.attributes["iterator_types"])
    return all("parallel" in str(k) for k in kinds)


def _add_producers(group: _Group, window: ir.Operation) -> None:
    """Pads, normalisation and upsampling that only this window's input uses.

    A pad as tall as the window would give blocks that lie in it wholly.
    """
    op, kernel = _defining(window.operands[0]), shape_of(window.operands[1])[0]
    while op is not None and len(users(op.results[0])) == 1:
        if op.name != "tensor.pad" and not _is_elementwise(op):
            return
        if op.name == "tensor.pad" and max(_pad_rows(op)) >= kernel:
            return
        if _upsampling(op) > 1 and group.producers and group.producers[-1].name == "tensor.pad":
            return  # the padding shifts its tiles off the input's pixels
        group.producers.append(op)
        op = _defining(op.operands[0])


def _pad_rows(pad: ir.Operation) -> tuple[int, int]:
    """Rows that a pad of N, H, W, C adds above and below."""
    low, high = (ir.DenseI64ArrayAttr(pad.attributes[f"static_{k}"]) for k in ("low", "high"))
    return int(low[1]), int(high[1])


@dataclass
class _Region:
    """One forall of generics. members: the root's producers that nothing else uses, last first."""

    root: ir.Operation
    members: list[ir.Operation]


def _regions(module: ir.Module) -> list[_Region]:
    """What no window group holds: every root with all producers that only it needs, fills too."""
    kernel = module.body.operations[0].operation
    ops = [view.operation for view in kernel.regions[0].blocks[0].operations]
    regions: list[_Region] = []
    for root in reversed(ops):
        if root.name not in ("linalg.generic", "linalg.transpose") or TAG in root.attributes:
            continue
        _tag(root, f"r{len(regions)}root")
        region = _Region(root, [])
        for op in reversed(ops):
            if root.name != "linalg.generic":
                break
            if op.name in ("linalg.generic", "linalg.fill") and _belongs(op, region):
                _tag(op, f"r{len(regions)}m{len(region.members)}")
                region.members.append(op)
        regions.append(region)
    return regions


def _belongs(op: ir.Operation, region: _Region) -> bool:
    """Whether every user of an untagged op is in the region, and reads it by one operand.

    Two operands would read two tiles; fusing the producer for one leaves the other wrong.
    """
    if TAG in op.attributes:
        return False
    inside = {_tag_of(m) for m in [region.root, *region.members]}
    using = [_tag_of(u) if TAG in u.attributes else "" for u in users(op.results[0])]
    return bool(using) and len(set(using)) == len(using) and inside.issuperset(using)


# ---- schedules ----------------------------------------------------------------------------------


def _input_bytes(group: _Group) -> tuple[int, int, int]:
    """Bytes of a padded input row, stride, and rows that a block reads besides its own."""
    window = group.windows[-1]
    _, _, width, channels = shape_of(window.operands[0])
    kernel = shape_of(window.operands[1])[0]
    stride = int(ir.DenseIntElementsAttr(window.attributes["strides"])[0])
    return 4 * width * channels, stride, max(0, kernel - stride)


def _schedule_window(script: Script, group: _Group, isa: Isa) -> None:
    """Blocks of rows; in a block, register tiles whose sums live through the whole reduction."""
    _, _, width, channels = shape_of(group.root.results[0])
    tile = _register_tile(group, width, channels, isa)
    block, loop = script.forall(script.match(_tag_of(group.root)), _block_tile(group, tile, isa))
    windows = []
    for window in reversed(group.windows if group.epilogue else ()):
        op, loop = script.fuse(script.match(_tag_of(window)), loop)
        windows.append(op)
    fill = None
    if group.fill is not None:
        fill, loop = script.fuse(script.match(_tag_of(group.fill)), loop)
    for producer in group.producers:
        _, loop = script.fuse(script.match(_tag_of(producer)), loop)
    if group.epilogue:
        reductions = 3 if group.windows[0].name == CONV else 2
        _schedule_registers(script, block, windows, fill, tile, reductions=reductions)
    else:
        _schedule_pool(script, block, tile)


def _block_tile(group: _Group, tile: tiles.RegisterTile, isa: Isa) -> list[int]:
    """Tile sizes of the blocks: some rows of an image; parts of the channels where rows are few."""
    batch, height, _, channels = shape_of(group.root.results[0])
    row_bytes, stride, halo = _input_bytes(group)
    blocks = tiles.wanted_blocks(isa)
    rows = tiles.rows_per_block(
        batch, height, blocks, row_bytes=row_bytes, stride=stride, halo=halo
    )
    if any(rows % _upsampling(p) for p in group.producers):
        rows = 1
    missing = -(-blocks * rows // (batch * height))
    part = tiles.channels_per_block(channels, tile, missing)
    return [1, rows, 0, part if part < channels else 0]


def _schedule_registers(
    script: Script,
    epilogue: str,
    windows: Sequence[str],
    fill: str | None,
    tile: tiles.RegisterTile,
    *,
    reductions: int,
) -> None:
    """Register tiles of the epilogue, with the windows (the last first) and the fill fused in."""
    tiled, loop = script.loops(epilogue, [0, 1, tile.pixels, tile.channels], _CHANNELS_OUTERMOST)
    inner = []
    for window in windows:
        op, loop = script.fuse(window, loop)
        inner.append(op)
    if fill is not None:
        start, _ = script.fuse(fill, loop)
        script.vectorize(start)
    for op in inner:
        script.vectorize_steps(op, reductions)
    script.vectorize(tiled)


def _schedule_pool(script: Script, block: str, tile: tiles.RegisterTile) -> None:
    """Register tiles of a window op that nothing follows; the block's fill stays in memory."""
    sizes = [0, 1, tile.pixels, tile.channels, 0, 0]
    window, _ = script.loops(block, sizes, [*_CHANNELS_OUTERMOST, 4, 5])
    script.vectorize_steps(window, reductions=2)


def _pixel_bytes(window: ir.Operation) -> int:
    """Bytes between the first inputs of two neighbouring output pixels."""
    value = window.operands[0]
    pitch = shape_of(value)[3]
    while (op := _defining(value)) is not None and op.name in _READS:
        value = op.operands[0]
        found = _PITCH.search(str(value.type))
        pitch = int(found[1]) if found else pitch
    return 4 * pitch * int(ir.DenseIntElementsAttr(window.attributes["strides"])[1])


def _upsampling(op: ir.Operation) -> int:
    """The factor of an upsampling generic, 1 for any other op.

    A tile of its result reads a tile of its input only if it begins and ends at whole pixels of
    the input, or is a single row.
    """
    if op.name != "linalg.generic":
        return 1
    for attribute in ir.ArrayAttr(op.attributes["indexing_maps"]):
        for e in ir.AffineMapAttr(attribute).value.results:
            if isinstance(e, ir.AffineFloorDivExpr):
                return int(ir.AffineConstantExpr(e.rhs).value)
    return 1


def _register_tile(group: _Group, width: int, channels: int, isa: Isa) -> tiles.RegisterTile:
    if group.windows[-1].name == CONV:
        pointwise = shape_of(group.windows[-1].operands[1])[:2] == [1, 1]
        return tiles.register_tile(
            width,
            channels,
            isa,
            prefer_channels=pointwise,
            pixel_bytes=max(_pixel_bytes(window) for window in group.windows),
        )
    lanes = tiles.largest_divisor(channels, isa.lanes)
    return tiles.RegisterTile(tiles.largest_divisor(width, 8), lanes)


def _schedule_region(script: Script, region: _Region, isa: Isa) -> None:
    """Blocks over the root's leading parallel dimensions. Contractions get register tiles; LLVM
    vectorises the loops of the rest."""
    sizes = _block_sizes(region.root, tiles.wanted_blocks(isa))
    if not any(sizes):
        return
    handles: dict[str, str] = {}
    handles[_tag_of(region.root)], loop = script.forall(script.match(_tag_of(region.root)), sizes)
    for member in region.members:
        script.cse()
        handles[_tag_of(member)], loop = script.fuse(script.match(_tag_of(member)), loop)
    inside = _extents_in_block(region, sizes)
    for member in region.members:
        using = users(member.results[0])
        if _is_contraction(member) and len(using) == 1 and _is_elementwise(using[0]):
            extents = inside[_tag_of(member)]
            _schedule_contraction(script, member, using[0], handles, extents, isa)


def _block_sizes(root: ir.Operation, wanted: int) -> list[int]:
    """Tile sizes of the root's loops for at least `wanted` blocks, 0 where a loop stays whole."""
    kinds = _kinds(root)
    extents, blocks = _loop_extents(root, len(kinds)), 1
    sizes = [0] * len(kinds)
    for d, kind in enumerate(kinds):
        if "parallel" not in kind or blocks >= wanted:
            continue
        sizes[d] = tiles.largest_divisor(extents[d], max(1, extents[d] * blocks // wanted))
        if sizes[d] % _upsampling(root):
            sizes[d] = 1
        blocks *= extents[d] // sizes[d]
    return sizes


def _kinds(op: ir.Operation) -> list[str]:
    if op.name != "linalg.generic":
        return ["parallel"] * len(shape_of(op.results[0]))
    return [str(kind) for kind in ir.ArrayAttr(op.attributes["iterator_types"])]


def _maps(op: ir.Operation) -> list[list[int]]:
    """The dimension of every map result, -1 where it is no plain dimension."""
    return [
        [e.position if isinstance(e, ir.AffineDimExpr) else -1 for e in a.value.results]
        for a in map(ir.AffineMapAttr, ir.ArrayAttr(op.attributes["indexing_maps"]))
    ]


def _is_contraction(op: ir.Operation) -> bool:
    """A sum of products of two operands over one dimension."""
    if op.name != "linalg.generic" or len(op.operands) != 3:
        return False
    body = [view.operation.name for view in op.regions[0].blocks[0].operations]
    reductions = sum("reduction" in kind for kind in _kinds(op))
    return body == ["arith.mulf", "arith.addf", "linalg.yield"] and reductions == 1


def _schedule_contraction(
    script: Script,
    op: ir.Operation,
    epilogue: ir.Operation,
    handles: dict[str, str],
    extents: Sequence[int],
    isa: Isa,
) -> None:
    """Register tiles of the epilogue's loops, with the contraction and its fill fused in.

    Rows of a tile run over the dimension that only operand 0 has, columns over the last. extents:
    of the contraction's loops, in a block.
    """
    left, right, out = _maps(op)
    rows = [d for d in out if d in left and d not in right]
    which = [i for i, o in enumerate(epilogue.operands) if o == op.results[0]]
    if not rows or out[-1] not in right or not which:
        return
    places = _maps(epilogue)[which[0]]
    tile = tiles.register_tile(extents[rows[-1]], extents[out[-1]], isa)
    sizes = [1] * len(_kinds(epilogue))
    sizes[places[out.index(rows[-1])]] = tile.pixels
    sizes[places[-1]] = tile.channels
    tiled, loop = script.loops(handles[_tag_of(epilogue)], sizes)
    inner, loop = script.fuse(handles[_tag_of(op)], loop)
    fill = _defining(op.operands[2])
    if fill is not None and TAG in fill.attributes:
        start, loop = script.fuse(handles[_tag_of(fill)], loop)
        script.vectorize(start)
    steps = [1 if "reduction" in kind else 0 for kind in _kinds(op)]
    step, _ = script.loops(inner, steps)
    script.vectorize(step)
    script.vectorize(tiled)


def _extents_in_block(region: _Region, block: Sequence[int]) -> dict[str, list[int]]:
    """How much of each of its loops a block runs, for the root and every generic fused into it."""
    root = region.root
    whole = _loop_extents(root, len(_kinds(root)))
    inside = {_tag_of(root): [b or w for b, w in zip(block, whole, strict=True)]}
    for member in region.members:
        if member.name != "linalg.generic":
            continue
        user = users(member.results[0])[0]
        operand = next(i for i, o in enumerate(user.operands) if o == member.results[0])
        extents = _loop_extents(member, len(_kinds(member)))
        for loop, outer in zip(_maps(member)[-1], _maps(user)[operand], strict=True):
            if outer >= 0:
                extents[loop] = inside[_tag_of(user)][outer]
        inside[_tag_of(member)] = extents
    return inside


def _loop_extents(op: ir.Operation, count: int) -> list[int]:
    """The extent of every loop of a linalg op, from its operands' shapes."""
    if op.name != "linalg.generic":
        return shape_of(op.results[0])
    extents = [0] * count
    maps = ir.ArrayAttr(op.attributes["indexing_maps"])
    for operand, attribute in zip(op.operands, maps, strict=True):
        for size, e in zip(
            shape_of(operand), ir.AffineMapAttr(attribute).value.results, strict=True
        ):
            if isinstance(e, ir.AffineDimExpr):
                extents[e.position] = size
    if 0 in extents:
        raise InternalError(
            f"a loop of '{op.name}' has no extent", where=yolo.layer_of(op.location)
        )
    return extents
