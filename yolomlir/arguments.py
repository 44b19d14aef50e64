"""Checks of what callers of the API pass."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

from yolomlir.diagnostics import UserError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An argument as an `int`, which numpy's integers become.

    Raises UserError for anything else, a `bool` included, and for less than `least`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {value!r}; expected a whole number") from None
    if least is not None and number < least:
        raise UserError(f"{name} is {number}; it must be at least {least}")
    return number


def file_path(name: str, value: Any, expected: str) -> Path:
    """An argument as a path. Raises UserError for what is none, saying what was expected."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UserError(f"{name} is {value!r:.60}; expected {expected}")
    return Path(value)


__all__ = ["file_path", "whole"]
