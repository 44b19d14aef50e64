"""A profile as tables, a Chrome trace and a roofline plot; two profiles compared."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.environment import describe
from yolomlir.evaluate.outputs import markdown_table, print_table
from yolomlir.evaluate.profile import METHODS, KernelProfile, Profile, target_of

_COLUMNS = (
    "kernel", "calls", "total us", "share", "median", "mean", "min", "max", "stddev", "GFLOP/s",
    "GB/s", "roof us", "of roof",
)  # fmt: skip
_OPTIONAL = ("mean", "max", "stddev", "roof us", "GB/s", "GFLOP/s", "min", "share")
"""What a narrow terminal does without, the first soonest."""
_SHOWN = 20


def kernel_rows(found: Profile) -> list[list[str]]:
    """A row a step, the longest first. total: of all calls; share and rates: of the medians; roof:
    the least time at the chip's peak rates."""
    whole = sum(k.times.median for k in found.kernels)
    ordered = sorted(found.kernels, key=lambda k: -k.times.median)
    return [_kernel_row(k, whole, found) for k in ordered]


def _kernel_row(kernel: KernelProfile, whole: float, found: Profile) -> list[str]:
    times = kernel.times
    roof = kernel.roof_us(target_of(found), found.precision)
    return [
        kernel.layer,
        str(times.count),
        f"{times.mean * times.count:.1f}",
        f"{100 * times.median / whole:.1f}%",
        *(
            f"{v:.2f}"
            for v in (times.median, times.mean, times.minimum, times.maximum, times.deviation)
        ),
        f"{kernel.flops_per_s / 1e9:.1f}",
        f"{kernel.bytes_per_s / 1e9:.1f}",
        f"{roof:.2f}" if roof else "-",
        f"{100 * roof / times.median:.0f}%" if roof and times.median else "-",
    ]


def transfer_rows(found: Profile) -> list[list[str]]:
    """A row a copy, in the columns of `kernel_rows`."""
    rows = []
    for t in found.transfers:
        s = t.times
        figures = (s.median, s.mean, s.minimum, s.maximum, s.deviation)
        rate = f"{t.bytes / s.median / 1e3:.1f}" if s.median else "-"
        total = f"{s.mean * s.count:.1f}"
        rows.append(
            [t.name, str(s.count), total, "", *(f"{v:.2f}" for v in figures), "", rate, "-", "-"]
        )
    return rows


def group_rows(found: Profile, key: Callable[[KernelProfile], str]) -> list[list[str]]:
    """Kernels, median time an inference, share, GFLOP/s and GB/s of groups, the longest first."""
    groups: dict[str, list[KernelProfile]] = defaultdict(list)
    for kernel in found.kernels:
        groups[key(kernel)].append(kernel)
    whole = sum(k.times.median for k in found.kernels)
    table: list[tuple[float, str, int, float, float]] = []
    for name, kernels in groups.items():
        us = sum(k.times.median for k in kernels)
        flops, size = (sum(k.flops for k in kernels), sum(k.bytes for k in kernels))
        rates = (flops / us / 1e3, size / us / 1e3) if us else (0.0, 0.0)
        table.append((us, name, len(kernels), *rates))
    return [
        [
            name,
            str(count),
            f"{us:.1f}",
            f"{100 * us / whole:.1f}%",
            f"{gflops:.1f}",
            f"{gbytes:.1f}",
        ]
        for us, name, count, gflops, gbytes in sorted(table, reverse=True)
    ]


def layer_group(kernel: KernelProfile) -> str:
    """`model.2` of `model.2.m.0.cv1.conv`."""
    return ".".join(kernel.layer.split(".")[:2])


def summary(found: Profile) -> list[str]:
    """How the kernels' times relate to the whole, in words."""
    total = found.total_us.median
    what = "the steps" if found.target == "cpu" else "the graph's GPU time"
    lines = [
        f"measured by {METHODS[found.method]}, {found.count} inferences",
        f"{len(found.kernels)} kernels add up to {found.sum_us:.1f} us; {what}: {total:.1f} us "
        f"({100 * (found.sum_us / total - 1):+.1f}%); some kernel runs for {found.busy_us:.1f} us",
    ]
    if not found.overlaps:
        lines.append("no two kernels overlap")
        return lines
    longest = "; ".join(f"{o.first} with {o.second} {o.us:.1f} us" for o in found.overlaps[:5])
    lines.append(
        f"{found.overlap_us:.1f} us of the sum overlap, in {len(found.overlaps)} pairs: {longest}"
    )
    return lines


