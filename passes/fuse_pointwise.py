"""The pass `yolo-fuse-pointwise`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import (
    Outliner,
    convolution,
    dispatches,
    entry_block,
    erase_unused_functions,
    family_of,
    functions,
    is_weight,
    operations,
    precision_of,
    producer,
    require_grouped,
    users,
    weight_index,
)
from yolomlir.passes.placement import Placement, overlap

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError
from yolomlir.remarks import remark
from yolomlir.target import TARGETS, Target

if TYPE_CHECKING:
    from yolomlir.codegen.gpu.chain_tile import ChainShape

VIEWS = ("yolo.slice", "yolo.concat")
_ABSORBED = ("yolo.conv2d", "yolo.silu", "yolo.add", "yolo.concat")
"""Ops of a stage; a first stage may read through an upsampling as well."""


@dataclass(frozen=True)
class FusePointwise(Pass):
    """Put 1x1 convolutions into the dispatch that makes their input, on a GPU.

    A chain is a convolution of any kernel and stride, dense or depthwise, and 1x1 convolutions of
    stride 1 that read its result or one another's, each with its activation and residual. Its
    kernel keeps a tile of pixels on chip through all of them. A result that is read outside is a
    result of the chain's dispatch, too; others are never stored. Chains grow in program order, as
    long as no other dispatch has to run between two of their members, a tile fits, and a block need
    not stream more weights than it is worth.

    A tile has to fit every GPU that the compiler knows, not only the one compiled for: the graph is
    part of a compiled file, from which programs for other GPUs are made (`compiler.recompile`), and
    a chain that needs an H200's shared memory or a cluster of blocks could not run on an RTX 4090.

    Options:
        max-stages: convolutions of a chain.
        max-first-k: the longest sum (kernel area x channels) of a first convolution; longer ones
            are better divided over K by their own kernel.
        max-pixels: pixels of the result.
        max-weight-kib: KiB of weights that a block may have to stream for the later stages.
        depthwise: whether depthwise convolutions begin chains as well.
        portable: whether a tile has to fit all GPUs. Without, only the target's limits count, which
            makes more chains on the larger GPUs and files that are for those alone.

    Before:
        %1 = call @conv2d_3x3s1_8x16x16_8_silu(%x, %w, %b) {yolo.dispatch}
        %2 = call @conv2d_1x1s1_8x16x16_4(%1, %v, %c) {yolo.dispatch}

    After:
        %2 = call @chain_3x3s1_8x16x16_8_silu_then_4(%x, %w, %b, %v, %c) {yolo.dispatch}

    Statistics:
        chains: dispatches made.
        fused: dispatches that went into another.
        stored: results of stages that others read, so that they are stored.
        kept_apart: candidates refused, each with a remark.

    Example:
        // RUN: yolomlir-opt %s --target=sm_90 --split-input-file --yolo-fuse-pointwise \\
        // RUN:   | FileCheck %s

        // CHECK-LABEL: func.func @main
        // CHECK-NOT: @conv2d
        // CHECK: call @chain_1x1s1_8x4x4_8_silu_then_8_add(%arg0, {{.*}}, %arg0) {yolo.dispatch}
        // CHECK: func.func private @chain_1x1s1_8x4x4_8_silu_then_8_add
        // CHECK-SAME: yolo.family = "chain"
        // CHECK: yolo.conv2d
        // CHECK-NEXT: yolo.silu
        // CHECK-NEXT: yolo.conv2d
        // CHECK-NEXT: yolo.add
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        !w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
        func.func @main(%x: !t) -> !t {
          %w = "yolo.weight"() {name = "a.weight"} : () -> !w
          %0 = func.call @conv2d_1x1s1_8x4x4_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
          %1 = func.call @conv2d_1x1s1_8x4x4_8_add(%0, %w, %x) {yolo.dispatch}
              : (!t, !w, !t) -> !t
          return %1 : !t
        }
        func.func private @conv2d_1x1s1_8x4x4_8_silu(%x: !t, %w: !w) -> !t
            attributes {yolo.family = "conv2d"} {
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
              padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.silu"(%0) : (!t) -> !t
          return %1 : !t
        }
        func.func private @conv2d_1x1s1_8x4x4_8_add(%x: !t, %w: !w, %r: !t) -> !t
            attributes {yolo.family = "conv2d"} {
          %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
              padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
          %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
          return %1 : !t
        }
    """

    name: ClassVar[str] = "yolo-fuse-pointwise"
    max_stages: int = 6
    max_first_k: int = 640
    max_pixels: int = 1 << 20
    max_weight_kib: int = 384
    depthwise: bool = True
    portable: bool = True

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Make chains of the dispatches of `@main`; does nothing for a CPU."""
        self.require_positive("max_stages", "max_first_k", "max_pixels", "max_weight_kib")
        if context.target.kind != "gpu":
            return
        require_grouped(entry_block(module), (*VIEWS, "yolo.upsample"))
        graph = _Graph(module)
        for call in graph.calls:
            reason = self._try_to_join(call, graph, context.target)
            if reason:
                remark(call.location, f"not fused with what it reads: {reason}")
                context.count(self, "kept_apart")
        placement = Placement(graph.block)
        placement.try_views([op for op in operations(graph.block) if op.name in VIEWS])
        chains = [_without_hazards(group, graph, placement) for group in graph.chains()]
        del placement
        outliner = Outliner(module)
        for chain in chains:
            if len(chain) > 1:
                made = _outline(chain, graph, outliner)
                context.count(self, "chains")
                context.count(self, "fused", len(chain) - 1)
                context.count(self, "stored", len(made.results) - 1)
        erase_unused_functions(module)

    def _try_to_join(self, call: ir.Operation, graph: _Graph, target: Target) -> str | None:
        """Add a call to the chain that makes its input; why not, where that is worth a remark."""
        if not graph.is_pointwise(call) or not _is_stored(call.results[0], ()):
            return None
        reasons = []
        for source in graph.convolutions_read(call):
            group = graph.group_of(source)
            reason = self._objection([*group, call], graph, target)
            if reason is None:
                graph.join(group, call)
                return None
            reasons.append(reason)
        return reasons[0] if reasons else None

    def _objection(
        self, joined: Sequence[ir.Operation], graph: _Graph, target: Target
    ) -> str | None:
        """Why dispatches are not to be one."""
        if len(joined) > self.max_stages:
            return f"the chain has {len(joined) - 1} stages already"
        reason = graph.objection(joined)
        return reason or self._too_costly(graph.shape(joined), target, graph.precision)

    def _too_costly(self, shape: ChainShape, target: Target, precision: str) -> str | None:
        from yolomlir.codegen.gpu.chain_space import default_tile
        from yolomlir.codegen.gpu.chain_tile import plan

        if shape.depthwise and not self.depthwise:
            return "it begins with a depthwise convolution"
        if shape.sizes()[0][0] > self.max_first_k:
            return f"its sums are {shape.first.k} long; at most {self.max_first_k}"
        if shape.first.pixels > self.max_pixels:
            return f"the result has {shape.first.pixels} pixels; at most {self.max_pixels}"
        reason = tile_objection(shape, target, precision, portable=self.portable)
        if reason is not None:
            return reason
        work = plan(default_tile(shape, target, precision), shape)
        sizes = zip(work.stages[1:], shape.later, strict=True)
        streamed = sum(shape.element.bytes * stage.n * k for stage, (k, _) in sizes)
        if streamed > 1024 * self.max_weight_kib:
            return f"a block would stream {streamed // 1024} KiB; at most {self.max_weight_kib}"
        return None


