"""What can watch a pipeline run: IR printing, numbered dumps, timing, statistics."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TextIO

from yolomlir.bindings import ir, passmanager
from yolomlir.diagnostics import UserError
from yolomlir.passes.base import PassContext, Step

Printer = Callable[[ir.Module], str]
"""How a module becomes text; debug info and generic form are the printer's business."""


class Instrumentation:
    """Called around every pass of a pipeline; `steps[index]` is the pass."""

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """The pass is about to run."""

    def after(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """The pass has run and what it left is valid."""

    def failed(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """The pass raised, or left invalid IR; `module` may not verify."""


class IRPrinting(Instrumentation):
    """Print the module before or after passes.

    Args:
        stream: where to.
        printer: module to text.
        before: names of passes to print before; None means all.
        after: the same, after.
        only_changes: print after a pass only where the text differs from before it.
        on_failure: print what a failing pass left.
    """

    def __init__(
        self,
        stream: TextIO,
        printer: Printer,
        *,
        before: Collection[str] | None = (),
        after: Collection[str] | None = (),
        only_changes: bool = False,
        on_failure: bool = False,
    ) -> None:
        self._stream, self._printer = stream, printer
        self._before, self._after = before, after
        self._only_changes, self._on_failure = only_changes, on_failure
        self._text = ""

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Print, where asked, and remember the text to tell changes."""
        name = steps[index].name
        if self._before is None or name in self._before:
            self._print(f"IR Dump Before {name}", self._printer(module))
        if self._only_changes:
            self._text = self._printer(module)

    def after(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Print, where asked."""
        name = steps[index].name
        if self._after is not None and name not in self._after:
            return
        text = self._printer(module)
        if self._only_changes and text == self._text:
            return
        self._print(f"IR Dump After {name}", text)

    def failed(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Print what the pass left, where asked."""
        if self._on_failure:
            self._print(f"IR Dump After {steps[index].name} Failed", self._printer(module))

    def _print(self, title: str, text: str) -> None:
        self._stream.write(f"// -----// {title} //----- //\n{text.rstrip()}\n\n")


class TreeDump(Instrumentation):
    """Write the module after every pass to `folder/NN_pass.mlir`; `00_input.mlir` comes first.

    Raises UserError where the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, printer: Printer) -> None:
        self._folder, self._printer = folder, printer

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Write the input, once."""
        if index == 0:
            self._write("00_input", module)

    def after(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Write what the pass left."""
        self._write(
            f"{index + 1:02d}_{'_'.join((*steps[index].anchors, steps[index].name))}", module
        )

    def _write(self, name: str, module: ir.Module) -> None:
        safe = re.sub(r"[^\w.-]", "_", name)
        path = self._folder / f"{safe}.mlir"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(self._printer(module), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write: {error.strerror}", where=str(path)) from error


class Timing(Instrumentation):
    """Wall time a pass, in seconds, verification included; `record` adds phases around them."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []
        self._started = 0.0

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def after(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Stop the clock."""
        self.record(steps[index].element, time.perf_counter() - self._started)

    def failed(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Stop the clock."""
        self.record(f"{steps[index].element} (failed)", time.perf_counter() - self._started)

    def record(self, name: str, seconds: float) -> None:
        """Add a row."""
        self.rows.append((name, seconds))

    def report(self) -> str:
        """The table that `--mlir-timing` prints."""
        total = sum(seconds for _, seconds in self.rows)
        lines = _title("Execution time report")
        lines += [f"  Total Execution Time: {total:.4f} seconds", ""]
        lines.append("  ----Wall Time----  ----Name----")
        for name, seconds in [*self.rows, ("Total", total)]:
            share = 100.0 * seconds / total if total else 100.0
            lines.append(f"  {seconds:8.4f} ({share:5.1f}%)  {name}")
        return "\n".join(lines) + "\n"


def _title(text: str) -> list[str]:
    rule = f"==={'-' * 73}==="
    return [rule, f"{f'... {text} ...':^79}".rstrip(), rule]


_STATISTIC = re.compile(r"^\s*\(S\)\s+(\d+)\s+(\S+)", re.MULTILINE)


def run_counting(manager: passmanager.PassManager, op: ir.Operation) -> dict[str, int]:
    """Run an upstream pass manager; returns its passes' statistics by name.

    MLIR has them printed to the process's standard error and nowhere else, so that goes to a file
    meanwhile.
    """
    manager.enable_statistics()
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                manager.run(op)
            finally:
                os.dup2(kept, 2)
                file.seek(0)
                text = file.read().decode(errors="replace")
    finally:
        os.close(kept)
    return {name: int(count) for count, name in _STATISTIC.findall(text)}


def statistics_report(context: PassContext) -> str:
    """The table that `--statistics` prints: a row a statistic, by pass."""
    lines = _title("Pass statistics report")
    for name, counts in context.statistics.items():
        lines.append(name)
        lines += [f"  (S) {value:6d} {statistic}" for statistic, value in sorted(counts.items())]
    return "\n".join(lines) + "\n"
