"""Ctrl-C and SIGTERM: as exceptions, and at a moment when they cannot be had, after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came: `docker stop`, a batch system's limit, `timeout`. Ends a run as Ctrl-C does."""


@contextmanager
def termination_raises() -> Iterator[None]:
    """Raise TerminatedError where SIGTERM would end the process, so that what is done is kept.

    Does nothing outside of the main thread, which alone receives signals, and where SIGTERM is
    handled or ignored already.
    """
    if not _is_main() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: object) -> NoReturn:
        raise TerminatedError

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver a SIGINT or SIGTERM that comes within the block at its end.

    Does nothing outside of the main thread, which alone receives signals, and where a handler was
    installed that is not Python's.
    """
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.enter_context(_deferred(number))
        yield


@contextmanager
def _deferred(number: signal.Signals) -> Iterator[None]:
    previous = signal.getsignal(number)
    if not _is_main() or previous is None:
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, previous)
        if came:
            signal.raise_signal(number)


def forget_interruption() -> None:
    """After an interruption that was handled: let the exit code be what `sys.exit` says.

    CPython remembers that a KeyboardInterrupt left code which it ran from a string, such as what
    `dataclasses` makes while a module is imported, until it runs the next such code; a process
    begun with `python -m` ends by SIGINT then, whatever became of the exception.
    """
    exec("")


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
