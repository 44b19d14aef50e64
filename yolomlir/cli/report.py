"""What `predict` prints and writes: tables, a line a live frame, JSON, annotated images."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from yolomlir.cli.progress import console, discard_output, printable
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.outputs import print_table, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from yolomlir.results import Result
    from yolomlir.vision.decode import SourceError

_LINES_SUFFIX = ".jsonl"
_NEWEST = 10_000
"""Frames whose median latency is told: an endless run keeps no more."""


class Report:
    """What comes out: a table or a line, and annotated images, at once; JSON as the file says.

    json: where detections go, `-` for stdout, None for nowhere. save: a folder for images. live:
    whether a source is known to be a camera or stream.
    """

    def __init__(self, json_file: str | None, save: Path | None, *, live: bool = False) -> None:
        self.results = 0
        self.failed = 0
        self._console = console(stderr=json_file == "-")
        self._json = _Json(json_file, live) if json_file is not None else None
        self._saver = _saver(save) if save else None
        self._live: _LiveCount | None = None

    def add(self, result: Result | SourceError) -> None:
        """Report one result, or what could not be read."""
        if isinstance(result, UserError):
            self.failed += 1
            with self._printing():
                self._end_live()
            complain(result)
            return
        self.results += 1
        live = result.latency_s is not None
        if self._json:
            self._json.add(result.to_dict(), live)
        saved = f"saved {self._saver.save(result)}" if self._saver else ""
        with self._printing():
            if live:
                self._print_live(result, saved)
                return
            _print_table(self._console, result)
            if saved:
                self._line(f"  {saved}")

    def finish(self) -> None:
        """Write what is written last."""
        with self._printing():
            self._end_live()
        if self._json:
            self._json.finish()

    @contextmanager
    def _printing(self) -> Iterator[None]:
        """What else is asked for goes on where the reader of what is printed went away."""
        try:
            yield
        except BrokenPipeError:
            if self._console.stderr or not (self._json or self._saver):
                raise
            discard_output()

    def _line(self, text: str) -> None:
        # Not by rich, which takes longer than a frame has, and says it again after a Ctrl-C.
        self._console.file.write(f"{printable(text)}\n")
        self._console.file.flush()

    def _print_live(self, result: Result, saved: str) -> None:
        from yolomlir.vision.sources import split_frame_number

        name, _ = split_frame_number(result.name)
        if self._live is None or self._live.name != name:
            self._end_live()
            self._live = _LiveCount(name)
        self._live.add(result)
        self._line("  ".join(filter(None, (*_live_cells(result), saved))))

    def _end_live(self) -> None:
        if self._live is not None:
            self._line(self._live.summary())
        self._live = None


class _LiveCount:
    """Frames of a camera or stream so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen = 0
        self._passed = 0  # by the camera's own count
        self._latencies_s: deque[float] = deque(maxlen=_NEWEST)

    def add(self, result: Result) -> None:
        self._seen += 1
        self._passed = (result.frame_number or 0) + 1
        self._latencies_s.append(result.latency_s or 0.0)

    def summary(self) -> str:
        median_ms = statistics.median(self._latencies_s) * 1e3
        frames = "1 frame" if self._seen == 1 else f"{self._seen} frames"
        dropped = self._passed - self._seen
        return f"{self.name}: {frames}, {dropped} dropped, median latency {median_ms:.1f} ms"


def _live_cells(result: Result) -> tuple[str, ...]:
    counts = Counter(d.class_name for d in result.detections)
    found = ", ".join(f"{count} {name}" for name, count in counts.items())
    time_s, latency_s = result.time_s or 0.0, result.latency_s or 0.0
    return result.name, f"{time_s:.2f} s", found or "no detections", f"{latency_s * 1e3:.1f} ms"


class _Json:
    """Detections as JSON: one array at the end, or an object a line, at once."""

    def __init__(self, file: str, live: bool) -> None:
        self._file = file
        # Nothing could be read from an array that ends with the camera.
        self._lines = file.endswith(_LINES_SUFFIX) or (file == "-" and live)
        self._records: list[dict[str, Any]] = []
        self._stack = ExitStack()
        self._out: IO[str] | None = None

    def add(self, record: dict[str, Any], live: bool) -> None:
        self._records.append(record)
        self._lines |= live and self._file == "-"
        if self._lines:
            self._write_lines()

    def finish(self) -> None:
        if self._lines:
            self._write_lines()
            self._stack.close()
            return
        text = json.dumps(self._records, indent=1) + "\n"
        if self._file == "-":
            sys.stdout.write(text)
        else:
            write_text(self._file, text)

    def _write_lines(self) -> None:
        """Write what there is; the file is opened with the first line, not for a run that fails."""
        text = "".join(json.dumps(record) + "\n" for record in self._records)
        self._records.clear()
        if self._file == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if self._out is None:
                file = open(self._file, "w", encoding="utf-8")  # noqa: SIM115 (the stack closes it)
                self._out = self._stack.enter_context(file)
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=self._file) from error


def complain(error: UserError) -> None:
    """Say on one line of stderr what could not be read."""
    print(f"yolomlir: error: {printable(' '.join(str(error).splitlines()))}", file=sys.stderr)


def _saver(folder: Path) -> Any:
    from yolomlir.vision.drawing import AnnotatedImages

    return AnnotatedImages(folder)


def _print_table(out: Console, result: Result) -> None:
    title = f"{printable(result.name)}  {result.width}x{result.height}"
    if not result.detections:
        out.print(f"{title}: no detections", markup=False, soft_wrap=True)
        return
    out.print(title, markup=False, soft_wrap=True)
    rows = [(d.class_name, f"{d.score:.3f}", *(f"{v:.1f}" for v in d.box)) for d in result]
    print_table(out, ("class", "score", "x1", "y1", "x2", "y2"), rows)
