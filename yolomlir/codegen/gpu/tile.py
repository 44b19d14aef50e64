"""`yolo.tile` of a dispatch function as a family's dataclass of integers, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo

TILE = "yolo.tile"

T = TypeVar("T")


def tile_or(function: ir.Operation, kind: type[T], default: Callable[[], T]) -> T:
    """The tile that a function's attribute states, else the default.

    Raises UserError for options that `kind` does not have, lacks, or that are not positive (0 where
    that is the option's default).
    """
    if TILE not in function.attributes:
        return default()
    # T is a tile's dataclass, for which typing has no bound.
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    options = list(defaults)
    where = yolo.layer_of(function.location)
    hint = f"options of {kind.__name__}: {', '.join(options)}"
    values: dict[str, Any] = {}
    for named in ir.DictAttr(function.attributes[TILE]):
        if named.name not in options:
            raise UserError(f"the tile has no option '{named.name}'", where=where, hint=hint)
        values[named.name] = int(ir.IntegerAttr(named.attr).value)
        if values[named.name] < (0 if defaults[named.name] == 0 else 1):
            raise UserError(f"the tile has {named.name} {values[named.name]}", where=where)
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"the tile is incomplete: {error}", where=where, hint=hint) from error


def to_attribute(tile: object) -> ir.Attribute:
    """The `yolo.tile` dictionary of a tile, in the current context."""
    i64 = ir.IntegerType.get_signless(64)
    values = dataclasses.asdict(tile)  # type: ignore[call-overload]
    return ir.DictAttr.get({key: ir.IntegerAttr.get(i64, v) for key, v in values.items()})


__all__ = ["TILE", "tile_or", "to_attribute"]
