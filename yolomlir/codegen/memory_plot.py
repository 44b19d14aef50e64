"""A picture of the memory plan: which bytes of the arena each tensor takes, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from yolomlir.codegen.build_plan import Footprint
from yolomlir.diagnostics import UserError
from yolomlir.runtime.plan import Plan, View

MIB = 1024 * 1024
_COLOURS = {
    "conv2d": "#4c78a8",
    "depthwise": "#72b7b2",
    "attention": "#e45756",
    "max_pool": "#54a24b",
    "detect": "#b279a2",
    "input": "#9d755d",
}
_OTHER = "#bab0ac"


@dataclass(frozen=True)
class Life:
    """A tensor in the arena: bytes [start, end), steps [first, last], the layer that makes it."""

    start: int
    end: int
    first: int
    last: int
    layer: str
    family: str


def lives(plan: Plan) -> list[Life]:
    """Every input and every result of a step, from the step that writes it to its last reader.

    Inputs begin at step -1, outputs end after the last step. A slice of a buffer takes the bytes
    from its first element to its last, what lies between included.
    """
    reads = [
        [Footprint.of(a.view) for a in step.arguments if a.view is not None] for step in plan.steps
    ]
    writes = [[Footprint.of(view) for view in step.results] for step in plan.steps]
    outputs = set(plan.outputs.values())
    end = len(plan.steps)

    def life(view: View, first: int, layer: str, family: str) -> Life:
        own = Footprint.of(view)
        last = first
        for index in range(first + 1, end):
            if any(own.meets(read) for read in reads[index]):
                last = index
            if any(own.meets(write) for write in writes[index]):
                break
        pinned = view in outputs or first < 0
        return Life(own.start, own.end, first, end if pinned else last, layer, family)

    found = [life(view, -1, name, "input") for name, view in plan.inputs.items()]
    for index, step in enumerate(plan.steps):
        family = next((f for f in _COLOURS if step.kernel.startswith(f)), "other")
        found += [life(view, index, step.layer, family) for view in step.results]
    return found


def plot_memory(plan: Plan, path: str | Path) -> None:
    """Draw a plan's arena, bytes upwards and steps to the right, into a picture file.

    The file's ending says its format (`.png`, `.svg`, `.pdf`). Raises UserError where matplotlib is
    not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise UserError(
            "a plot of the memory plan needs matplotlib", hint="pip install matplotlib"
        ) from error
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tensors = lives(plan)
    for tensor in tensors:
        corner = (tensor.first - 0.5, tensor.start / MIB)
        width = tensor.last - tensor.first + 1
        height = (tensor.end - tensor.start) / MIB
        colour = _COLOURS.get(tensor.family, _OTHER)
        axes.add_patch(
            Rectangle(corner, width, height, facecolor=colour, edgecolor="white", lw=0.4, alpha=0.7)
        )
    axes.axhline(plan.arena_bytes / MIB, color="black", lw=0.8, ls="--")
    axes.set_xlim(-2, len(plan.steps) + 1)
    axes.set_ylim(0, plan.arena_bytes / MIB * 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("offset in the arena, MiB")
    axes.set_title(f"{len(plan.steps)} steps, arena of {plan.arena_bytes / MIB:.2f} MiB")
    shown = dict.fromkeys(tensor.family for tensor in tensors)
    patches = [Patch(color=_COLOURS.get(family, _OTHER), label=family) for family in shown]
    axes.legend(handles=patches, loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture: {error}", where=path) from error
