"""Checks of what callers of the API pass."""

from __future__ import annotations

import operator
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


__all__ = ["whole"]
