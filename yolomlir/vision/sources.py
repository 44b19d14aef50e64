"""Pictures in: files, folders, globs, URLs, PIL images, arrays, bytes, videos, cameras and streams.

`open_sources` reads lazily, so that memory stays flat over any number of pictures, and reports
what it cannot read in its place in the sequence: one bad file does not stop the others.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from PIL import Image

from yolomlir import __version__
from yolomlir.arguments import whole
from yolomlir.vision.decode import (
    Pixels,
    SourceError,
    check_color,
    image_from_array,
    image_from_bytes,
    image_from_pil,
    read_image,
    undecodable,
)
from yolomlir.vision.live import PROBE_OPTIONS, LiveSource, live_source, read_live, without_password

__all__ = [
    "IMAGE_SUFFIXES",
    "VIDEO_SUFFIXES",
    "Frame",
    "SourceError",
    "file_stem",
    "is_url",
    "list_files",
    "open_sources",
    "split_frame_number",
]

log = logging.getLogger(__name__)

# str, PathLike, bytes, PIL image, array, or an iterable of them, nested at will.
Source: TypeAlias = Any

# fmt: off
IMAGE_SUFFIXES = frozenset({
    ".avif", ".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm",
    ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
})
VIDEO_SUFFIXES = frozenset({
    ".3gp", ".asf", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg",
    ".mts", ".ogv", ".ts", ".webm", ".wmv",
})
_PLAYLIST_TYPES = frozenset({
    "application/vnd.apple.mpegurl", "application/x-mpegurl", "audio/mpegurl", "audio/x-mpegurl",
})
# fmt: on
MAX_DOWNLOAD_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture.

    image: uint8, H x W x 3, RGB, C-contiguous. name: what to call it in a message: the path or
    URL as given, "video.mp4 frame 12", or "image 3" for one from memory. path: the file or URL,
    None for memory. index: its number among the frames of this run, from 0. frame_number, time_s:
    for a video, the frame's number from 0 and its time from the start in seconds. Those of a camera
    or stream count what was dropped too, and are the time since its first frame. arrived_s: when
    a live frame was decoded, by `time.monotonic`; None for anything that waits to be read.
    """

    image: Pixels
    name: str
    path: str | None = None
    index: int = 0
    frame_number: int | None = None
    time_s: float | None = None
    arrived_s: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[0], self.image.shape[1]


Pictures: TypeAlias = Generator[Frame | SourceError, None, None]


def file_stem(name: str) -> str:
    """A file name without suffix for what is made from the frame of this name, safe anywhere.

    `a/bus.jpg` gives `bus`, `clip.mp4 frame 12` gives `clip_000012`.
    """
    name, number = split_frame_number(name)
    path = _url_path(name) if "://" in name else name
    stem = PurePosixPath(path.replace("\\", "/")).stem
    if number is not None:
        stem = f"{stem}_{number:06d}"
    return re.sub(r'[\x00-\x1f<>:"/\\|?* ]+', "_", stem)[:120] or "image"


def _url_path(url: str) -> str:
    """A URL's path; of a stream without one its host."""
    parts = urllib.parse.urlsplit(url)
    return parts.path if is_url(url) or parts.path.strip("/") else parts.netloc


def split_frame_number(name: str) -> tuple[str, int | None]:
    """A frame's name as the file's and, for one of a video, the frame's number."""
    match = re.fullmatch(r"(.+) frame (\d+)", name, re.DOTALL)
    return (match[1], int(match[2])) if match else (name, None)


def open_sources(
    sources: Source,
    *,
    color: str = "rgb",
    video_stride: int = 1,
    frames: int | None = None,
    timeout_s: float = 30.0,
) -> Pictures:
    """Every picture of `sources` in order, lazily; a `SourceError` in place of an unreadable one.

    sources: a path to an image or a video, a folder (its images and videos by name, not those of
    its subfolders), a glob (`**` descends), an http(s) URL, encoded bytes, a PIL image, an array
    (see `image_from_array`), a camera or stream (see `live_source`), or an iterable of such. color:
    the channel order of arrays; files and PIL images know theirs. video_stride: take every n-th
    frame of a video. frames: take this many of each video, camera or stream, and no more.
    timeout_s: how long a server may be silent.

    A camera or stream gives its newest frame each time; those that came in meanwhile are dropped.
    It goes on until it breaks, which is a SourceError, or until the iterator is closed, which ends
    its thread and frees the device.

    Raises UserError for a bad option, before anything is read.
    """
    check_color(color)
    for name, value in (("video_stride", video_stride), ("frames", frames)):
        if value is not None:
            whole(name, value, 1)
    return _number(_Reader(color, video_stride, frames, timeout_s).read(sources))


