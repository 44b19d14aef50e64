"""The pass `yolo-assign-tiles`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes import naming
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import ENTRY, FAMILY, convolution, functions, operations, producer

from yolomlir.bindings import ir
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.remarks import remark
from yolomlir.target import Target

if TYPE_CHECKING:
    from yolomlir.codegen.gpu.attention_problem import AttentionShape
    from yolomlir.codegen.gpu.chain_tile import ChainShape
    from yolomlir.codegen.gpu.conv_problem import ConvShape

TILE = "yolo.tile"


@dataclass(frozen=True)
class AssignTiles(Pass):
    """Give each dispatch's function its tile: measured where it is known, else by a rule.

    The tile is the attribute `yolo.tile` of the private function, a dictionary whose keys the code
    generator of the family knows. It is part of the IR: print it, change it, go on from there. A
    function that has one keeps it. Otherwise it comes from the option `table`, from what `yolomlir
    tune` found on this machine, from the table that the package ships for the target, or, for
    convolutions, from the cost model, in this order. Functions of other families that are left
    without a tile are compiled with what their code generator takes as default.

    Options:
        override: replace the tiles that are there already, or remove them where none is known.
        untuned: ask neither the database nor the shipped table.
        table: a JSON file of {function's name: {key: integer or boolean}}, asked before the rule.

    Before:
        func.func private @conv2d_1x1s1_8x4x4_8(…) attributes {yolo.family = "conv2d"}

    After:
        func.func private @conv2d_1x1s1_8x4x4_8(…) attributes {yolo.family = "conv2d",
                                                               yolo.tile = {m = 64 : i64, …}}

    Statistics:
        from_table: functions whose tile the table had.
        from_database: functions whose tile tuning on this machine found.
        from_shipped: functions whose tile the package's table had.
        from_rule: convolutions whose tile the cost model chose.
        kept: functions that had a tile.

    Example:
        // RUN: yolomlir-opt %s --split-input-file --yolo-assign-tiles | FileCheck %s

        // CHECK: func.func private @f
        // CHECK-SAME: yolo.tile = {m = 32 : i64}
        !t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
        func.func @main(%x: !t) -> !t {
          %0 = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
          return %0 : !t
        }
        func.func private @f(%x: !t) -> !t
            attributes {yolo.family = "elementwise", yolo.tile = {m = 32 : i64}} {
          %0 = "yolo.silu"(%x) : (!t) -> !t
          return %0 : !t
        }
    """

    name: ClassVar[str] = "yolo-assign-tiles"
    override: bool = False
    untuned: bool = False
    table: str = ""

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Set `yolo.tile` on the private functions."""
        table = _read_table(self.table) if self.table else {}
        root = module.operation
        precision = "tf32"
        if "yolo.precision" in root.attributes:
            precision = yolo.string(root, "yolo.precision")
        known = _Known(context.target, precision) if self._may_ask(context.target) else None
        for name, function in functions(module).items():
            if name == ENTRY or FAMILY not in function.attributes:
                continue
            if TILE in function.attributes and not self.override:
                context.count(self, "kept")
                continue
            if name in table:
                function.attributes[TILE] = _attribute(table[name])
                context.count(self, "from_table")
                continue
            found = known.find(function) if known else None
            if found is not None:
                function.attributes[TILE], source = found
                context.count(self, source)
                continue
            tile = _by_rule(function, context.target, precision)
            if tile is not None:
                function.attributes[TILE] = tile
                context.count(self, "from_rule")
            elif TILE in function.attributes:  # of another target, perhaps: it may not fit this one
                del function.attributes[TILE]

    def _may_ask(self, target: Target) -> bool:
        return target.kind == "gpu" and not self.untuned


class _Known:
    """What is known of functions: the database of this machine, then the shipped table."""

    def __init__(self, target: Target, precision: str) -> None:
        from yolomlir.autotune.lookup import Lookup

        self._lookup = Lookup(target, precision)

    def find(self, function: ir.Operation) -> tuple[ir.Attribute, str] | None:
        """The tile and the statistic to count, or None."""
        from yolomlir.autotune.space import attribute

        family = yolo.string(function, FAMILY)
        shape: ConvShape | ChainShape | AttentionShape | None = None
        if family == naming.CHAIN:
            shape = chain_shape(function)
        elif family == naming.CONV2D:
            shape = conv_shape(function)
        elif family == naming.ATTENTION:
            shape = attention_shape(function)
        found = self._lookup.find(function, shape)
        if found is None:
            return None
        tile, source = found
        return attribute(tile), "from_database" if source == "database" else "from_shipped"


def _by_rule(function: ir.Operation, target: Target, precision: str) -> ir.Attribute | None:
    """What the cost model chooses for a convolution; None for other families, whose code generators
    choose."""
    if target.kind != "gpu" or yolo.string(function, FAMILY) != naming.CONV2D:
        return None
    from yolomlir.autotune.untuned import default_tile
    from yolomlir.codegen.gpu.conv2d_kinds import attribute_of

    try:
        return attribute_of(default_tile(conv_shape(function), target, precision))
    except UnsupportedError as error:
        remark(function.location, f"no tile: {error.message}")
        return None


def conv_shape(function: ir.Operation) -> ConvShape:
    """The implicit GEMM of a `conv2d` function at the `yolo` level; of others the first one."""
    return _geometry(convolution(function.regions[0].blocks[0]))


def inner_shape(conv: ir.Operation) -> ConvShape:
    """The implicit GEMM of a convolution whose input is a result that stays on chip."""
    return _geometry(conv, copied=False)


def _geometry(conv: ir.Operation, *, copied: bool = True) -> ConvShape:
    """copied: whether its input comes by copies from the arguments that it is made of."""
    from yolomlir.codegen.gpu.conv_problem import ConvShape
    from yolomlir.codegen.gpu.element import FLOAT16, FLOAT32

    batch, channels, height, width = yolo.shape_of(conv.operands[0])
    _, out, out_h, out_w = yolo.shape_of(conv.results[0])
    kernel_h, kernel_w = yolo.shape_of(conv.operands[1])[2:]
    stride_h, stride_w = yolo.integers(conv, "strides")
    top, left, _, _ = yolo.integers(conv, "padding")
    multiplied = ir.RankedTensorType(conv.operands[1].type).element_type
    element = FLOAT16 if isinstance(multiplied, ir.F16Type) else FLOAT32
    first = 0
    vectors = []
    for source in _sources(conv.operands[0]) if copied else ():
        converted = ir.RankedTensorType(source.type).element_type != multiplied
        size = yolo.shape_of(source)[1]
        vectors.append(0 if converted else min(element.widest(size), element.widest(first)))
        first += size
    return ConvShape(
        batch, height, width, channels, out_h, out_w, out, kernel_h, kernel_w,
        stride_h, stride_w, top, left, source_vector=min(vectors, default=element.chunk),
        dtype=element.name,
    )  # fmt: skip


def attention_shape(function: ir.Operation) -> AttentionShape:
    """What the tile of an `attention` function at the `yolo` level depends on."""
    from yolomlir.codegen.gpu.attention_problem import AttentionShape
    from yolomlir.codegen.gpu.element import FLOAT16, FLOAT32

    ops = operations(function.regions[0].blocks[0])
    op = next(op for op in ops if op.name == "yolo.attention")
    batch, _, height, width = yolo.shape_of(op.operands[0])
    heads, key_dim, head_dim = (yolo.integer(op, k) for k in ("heads", "key_dim", "head_dim"))
    element = FLOAT16 if yolo.element_of(op.operands[0]) == "f16" else FLOAT32
    return AttentionShape(
        batch, height, width, heads, key_dim, head_dim, yolo.real(op, "scale"), None,
        dtype=element.name,
    )  # fmt: skip


def chain_shape(function: ir.Operation) -> ChainShape:
    """What the tile of a `chain` function at the `yolo` level depends on."""
    from yolomlir.codegen.gpu.chain_tile import ChainShape

    stages: dict[ir.Value, int] = {}
    later: list[tuple[int, int]] = []
    inner: list[ConvShape] = []
    kept: set[int] = set()
    ops = operations(function.regions[0].blocks[0])
    convs = [op for op in ops if op.name == "yolo.conv2d"]
    for op in ops:
        if op in convs[1:]:
            out, *sizes = yolo.shape_of(op.operands[1])
            later.append((prod(sizes), out))
            if sizes[1:] != [1, 1]:
                inner.append(inner_shape(op))
        elif op.name == "yolo.add":
            kept |= {stages[v] for v in op.operands if v in stages} - {len(later)}
        if op.name in ("yolo.conv2d", "yolo.silu", "yolo.add"):
            stages[op.results[0]] = len(later)
    depthwise = yolo.integer(convs[0], "groups") > 1
    added = tuple(sorted(kept))
    return ChainShape(conv_shape(function), tuple(later), added, depthwise, tuple(inner))


def _sources(value: ir.Value) -> list[ir.Value]:
    """The arguments that a convolution reads, in the order of their channels."""
    op = producer(value)
    if op is None:
        return [value]
    return [source for operand in op.operands for source in _sources(operand)]


def _attribute(tile: Mapping[str, int | bool]) -> ir.Attribute:
    wide = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get(
        {
            key: ir.BoolAttr.get(value)
            if isinstance(value, bool)
            else ir.IntegerAttr.get(wide, value)
            for key, value in tile.items()
        }
    )


def _read_table(path: str) -> dict[str, dict[str, int | bool]]:
    try:
        table: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the tile table: {error.strerror}", where=path) from error
    except ValueError as error:
        raise UserError(f"the tile table is not JSON: {error}", where=path) from error
    if not isinstance(table, dict) or not all(_is_tile(tile) for tile in table.values()):
        raise UserError(
            "the tile table is not {function: {key: integer or boolean}}",
            where=path,
            hint='such as {"conv2d_1x1s1_64x20x20_64_silu": {"block_m": 64}}',
        )
    return table


def _is_tile(tile: object) -> bool:
    return isinstance(tile, dict) and all(isinstance(value, int) for value in tile.values())
