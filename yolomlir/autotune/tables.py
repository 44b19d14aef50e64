"""Tables of tiles that ship with the package: measured where there was a GPU, else predicted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from yolomlir.autotune.signature import Form, size_in
from yolomlir.autotune.sizes import Size, standing_for
from yolomlir.autotune.space import SPACE_VERSION

logger = logging.getLogger(__name__)

MEASURED, PREDICTED = "measured", "predicted"
_FORMAT = 1


@dataclass(frozen=True)
class TableEntry:
    """A tile for a signature, its time and the default tile's (microseconds; predicted ones in a
    table that says so)."""

    tile: str
    us: float
    default_us: float

    def row(self) -> list[str | float]:
        """As JSON has it."""
        return [self.tile, round(self.us, 3), round(self.default_us, 3)]


@dataclass(frozen=True)
class Table:
    """Entries by precision and signature. kind: `measured` or `predicted`."""

    target: str
    device: str
    kind: str
    entries: dict[str, dict[str, TableEntry]]
    note: str = ""

    def find(self, precision: str, signature: str) -> TableEntry | None:
        """The entry, or None. A function without float16 (`detect`) is the same at `fp16` as at
        `tf32`."""
        entry = self.entries.get(precision, {}).get(signature)
        if entry is None and precision == "fp16":
            entry = self.entries.get("tf32", {}).get(signature)
        return entry

    def near(self, precision: str, form: Form) -> Iterator[TableEntry]:
        """The entries that may serve a function, the nearest first.

        Its own, and those of other sizes that were measured and stand for it. What is predicted is
        so for each size alone.
        """
        if own := self.find(precision, form.at(form.size)):
            yield own
        if self.kind != MEASURED:
            return
        others = {s: self.find(precision, form.at(s)) for s in self._sizes - {form.size}}
        known = {size: entry for size, entry in others.items() if entry is not None}
        yield from (known[size] for size in standing_for(form.size, known))

    @cached_property
    def _sizes(self) -> frozenset[Size]:
        """Of all functions."""
        return frozenset(size_in(text) for rows in self.entries.values() for text in rows)

    def merged(self, other: Table) -> Table:
        """With the entries of another of the same GPU, which win."""
        precisions = sorted({*self.entries, *other.entries})
        entries = {p: {**self.entries.get(p, {}), **other.entries.get(p, {})} for p in precisions}
        return Table(other.target, other.device, other.kind, entries, other.note)

    def save(self, path: Path) -> None:
        """Write it as JSON, a line an entry, sorted."""
        lines = []
        for precision in sorted(self.entries):
            rows = [
                f"      {json.dumps(signature)}: {json.dumps(entry.row())}"
                for signature, entry in sorted(self.entries[precision].items())
            ]
            lines.append(f"    {json.dumps(precision)}: {{\n" + ",\n".join(rows) + "\n    }")
        head = {
            "format": _FORMAT, "space": SPACE_VERSION, "target": self.target,
            "device": self.device, "kind": self.kind, "note": self.note,
        }  # fmt: skip
        text = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        body = ",\n".join(lines)
        path.write_text(f'{{\n{text},\n  "entries": {{\n{body}\n  }}\n}}\n', encoding="utf-8")


def parse_table(data: Any, where: str) -> Table | None:
    """A table from JSON; None, with a warning, where it is damaged or of another version."""
    try:
        if (data["format"], data["space"]) != (_FORMAT, SPACE_VERSION):
            logger.warning("%s: a table of another version: not used", where)
            return None
        entries = {
            precision: {s: TableEntry(str(e[0]), float(e[1]), float(e[2])) for s, e in rows.items()}
            for precision, rows in data["entries"].items()
        }
        target, device, kind = (str(data[k]) for k in ("target", "device", "kind"))
        return Table(target, device, kind, entries, str(data["note"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        logger.warning("%s: a damaged table: not used (%r)", where, error)
        return None


def load_table(path: Path) -> Table | None:
    """A table from a file; None, with a warning, where there is no such table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be read: %s", path, error)
        return None
    return parse_table(data, str(path))


@cache
def shipped(target: str) -> Table | None:
    """The package's table of a target, or None."""
    file = resources.files("yolomlir.autotune") / "tables" / f"{target}.json"
    if not file.is_file():
        return None
    return parse_table(json.loads(file.read_text(encoding="utf-8")), f"table of {target}")


def table_of(
    target: str, device: str, kind: str, rows: Iterable[tuple[str, str, TableEntry]], note: str = ""
) -> Table:
    """A table of (precision, signature, entry)."""
    entries: dict[str, dict[str, TableEntry]] = {}
    for precision, signature, entry in rows:
        entries.setdefault(precision, {})[signature] = entry
    return Table(target, device, kind, entries, note)
