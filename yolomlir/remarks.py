"""Warnings and remarks of passes about one op, carried by `logging`.

`yolomlir-opt` turns the records into MLIR diagnostics; anyone else sees ordinary log lines.
"""

from __future__ import annotations

import logging

from yolomlir.bindings import ir

LOGGER = logging.getLogger("yolomlir.remarks")


def warning(location: ir.Location, message: str) -> None:
    """Something a user should know about the op at `location`; compilation goes on."""
    _emit(logging.WARNING, location, message)


def remark(location: ir.Location, message: str) -> None:
    """Why a pass did, or did not do, something to the op at `location`."""
    _emit(logging.INFO, location, message)


def _emit(level: int, location: ir.Location, message: str) -> None:
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s: %s", location, message, extra={"mlir": (location, message)})
