"""The pass `yolo-assign-tiles`."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from yolomlir.dialects import yolo
from yolomlir.passes.base import Pass, PassContext
from yolomlir.passes.outlining import ENTRY, FAMILY, functions

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.target import Target

LOGGER = logging.getLogger(__name__)
TILE = "yolo.tile"
_DEFAULTS = {"conv2d": ("yolomlir.codegen.gpu.conv2d_tile", "default_tile")}
"""Where the rule of thumb of a family of GPU kernels is: module and function."""

Rule = Callable[[ir.Operation, Target], Mapping[str, int] | None]
"""A family's rule: the private function and the target to the tile, None for no opinion."""


@dataclass(frozen=True)
class AssignTiles(Pass):
    """Give each dispatch's function its tile, from a table or by the kernel family's rule.

    The tile is the attribute `yolo.tile` of the private function, a dictionary whose keys the code
    generator of the family knows. It is part of the IR: print it, change it, go on from there. A
    function that has one keeps it. Functions without a tile are compiled with what their code
    generator takes as default.

    Options:
        override: replace the tiles that are there already.
        table: a JSON file of {function's name: {key: integer}}, asked before the rule.

    Before:
        func.func private @conv2d_1x1s1_8x4x4_8(…) attributes {yolo.family = "conv2d"}

    After:
        func.func private @conv2d_1x1s1_8x4x4_8(…) attributes {yolo.family = "conv2d",
                                                               yolo.tile = {m = 64 : i64, …}}

    Statistics:
        from_table: functions whose tile the table had.
        from_rule: functions whose tile the family's rule gave.
        kept: functions that had a tile.

    Example:
        // RUN: yolomlir-opt %s --yolo-assign-tiles | FileCheck %s

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
    table: str = ""

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Set `yolo.tile` on the private functions."""
        table = _read_table(self.table) if self.table else {}
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
            tile = _by_rule(function, context.target)
            if tile is not None:
                function.attributes[TILE] = _attribute(tile)
                context.count(self, "from_rule")


def _by_rule(function: ir.Operation, target: Target) -> Mapping[str, int] | None:
    place = _DEFAULTS.get(yolo.string(function, FAMILY))
    if target.kind != "gpu" or place is None:
        return None
    if importlib.util.find_spec(place[0]) is None:
        return None
    rule: Rule = getattr(importlib.import_module(place[0]), place[1])
    return rule(function, target)


def _attribute(tile: Mapping[str, int]) -> ir.Attribute:
    wide = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({key: ir.IntegerAttr.get(wide, value) for key, value in tile.items()})


def _read_table(path: str) -> dict[str, dict[str, int]]:
    try:
        table: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the tile table: {error.strerror}", where=path) from error
    except ValueError as error:
        raise UserError(f"the tile table is not JSON: {error}", where=path) from error
    if not isinstance(table, dict) or not all(_is_tile(tile) for tile in table.values()):
        raise UserError(
            "the tile table is not {function: {key: integer}}",
            where=path,
            hint='such as {"conv2d_1x1s1_64x20x20_64_silu": {"m": 64}}',
        )
    return table


def _is_tile(tile: object) -> bool:
    return isinstance(tile, dict) and all(type(value) is int for value in tile.values())
