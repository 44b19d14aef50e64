"""A benchmark as a table, Markdown and a plot."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.benchmark import BenchmarkResult, EngineResult
from yolomlir.evaluate.environment import describe
from yolomlir.evaluate.outputs import markdown_table, print_table
from yolomlir.evaluate.peers.base import COLUMNS

HEADER = (
    "engine", "precision", "inf/s", "wall ms", "min", "p90", "p99", "spread", "enqueue", "H2D",
    "GPU", "D2H", "host MB", "GPU MB", "build s", "relative",
)  # fmt: skip
_OPTIONAL = ("host MB", "p99", "D2H", "build s", "GPU MB", "H2D", "enqueue", "p90", "inf/s", "min")
"""What a narrow terminal does without, the first soonest."""


BUSY = 0.25
"""A spread of rounds from which on the machine is said to be busy."""


def rows(result: BenchmarkResult) -> list[list[str]]:
    """A row an engine. relative: time by that of the first engine; of the GPU where both tell."""
    first = next((e for e in result.engines if e.state == "ok"), None)
    return [_row(engine, first) for engine in result.engines]


def _row(engine: EngineResult, first: EngineResult | None) -> list[str]:
    name = engine.name if engine.device in engine.name else f"{engine.name} ({engine.device})"
    if engine.state != "ok":
        return [name, engine.precision, f"{engine.state}: {engine.reason}", *[""] * 13]
    wall = engine.columns["wall"]
    parts = [engine.columns.get(column) for column in COLUMNS[1:]]
    return [
        name,
        engine.precision,
        f"{engine.throughput:.1f}",
        _ms(wall.median),
        _ms(wall.minimum),
        _ms(wall.p90),
        _ms(wall.p99),
        f"{100 * wall.spread:.1f}%",
        *(_ms(part.median) if part else "-" for part in parts),
        _mb(engine.peak_mb),
        _mb(engine.gpu_mb),
        "-" if engine.build_s is None else f"{engine.build_s:.1f}",
        f"{_relative(engine, first):.2f}x",
    ]


def compact(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns that nothing was measured for."""
    table = rows(result)
    kept = [i for i in range(len(HEADER)) if any(row[i] not in ("", "-") for row in table)]
    return [HEADER[i] for i in kept], [[row[i] for i in kept] for row in table]


def _relative(engine: EngineResult, first: EngineResult | None) -> float:
    if first is None:
        return 1.0
    column = "gpu" if "gpu" in engine.columns and "gpu" in first.columns else "wall"
    return engine.columns[column].median / first.columns[column].median


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def title(result: BenchmarkResult) -> str:
    """What was measured, on one line."""
    s = result.settings
    return (
        f"YOLO26{s['scale']}, {s['classes']} classes, {s['height']}x{s['width']}, "
        f"batch {s['batch']}, {s['threads']} CPU threads, {s['rounds']} interleaved rounds"
    )


def print_benchmark(console: Console, result: BenchmarkResult) -> None:
    """Print it; what is not a table comes below it."""
    header, body = compact(result)
    timed = [row for e, row in zip(result.engines, body, strict=True) if e.state == "ok"]
    print_table(console, header, timed, title=title(result), optional=_OPTIONAL)
    for line in _remarks(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _remarks(result: BenchmarkResult) -> list[str]:
    lines = [describe(result.environment)]
    spreads = [e.columns["wall"].spread for e in result.engines if e.state == "ok"]
    if max(spreads, default=0.0) > BUSY:
        lines.append(
            f"rounds differ by up to {100 * max(spreads):.0f}%: the machine is busy with something "
            "else; the least times mean more than the medians"
        )
    for engine in result.engines:
        if engine.state == "ok":
            notes = f"; {engine.notes}" if engine.notes else ""
            lines.append(f"{engine.name}: checked, {engine.check}{notes}")
        else:
            lines.append(f"{engine.name}: {engine.state}: {engine.reason}")
    return lines


def markdown(result: BenchmarkResult) -> str:
    """The table with its title and remarks."""
    table = markdown_table(*compact(result))
    remarks = "\n".join(f"- {line}" for line in _remarks(result))
    command = f"`{result.environment['command']}`"
    return f"{title(result)}\n\n{table}\n{command}\n\n{remarks}\n"


def plot(result: BenchmarkResult, path: str | os.PathLike[str]) -> None:
    """Bars of the median wall time with the range of the rounds' medians.

    Raises UserError without matplotlib, or where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "matplotlib is not installed", hint="pip install 'yolomlir[bench]'"
        ) from error
    engines = [e for e in result.engines if e.state == "ok"]
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(engines)), layout="constrained")
    axes = figure.add_subplot()
    walls = [e.columns["wall"].median for e in engines]
    below = [w - min(e.rounds_ms) for w, e in zip(walls, engines, strict=True)]
    above = [max(e.rounds_ms) - w for w, e in zip(walls, engines, strict=True)]
    errors = [[max(0.0, v) for v in side] for side in (below, above)]
    bars = axes.barh([e.name for e in engines], walls, xerr=errors, color="#4878a8")
    axes.bar_label(bars, labels=[f" {_ms(w)} ms" for w in walls], label_type="center", color="w")
    axes.invert_yaxis()
    axes.set_xlabel("median wall time, ms (whiskers: rounds' medians)")
    axes.set_title(f"{title(result)}\n{describe(result.environment)}", fontsize=9)
    try:
        figure.savefig(Path(path), dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be written: {error}", where=path) from error