def tile_objection(
    shape: ChainShape, target: Target, precision: str, *, portable: bool
) -> str | None:
    """Why a chain has no tile, for the target or, where it has to be portable, for every GPU."""
    from yolomlir.codegen.gpu.chain_space import default_tile, tile_space
    from yolomlir.diagnostics import UnsupportedError

    smallest = smallest_gpu()
    if portable and next(tile_space(shape, smallest, precision), None) is None:
        return f"no tile fits {smallest.shared_memory_bytes} bytes without clusters"
    try:
        default_tile(shape, target, precision)
    except UnsupportedError as error:
        return error.message
    return None


def smallest_gpu() -> Target:
    """What every GPU of the table has: the least shared memory, and clusters only if all do.

    A chain's tile that is legal on it is legal on all of them.
    """
    gpus = [target for target in TARGETS.values() if target.kind == "gpu"]
    least = min(gpus, key=lambda target: target.shared_memory_bytes)
    return replace(least, name="every GPU", clusters=all(target.clusters for target in gpus))


class _Graph:
    """The dispatches of `@main`, what each needs, and the chains made so far."""

    def __init__(self, module: ir.Module) -> None:
        self.block = entry_block(module)
        self.table = functions(module)
        self.calls = dispatches(module)
        self._number = {op: i for i, op in enumerate(self.calls)}
        self._sources = [self._producers(list(call.operands)) for call in self.calls]
        self._chain = [[i] for i in range(len(self.calls))]
        self.precision = precision_of(module)

    def chains(self) -> list[list[ir.Operation]]:
        """The chains of more than one member, each in program order."""
        found = {id(c): c for c in self._chain if len(c) > 1}
        return [[self.calls[i] for i in sorted(chain)] for chain in found.values()]

    def group_of(self, call: ir.Operation) -> list[ir.Operation]:
        """The members of a call's chain, itself among them, in program order."""
        return [self.calls[i] for i in sorted(self._chain[self._number[call]])]

    def join(self, group: Sequence[ir.Operation], call: ir.Operation) -> None:
        """Add a call to a chain."""
        chain = self._chain[self._number[group[0]]]
        chain.append(self._number[call])
        self._chain[self._number[call]] = chain

    def _producers(self, values: Sequence[ir.Value]) -> set[int]:
        """The dispatches that compute what values hold, views looked through."""
        found: set[int] = set()
        for value in values:
            op = producer(value)
            if op is None or op.name == "yolo.weight":
                continue
            if yolo.is_dispatch(op):
                found.add(self._number[op])
            else:
                found |= self._producers(list(op.operands))
        return found

    # ---- what a dispatch is ---------------------------------------------------------------------

    def body(self, call: ir.Operation) -> ir.Block:
        """The body of the function that a dispatch calls."""
        return self.table[yolo.callee(call)].regions[0].blocks[0]

    def convolution(self, call: ir.Operation) -> ir.Operation:
        """The convolution of a `conv2d` dispatch."""
        return convolution(self.body(call))

    def is_pointwise(self, call: ir.Operation) -> bool:
        """Whether a dispatch is a 1x1 convolution of stride 1 that reads nothing enlarged."""
        if family_of(call, self.table) != naming.CONV2D:
            return False
        body = operations(self.body(call))[:-1]
        conv = self.convolution(call)
        return (
            all(op.name in _ABSORBED for op in body)
            and yolo.shape_of(conv.operands[1])[2:] == [1, 1]
            and list(yolo.integers(conv, "strides")) == [1, 1]
            and not any(yolo.integers(conv, "padding"))
            and yolo.integer(conv, "groups") == 1
            and not any(_is_enlarged(value) for value in self.sources(call))
        )

    def can_begin(self, call: ir.Operation) -> bool:
        """Whether a dispatch can be a chain's first stage: no image; of one group, or depthwise."""
        names = [op.name for op in operations(self.body(call))[:-1]]
        known = all(name in (*_ABSORBED, "yolo.upsample") for name in names)
        conv = self.convolution(call)
        multiplied = ir.RankedTensorType(conv.operands[1].type).element_type
        types = [ir.RankedTensorType(v.type).element_type for v in self.sources(call)]
        floats = all(type_ == multiplied for type_ in types)
        depthwise = family_of(call, self.table) == naming.DEPTHWISE
        by_tap = depthwise and Layout.of(conv.operands[1].type) is Layout.HWIO
        return known and floats and (by_tap or yolo.integer(conv, "groups") == 1)

    def sources(self, call: ir.Operation) -> list[ir.Value]:
        """The operands that a dispatch's convolution reads."""
        return list(call.operands)[: weight_index(self.body(call))]

    def convolutions_read(self, call: ir.Operation) -> list[ir.Operation]:
        """The dispatches that a convolution reads from and that can be in a chain, latest first."""
        numbers = sorted(self._producers(self.sources(call)), reverse=True)
        found = [self.calls[number] for number in numbers]
        return [
            op
            for op in found
            if family_of(op, self.table) in (naming.CONV2D, naming.DEPTHWISE)
            and self.can_begin(self.group_of(op)[0])
        ]

    def shape(self, chain: Sequence[ir.Operation]) -> ChainShape:
        """What a chain's tile depends on."""
        from yolomlir.passes.assign_tiles import conv_shape

        from yolomlir.codegen.gpu.chain_tile import ChainShape

        later = []
        for call in chain[1:]:
            out, channels = yolo.shape_of(self.convolution(call).operands[1])[:2]
            later.append((channels, out))
        added = [v for call in chain for v in self._residuals(call)]
        kept = [i for i, call in enumerate(chain) if call.results[0] in added]
        first = conv_shape(self.table[yolo.callee(chain[0])])
        depthwise = family_of(chain[0], self.table) == naming.DEPTHWISE
        return ChainShape(first, tuple(later), tuple(kept), depthwise)

    def _residuals(self, call: ir.Operation) -> list[ir.Value]:
        """The operands of a dispatch that its convolution does not read, weights left out."""
        rest = list(call.operands)[len(self.sources(call)) :]
        return [v for v in rest if len(yolo.shape_of(v)) == 4 and not is_weight(v)]

    # ---- what can be joined ---------------------------------------------------------------------

    def objection(self, chain: Sequence[ir.Operation]) -> str | None:
        """Why dispatches cannot be one; None where they can."""
        members = {self._number[call] for call in chain}
        last = chain[-1]
        for value in self._residuals(last):
            inside = self._producers([value]) & members
            if inside and producer(value) not in chain:
                return "it adds a part of an inner result"
        outside = set().union(*(self._sources[m] for m in members)) - members
        reached = self._reached_from(members)
        if outside & reached:
            return "another dispatch has to run between the two"
        return None

    def _reached_from(self, members: set[int]) -> set[int]:
        """The dispatches that need one of `members`, chains taken as one dispatch each."""
        reached = set(members)
        grown = True
        while grown:
            grown = False
            for number, sources in enumerate(self._sources):
                if number in reached or not sources & reached:
                    continue
                reached |= set(self._chain[number])
                grown = True
        return reached - members


