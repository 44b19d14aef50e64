"""Cameras and streams through PyAV: a thread decodes them and keeps the newest frame only.

What a slow reader does not fetch in time is replaced, so that it always sees the present; frames
are numbered as they come in, so that a gap in the numbers is what was dropped.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from yolomlir.vision.decode import Pixels, SourceError
from yolomlir.vision.video import import_av, upright

__all__ = [
    "PROBE_OPTIONS",
    "STREAM_SCHEMES",
    "LiveFrame",
    "LiveSource",
    "check_live",
    "exit_without_waiting",
    "live_source",
    "read_live",
    "without_password",
]

log = logging.getLogger(__name__)

STREAM_SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "srt", "udp", "rtp", "tcp")
"""What a URL of a stream begins with. An http(s) URL is one when the server's answer says so."""

_DEVICE_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
"""FFmpeg's name of what reads cameras, by `sys.platform`."""
_DEVICE_PATH = re.compile(r"/dev/(video\d+|v4l/.+)")

PROBE_OPTIONS = {"fpsprobesize": "0"}
"""Measuring a stream's rate, which is of no interest here, would hold the first frames back."""
_SCHEME_OPTIONS = {
    "rtsp": {"rtsp_flags": "prefer_tcp"},  # over UDP, the default, a packet lost is a torn picture
    "rtsps": {"rtsp_flags": "prefer_tcp"},
    "udp": {"overrun_nonfatal": "1"},  # falling behind loses packets, not the stream
}
_PHASES = 3
"""Opening, looking for the streams and reading may each wait as long as a server may be silent."""
_POLL_S = 0.2
"""A wait is cut into such pieces, between which Ctrl-C is seen on every platform."""
_JOIN_S = 1.0
"""How long closing waits for a thread that waits for data itself."""


@dataclass(frozen=True)
class LiveSource:
    """What to open. name: what messages call it, without a password. file: a URL, a device, or an
    object with `read`. format: FFmpeg's name of the format, None to find out. on_close: what ends a
    read of `file` in another thread."""

    name: str
    file: Any
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    camera: bool = False
    on_close: Callable[[], None] | None = None


class LiveFrame(NamedTuple):
    """number: of the frame in the stream, from 0, those dropped included. time_s: since the first
    frame. arrived_s: when it was decoded, by `time.monotonic`; None in a recording, which waits.
    pixels: uint8, H x W x 3, RGB, contiguous."""

    number: int
    time_s: float
    arrived_s: float | None
    pixels: Pixels


def live_source(source: object) -> LiveSource | None:
    """The camera or stream that a source names; None for anything else.

    `camera:0`, `camera:NAME`, `/dev/video0`, a bare number that is no file's name, a URL of
    `STREAM_SCHEMES`, or an http(s) URL of a `.m3u8` playlist. Raises SourceError where the name
    cannot be one.
    """
    if isinstance(source, os.PathLike):
        path = os.fspath(source)
        return _camera(path, path) if _is_device(path) else None
    if not isinstance(source, str):
        return None
    scheme, colon, rest = source.partition(":")
    if scheme.lower() == "camera" and colon:
        return _camera(source, rest.strip())
    if _is_device(source) or (re.fullmatch(r"[0-9]{1,2}", source) and not os.path.lexists(source)):
        return _camera(source, source)
    if not rest.startswith("//"):
        return None
    if scheme.lower() in STREAM_SCHEMES:
        return _stream(source)
    if scheme.lower() in ("http", "https") and rest.partition("?")[0].lower().endswith(".m3u8"):
        return _stream(source)
    if scheme.lower() in ("http", "https") or len(scheme) < 2 or os.path.lexists(source):
        return None  # a picture or video there, a drive of Windows, a file of such a name
    kinds = ", ".join(("http", "https", *STREAM_SCHEMES))
    raise SourceError(without_password(source), "no URL of a kind that is read", hint=kinds)


def _is_device(path: object) -> bool:
    return isinstance(path, str) and _DEVICE_PATH.fullmatch(path) is not None


def _stream(url: str) -> LiveSource:
    scheme = url.partition(":")[0].lower()
    options = {**PROBE_OPTIONS, **_SCHEME_OPTIONS.get(scheme, {})}
    return LiveSource(without_password(url), url, None, options)


def without_password(url: str) -> str:
    """A URL without the user's name and password, for messages, results and file names."""
    return re.sub(r"(?<=://)[^/?#@]+(:[^/?#@]*)?@", "", url, count=1)


def _camera(name: str, which: str) -> LiveSource:
    """A camera by number, by the path of its device, or by name where the system has names."""
    if not which or "\0" in which:
        raise SourceError(name, "names no camera", hint="camera:0 is the first one")
    number = re.fullmatch(r"[0-9]+", which) is not None
    if sys.platform.startswith("linux"):
        if not number and not which.startswith("/"):
            raise SourceError(name, "names no camera", hint="a number, camera:0, or /dev/video0")
        device = f"/dev/video{int(which)}" if number else which
        return LiveSource(name, device, "v4l2", camera=True)
    device_format = _DEVICE_FORMATS.get(sys.platform)
    if device_format is None:
        raise SourceError(name, f"cameras of {sys.platform} are not supported")
    if device_format == "avfoundation":  # its default, 29.97 a second, is a rate few cameras have
        return LiveSource(name, which, device_format, {"framerate": "30"}, camera=True)
    return LiveSource(name, which if number else f"video={which}", device_format, camera=True)


