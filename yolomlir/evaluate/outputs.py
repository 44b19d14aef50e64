"""Tables, and files that reports are written to."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolomlir.diagnostics import UserError
from yolomlir.files import replacing

if TYPE_CHECKING:
    from rich.console import Console


_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
"""What matplotlib draws, by a file's ending."""


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Fail before the work, not after it, when a file cannot be written. None is skipped."""
    for path in paths:
        if path is None or is_stream(path):
            continue
        existed = Path(path).exists()
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            hint = "name a file in a folder that exists and that you may write to"
            message = f"cannot be written: {error.strerror}"
            raise UserError(message, where=path, hint=hint) from error
        if not existed:
            Path(path).unlink()


def check_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder; fail before the work, not after it, when nothing can be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=path,
            hint="name a folder that you may write to",
        ) from error


def check_picture(*paths: str | os.PathLike[str] | None) -> None:
    """Fail before the work, not after it, when a picture cannot be drawn. None is skipped.

    Raises UserError without matplotlib, for an ending that names no format, or as `check_writable`.
    """
    given = [path for path in paths if path is not None]
    if given and importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib", where=given[0], hint="pip install matplotlib")
    for path in given:
        if Path(path).suffix.lower() not in _PICTURES:
            kinds = ", ".join(_PICTURES)
            raise UserError("names no kind of picture", where=path, hint=f"it ends in {kinds}")
    check_writable(*given)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write data as JSON. Raises UserError where the file cannot be written."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all: an older one stays until the new one is complete.

    A pipe or device is written as it is. Raises UserError where the file cannot be written.
    """
    try:
        if is_stream(path):
            Path(path).write_text(text, encoding="utf-8")
            return
        _replace(Path(path), text)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error


def _replace(path: Path, text: str) -> None:
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except PermissionError:
        if not path.exists():
            raise
        path.write_text(text, encoding="utf-8")  # a folder where files may change, not come or go


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether it is a pipe or device, which is written once and not replaced."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path)
    except OSError:
        return False


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    names = list(header)
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "|".join([" --- ", *[" ---: "] * (len(names) - 1)]) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


_PADDING = 2
"""Columns of a terminal between two columns of a table."""
_FOLDED = 24
"""What the first column of a table shrinks to at most."""


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print a table, and below it which columns were left out for the console's width.

    The first column stands to the left and is folded where the console is narrow; the others hold
    figures, which are never cut. optional: columns to do without, the first soonest.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[header[i], *(row[i] for row in rows)] for i in range(len(header))]
    widths = [max(map(len, column)) for column in cells]
    least = [min(widths[0], _FOLDED), *widths[1:]]
    kept = list(range(len(header)))
    for name in optional:
        if sum(least[i] + _PADDING for i in kept) <= console.width:
            break
        kept = [i for i in kept if header[i] != name]
    table = Table(box=None, title=Text(title) if title else None, title_justify="left")
    for i in kept:
        if i:
            table.add_column(header[i], justify="right", min_width=widths[i], no_wrap=True)
        else:
            table.add_column(header[i], min_width=least[i], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i]) for i in kept))
    console.print(table, crop=False)
    left_out = [name for i, name in enumerate(header) if i not in kept]
    if left_out:
        text = Text(f"left out, the terminal is too narrow: {', '.join(left_out)}")
        console.print(text, soft_wrap=True)
