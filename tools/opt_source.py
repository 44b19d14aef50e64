"""Text that `yolomlir-opt` reads: chunks of a file, places in it, diagnostics about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError

SEPARATOR = "// -----"
BYTECODE_MAGIC = b"ML\xefR"
_FILE_LOCATION = re.compile(r'loc\("-":(\d+):(\d+)\)')


@dataclass(frozen=True)
class Place:
    """Where a diagnostic points: a line and column from 1 (None where unknown), and a layer."""

    line: int | None = None
    column: int | None = None
    layer: str | None = None


@dataclass(frozen=True)
class Diagnostic:
    """One error, warning, note or remark."""

    severity: str
    message: str
    place: Place = Place()


@dataclass(frozen=True)
class Source:
    """One chunk of an input file.

    text: the chunk; empty for bytecode. first_line: its first line's number in the file, from 1.
    """

    name: str
    text: str
    first_line: int = 1
    bytecode: bytes | None = None

    def parse(self) -> ir.Module:
        """The module, in the current context; line numbers are the file's. Raises ir.MLIRError."""
        if self.bytecode is not None:
            return ir.Module.parse(self.bytecode)
        return ir.Module.parse("\n" * (self.first_line - 1) + self.text)

    def line(self, number: int) -> str | None:
        """A line of the file, where it is in this chunk."""
        lines = self.text.splitlines()
        index = number - self.first_line
        return lines[index] if 0 <= index < len(lines) else None

    def place_of(self, location: ir.Location) -> Place:
        """Where a location points to in this chunk."""
        if location.is_a_file():
            return Place(location.start_line, location.start_col)
        if location.is_a_callsite():
            return self.place_of(location.callee)
        if location.is_a_fused():
            places = [self.place_of(part) for part in location.locations]
            return next((place for place in places if place.line), places[0] if places else Place())
        if location.is_a_name():
            inner = self.place_of(location.child_loc)
            name = str(location.name_str)
            return (
                Place(inner.line, inner.column, name) if inner.line else self._place_of_layer(name)
            )
        return Place()

    def place_named(self, where: str | None) -> Place:
        """Where an error's `where` points to: a printed file location or a layer's name."""
        if where is None:
            return Place()
        match = _FILE_LOCATION.search(where)
        if match:
            return Place(int(match[1]), int(match[2]))
        if where.startswith("loc("):
            return Place()
        return self._place_of_layer(where)

    def _place_of_layer(self, layer: str) -> Place:
        """The first line that says `loc("layer"`; such a location has no line of its own."""
        needle = f'loc("{layer}"'
        for index, line in enumerate(self.text.splitlines()):
            column = line.find(needle)
            if column >= 0:
                return Place(self.first_line + index, column + 1, layer)
        return Place(layer=layer)


def read_sources(name: str, data: bytes, *, split: bool) -> list[Source]:
    """The chunks of a file: itself, or what lies between `// -----` lines where `split`."""
    if data.startswith(BYTECODE_MAGIC):
        return [Source(name, "", bytecode=data)]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8; expected MLIR as text or bytecode"
        raise UserError(message, where=name) from error
    return list(_chunks(name, text)) if split else [Source(name, text)]


def _chunks(name: str, text: str) -> Iterator[Source]:
    lines: list[str] = []
    first = 1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.rstrip() != SEPARATOR:
            lines.append(line)
            continue
        yield Source(name, "\n".join(lines) + "\n", first)
        lines, first = [], number + 1
    yield Source(name, "\n".join(lines) + "\n", first)


def render(diagnostic: Diagnostic, source: Source) -> str:
    """A diagnostic as compilers print it: `file:line:column: error: …`, the line, a caret."""
    place = diagnostic.place
    head = source.name if place.line is None else f"{source.name}:{place.line}:{place.column}"
    message = diagnostic.message
    if place.layer and place.layer not in message:
        message = f"{place.layer}: {message}"
    text = f"{head}: {diagnostic.severity}: {message}\n"
    line = source.line(place.line) if place.line else None
    if line is None or not place.column:
        return text
    return f"{text}{line}\n{' ' * (place.column - 1)}^\n"
