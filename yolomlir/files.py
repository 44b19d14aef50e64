"""Files that are written whole or not at all."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_UNWRITABLE: set[Path] = set()
"""Folders that were warned about."""


def warn_unwritable(folder: Path, error: OSError, logger: logging.Logger) -> None:
    """Say that kernels cannot be kept in a folder: once a process, not once a kernel."""
    level = logging.DEBUG if folder in _UNWRITABLE else logging.WARNING
    _UNWRITABLE.add(folder)
    logger.log(level, "%s: cannot be written, its kernels are not cached: %s", folder, error)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and vanishes if it raises.

    A reader, another writer or a kill at any moment sees the old content or the new one. The folder
    must be there. A link stays one: the file it names is replaced. Raises OSError as `open` does.
    """
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's file is its owner's only
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