def is_url(source: object) -> bool:
    """Whether this is an http or https URL."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def list_files(source: str | os.PathLike[str]) -> list[Path]:
    """The image and video files that a path, folder or glob names, sorted by name.

    A path that exists is taken literally, whatever characters it has. Raises SourceError when
    there is none.
    """
    text = os.path.expanduser(os.fspath(source))
    path = Path(text)
    if path.is_dir():
        files = _media(path.iterdir())
        if not files:
            raise SourceError(source, "a folder without images or videos")
        return files
    if path.exists() or not glob.has_magic(text):
        return [path]
    files = _media(Path(match) for match in glob.iglob(text, recursive=True))
    if not files:
        raise SourceError(source, "no image or video matches this pattern")
    return files


def _media(paths: Iterable[Path]) -> list[Path]:
    known = IMAGE_SUFFIXES | VIDEO_SUFFIXES
    return sorted((p for p in paths if p.suffix.lower() in known and not p.is_dir()), key=_natural)


def _natural(path: Path) -> tuple[list[tuple[int, int, str]], str]:
    """A sorting key by which image2 comes before image10."""
    parts = re.findall(r"\d+|\D+", str(path))
    key = [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts]
    return key, str(path)


def _number(items: Pictures) -> Pictures:
    index = 0
    with closing(items):
        for item in items:
            if isinstance(item, SourceError):
                yield item
                continue
            yield replace(item, index=index)
            index += 1


@dataclass
class _Reader:
    color: str
    video_stride: int
    frames: int | None
    timeout_s: float
    in_memory: int = 0  # pictures from memory met so far, to name them

    def read(self, source: Source) -> Pictures:
        """The pictures of one source, or the error it gives."""
        try:
            yield from self._dispatch(source)
        except SourceError as error:
            yield error
        except OSError as error:
            name = source if isinstance(source, str | os.PathLike) else type(source).__name__
            yield SourceError(name, f"cannot be read: {error.strerror or error}")

    def _dispatch(self, source: Source) -> Pictures:
        if (live := live_source(source)) is not None:
            yield from self._read_live(live)
        elif isinstance(source, str) and is_url(source):
            yield from self._read_url(source)
        elif isinstance(source, str | os.PathLike):
            yield from self._read_files(os.fspath(source))
        elif isinstance(source, bytes | bytearray | memoryview):
            name = self._memory_name()
            yield Frame(image_from_bytes(bytes(source), name), name)
        elif isinstance(source, Image.Image):
            name = self._memory_name(getattr(source, "filename", ""))
            yield Frame(_from_pil(source, name), name)
        elif hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
            name = self._memory_name()
            yield Frame(image_from_array(source, name, self.color), name)
        elif isinstance(source, Iterable):
            for item in source:
                yield from self.read(item)
        else:
            hint = "expected a path, URL, bytes, PIL image, array, or a list of them"
            if isinstance(source, int):
                hint += f"; a camera is 'camera:{source}'"
            raise SourceError(self._memory_name(), f"a {type(source).__name__}", hint=hint)

    def _memory_name(self, filename: object = "") -> str:
        name = f"image {self.in_memory}"
        self.in_memory += 1
        return str(filename) if isinstance(filename, str | os.PathLike) and filename else name

    def _read_files(self, source: str | bytes) -> Pictures:
        if isinstance(source, bytes):
            source = os.fsdecode(source)
        if not source or "\0" in source:
            raise SourceError(repr(source), "not a path")
        for path in list_files(source):
            yield from self._read_file(path, str(path))

    def _read_file(self, path: Path, name: str) -> Pictures:
        if path.suffix.lower() not in VIDEO_SUFFIXES:
            try:
                frame = Frame(read_image(path), name, name)
            except SourceError as error:
                yield SourceError(name, error.message, hint=error.hint)
                return
            yield frame
            return
        from yolomlir.vision.video import read_video

        try:
            with closing(read_video(path, self.video_stride)) as video:
                for number, time_s, pixels in islice(video, self.frames):
                    yield Frame(pixels, f"{name} frame {number}", name, 0, number, time_s)
        except SourceError as error:
            yield SourceError(name, error.message, hint=error.hint)

    def _read_live(self, live: LiveSource) -> Pictures:
        name = live.name
        with closing(read_live(live, timeout_s=self.timeout_s, stride=self.video_stride)) as stream:
            for number, time_s, arrived_s, pixels in islice(stream, self.frames):
                title = f"{name} frame {number}"
                yield Frame(pixels, title, name, 0, number, time_s, arrived_s)

    def _read_url(self, url: str) -> Pictures:
        name = without_password(url)
        with _fetched(url, name, self.timeout_s) as response:
            kind = response.headers.get_content_type()
            if kind == "multipart/x-mixed-replace" and not response.isclosed():
                yield from self._read_motion_jpeg(response, name)
                return
            if kind not in _PLAYLIST_TYPES:
                yield from self._read_download(response, url, name)
                return
        yield from self._read_live(LiveSource(name, url, None, PROBE_OPTIONS))

    def _read_motion_jpeg(self, response: HTTPResponse, name: str) -> Pictures:
        """A camera that answers with one JPEG after another."""
        with closing(_AsItComes(response)) as file:
            live = LiveSource(name, file, "mpjpeg", PROBE_OPTIONS, on_close=file.interrupt)
            yield from self._read_live(live)

    def _read_download(self, response: HTTPResponse, url: str, name: str) -> Pictures:
        with TemporaryDirectory(prefix="yolomlir-") as folder:
            path = _download(response, Path(folder), url, name)
            response.close()
            yield from self._read_file(path, name)


class _AsItComes:
    """An answer's bytes as they come in, for FFmpeg: a read returns what is there."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        handle = response.fileno()  # of any family: only shutdown() is asked of it
        self._connection = socket.fromfd(handle, socket.AF_INET, socket.SOCK_STREAM)

    def read(self, size: int) -> bytes:
        """At least one byte, unless it ends."""
        return self._response.read1(size)

    def interrupt(self) -> None:
        """End a read in another thread, which holds a lock that closing would wait for."""
        with suppress(OSError):  # the server was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free this handle of the connection."""
        self._connection.close()