# ---- memory -------------------------------------------------------------------------------------


def _without_hazards(
    chain: list[ir.Operation], graph: _Graph, placement: Placement
) -> list[ir.Operation]:
    """A chain less the last members, so many that what it reads and stores shares no memory.

    Views let a result take the place of a tensor that is no longer read when it is written; a
    kernel that reads the one and writes the other would need them apart.
    """
    while len(chain) > 1:
        read, stored = _accesses(chain)
        spans = [(placement.buffer_of(v), v) for v in (*read, *stored)]
        clash = any(
            a is b and overlap(a.span(x), b.span(y))
            for i, (a, x) in enumerate(spans[len(read) :])
            for b, y in [*spans[: len(read)], *spans[len(read) + i + 1 :]]
        )
        if not clash:
            break
        remark(chain[-1].location, "left out of its chain: it would write where the chain reads")
        chain = chain[:-1]
    return chain


def _accesses(chain: Sequence[ir.Operation]) -> tuple[list[ir.Value], list[ir.Value]]:
    """The activations that a chain reads from outside, and the results that it stores."""
    results = [call.results[0] for call in chain]
    leaves = [v for call in chain for operand in call.operands for v in _leaves(operand, results)]
    read = [v for v in dict.fromkeys(leaves) if v not in results and not is_weight(v)]
    return read, [v for v in results if _is_stored(v, chain)]