def print_profile(console: Console, found: Profile, *, every: bool) -> None:
    """Print kernels (the longest unless all are asked for), copies, families, layers, summary."""
    rows = kernel_rows(found)
    shown = rows if every else rows[:_SHOWN]
    _print_table(console, _title(found), _COLUMNS, shown + transfer_rows(found))
    if len(shown) < len(rows):
        console.print(f"… and {len(rows) - len(shown)} more (--all)\n", highlight=False)
    header = ("family", "kernels", "us", "share", "GFLOP/s", "GB/s")
    _print_table(console, "by family", header, group_rows(found, lambda k: k.family))
    layers = ("layer", *header[1:])
    _print_table(console, "by layer", layers, group_rows(found, layer_group))
    for line in (*summary(found), describe(found.environment)):
        console.print(line, highlight=False, markup=False)


def _title(found: Profile) -> str:
    model = found.model
    size = f"{model['height']}x{model['width']}, batch {model['batch']}"
    return f"YOLO26{model['scale']}, {size}, {found.target}, {found.precision}"


def _print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    print_table(console, header, rows, title=title, optional=_OPTIONAL)
    console.print()


def markdown(found: Profile) -> str:
    """All tables and the summary."""
    header = ("family", "kernels", "us", "share", "GFLOP/s", "GB/s")
    parts = [
        _title(found),
        markdown_table(header, group_rows(found, lambda k: k.family)),
        markdown_table(("layer", *header[1:]), group_rows(found, layer_group)),
        markdown_table(_COLUMNS, kernel_rows(found) + transfer_rows(found)),
        f"`{found.environment['command']}`",
        "\n".join(f"- {line}" for line in (*summary(found), describe(found.environment))),
    ]
    return "\n\n".join(parts) + "\n"


# ---- other forms --------------------------------------------------------------------------------


def chrome_trace(found: Profile) -> dict[str, Any]:
    """One inference for chrome://tracing or Perfetto: a lane for each kernel beside another."""
    events: list[dict[str, Any]] = []
    free: list[float] = []
    for kernel in sorted(found.kernels, key=lambda k: k.begin_us):
        lane = next((i for i, end in enumerate(free) if end <= kernel.begin_us), len(free))
        end = kernel.begin_us + kernel.times.median
        free[lane : lane + 1] = [end]
        events.append(
            {
                "name": kernel.layer,
                "cat": kernel.family,
                "ph": "X",
                "ts": kernel.begin_us,
                "dur": kernel.times.median,
                "pid": 0,
                "tid": lane,
                "args": {"kernel": kernel.kernel, "flops": kernel.flops, "bytes": kernel.bytes},
            }
        )
    name = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": _title(found)}}
    return {"traceEvents": [name, *events], "displayTimeUnit": "ns"}


def compare_profiles(
    before: Profile, after: Profile
) -> tuple[list[list[str]], tuple[float, float]]:
    """A row a kernel of either, by the change of its time, and both totals in microseconds."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for index, found in enumerate((before, after)):
        for kernel in found.kernels:
            times[kernel.layer][index] += kernel.times.median
    ordered = sorted(times.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    rows = [
        [name, f"{old:.2f}", f"{new:.2f}", f"{new - old:+.2f}", f"{old / new:.2f}x" if new else "-"]
        for name, (old, new) in ordered
    ]
    return rows, (before.total_us.median, after.total_us.median)


def print_comparison(console: Console, before: Profile, after: Profile, *, every: bool) -> None:
    """Print what changed most."""
    rows, (old, new) = compare_profiles(before, after)
    header = ("kernel", "before us", "after us", "change", "speed")
    _print_table(console, f"{_title(before)} and after", header, rows if every else rows[:_SHOWN])
    console.print(
        f"an inference: {old:.1f} us before, {new:.1f} us after ({100 * (new / old - 1):+.1f}%)",
        highlight=False,
    )


def roofline(found: Profile, path: str | os.PathLike[str]) -> None:
    """Draw achieved rates over operations a byte, with the chip's roofs where they are known.

    Raises UserError without matplotlib, or where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "matplotlib is not installed", hint="pip install 'yolomlir[bench]'"
        ) from error
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    working = [k for k in found.kernels if k.flops]
    for family in sorted({k.family for k in working}):
        some = [k for k in working if k.family == family]
        axes.scatter(
            [k.flops / k.bytes for k in some],
            [k.flops_per_s / 1e9 for k in some],
            s=[10 + 200 * k.times.median / found.sum_us for k in some],
            label=family,
            alpha=0.7,
        )
    target = target_of(found)
    if target.dram_gb_per_s:
        peak = 1e3 * target.peak_tflops(found.precision)
        low, high = 0.1, 1e3
        ridge = peak / target.dram_gb_per_s
        axes.plot(
            [low, ridge, max(high, ridge)], [low * target.dram_gb_per_s, peak, peak], color="black"
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="GFLOP/s")
    axes.set_title(f"{_title(found)}\n{describe(found.environment)}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(Path(path), dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be written: {error}", where=path) from error
