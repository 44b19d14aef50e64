"""A journal of detections, so that an interrupted evaluation goes on where it stopped.

JSON lines: a header with the key of the run, then a record an image, appended as images finish.
The key covers model, settings and dataset: a journal of another run is never continued.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from yolomlir.diagnostics import UserError

log = logging.getLogger(__name__)

_FORMAT = "yolomlir-detections-1"


@dataclass(frozen=True)
class ImageRecord:
    """What evaluation found on one image.

    rows: x, y, width, height (pixels of the original, 3 decimals), score (5 decimals), class index,
    in the detector's order. error: why the image could not be read; it has no rows then. width,
    height: the decoded image's, 0 when it could not be read.
    """

    image_id: int
    rows: list[list[float]]
    width: int = 0
    height: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the journal holds it."""
        return dict(vars(self))


class Journal:
    """The records of a run, on disk as they come. Use it as `with Journal.open(…) as journal:`."""

    def __init__(self, path: Path | None, records: dict[int, ImageRecord], file: TextIO | None):
        self.path = path
        self.records = records
        self.resumed = len(records)
        self._file = file

    @staticmethod
    def open(path: Path | None, key: str, image_ids: Sequence[int]) -> Journal:
        """Continue the journal at `path` if it is of the run `key`, else begin it.

        path None keeps records in memory only. A last line cut off by a kill is dropped. Raises
        UserError when the file is something else than a journal, or cannot be written.
        """
        if path is None:
            return Journal(None, {}, None)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            records = _read(path, key, set(image_ids)) if path.exists() else {}
            # Written anew through a second file: damaged lines go, and a kill now loses nothing.
            fresh = path.with_name(path.name + ".new")
            with fresh.open("w", encoding="utf-8") as file:
                _write(file, {"format": _FORMAT, "key": key})
                for record in records.values():
                    _write(file, record.to_json())
            os.replace(fresh, path)
            return Journal(path, records, path.open("a", encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"the journal cannot be written: {error.strerror}", where=path
            ) from error

    def add(self, records: Sequence[ImageRecord]) -> None:
        """Record finished images."""
        for record in records:
            self.records[record.image_id] = record
            if self._file:
                _write(self._file, record.to_json())
        if self._file:
            self._file.flush()

    def discard(self) -> None:
        """Close and remove the file: the run is complete."""
        self.close()
        if self.path:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file:
            self._file.close()
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _write(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, separators=(",", ":")) + "\n")


def _read(path: Path, key: str, image_ids: set[int]) -> dict[int, ImageRecord]:
    values = list(_lines(path))
    if not values:
        return {}
    header = values[0]
    if header.get("format") != _FORMAT:
        raise UserError(
            "is not a journal of detections; it is not overwritten", where=path, hint="name another"
        )
    if header.get("key") != key:
        log.warning("%s: of another model, dataset or settings; starting anew", path)
        return {}
    records = {}
    for value in values[1:]:
        try:
            record = ImageRecord(**value)
        except TypeError:
            log.warning("%s: a damaged record; its image is evaluated again", path)
            continue
        if record.image_id in image_ids:
            records[record.image_id] = record
    return records


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every line that is a JSON object. The first that is not a journal's header comes as {}."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            elif number == 0:
                yield {}
            else:
                log.warning("%s:%d: cut off or damaged; evaluated again", path, number + 1)
