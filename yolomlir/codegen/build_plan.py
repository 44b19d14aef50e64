"""From the optimised module to the executable plan: steps, places in the arena, dependencies."""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo
from yolomlir.passes.outlining import (
    ENTRY,
    dispatches,
    entry_block,
    functions,
    operations,
    producer,
)
from yolomlir.passes.plan_memory import ARENA, VIEWS
from yolomlir.runtime.plan import Argument, Plan, Step, View

INPUT, OUTPUT = "image", "detections"
"""Names of the plan's first input and output; further ones get a number: `image1`."""
_DTYPES = {"f32": "float32", "ui8": "uint8", "f16": "float16", "si8": "int8"}
ITEM_BYTES = {"float32": 4, "uint8": 1, "float16": 2, "int8": 1}


def build_plan(module: ir.Module) -> Plan:
    """The plan of a module that `yolo-plan-memory` has annotated.

    A step depends on every earlier one that writes what it reads or writes, or reads what it
    writes, so far as another dependency does not imply it. Channel slices of one buffer are told
    apart.
    Raises UserError where the module has no memory plan.
    """
    main = functions(module)[ENTRY]
    if ARENA not in main.attributes:
        raise UserError("the module has no memory plan", hint="run yolo-plan-memory")
    block = entry_block(module)
    views = _views(main, [*block.arguments, *operations(block)[-1].operands])
    count = len(block.arguments)
    steps = [_step(call) for call in dispatches(module)]
    depends = dependencies(steps)
    metadata = {
        name.removeprefix("yolo."): _plain(module.operation.attributes[name])
        for name in ("yolo.model", "yolo.precision")
        if name in module.operation.attributes
    }
    return Plan(
        arena_bytes=yolo.integer(main, ARENA),
        inputs=_named(INPUT, views[:count]),
        outputs=_named(OUTPUT, views[count:]),
        steps=tuple(
            Step(s.kernel, s.layer, s.arguments, s.results, d)
            for s, d in zip(steps, depends, strict=True)
        ),
        metadata=metadata,
    )


def _named(name: str, views: list[View | None]) -> dict[str, View]:
    return {f"{name}{index or ''}": view for index, view in enumerate(views) if view is not None}


def _plain(attribute: ir.Attribute) -> object:
    """An attribute as Python's own types."""
    if isinstance(attribute, ir.DictAttr):
        return {item.name: _plain(item.attr) for item in attribute}
    if isinstance(attribute, ir.ArrayAttr):
        return [_plain(item) for item in attribute]
    if isinstance(attribute, (ir.StringAttr, ir.IntegerAttr, ir.FloatAttr, ir.BoolAttr)):
        return attribute.value
    return str(attribute)


def _views(op: ir.Operation, values: list[ir.Value]) -> list[View | None]:
    """The entries of `yolo.views`, each with the shape of its tensor; None for a weight."""
    entries = list(ir.ArrayAttr(op.attributes[VIEWS])) if VIEWS in op.attributes else []
    if len(entries) != len(values):
        raise UserError(
            f"'{VIEWS}' has {len(entries)} entries; expected {len(values)}",
            where=yolo.layer_of(op.location),
            hint="run yolo-plan-memory again",
        )
    found: list[View | None] = []
    for entry, value in zip(entries, values, strict=True):
        place = [int(v) for v in ir.DenseI64ArrayAttr(entry)]
        dtype = _DTYPES[str(ir.RankedTensorType(value.type).element_type)]
        shape = tuple(yolo.shape_of(value))
        found.append(View(place[0], place[1], shape, dtype) if place else None)
    return found


def _step(call: ir.Operation) -> Step:
    views = _views(call, [*call.operands, *call.results])
    arguments = []
    for view, value in zip(views, call.operands, strict=False):
        weight = producer(value, "yolo.weight")
        name = None if weight is None else yolo.string(weight, "name")
        arguments.append(Argument(view, name))
    results = tuple(v for v in views[len(arguments) :] if v is not None)
    return Step(yolo.callee(call), yolo.layer_of(call.location), tuple(arguments), results)


# ---- dependencies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """The bytes of a view: [start, end), of which `width` in every `pitch` are its own."""

    start: int
    end: int
    pitch: int
    width: int

    @staticmethod
    def of(view: View) -> Footprint:
        """The bytes that a view covers."""
        item = ITEM_BYTES[view.dtype]
        shape = view.shape
        channels = shape[1] if len(shape) == 4 else (shape[-1] if shape else 1)
        positions = 1
        for size in (shape[0], *shape[2:]) if len(shape) == 4 else shape[:-1]:
            positions *= size
        pitch, width = view.pitch * item, channels * item
        end = view.offset_bytes + (positions - 1) * pitch + width
        return Footprint(view.offset_bytes, end, pitch, width)

    def meets(self, other: Footprint) -> bool:
        """Whether two views share a byte; exact where their pitches are equal, else cautious."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.pitch != other.pitch:
            return True
        ahead = (other.start - self.start) % self.pitch
        return ahead < self.width or ahead + other.width > self.pitch


def dependencies(steps: list[Step]) -> list[tuple[int, ...]]:
    """For each step the earlier ones it must wait for, those left out that others imply."""
    reads = [[Footprint.of(a.view) for a in s.arguments if a.view is not None] for s in steps]
    writes = [[Footprint.of(v) for v in s.results] for s in steps]
    before: list[int] = []
    direct: list[tuple[int, ...]] = []
    for index in range(len(steps)):
        implied, kept = 0, []
        for other in reversed(range(index)):
            if implied >> other & 1:
                continue
            if (
                _meet(writes[other], reads[index])
                or _meet(writes[other], writes[index])
                or _meet(reads[other], writes[index])
            ):
                kept.append(other)
                implied |= before[other] | 1 << other
        before.append(implied)
        direct.append(tuple(sorted(kept)))
    return direct


def _meet(some: list[Footprint], others: list[Footprint]) -> bool:
    return any(a.meets(b) for a in some for b in others)
