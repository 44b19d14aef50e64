"""What tuning found, on disk: a file of JSON lines a GPU, appended to as measurements come.

A file begins with a `header` line and goes on with `case` (what a key stands for), `time` (one
measured candidate) and `winner` lines. Later lines replace earlier ones. So a killed run loses at
most its last line, and the next one goes on from there. Lines that are damaged, foreign or of
another version of the compiler are counted, reported once, and left out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolomlir.diagnostics import UserError
from yolomlir.settings import settings

logger = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class CaseRecord:
    """What a key stands for. digest: of the function alone. shape: of a convolution."""

    key: str
    digest: str
    signature: str
    family: str
    precision: str
    shape: dict[str, Any]


@dataclass(frozen=True)
class TimeRecord:
    """One candidate: microseconds and their spread, or a fault. final: measured with care."""

    key: str
    tile: str
    us: float = 0.0
    spread: float = 0.0
    final: bool = False
    fault: str = ""


@dataclass(frozen=True)
class WinnerRecord:
    """The tile chosen for a key, its time and the default tile's, microseconds."""

    key: str
    tile: str
    us: float
    default_us: float
    default_tile: str


_KINDS = {"case": CaseRecord, "time": TimeRecord, "winner": WinnerRecord}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def folder() -> Path:
    """Where the databases are."""
    return Path(settings().cache_dir) / "tuning"


def path_for(target: str, device: str) -> Path:
    """The file of one GPU."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return folder() / f"{target}-{slug}{SUFFIX}"


@dataclass
class Database:
    """The content of one file. path: None keeps everything in memory."""

    target: str
    device: str
    path: Path | None = None
    cases: dict[str, CaseRecord] = field(default_factory=dict)
    times: dict[str, dict[str, TimeRecord]] = field(default_factory=dict)
    winners: dict[str, WinnerRecord] = field(default_factory=dict)
    damaged: int = 0

    @staticmethod
    def open(target: str, device: str, path: Path | None = None) -> Database:
        """The database of a GPU, empty where there is none yet.

        path: default the user's cache folder. Damaged lines are logged as a warning and left out; a
        file of another GPU or format is set aside under another name.
        """
        database = Database(target, device, path or path_for(target, device))
        database._read()
        return database

    def _read(self) -> None:
        path = self.path
        if path is None or not path.is_file():
            return
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            logger.warning("%s: cannot be read (%s): tuning again", path, error.strerror)
            return
        header = _parsed(lines[0]) if lines else None
        if header != self._header():
            self._set_aside("is not a tuning database of this GPU and version")
            return
        for line in lines[1:]:
            self._take(line)
        if self.damaged:
            logger.warning("%s: %d damaged lines were left out", path, self.damaged)

    def _take(self, line: str) -> None:
        data = _parsed(line) or {}
        try:
            record = _KINDS[data.pop("kind")](**data)
        except (KeyError, TypeError):
            self.damaged += 1
            return
        if not _well_typed(record):
            self.damaged += 1
            return
        self._remember(record)

    def _remember(self, record: Any) -> None:
        if isinstance(record, CaseRecord):
            self.cases[record.key] = record
        elif isinstance(record, TimeRecord):
            self.times.setdefault(record.key, {})[record.tile] = record
        else:
            self.winners[record.key] = record

    def _set_aside(self, reason: str) -> None:
        assert self.path is not None
        aside = self.path.with_suffix(".foreign")
        logger.warning("%s: %s: set aside as %s, tuning again", self.path, reason, aside.name)
        try:
            os.replace(self.path, aside)
        except OSError as error:
            raise UserError(
                f"{reason}, and cannot be moved: {error.strerror}", where=str(self.path)
            ) from error

    def _header(self) -> dict[str, Any]:
        return {
            "kind": "header", "format": FORMAT, "target": self.target, "device": self.device,
        }  # fmt: skip

    def add(self, record: CaseRecord | TimeRecord | WinnerRecord) -> None:
        """Remember a record and append it to the file at once."""
        self._remember(record)
        if self.path is None:
            return
        try:
            self._append({"kind": _NAMES[type(record)], **dataclasses.asdict(record)})
        except OSError as error:
            logger.warning("%s: cannot be written (%s): not kept", self.path, error.strerror)
            self.path = None

    def _append(self, data: dict[str, Any]) -> None:
        assert self.path is not None
        new = not self.path.exists()
        if new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(data) + "\n"
        if new:
            text = json.dumps(self._header()) + "\n" + text
        elif not _ends_a_line(self.path):  # a killed run's last line
            text = "\n" + text
        # One write: lines of two processes that tune at once do not mix.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def stale(self, digest: str, key: str) -> bool:
        """Whether there is a winner for a function, but of another compiler, assembler or space."""
        return key not in self.winners and any(
            case.digest == digest and case.key in self.winners for case in self.cases.values()
        )


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _well_typed(record: Any) -> bool:
    expected = {"str": str, "float": (int, float), "bool": bool, "dict[str, Any]": dict}
    return all(
        isinstance(getattr(record, f.name), expected[str(f.type)])  # type: ignore[arg-type]
        for f in dataclasses.fields(record)
    )


# ---- all files ----------------------------------------------------------------------------------


def databases(target: str | None = None) -> Iterator[Database]:
    """Every readable database in the cache folder, of one target or of all."""
    where = folder()
    for path in sorted(where.glob(f"{target or ''}*{SUFFIX}")) if where.is_dir() else []:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                header = _parsed(file.readline())
        except OSError as error:
            logger.warning("%s: cannot be read (%s): not used", path, error.strerror)
            continue
        if header is None or header.get("kind") != "header":
            logger.warning("%s: not a tuning database", path)
            continue
        found_target, device = str(header.get("target")), str(header.get("device"))
        if target in (None, found_target):
            yield Database.open(found_target, device, path)