def check_live(live: LiveSource) -> None:
    """Raise SourceError for a camera that plainly is not there, or where PyAV is missing."""
    import_av(live.name)
    if live.format == "v4l2" and not os.path.exists(live.file):
        there = sorted(str(path) for path in Path("/dev").glob("video*"))
        hint = f"there are {', '.join(there)}" if there else "this machine has no camera"
        what = f"no camera {live.file}" if live.name != live.file else "no such camera"
        raise SourceError(live.name, what, hint=hint)


def read_live(
    live: LiveSource, *, timeout_s: float = 30.0, stride: int = 1
) -> Generator[LiveFrame, None, None]:
    """The newest frame, again and again, of every `stride`-th one that comes in.

    Closing the iterator ends the thread and frees the device; a thread that waits for a silent
    server ends within `timeout_s`, and so does the process. A recorded HLS playlist gives every
    frame, and ends as a file does. Raises SourceError, with the number of frames so far, when the
    source cannot be opened, is silent for `timeout_s`, breaks, or ends.
    """
    check_live(live)
    newest = _Newest()
    thread = threading.Thread(
        target=_read, args=(live, newest, timeout_s, stride), name="yolomlir-live", daemon=True
    )
    patience = timeout_s if live.camera else _PHASES * timeout_s
    # A driver that hangs never comes back to Python, and needs no waiting for.
    _waiting[thread] = _JOIN_S if live.camera else patience
    thread.start()
    try:
        while (frame := newest.take(patience)) is not None:
            yield frame
            patience = timeout_s + 1
    except SourceError:
        raise
    except (OSError, ValueError, RuntimeError, _av_error()) as error:
        raise _error(live, error, newest.count, timeout_s) from error
    finally:
        newest.stop()
        if live.on_close is not None:
            live.on_close()
        thread.join(_JOIN_S)
        if thread.is_alive():
            log.info("%s is closed when it answers, or in %g s", live.name, timeout_s)
    if newest.recording and newest.count:
        return
    ended = f"the stream ended after {newest.count} frames" if newest.count else "holds no frame"
    raise SourceError(live.name, ended)


_waiting: WeakKeyDictionary[threading.Thread, float] = WeakKeyDictionary()
"""Threads, and how long each one may wait for a silent server."""


@atexit.register
def _wait_for_threads() -> None:
    """FFmpeg calls back into Python while it waits: that must not outlive the interpreter."""
    try:
        for thread, seconds in list(_waiting.items()):
            thread.join(seconds)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)


def exit_without_waiting(code: int) -> None:
    """Let this process end with this code at once, even if a thread waits for a silent server.

    For a program that has nothing to do at its end but to flush what it printed.
    """
    if _is_one_alive():
        atexit.register(_leave, code)


def _is_one_alive() -> bool:
    return any(thread.is_alive() for thread in list(_waiting))


def _leave(code: int) -> None:
    if _is_one_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Newest:
    """Where the thread leaves a frame and the reader fetches it: the newest one, and no other.

    Frames are converted to RGB as they are fetched, since most of a fast camera's are not. The
    lock is held meanwhile: a camera's frame lies in memory that goes away with the device.
    """

    def __init__(self) -> None:
        self.count = 0  # frames that came in
        self.recording = False  # every frame counts: the thread waits for the reader
        self._changed = threading.Condition()
        self._frame: tuple[int, float, float | None, Any] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._stopped = False

    def put(self, number: int, time_s: float, arrived_s: float, frame: Any) -> bool:
        """Leave a frame, in place of one that is still there; False when nobody wants more."""
        with self._changed:
            while self.recording and self._frame is not None and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return False
            self._frame = (number, time_s, None if self.recording else arrived_s, frame)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> None:
        """Wait, or less long when nobody wants more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def settle(self) -> None:
        """Copy the frame that is still there: the device is about to be closed."""
        with self._changed:
            if self._frame is not None and not self._stopped:
                self._frame = (*self._frame[:3], upright(self._frame[3]))

    def end(self, error: BaseException | None) -> None:
        """No frame follows, for this reason."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody wants more."""
        with self._changed:
            self._stopped, self._frame = True, None
            self._changed.notify_all()

    def take(self, timeout_s: float) -> LiveFrame | None:
        """The newest frame, not seen before; None at the end. Raises what the thread raised."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._frame is None and not self._ended:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._changed.wait(min(left, _POLL_S))
            if self._frame is None:
                if self._error is not None:
                    raise self._error
                return None
            (number, time_s, arrived_s, frame), self._frame = self._frame, None
            self._changed.notify_all()
            pixels = upright(frame) if hasattr(frame, "to_ndarray") else frame
            return LiveFrame(number, time_s, arrived_s, pixels)


def _read(live: LiveSource, newest: _Newest, timeout_s: float, stride: int) -> None:
    """The thread."""
    error: BaseException | None = None
    try:
        _decode(live, newest, timeout_s, stride)
    except BaseException as raised:  # the reader raises it
        error = raised
    newest.end(error)


def _decode(live: LiveSource, newest: _Newest, timeout_s: float, stride: int) -> None:
    with _open(live, timeout_s) as container:
        if not container.streams.video:
            raise SourceError(live.name, "no video stream in it")
        stream = container.streams.video[0]
        stream.thread_type = "SLICE"  # threads over frames would each hold one back
        hls = "hls" in container.format.name.split(",")
        newest.recording = hls and container.duration is not None
        pace = _Pace(newest) if hls and not newest.recording else None
        try:
            _fill(newest, _frames(container, stream), pace, stride)
        finally:
            newest.settle()


def _fill(newest: _Newest, frames: Iterator[Any], pace: _Pace | None, stride: int) -> None:
    first_s = 0.0
    for number, frame in enumerate(frames):
        if pace is not None:
            pace.wait_for(frame.time)
        arrived_s = time.monotonic()
        first_s = first_s or arrived_s
        newest.count = number + 1
        # A recording has a time of its own; it comes in as fast as it is read.
        time_s = frame.time if newest.recording else arrived_s - first_s
        if number % stride == 0 and not newest.put(number, time_s, arrived_s, frame):
            return


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Every frame. A packet that was damaged on its way costs its picture, not the stream."""
    import av

    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError as error:
            log.debug("a damaged packet: %s", error)
            continue
        yield from frames


