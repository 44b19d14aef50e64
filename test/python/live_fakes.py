"""A camera that a script plays, and a model that finds the same in every picture."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from live_servers import picture

import yolomlir.vision.live
from yolomlir.api import Model

WAIT_S = 20
"""For what comes at once, unless it is broken."""


class FakeFrame:
    """A decoded frame, as bright as its number."""

    time = None

    def __init__(self, number: int, camera: FakeCamera) -> None:
        self.number = number
        self.camera = camera

    def to_ndarray(self, format: str) -> np.ndarray:
        assert format == "rgb24"
        assert not self.camera.closed.is_set()  # the frame may lie in the device's memory
        return picture(self.number)


class FakeCamera:
    """A device whose frames come from a script: what is to be decoded, or an error to raise."""

    duration = None
    format = SimpleNamespace(name="video4linux2,v4l2")

    def __init__(self, script: Iterator[int | Exception]) -> None:
        self.script = script
        self.streams = SimpleNamespace(video=[SimpleNamespace(thread_type=None)])
        self.closed = threading.Event()
        self.alive: list[weakref.ref[FakeFrame]] = []
        self.opened: list[tuple[object, dict]] = []
        self.open_error: Exception | None = None

    def demux(self, stream: object) -> Iterator[SimpleNamespace]:
        assert stream is self.streams.video[0]
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            yield SimpleNamespace(decode=lambda item=item: [self.frame(item)])

    def frame(self, number: int) -> FakeFrame:
        frame = FakeFrame(number, self)
        self.alive.append(weakref.ref(frame))
        return frame

    def __enter__(self) -> FakeCamera:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()


def plug_in(monkeypatch: pytest.MonkeyPatch, script: Iterable[int | Exception]) -> FakeCamera:
    """A camera out of a script; what it was opened with is in `opened`."""
    camera = FakeCamera(iter(script))

    def fake_open(file, **options):
        camera.opened.append((file, options))
        if camera.open_error:
            raise camera.open_error
        return camera

    av = pytest.importorskip("av", reason="PyAV is not installed")
    monkeypatch.setattr(av, "open", fake_open)
    monkeypatch.setattr(av, "formats_available", {"video4linux2,v4l2", "avfoundation", "dshow"})
    monkeypatch.setattr(yolomlir.vision.live, "check_live", lambda live: None)
    return camera


def counting(limit: int | None = None) -> Iterator[int]:
    number = 0
    while limit is None or number < limit:
        yield number
        number += 1


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "yolomlir-live"]


class FakeModel(Model):
    """A model that finds a person and two buses, and notes the sizes of its batches."""

    def __init__(self, batch: int = 1) -> None:
        self.batches: list[int] = []
        self.interrupt_at: int | None = None
        names = ("person", "bus")
        self._info = SimpleNamespace(
            batch=batch, height=64, width=96, max_det=3, classes=2, names=names
        )

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.batches.append(len(images))
        if self.interrupt_at == len(self.batches):
            raise KeyboardInterrupt
        row = [1.0, 2.0, 30.0, 40.0, 0.9]
        return np.array([[[*row, 0], [*row, 1], [*row, 1]]] * len(images), np.float32)

    def close(self) -> None:
        return
