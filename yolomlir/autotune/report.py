"""What tuning gained, a line a function: as a table on the terminal, Markdown, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from yolomlir.autotune.session import Row, TuningResult
from yolomlir.diagnostics import UserError

COLUMNS = ("layer", "family", "launches", "default us", "tuned us", "gain", "tile")


def summary(result: TuningResult) -> list[str]:
    """The result in a few lines."""
    default = sum(r.count * r.default_us for r in result.rows)
    tuned = sum(r.count * r.us for r in result.rows)
    convs = [r for r in result.rows if r.family in ("conv2d", "depthwise")]
    known = sum(r.from_database for r in result.rows)
    lines = [
        f"{result.device}, {result.target}, yolo26{result.scale}, {result.precision}: "
        f"{len(result.rows)} functions, {result.measured} candidates measured in "
        f"{result.seconds:.0f} s, {known} functions from the database",
        f"sum over launches: {default:.1f} us by default, {tuned:.1f} us tuned "
        f"({_percent(default, tuned)}); convolutions alone "
        f"{sum(r.count * r.default_us for r in convs):.1f} and "
        f"{sum(r.count * r.us for r in convs):.1f} us",
    ]
    if result.network is not None:
        n = result.network
        lines.append(
            f"whole graph: {n.before.us:.1f} us with each function's fastest, {n.after.us:.1f} us "
            f"after {n.tried} exchanges and {n.launches} ways of launching were tried"
        )
    if result.missing:
        lines.append(
            f"{len(result.missing)} functions were not reached in time; run again to go on"
        )
    return lines


def rich_table(result: TuningResult) -> RichTable:
    """For the terminal."""
    table = RichTable(box=None, header_style="bold")
    for column in COLUMNS:
        right = column in ("launches", "default us", "tuned us", "gain")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in result.rows:
        table.add_row(*_cells(row))
    return table


def markdown(result: TuningResult) -> str:
    """The summary and the table."""
    lines = [*summary(result), "", "| " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + "---|" * len(COLUMNS))
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result.rows]
    return "\n".join(lines) + "\n"


def as_json(result: TuningResult, indent: int | None = 1) -> str:
    """Everything, as one JSON object and a newline."""
    data: dict[str, Any] = dataclasses.asdict(result)
    return json.dumps(data, indent=indent) + "\n"


def plot(result: TuningResult, path: Path) -> None:
    """Bars of default and tuned time a function, times its launches, the heaviest first.

    Raises UserError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "plots need matplotlib", hint="pip install 'yolomlir[bench]', or leave --plot away"
        ) from error
    rows = result.rows
    figure = Figure(figsize=(9, 0.6 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [r.count * r.default_us for r in rows], 0.8, color="0.8", label="default")
    axes.barh(places, [r.count * r.us for r in rows], 0.45, color="tab:green", label="tuned")
    axes.set_yticks(places, [f"{r.layer} x{r.count}" for r in rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds an inference")
    axes.set_title(f"yolo26{result.scale}, {result.precision}, {result.device}", fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=130)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.layer,
        row.family,
        str(row.count),
        f"{row.default_us:.2f}",
        f"{row.us:.2f}",
        _percent(row.default_us, row.us),
        "default" if row.tile == row.default_tile else _short(row.tile),
    )


def _short(tile: str) -> str:
    """A key without the options that are off."""
    return " ".join(i for i in tile.split(",") if not i.endswith("=0"))


def _percent(before: float, after: float) -> str:
    return f"{100 * (before - after) / before:+.1f} %" if before else ""
