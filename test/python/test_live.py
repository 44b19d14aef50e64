"""Cameras and streams: the newest frame, what is dropped, how they end, and how they are freed."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import live_fakes
import numpy as np
import pytest
from live_fakes import WAIT_S, FakeModel, counting, readers
from live_servers import (
    PACKET,
    http_server,
    motion_jpeg,
    page,
    picture,
    rtsp_camera,
    tcp_server,
    transport_stream,
)
from PIL import Image

import yolomlir.vision.live
from yolomlir.diagnostics import UserError
from yolomlir.vision.live import live_source
from yolomlir.vision.sources import Frame, file_stem, open_sources

av = pytest.importorskip("av", reason="PyAV is not installed")


@pytest.fixture
def plug_in(monkeypatch):
    """Makes a camera out of a script."""
    return partial(live_fakes.plug_in, monkeypatch)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in readers():
        thread.join(WAIT_S)
    assert readers() == []


# ---- the newest frame ---------------------------------------------------------------------------


def test_a_slow_reader_sees_the_newest_frame(plug_in) -> None:
    go_on, all_in, last = threading.Event(), threading.Event(), threading.Event()

    def script():
        yield 0
        go_on.wait(WAIT_S)
        yield from range(1, 10)
        all_in.set()  # asked for the next one: 9 has been put where the reader finds it
        last.wait(WAIT_S)
        yield 10

    camera = plug_in(script())
    with closing(open_sources("camera:0")) as frames:
        first = next(frames)
        assert (first.frame_number, first.time_s, first.index) == (0, 0.0, 0)
        go_on.set()
        assert all_in.wait(WAIT_S)
        second = next(frames)
        assert (second.name, second.path, second.index) == ("camera:0 frame 9", "camera:0", 1)
        assert second.time_s > 0
        np.testing.assert_array_equal(second.image, picture(9))
        last.set()
        assert next(frames).frame_number == 10
    assert camera.closed.is_set()
    assert readers() == []


def test_memory_stays_flat_while_nobody_reads(plug_in) -> None:
    all_in, done = threading.Event(), threading.Event()

    def script():
        yield from range(500)
        all_in.set()
        done.wait(WAIT_S)

    camera = plug_in(script())
    with closing(open_sources("camera:0")) as frames:
        next(frames)
        assert all_in.wait(WAIT_S)
        gc.collect()
        assert sum(ref() is not None for ref in camera.alive) <= 2  # the newest, and the loop's
        done.set()


def test_stride_counts_the_cameras_frames(plug_in) -> None:
    plug_in(counting())
    frames = open_sources("camera:0", video_stride=3, frames=4)
    assert all(frame.frame_number % 3 == 0 for frame in frames)


def test_frames_stops_and_the_next_source_follows(plug_in) -> None:
    camera = plug_in(counting())
    items = list(open_sources(["camera:0", picture(1)], frames=3))
    assert [frame.path for frame in items] == ["camera:0"] * 3 + [None]
    assert camera.closed.is_set()


def test_frames_of_a_video(tmp_path) -> None:
    path = tmp_path / "clip.ts"
    path.write_bytes(transport_stream(5))
    assert [f.frame_number for f in open_sources([path, path], frames=2)] == [0, 1, 0, 1]
    with pytest.raises(UserError, match="frames is 0; it must be at least 1"):
        open_sources(path, frames=0)


def test_an_error_of_the_readers_frees_the_camera(plug_in) -> None:
    camera = plug_in(counting())

    def read() -> None:
        with closing(open_sources("camera:0")) as frames:
            raise ZeroDivisionError(next(frames).name)

    with pytest.raises(ZeroDivisionError):
        read()
    assert camera.closed.is_set()


def test_a_silent_camera_is_given_up(plug_in, monkeypatch) -> None:
    """A driver that hangs ends no read, whatever FFmpeg was told about time."""
    done = threading.Event()
    monkeypatch.setattr(yolomlir.vision.live, "_JOIN_S", 0.01)

    def script():
        done.wait(WAIT_S)
        yield 0

    plug_in(script())
    (error,) = open_sources("camera:0", timeout_s=0.05)
    done.set()
    assert error.reason == "cannot be opened: nothing came for 0.05 s"


@pytest.mark.parametrize(
    ("frames", "error", "reason"),
    [
        (3, None, "the stream ended after 3 frames"),
        (0, None, "holds no frame"),
        (2, OSError(19, "No such device"), "breaks after 2 frames: No such device"),
    ],
)
def test_endings(plug_in, frames, error, reason) -> None:
    camera = plug_in([*range(frames), *([error] if error else [])])
    *seen, last = open_sources("camera:0")
    assert last.reason == reason
    assert last.path == "camera:0"
    if frames:
        # However many were dropped, the one that came last before the end is seen.
        assert seen[-1].frame_number == frames - 1
        np.testing.assert_array_equal(seen[-1].image, picture(frames - 1))
    assert camera.closed.is_set()


# ---- what names a camera or stream --------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="names of devices on Linux")
@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("camera:0", "/dev/video0"),
        ("CAMERA:12", "/dev/video12"),
        ("camera:/dev/v4l/by-id/x", "/dev/v4l/by-id/x"),
        ("/dev/video3", "/dev/video3"),
        (Path("/dev/video3"), "/dev/video3"),
        ("7", "/dev/video7"),
    ],
)
def test_cameras_are_opened_by_their_device(plug_in, source, file) -> None:
    camera = plug_in(counting())
    (frame,) = open_sources(source, frames=1, timeout_s=7)
    assert frame.name == f"{source} frame {frame.frame_number}"
    ((opened, options),) = camera.opened
    expected = {"format": "v4l2", "container_options": {}, "timeout": (7, 7)}
    assert (opened, options) == (file, expected)


@pytest.mark.parametrize(
    ("platform", "source", "file", "format"),
    [
        ("darwin", "camera:1", "1", "avfoundation"),
        ("darwin", "camera:FaceTime HD", "FaceTime HD", "avfoundation"),
        ("win32", "camera:USB Cam: two", "video=USB Cam: two", "dshow"),
        ("win32", "camera:1", "video=second", "dshow"),
    ],
)
def test_cameras_of_other_systems(plug_in, monkeypatch, platform, source, file, format) -> None:
    devices = [("mic", ["audio"]), ("first", ["video"]), ("second", ["video", "audio"])]
    listed = [SimpleNamespace(name=name, media_types=types) for name, types in devices]
    camera = plug_in(counting())
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(av, "enumerate_input_devices", lambda format: listed, raising=False)
    (frame,) = open_sources(source, frames=1)
    assert frame.path == source
    ((opened, options),) = camera.opened
    assert (opened, options["format"]) == (file, format)
    if platform == "win32":
        (error,) = open_sources("camera:2")
        assert error.reason == "no such camera; there are 2"


def test_a_number_that_is_a_files_name_is_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert live_source("0").camera
    Image.fromarray(picture(3)).save("0", "PNG")
    assert live_source("0") is None
    (frame,) = open_sources("0")
    np.testing.assert_array_equal(frame.image, picture(3))
    assert frame.frame_number is None


@pytest.mark.parametrize("source", ["100", "photo.jpg", "http://host/x.jpg", "rtsp:x", "", 0, b"0"])
def test_what_is_no_camera_or_stream(source) -> None:
    assert live_source(source) is None


def test_an_integer_is_told_how_to_name_a_camera() -> None:
    (error,) = open_sources([0])
    assert "a camera is 'camera:0'" in error.reason


@pytest.mark.skipif(sys.platform != "linux", reason="names of devices on Linux")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("camera:", "names no camera (camera:0 is the first one)"),
        ("camera:front", "names no camera (a number, camera:0, or /dev/video0)"),
        ("camera:99", "no camera /dev/video99"),
        ("/dev/video99", "no such camera"),
    ],
)
def test_wrong_names(source, reason) -> None:
    (error,) = open_sources(source)
    assert reason in error.reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "no permission to open it (join the group"),
        (OSError(16, "Device or resource busy"), "another program is using it"),
        (OSError(22, "Invalid argument"), "cannot be opened: Invalid argument"),
    ],
)
def test_a_camera_that_cannot_be_opened(plug_in, error, reason) -> None:
    plug_in([]).open_error = error
    (got,) = open_sources("/dev/video0")
    assert got.reason.startswith(reason)


def test_pyav_without_cameras_or_without_the_protocol(plug_in, monkeypatch) -> None:
    missing = av.error.ProtocolNotFoundError(1330794744, "Protocol not found")
    plug_in([]).open_error = missing
    (error,) = open_sources("srt://host:1")
    assert error.reason.startswith("this PyAV was built without srt://")
    monkeypatch.setattr(av, "formats_available", {"mp4"})
    (error,) = open_sources("camera:0")
    assert "was built without" in error.reason


@pytest.mark.parametrize("source", ["/dev/video0", "rtsp://host/x"])
def test_no_pyav(monkeypatch, source) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (error,) = open_sources(source)
    assert "pip install 'yolomlir[video]'" in error.reason


# ---- streams ------------------------------------------------------------------------------------


def test_a_stream_over_tcp_until_it_ends() -> None:
    with tcp_server(lambda connection: connection.sendall(transport_stream(8))) as port:
        *seen, last = open_sources(f"tcp://127.0.0.1:{port}", timeout_s=WAIT_S)
    numbers = [frame.frame_number for frame in seen]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 7
    for frame in seen:
        level = frame.frame_number * 8
        assert abs(int(frame.image.mean()) - level) <= 6
    assert last.reason == "the stream ended after 8 frames"


def test_a_stream_that_falls_silent() -> None:
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(transport_stream(8))
        done.wait(WAIT_S)

    with tcp_server(serve) as port:
        items = list(open_sources(f"tcp://127.0.0.1:{port}", timeout_s=0.5))
        done.set()
    assert isinstance(items[0], Frame)
    assert items[-1].reason.startswith("breaks after ")
    assert items[-1].reason.endswith(" frames: nothing came for 0.5 s")


def test_a_stream_that_is_damaged_goes_on() -> None:
    """A packet lost in the middle costs a picture, not the stream."""
    data = bytearray(transport_stream(30))
    middle = len(data) // 2 // PACKET * PACKET
    data[middle + 20 : middle + PACKET] = bytes(PACKET - 20)
    with tcp_server(lambda connection: connection.sendall(bytes(data))) as port:
        *seen, last = open_sources(f"tcp://127.0.0.1:{port}", timeout_s=WAIT_S)
    assert last.reason.startswith("the stream ended after ")
    assert abs(int(seen[-1].image.mean()) - 29 * 8) <= 6


def test_nobody_at_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (error,) = open_sources(f"rtsp://me:secret@127.0.0.1:{port}/x")
    assert error.path == f"rtsp://127.0.0.1:{port}/x"
    assert error.reason == "cannot be opened: Connection refused"


def test_a_stream_over_udp() -> None:
    done = threading.Event()
    data, step = transport_stream(25), 7 * PACKET

    def send(port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not done.is_set():
                for place in range(0, len(data), step):
                    sender.sendto(data[place : place + step], ("127.0.0.1", port))
                    done.wait(0.005)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sender = threading.Thread(target=send, args=(port,))
    sender.start()
    try:
        seen = list(open_sources(f"udp://127.0.0.1:{port}", frames=3, timeout_s=WAIT_S))
    finally:
        done.set()
        sender.join()
    assert [frame.image.shape for frame in seen] == [(64, 96, 3)] * 3


def test_an_rtsp_camera() -> None:
    done = threading.Event()
    with tcp_server(rtsp_camera(transport_stream(20), done)) as port:
        url = f"rtsp://127.0.0.1:{port}/front"
        (frame,) = open_sources(url.replace("//", "//me:secret@"), frames=1, timeout_s=WAIT_S)
        done.set()
    assert frame.name == f"{url} frame {frame.frame_number}"
    assert file_stem(frame.name) == f"front_{frame.frame_number:06d}"
    assert frame.image.shape == (64, 96, 3)


def test_a_camera_over_http() -> None:
    done = threading.Event()
    with http_server({"/video?x=1": motion_jpeg(5, done, login=True)}) as url:
        address = url.replace("//", "//me:secret%20word@") + "/video?x=1"
        frames = open_sources(address, timeout_s=WAIT_S)
        seen = [next(frames)]
        while seen[-1].frame_number < 4:
            seen.append(next(frames))
        frames.close()  # the server sends nothing more: closing must not wait for it
        assert readers() == []
        assert not done.is_set()
        done.set()
        (refused,) = open_sources(address.replace("secret", "wrong"))
    assert seen[-1].name == f"{url}/video?x=1 frame 4"
    np.testing.assert_allclose(seen[-1].image.mean(), 32, atol=4)
    assert (refused.path, "401" in refused.reason) == (f"{url}/video?x=1", True)


def test_a_camera_over_http_that_hangs_up() -> None:
    pages = {"/a": motion_jpeg(5, length=False), "/b": motion_jpeg(5), "/c": motion_jpeg(0)}
    with http_server(pages) as url:
        items = [list(open_sources(f"{url}{path}", timeout_s=WAIT_S)) for path in pages]
    for *seen, last in items[:2]:
        assert seen[-1].frame_number == 4
        assert last.reason == "the stream ended after 5 frames"
    ((error,), reason) = items[2], "cannot be opened: "
    assert error.reason.startswith(reason)


@contextmanager
def playlist(*, ended: bool) -> Iterator[str]:
    """HLS of three segments, ten frames each, twenty-five a second."""
    lines = ["#EXTM3U", "#EXT-X-VERSION:3", "#EXT-X-TARGETDURATION:1", "#EXT-X-MEDIA-SEQUENCE:0"]
    for number in range(3):
        lines += ["#EXT-X-DISCONTINUITY"] * bool(number) + ["#EXTINF:0.4,", f"{number}.ts"]
    text = "\n".join(lines + ["#EXT-X-ENDLIST"] * ended) + "\n"
    kind = "application/vnd.apple.mpegurl"
    pages = {f"/{n}.ts": page("video/mp2t", transport_stream(10, first=10 * n)) for n in range(3)}
    with http_server({"/live": page(kind, text.encode()), **pages}) as url:
        yield f"{url}/live"


def test_a_recorded_playlist_gives_every_frame() -> None:
    with playlist(ended=True) as url:
        seen = list(open_sources(url, timeout_s=WAIT_S))
    assert [frame.frame_number for frame in seen] == list(range(30))
    assert all(frame.arrived_s is None for frame in seen)


def test_a_live_playlist_is_paced() -> None:
    """Segments arrive at once; frames come at their time, as from a camera."""
    with playlist(ended=False) as url:
        seen = list(open_sources(url, frames=8, timeout_s=WAIT_S))
    assert all(frame.arrived_s is not None for frame in seen)
    first, last = seen[0], seen[-1]
    due_s = (min(last.frame_number, 9) - first.frame_number) / 25
    assert last.time_s - first.time_s >= due_s - 0.001


# ---- results ------------------------------------------------------------------------------------


def test_a_live_frame_waits_for_no_batch(plug_in) -> None:
    go_on = threading.Event()

    def script():
        for number in range(3):
            yield number
            go_on.wait(WAIT_S)  # the next frame comes when this one's result is there
            go_on.clear()

    plug_in(script())
    model = FakeModel(batch=4)
    with closing(model.predict_many(["camera:0"], frames=3)) as results:
        for number, result in enumerate(results):
            assert result.name == f"camera:0 frame {number}"
            assert result.frame_number == number
            assert result.latency_s > 0
            go_on.set()
    assert model.batches == [1, 1, 1]


def test_files_fill_batches_as_before(tmp_path) -> None:
    path = tmp_path / "clip.ts"
    path.write_bytes(transport_stream(5))
    model = FakeModel(batch=4)
    results = list(model.predict_many([path]))
    assert model.batches == [4, 1]
    assert [result.frame_number for result in results] == list(range(5))
    assert "latency_s" not in results[0].to_dict()


def test_predict_takes_one_frame_of_a_camera(plug_in) -> None:
    camera = plug_in(counting())
    assert len(FakeModel().predict("camera:0")) == 3
    assert camera.closed.is_set()
