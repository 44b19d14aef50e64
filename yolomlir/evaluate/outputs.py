"""Files that reports are written to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from yolomlir.diagnostics import UserError


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Fail before the work, not after it, when a file cannot be written. None is skipped."""
    for path in paths:
        if path is None:
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


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write data as JSON. Raises UserError where the file cannot be written."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text. Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=path) from error


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    names = list(header)
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "|".join([" --- ", *[" ---: "] * (len(names) - 1)]) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
