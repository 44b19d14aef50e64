"""`--verify-diagnostics`: what a test file expects, held against what came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.tools.opt_source import Diagnostic, Source

_EXPECTATION = re.compile(
    r"expected-(?P<severity>error|warning|note|remark)(?P<regex>-re)?\s*"
    r"(?:@(?P<where>[+-]\d+|above|below|unknown))?\s*\{\{(?P<text>.*?)\}\}(?!\})"
)
_PIECE = re.compile(r"\{\{(.*?)\}\}")


@dataclass(frozen=True)
class Expectation:
    """One `expected-…` comment. line: where it expects the diagnostic; None is `@unknown`."""

    severity: str
    line: int | None
    text: str
    regex: bool
    written_at: int

    def matches(self, diagnostic: Diagnostic) -> bool:
        """Whether a diagnostic is the one expected: severity, line, and text within its message."""
        if diagnostic.severity != self.severity or diagnostic.place.line != self.line:
            return False
        layer = diagnostic.place.layer
        message = f"{layer}: {diagnostic.message}" if layer else diagnostic.message
        if not self.regex:
            return self.text in message
        return re.search(_pattern(self.text), message) is not None


def _pattern(text: str) -> str:
    """A regular expression: what is in double braces as it is, the rest literally."""
    parts = _PIECE.split(text)
    return "".join(part if i % 2 else re.escape(part) for i, part in enumerate(parts))


def expectations(source: Source) -> list[Expectation]:
    """Every expectation of a chunk. `@above` and `@below` skip lines of other expectations."""
    lines = source.text.splitlines()
    found: list[Expectation] = []
    for index, line in enumerate(lines):
        for match in _matches(line):
            target = _target(lines, index, match["where"])
            number = None if target is None else target + source.first_line
            severity, regex = match["severity"], match["regex"] is not None
            at = index + source.first_line
            found.append(Expectation(severity, number, match["text"], regex, at))
    return found


def _matches(line: str) -> list[re.Match[str]]:
    if "expected-" not in line or "//" not in line:
        return []
    # The text of `-re` may itself hold {{…}}: those run to the last `}}` before the next comment.
    nested = re.compile(_EXPECTATION.pattern.replace(r".*?)\}\}(?!\})", r".*)\}\}(?!\})"))
    return list((nested if "-re" in line else _EXPECTATION).finditer(line))


def _target(lines: Sequence[str], index: int, where: str | None) -> int | None:
    if where == "unknown":
        return None
    if where in ("above", "below"):
        step = -1 if where == "above" else 1
        index += step
        while 0 <= index < len(lines) and _matches(lines[index]):
            index += step
        return index
    return index + int(where or 0)


def check(source: Source, diagnostics: Sequence[Diagnostic]) -> list[str]:
    """What differs between the diagnostics expected and those that came; nothing where all match.

    Each expectation takes one diagnostic. Errors, warnings and remarks must all be expected; notes
    need not be, since MLIR adds some of its own ("see current operation").
    """
    left = list(diagnostics)
    problems: list[str] = []
    expected = expectations(source)
    for expectation in expected:
        match = next((d for d in left if expectation.matches(d)), None)
        if match is None:
            problems.append(
                f"{source.name}:{expectation.written_at}: error: expected {expectation.severity} "
                f'"{expectation.text}" was not produced'
            )
            continue
        left.remove(match)
    for diagnostic in left:
        if diagnostic.severity == "note":
            continue
        line = diagnostic.place.line
        where = f"{source.name}:{line}" if line else source.name
        problems.append(f"{where}: error: unexpected {diagnostic.severity}: {diagnostic.message}")
    return problems
