"""Ctrl-C waits where it would crash: in a block, and while MLIR is loaded."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from yolomlir.interrupts import deferred_interrupts

_LOAD = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith('mlir._mlir_libs.'):
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
sys.meta_path.insert(0, Interrupting())
try:
    import yolomlir.bindings
except KeyboardInterrupt:
    sys.exit(42)
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Python's own handler: a process started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    after = []

    def interrupted() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            after.append("inside")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert after == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_interrupt_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone() -> None:
    handlers = []

    def enter() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_an_interrupt_while_mlir_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD], capture_output=True, text=True, check=False
    )
    assert done.returncode == 42, done.stderr
