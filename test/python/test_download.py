"""Downloads from a local server: interruption, resuming, and what a server gets wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from pt_writer import PtWriter

from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.download import fetch_release, resolve_weights
from yolomlir.frontend.seeded import seeded_checkpoint


@cache
def release() -> bytes:
    """A YOLO26n as Ultralytics releases it: half precision, under `ema`."""
    import tempfile

    tensors = seeded_checkpoint("n", 3, 0).tensors
    half = {key.removeprefix("model."): t.astype(np.float16) for key, t in tensors.items()}
    writer = PtWriter()
    module = writer.module({f"model.{key}": tensor for key, tensor in half.items()})
    with tempfile.TemporaryDirectory() as folder:
        return writer.save(Path(folder) / "w.pt", {"model": None, "ema": module}).read_bytes()


@dataclass
class Server:
    """What the handler does, and what it was asked."""

    content: bytes = b""
    cut_at: list[int] = field(default_factory=list)
    """One a request: bytes after which the connection is dropped."""
    ranges: bool = True
    requests: list[str | None] = field(default_factory=list)
    status: int = 200
    url: str = ""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append(wanted)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(wanted[len("bytes=") : -1]) if wanted and state.ranges else 0
            size = len(state.content)
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            end = start + state.cut_at.pop(0) if state.cut_at else size
            self.wfile.write(state.content[start:end])

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    monkeypatch.setenv("YOLOMLIR_RELEASE_URL", state.url)
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "cache"))
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def part_of(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights" / "yolo26n.pt.part"


def test_fetched_once(server: Server, tmp_path: Path) -> None:
    server.content = release()
    path = resolve_weights("yolo26n")
    assert path == tmp_path / "cache" / "weights" / "yolo26n.pt"
    assert path.read_bytes() == release()
    assert resolve_weights("yolo26n.pt") == path
    assert server.requests == [None]
    assert not part_of(tmp_path).exists()


def test_a_file_of_that_name_goes_first(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("yolo26n.pt").write_bytes(b"mine")
    assert resolve_weights("yolo26n.pt") == Path("yolo26n.pt")
    assert server.requests == []


def test_an_interrupted_download_goes_on(server: Server) -> None:
    server.content = release()
    server.cut_at = [1_000_000, 700_000]
    assert fetch_release("n").read_bytes() == release()
    assert server.requests == [None, "bytes=1000000-", "bytes=1700000-"]


def test_a_second_run_resumes(server: Server, tmp_path: Path) -> None:
    server.content = release()
    server.cut_at = [500_000, 0]
    with pytest.raises(UserError, match="stopped after 500000 bytes, which are kept") as caught:
        fetch_release("n")
    assert "put it at" in str(caught.value)
    assert part_of(tmp_path).stat().st_size == 500_000
    server.requests.clear()
    assert fetch_release("n").read_bytes() == release()
    assert server.requests == ["bytes=500000-"]


def test_a_server_without_ranges_begins_again(server: Server, tmp_path: Path) -> None:
    server.content = release()
    server.ranges = False
    part_of(tmp_path).parent.mkdir(parents=True)
    part_of(tmp_path).write_bytes(b"old")
    assert fetch_release("n").read_bytes() == release()


def test_a_whole_part_is_taken(server: Server, tmp_path: Path) -> None:
    server.content = release()
    part_of(tmp_path).parent.mkdir(parents=True)
    part_of(tmp_path).write_bytes(release())
    assert fetch_release("n").read_bytes() == release()


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    server.content = release()
    part_of(tmp_path).parent.mkdir(parents=True)
    part_of(tmp_path).write_bytes(release() + b"x")
    assert fetch_release("n").read_bytes() == release()
    assert server.requests == [f"bytes={len(release()) + 1}-", None]


@pytest.mark.parametrize("content", [b"<html>sign in</html>" * 50, b"PK\x03\x04" + bytes(500)])
def test_something_else_is_refused_and_removed(
    server: Server, tmp_path: Path, content: bytes
) -> None:
    server.content = content
    with pytest.raises(UserError, match="what came is no readable checkpoint"):
        fetch_release("n")
    assert list((tmp_path / "cache" / "weights").iterdir()) == []


def test_another_scale_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = release()
    with pytest.raises(UserError, match="what came is a yolo26n, not a yolo26s"):
        fetch_release("s")
    assert list((tmp_path / "cache" / "weights").iterdir()) == []


def test_the_server_says_no(server: Server) -> None:
    server.status = 404
    with pytest.raises(UserError, match=r"the server answered 404 .*get the file elsewhere"):
        fetch_release("n")


def test_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:  # a port that nobody listens on
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("YOLOMLIR_RELEASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError) as caught:
        resolve_weights("yolo26x")
    text = str(caught.value)
    assert "refused" in text
    assert f"http://127.0.0.1:{port}/yolo26x.pt" in text
    assert f"put it at {tmp_path / 'weights' / 'yolo26x.pt'}" in text
    assert "\n" not in text
    assert capsys.readouterr() == ("", "")  # no trace of a progress bar that nobody saw


@pytest.mark.parametrize("name", ["yolo11n", "yolo26z", "best.pt", "folder/yolo26n.pt"])
def test_other_names_are_missing_files(name: str) -> None:
    with pytest.raises(UserError, match=r"none.ylm: no such file .*`yolomlir compile"):
        resolve_weights("none.ylm")
    with pytest.raises(UserError, match=r"no such file .*yolo26n, yolo26s"):
        resolve_weights(name)


def test_a_cache_that_cannot_be_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="cannot write to"):
        fetch_release("n")
    assert server.requests == []


def test_untrained_weights_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    path = resolve_weights("seeded:n")
    expected = seeded_checkpoint("n", 80, 0).tensors
    found = load_checkpoint(path).tensors
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    written = path.stat().st_mtime_ns
    assert resolve_weights("seeded:n") == path
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"unknown scale 'q'.*n, s, m"):
        resolve_weights("seeded:q")
    assert [p.name for p in tmp_path.rglob("*.safetensors")] == [path.name]


def test_untrained_weights_need_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written.*YOLOMLIR_CACHE_DIR"):
        resolve_weights("seeded:n")