def _leaves(value: ir.Value, inner: Sequence[ir.Value]) -> Iterator[ir.Value]:
    """What a chain's operand is made of: inner results, and values that hold none."""
    op = producer(value)
    if value in inner or op is None or op.name not in VIEWS or not _holds(value, inner):
        yield value
        return
    for operand in op.operands:
        yield from _leaves(operand, inner)


def _holds(value: ir.Value, inner: Sequence[ir.Value]) -> bool:
    """Whether a value is, or is a view of, an inner result."""
    op = producer(value)
    if value in inner:
        return True
    return op is not None and op.name in VIEWS and any(_holds(v, inner) for v in op.operands)


def _is_enlarged(value: ir.Value) -> bool:
    """Whether a value has an enlarged part, where `yolo-concat-views` has not run yet."""
    op = producer(value)
    if op is None or op.name not in (*VIEWS, "yolo.upsample"):
        return False
    return op.name == "yolo.upsample" or any(_is_enlarged(v) for v in op.operands)


def _is_stored(value: ir.Value, chain: Sequence[ir.Operation]) -> bool:
    """Whether something outside a chain reads a value, views looked through."""
    for user in users(value):
        if user.name in VIEWS:
            if _is_stored(user.results[0], chain):
                return True
        elif user not in chain:
            return True
    return False


