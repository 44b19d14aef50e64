"""Frames of a video file through PyAV, one at a time."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from yolomlir.vision.decode import Pixels, SourceError

Frames = Generator[tuple[int, float | None, Pixels], None, None]


def read_video(path: Path, stride: int = 1) -> Frames:
    """Every `stride`-th frame: its number from 0, its time in seconds, and its RGB pixels.

    The rotation that a phone writes beside the stream is applied. Memory does not grow with the
    video's length. Raises SourceError when PyAV is not installed, when the file is no video, and
    at the place where it stops being readable.
    """
    av = import_av(path)
    if not path.exists():
        raise SourceError(path, "no such file")
    number = -1
    try:
        with av.open(os.fspath(path)) as container:
            if not container.streams.video:
                raise SourceError(path, "no video stream in this file")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for number, frame in enumerate(container.decode(stream)):
                if number % stride == 0:
                    yield number, frame.time, upright(frame)
    except av.FFmpegError as error:
        place = f"breaks after frame {number}" if number >= 0 else "not a readable video"
        raise SourceError(path, f"{place}: {error.strerror or error}") from error
    if number < 0:
        raise SourceError(path, "a video without frames")


def import_av(source: object) -> Any:
    """PyAV. Raises SourceError, of this source, when it is not installed."""
    try:
        import av
    except ImportError as error:
        raise SourceError(
            source,
            "videos and cameras need PyAV, which is not installed",
            hint="pip install 'yolomlir[video]'",
        ) from error
    return av


def upright(frame: Any) -> Pixels:
    """A frame of PyAV's as uint8 H x W x 3 RGB, turned as its container says."""
    pixels = frame.to_ndarray(format="rgb24")
    # Degrees counter-clockwise, from the container's display matrix; absent before PyAV 14.
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns))
