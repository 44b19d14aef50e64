"""Small steps that passes over `yolo` share: derived weights, retyped ops, dead ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext

from yolomlir.bindings import ir
from yolomlir.frontend.weights import Array

PURE = "yolo."
"""Every op of the dialect is pure: no use means no effect."""


def blocks(module: ir.Module) -> Iterator[ir.Block]:
    """The bodies of a module's functions, declarations left out."""
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func":
            yield from op.regions[0].blocks


def operations(module: ir.Module, name: str = "") -> list[ir.Operation]:
    """All function bodies' ops in order, those called `name` where given; a list that stays."""
    found = [view.operation for block in blocks(module) for view in block.operations]
    return [op for op in found if op.name == name] if name else found


def producer(value: ir.Value, name: str) -> ir.Operation | None:
    """The op that defines `value`, when it is named `name`."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != name:
        return None
    op: ir.Operation = owner.operation
    return op


def users(value: ir.Value) -> list[ir.Operation]:
    """The op of every use of a value: an op that uses it twice is there twice."""
    return [use.owner.operation for use in value.uses]


def is_four_dimensional(value: ir.Value) -> bool:
    """Whether a value is a ranked tensor with a physical order to speak of."""
    return isinstance(value.type, ir.RankedTensorType) and len(yolo.shape_of(value)) == 4


def replace(op: ir.Operation, value: ir.Value) -> None:
    """Use `value` wherever the one result of `op` is used, and erase `op`."""
    op.results[0].replace_all_uses_with(value)
    op.erase()


def weight_names(module: ir.Module) -> set[str]:
    """The names of all weights that a module refers to."""
    return {yolo.string(op, "name") for op in yolo.ops_in(module, "yolo.weight")}


def derived_weight(
    context: PassContext,
    taken: set[str],
    name: str,
    sources: Sequence[ir.Operation],
    function: Callable[..., Array],
    type_: ir.Type,
    loc: ir.Location | None = None,
) -> ir.Value:
    """A new `yolo.weight` at the insertion point, and its data in the store.

    Args:
        taken: names that the module uses; the new one is made unlike them and added.
        name: what to call it, before that.
        sources: `yolo.weight` ops whose tensors `function` gets, in physical order.
        type_: the new weight's type; `function` gives its tensor in that physical order.
        loc: of the new op; the first source's unless given.
    """
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}.{number}", number + 1
    taken.add(unique)
    context.weights.derive(unique, [yolo.string(op, "name") for op in sources], function)
    tensor = ir.RankedTensorType(type_)
    return yolo.weight(
        unique,
        list(tensor.shape),
        element=tensor.element_type,
        layout=Layout.of(type_) if len(tensor.shape) == 4 else Layout.LOGICAL,
        loc=loc or sources[0].location,
    )


def output_axis(type_: ir.Type) -> int:
    """Where a convolution weight's output channels lie in its physical order."""
    return Layout.of(type_).permutation.index(0)


def along(vector: Array, axis: int, rank: int) -> Array:
    """A vector shaped to multiply a tensor of `rank` along `axis`."""
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


def erase_dead(ops: Sequence[ir.Operation]) -> int:
    """Erase those of `ops`, in program order, that nothing uses; returns how many."""
    erased = 0
    for op in reversed(ops):
        if all(not list(result.uses) for result in op.results):
            op.erase()
            erased += 1
    return erased
