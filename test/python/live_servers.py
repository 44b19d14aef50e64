"""Streams that the tests serve themselves: MPEG-TS over TCP, UDP, RTSP and HLS, MJPEG over HTTP."""

from __future__ import annotations

import io
import socket
import struct
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

PACKET = 188
"""Bytes of a packet of MPEG-TS; seven fit an Ethernet frame."""
LOGIN = "Basic " + b64encode(b"me:secret word").decode()


def picture(number: int, height: int = 64, width: int = 96) -> np.ndarray:
    """Gray, and brighter by eight with every picture."""
    return np.full((height, width, 3), min(number * 8, 255), np.uint8)


def transport_stream(count: int, rate: int = 25, first: int = 0) -> bytes:
    """Pictures `first`, `first` + 1, … as MPEG-TS, `rate` a second, each one a whole image."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        stream = container.add_stream("mpeg2video", rate=rate)
        stream.height, stream.width, _ = picture(0).shape
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 1
        for number in range(first, first + count):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@contextmanager
def tcp_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port whose one visitor is served by `serve`, in a thread."""

    def work() -> None:
        # The visitor, or the test, may go away at any time.
        with suppress(OSError), listener:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        with suppress(OSError):  # wakes one that still waits for a visitor
            socket.create_connection(("127.0.0.1", port), 1).close()
        thread.join(5)
    assert not thread.is_alive()


def rtsp_camera(data: bytes, done: threading.Event) -> Callable[[socket.socket], None]:
    """An RTSP camera that sends MPEG-TS in RTP through the RTSP connection, until `done`."""

    def serve(connection: socket.socket) -> None:
        file = connection.makefile("rb")
        while True:
            lines = iter(lambda: file.readline().decode().strip(), "")
            first, *rest = list(lines)
            headers = dict(line.split(": ", 1) for line in rest)
            method = first.split()[0]
            body = "v=0\r\ns=x\r\nm=video 0 RTP/AVP 33\r\na=control:*\r\n"
            answer = f"RTSP/1.0 200 OK\r\nCSeq: {headers['CSeq']}\r\nSession: 1\r\n"
            if method == "DESCRIBE":
                answer += f"Content-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
                answer += f"\r\n{body}"
            elif method == "SETUP":
                answer += f"Transport: {headers['Transport']}\r\n\r\n"
            else:
                answer += "\r\n"
            connection.sendall(answer.encode())
            if method == "PLAY":
                break
        step = 7 * PACKET
        for number, place in enumerate(range(0, len(data), step)):
            payload = data[place : place + step]
            rtp = struct.pack(">BBHII", 0x80, 33, number & 0xFFFF, number, 1) + payload
            connection.sendall(struct.pack(">BBH", 0x24, 0, len(rtp)) + rtp)
        done.wait(10)

    return serve


@contextmanager
def http_server(pages: dict[str, Callable[[BaseHTTPRequestHandler], None]]) -> Iterator[str]:
    """Answers by path; the URL without a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                pages[self.path](self)

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def page(kind: str, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """An ordinary answer."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def motion_jpeg(
    count: int, done: threading.Event | None = None, *, login: bool = False, length: bool = True
) -> Callable[[BaseHTTPRequestHandler], None]:
    """A camera that answers with one JPEG after another, and then waits for `done`.

    length: whether it tells each one's, which not all of them do.
    """

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if login and handler.headers.get("Authorization") != LOGIN:
            handler.send_response(401)
            handler.send_header("WWW-Authenticate", 'Basic realm="camera"')
            handler.end_headers()
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=next")
        handler.end_headers()
        for number in range(count):
            file = io.BytesIO()
            Image.fromarray(picture(number)).save(file, "JPEG", quality=95)
            body = file.getvalue()
            head = "--next\r\nContent-Type: image/jpeg\r\n"
            head += f"Content-Length: {len(body)}\r\n" if length else ""
            handler.wfile.write(head.encode() + b"\r\n" + body + b"\r\n")
        if done is not None:
            done.wait(10)

    return answer
