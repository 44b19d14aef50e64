"""`yolo.tile` of a dispatch function as a family's dataclass of integers, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo

TILE = "yolo.tile"
CARVEOUTS = (0, 25, 50, 75, 100)
"""What the option `carveout` may be, which tiles of every family have: the part of an SM's memory,
percent, that the launch asks to have as shared memory, the rest being L1; 0 leaves it to the
driver. It is no part of the kernel's code. An SM must drain before its part changes."""
_LATER = "later"

T = TypeVar("T")


def later_option(default: int | bool) -> Any:
    """The field of an option that keys and attributes leave out where it has its default: what was
    written before there was such an option stays as it is."""
    return dataclasses.field(default=default, metadata={_LATER: True})


def stated_options(tile: Any) -> dict[str, int | bool]:
    """The options of a tile in their order, but those of `later_option` that have their default."""
    values = {f: getattr(tile, f.name) for f in dataclasses.fields(tile)}
    return {f.name: v for f, v in values.items() if not (_LATER in f.metadata and v == f.default)}


def plain(tile: T) -> T:
    """The tile with the default of every `later_option`."""
    options: Any = tile
    fields = dataclasses.fields(options)
    defaults = {f.name: f.default for f in fields if _LATER in f.metadata}
    changed: T = dataclasses.replace(options, **defaults)
    return changed


def carveout_objection(tile: Any) -> str | None:
    """Why a launch cannot ask for the `carveout` of a tile; None where it can."""
    if tile.carveout in CARVEOUTS:
        return None
    return f"carveout = {tile.carveout} is not one of {', '.join(map(str, CARVEOUTS))}"


def stated_carveout(function: ir.Operation) -> int:
    """The `carveout` of a function's tile, 0 where it states none."""
    if TILE not in function.attributes:
        return 0
    for named in ir.DictAttr(function.attributes[TILE]):
        if named.name == "carveout":
            return int(ir.IntegerAttr(named.attr).value)
    return 0


def tile_or(function: ir.Operation, kind: type[T], default: Callable[[], T]) -> T:
    """The tile that a function's attribute states, else the default.

    Raises UserError for options that `kind` does not have, lacks, or that are not positive (0 where
    that is the option's default).
    """
    if TILE not in function.attributes:
        return default()
    # T is a tile's dataclass, for which typing has no bound.
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    flags = {name for name, default in defaults.items() if isinstance(default, bool)}
    options = list(defaults)
    where = yolo.layer_of(function.location)
    hint = f"options of {kind.__name__}: {', '.join(options)}"
    values: dict[str, Any] = {}
    for named in ir.DictAttr(function.attributes[TILE]):
        if named.name not in options:
            raise UserError(f"the tile has no option '{named.name}'", where=where, hint=hint)
        number = int(ir.IntegerAttr(named.attr).value)  # an i1 is an integer of one bit
        values[named.name] = number != 0 if named.name in flags else number
        if values[named.name] < (0 if defaults[named.name] == 0 else 1):
            raise UserError(f"the tile has {named.name} {values[named.name]}", where=where)
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"the tile is incomplete: {error}", where=where, hint=hint) from error


def to_attribute(tile: object) -> ir.Attribute:
    """The `yolo.tile` dictionary of a tile, in the current context."""
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get(
        {
            name: ir.BoolAttr.get(v) if isinstance(v, bool) else ir.IntegerAttr.get(i64, v)
            for name, v in stated_options(tile).items()
        }
    )


__all__ = [
    "CARVEOUTS", "TILE", "carveout_objection", "later_option", "plain", "stated_carveout",
    "stated_options", "tile_or", "to_attribute",
]  # fmt: skip