class _Pace:
    """HLS arrives in pieces of some seconds: each frame waits for its time."""

    _LONGEST_WAIT_S = 15.0  # more than that is a jump of the clock

    def __init__(self, newest: _Newest) -> None:
        self._newest = newest
        self._start_s: float | None = None  # of the stream's clock, by time.monotonic

    def wait_for(self, time_s: float | None) -> None:
        """Return when the frame of this time, in seconds, is due."""
        if time_s is None:
            return
        now = time.monotonic()
        if self._start_s is None or not 0 <= self._start_s + time_s - now < self._LONGEST_WAIT_S:
            self._start_s = now - time_s  # the first one, a late one, or a jump: now is its time
            return
        self._newest.wait(self._start_s + time_s - now)


def _open(live: LiveSource, timeout_s: float) -> Any:
    import av

    if live.camera:
        live = _device(live, av)
    # Not as `options`, which go to the streams too: where streams are found only later, as by RTMP,
    # PyAV 12 to 15 reads beyond them and crashes.
    return av.open(
        live.file,
        format=live.format,
        container_options=dict(live.options),
        timeout=(timeout_s, timeout_s),
    )


def _device(live: LiveSource, av: Any) -> LiveSource:
    """The camera as FFmpeg's device calls it. Raises SourceError where this PyAV has no such."""
    known = {name for names in av.formats_available for name in names.split(",")}
    if live.format not in known:
        message = f"this PyAV {av.__version__} was built without {live.format}, which reads cameras"
        raise SourceError(live.name, message, hint="pip install --force-reinstall av")
    if live.format != "dshow" or not str(live.file).isdecimal():
        return live
    listed = getattr(av, "enumerate_input_devices", None)  # DirectShow has names only
    if listed is None:
        raise SourceError(
            live.name, "this PyAV lists no cameras", hint="give its name: camera:NAME"
        )
    names = [device.name for device in listed("dshow") if "video" in device.media_types]
    if int(live.file) >= len(names):
        raise SourceError(live.name, f"no such camera; there are {len(names)}")
    return replace(live, file=f"video={names[int(live.file)]}")


def _av_error() -> type[Exception]:
    import av

    error: type[Exception] = av.FFmpegError
    return error


def _error(live: LiveSource, error: Exception, count: int, timeout_s: float) -> SourceError:
    """What went wrong, in words."""
    kind = type(error).__name__
    code = getattr(error, "errno", None)
    reason = str(getattr(error, "strerror", None) or error) or kind
    if isinstance(error, TimeoutError) or kind == "ExitError":  # FFmpeg's word for a timeout
        reason = f"nothing came for {timeout_s:g} s"
    if count:
        return SourceError(live.name, f"breaks after {count} frames: {reason}")
    if kind == "ProtocolNotFoundError":
        scheme = str(live.file).partition(":")[0]
        hint = "a PyAV built with it, or another protocol"
        return SourceError(live.name, f"this PyAV was built without {scheme}://", hint=hint)
    if isinstance(error, PermissionError):
        group = f"join the group that owns {live.file}, often 'video'" if live.camera else None
        return SourceError(live.name, "no permission to open it", hint=group)
    if code == errno.EBUSY:
        return SourceError(live.name, "another program is using it")
    return SourceError(live.name, f"cannot be opened: {reason}")