# ---- rewriting ----------------------------------------------------------------------------------


def _outline(chain: Sequence[ir.Operation], graph: _Graph, outliner: Outliner) -> ir.Operation:
    """Replace a chain by one dispatch, at its last member; what reads it follows."""
    results = [call.results[0] for call in chain]
    stored = [value for value in results if _is_stored(value, chain)]
    operands = [
        v for call in chain for o in call.operands for v in _leaves(o, results) if v not in results
    ]

    def body(arguments: Sequence[ir.Value]) -> list[ir.Value]:
        rest = iter(arguments)
        values: dict[ir.Value, ir.Value] = {}
        for call in chain:
            inputs = [_build(operand, results, values, rest) for operand in call.operands]
            values[call.results[0]] = _copy_body(graph.body(call), inputs)
        return [values[value] for value in stored]

    name = _name([yolo.callee(call) for call in chain])
    last = chain[-1]
    made = outliner.call(body, operands, naming.CHAIN, name, loc=chain[0].location, before=last)
    for old, new in zip(stored, made.results, strict=True):
        old.replace_all_uses_with(new)
    _sink_users(made, stop=last)
    _erase(chain)
    return made


def _build(
    value: ir.Value,
    inner: Sequence[ir.Value],
    values: dict[ir.Value, ir.Value],
    rest: Iterator[ir.Value],
) -> ir.Value:
    """The operand of a member inside the chain's function: inner results, or the next argument."""
    if value in values:
        return values[value]
    if not _holds(value, inner):
        return next(rest)
    op = producer(value)
    if op is None:
        raise InternalError("an inner result of a chain comes from nowhere")
    inputs = [_build(operand, inner, values, rest) for operand in op.operands]
    copy = op.clone().operation
    for index, operand in enumerate(inputs):
        copy.operands[index] = operand
    return copy.results[0]


def _copy_body(block: ir.Block, inputs: Sequence[ir.Value]) -> ir.Value:
    """Copy a function's body to the insertion point; its result."""
    mapping = dict(zip(block.arguments, inputs, strict=True))
    ops = operations(block)
    for op in ops[:-1]:
        copy = op.clone().operation
        for index, operand in enumerate(op.operands):
            copy.operands[index] = mapping[operand]
        mapping[op.results[0]] = copy.results[0]
    return mapping[ops[-1].operands[0]]


def _sink_users(made: ir.Operation, stop: ir.Operation) -> None:
    """Move the ops between a chain's members that need its results behind it, in their order."""
    block = operations(made.block)
    position = {op: i for i, op in enumerate(block)}
    late = {made}
    after = made
    for op in block[: position[made]]:
        if any(producer(v) in late for v in op.operands):
            late.add(op)
            op.move_after(after)
            after = op


def _erase(chain: Sequence[ir.Operation]) -> None:
    """Erase the members of a chain that has been replaced, and the views that only they read."""
    for call in reversed(chain):
        operands = list(call.operands)
        call.erase()
        for operand in operands:
            _erase_dead_view(operand)


def _erase_dead_view(value: ir.Value) -> None:
    op = producer(value)
    if op is None or op.name not in VIEWS or users(value):
        return
    operands = list(op.operands)
    op.erase()
    for operand in operands:
        _erase_dead_view(operand)


def _name(callees: Sequence[str]) -> str:
    """`chain_3x3s1_8x16x16_8_silu_then_4`: the first function's name, then channels and epilogue
    of each other."""
    first = callees[0].removeprefix(f"{naming.CONV2D}_")
    later = []
    for callee in callees[1:]:
        plain = callee.partition("_from_")[0].removeprefix(f"{naming.CONV2D}_")
        later.append("_".join(plain.split("_")[2:]))
    return "_then_".join([f"{naming.CHAIN}_{first}", *later])