def _from_pil(image: Image.Image, name: str) -> Pixels:
    try:
        return image_from_pil(image, name)
    except SourceError:
        raise
    except Exception as error:  # a lazy image decodes its file now, which may raise anything
        raise undecodable(name, error) from error


@contextmanager
def _fetched(url: str, name: str, timeout_s: float) -> Iterator[HTTPResponse]:
    """The answer of an http(s) URL. Raises SourceError where there is none."""
    log.info("fetching %s", name)
    try:
        opener, bare = _opener(url)
        request = urllib.request.Request(bare, headers={"User-Agent": f"yolomlir/{__version__}"})
        response = opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise SourceError(name, f"the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise SourceError(name, f"cannot be fetched: {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise SourceError(name, f"cannot be fetched: {error or type(error).__name__}") from error
    with response:
        yield response


def _opener(url: str) -> tuple[urllib.request.OpenerDirector, str]:
    """What opens a URL, and the URL without user and password, which cameras often have."""
    user = urllib.parse.urlsplit(url)
    bare = without_password(url)
    if user.username is None:
        return urllib.request.build_opener(), bare
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    name, password = map(urllib.parse.unquote, (user.username, user.password or ""))
    passwords.add_password(None, bare, name, password)
    handlers = (urllib.request.HTTPDigestAuthHandler, urllib.request.HTTPBasicAuthHandler)
    return urllib.request.build_opener(*(make(passwords) for make in handlers)), bare


def _download(response: HTTPResponse, folder: Path, url: str, name: str) -> Path:
    """The file behind an answer, in `folder`. Raises SourceError."""
    suffix = PurePosixPath(urllib.parse.urlsplit(url).path).suffix.lower()
    if response.headers.get_content_type().startswith("video/") and suffix not in VIDEO_SUFFIXES:
        suffix = ".mp4"  # PyAV looks at the content; the suffix only says "video"
    path = folder / f"download{suffix}"
    try:
        _copy(response, path, name)
    except (OSError, HTTPException, ValueError) as error:
        raise SourceError(name, f"cannot be fetched: {error or type(error).__name__}") from error
    return path


def _copy(response: Any, path: Path, url: str) -> None:
    expected = response.headers.get("Content-Length", "")
    received = 0
    with path.open("wb") as file:
        while chunk := response.read(_CHUNK_BYTES):
            received += len(chunk)
            if received > MAX_DOWNLOAD_BYTES:
                raise SourceError(url, f"larger than {MAX_DOWNLOAD_BYTES >> 20} MiB")
            file.write(chunk)
    # read(n) ends silently when the connection breaks: the promised length tells.
    if expected.isdecimal() and received != int(expected):
        raise SourceError(url, f"the connection broke after {received} of {expected} bytes")
