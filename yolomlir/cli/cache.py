"""`yolomlir cache ls|clear|export`: what the cache folder holds, and tuning results as a table."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.table import Table

from yolomlir.cli.progress import console
from yolomlir.diagnostics import UserError
from yolomlir.settings import settings
from yolomlir.target import TARGETS

PARTS = {
    "artifacts": "compiled models",
    "kernels": "GPU machine code by content",
    "cpu": "CPU object code by content",
    "tuning": "measured tiles",
    "val": "journals of evaluations",
    "weights": "downloaded checkpoints",
}
"""Folders of the cache that have a meaning; others are listed by their name alone."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "cache",
        help="list, clear or export what is cached",
        description="List or clear the cache folder, or export tuning results as a table.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("ls", help="what the cache holds")
    clear = actions.add_parser("clear", help="delete it, or parts of it")
    clear.add_argument("parts", nargs="*", metavar="PART", help=f"such as {', '.join(PARTS)}")
    export = actions.add_parser("export", help="write tuning results as a table of tiles")
    export.add_argument("--target", required=True, metavar="TARGET", help="such as sm_90")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    if args.action == "ls":
        _list()
    elif args.action == "clear":
        _clear(args.parts)
    else:
        _export(args.target, args.output)
    return 0


def _list() -> None:
    from yolomlir.autotune.database import databases

    root = Path(settings().cache_dir)
    out = console()
    out.print(str(root), highlight=False)
    table = Table(box=None, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for part in _parts(root):
        files = [f for f in part.rglob("*") if f.is_file()]
        size = sum(f.stat().st_size for f in files) / 1e6
        meaning = PARTS.get(part.name, "")
        table.add_row(part.name, f"{len(files)} files", f"{size:.1f} MB", meaning)
    for database in databases():
        times = sum(len(t) for t in database.times.values())
        note = f"{len(database.winners)} functions tuned, {times} candidates measured"
        table.add_row("", "", "", f"{database.target} on {database.device}: {note}")
    out.print(table, highlight=False)


def _parts(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def _clear(names: list[str]) -> None:
    root = Path(settings().cache_dir)
    present = {part.name: part for part in _parts(root)}
    unknown = [n for n in names if n not in present and n not in PARTS]
    if unknown:
        raise UserError(
            f"the cache has no part '{unknown[0]}'",
            hint=f"parts: {', '.join(sorted({*PARTS, *present}))}",
        )
    # Only what this program put there: the folder may be one that the user shares with others.
    chosen = names or [n for n in present if n in PARTS]
    for name in chosen:
        if name in present:
            try:
                shutil.rmtree(present[name])
            except OSError as error:
                raise UserError(
                    f"cannot be deleted: {error.strerror}", where=str(present[name])
                ) from error
            console().print(f"{present[name]}: deleted", highlight=False)


def _export(target: str, output: Path) -> None:
    from yolomlir.autotune.database import databases
    from yolomlir.autotune.tables import MEASURED, TableEntry, table_of

    if target not in TARGETS:
        raise UserError(f"unknown target '{target}'", hint=f"one of: {', '.join(TARGETS)}")
    found = list(databases(target))
    rows = [
        (case.precision, case.signature, TableEntry(winner.tile, winner.us, winner.default_us))
        for database in found
        for key, winner in database.winners.items()
        for case in [database.cases.get(key)]
        if case is not None
    ]
    if not rows:
        raise UserError(f"nothing was tuned for {target}", hint="yolomlir tune yolo26n")
    device = ", ".join(sorted({d.device for d in found}))
    table = table_of(target, device, MEASURED, rows)
    try:
        table.save(output)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(output)) from error
    console().print(f"{output}: {len(rows)} entries", highlight=False)
