"""The errors yolomlir raises, each saying where, what was expected, what came, what to do."""

from __future__ import annotations

from typing import Any


class YolomlirError(Exception):
    """Base of every error raised on purpose.

    Args:
        message: what is wrong, with the values that came and those expected.
        where: a file, layer or op the error is about; printed first.
        hint: what the user can do about it; printed last.
    """

    def __init__(self, message: str, *, where: object = None, hint: str | None = None) -> None:
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(self.render())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle whole, so that a worker process can hand an error on."""
        return _rebuild, (type(self), self.message, self.where, self.hint)

    def render(self) -> str:
        """The error on one line: `where: message (hint)`."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


def _rebuild(
    kind: type[YolomlirError], message: str, where: str | None, hint: str | None
) -> YolomlirError:
    error = kind.__new__(kind)
    YolomlirError.__init__(error, message, where=where, hint=hint)
    return error


class UserError(YolomlirError):
    """A bad model, image, option or file: the user can mend it. The CLI exits with 2."""


class UnsupportedError(YolomlirError):
    """Valid input that yolomlir does not handle. The CLI exits with 2."""


class InternalError(YolomlirError):
    """A bug of yolomlir, with the path of a reproducer where there is one. The CLI exits with 1."""
