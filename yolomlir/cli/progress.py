"""What is drawn on a terminal: progress bars on stderr for what takes long, and a console.

rich takes longer to import than a warm prediction takes to run, so it is imported when something
has to be drawn.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from yolomlir.progress import ProgressCallback

_PIPE_WIDTH = 1000
"""Columns where there is no terminal: lines are never broken for a program that reads them."""


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[ProgressCallback]:
    """A callback that draws one bar a stage; bars vanish when the block ends.

    Nothing is drawn where standard error is no terminal: a log is no place for bars.
    """
    with ExitStack() as stack:
        bars: Any = None
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            nonlocal bars
            if quiet or not sys.stderr.isatty():
                return
            if bars is None:
                bars = stack.enter_context(_bars())
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def _bars() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console(stderr=True), transient=True)


def printable(text: str) -> str:
    """The text with control characters escaped: a file's name must not move a terminal's cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def discard_output() -> None:
    """Print to nowhere: the reader went away (`yolomlir … | head`), nothing can be said to it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(*, stderr: bool = False) -> Console:
    """A console whose reader may go away, and that breaks no lines where there is no terminal."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; main() ends quietly

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return _Console(stderr=stderr, width=width, highlight=False, emoji=False)
