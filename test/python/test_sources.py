"""Pictures in: every kind of source, and every way in which one can be bad."""

from __future__ import annotations

import io
import struct
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from yolomlir.diagnostics import UserError
from yolomlir.vision.decode import image_from_array, image_from_pil, read_image
from yolomlir.vision.sources import Frame, SourceError, file_stem, open_sources


def picture(height: int = 24, width: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def frames(sources, **options) -> list[Frame]:
    items = list(open_sources(sources, **options))
    assert all(isinstance(item, Frame) for item in items), items
    return items


def pixels(source, **options) -> np.ndarray:
    (frame,) = frames(source, **options)
    assert frame.image.dtype == np.uint8
    assert frame.image.ndim == 3
    assert frame.image.shape[2] == 3
    assert frame.image.flags.c_contiguous
    return frame.image


def error(source, **options) -> SourceError:
    (item,) = open_sources(source, **options)
    assert isinstance(item, SourceError), item
    return item


def save(path: Path, image: np.ndarray | Image.Image, **options) -> Path:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)
    return path


# --- Files, folders, globs ---


def test_file_path_and_string(tmp_path) -> None:
    path = save(tmp_path / "a.png", picture())
    for source in (path, str(path), [path], (str(path),), iter([path])):
        np.testing.assert_array_equal(pixels(source), picture())
    (frame,) = frames(path)
    assert (frame.name, frame.path, frame.index) == (str(path), str(path), 0)
    assert (frame.size, file_stem(frame.name)) == ((24, 32), "a")


def test_folder_in_natural_order_with_foreign_files(tmp_path) -> None:
    for name in ("b10.png", "b9.png", "a.JPG", "c.bmp"):
        save(tmp_path / name, picture())
    (tmp_path / "notes.txt").write_text("no picture, and not read")
    (tmp_path / "sub").mkdir()
    save(tmp_path / "sub" / "deeper.png", picture())
    assert [Path(f.name).name for f in frames(tmp_path)] == ["a.JPG", "b9.png", "b10.png", "c.bmp"]
    assert [f.index for f in frames([tmp_path, tmp_path])] == list(range(8))


def test_globs(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("x.png", "y.jpg", "sub/z.png"):
        save(tmp_path / name, picture())
    (tmp_path / "x.txt").write_text("text")
    assert [file_stem(f.name) for f in frames(str(tmp_path / "*"))] == ["x", "y"]
    assert sorted(file_stem(f.name) for f in frames(str(tmp_path / "**" / "*.png"))) == ["x", "z"]
    assert "no image or video matches" in error(str(tmp_path / "*.webp")).reason


def test_name_with_glob_characters_is_literal(tmp_path) -> None:
    path = save(tmp_path / "a[1].png", picture())
    save(tmp_path / "a1.png", picture(seed=1))
    np.testing.assert_array_equal(pixels(str(path)), picture())


def test_one_bad_file_does_not_stop_the_rest(tmp_path) -> None:
    """A folder as people have it: truncated, empty, text, bomb, CMYK, 1 x 1, good."""
    good = save(tmp_path / "0_good.jpg", picture(64, 64)).read_bytes()
    (tmp_path / "1_truncated.jpg").write_bytes(good[: len(good) // 2])
    (tmp_path / "2_empty.png").write_bytes(b"")
    (tmp_path / "3_text.jpg").write_text("this is not a picture\n" * 20)
    (tmp_path / "4_bomb.png").write_bytes(png_header(60_000, 60_000))
    save(tmp_path / "5_cmyk.jpg", Image.fromarray(picture(64, 64)).convert("CMYK"))
    save(tmp_path / "6_tiny.png", picture(1, 1))
    (tmp_path / "7_dangling.png").symlink_to(tmp_path / "nowhere.png")
    png = save(tmp_path / "8_cut.png", picture(64, 64))
    png.write_bytes(png.read_bytes()[:3000])
    save(tmp_path / "9_good.png", picture())
    items = list(open_sources([tmp_path, tmp_path / "missing.jpg"]))
    bad = [Path(i.path).name for i in items if isinstance(i, SourceError)]
    ok = [Path(i.name).name for i in items if isinstance(i, Frame)]
    assert ok == ["0_good.jpg", "5_cmyk.jpg", "6_tiny.png", "9_good.png"]
    assert bad == [
        *("1_truncated.jpg", "2_empty.png", "3_text.jpg", "4_bomb.png"),
        *("7_dangling.png", "8_cut.png", "missing.jpg"),
    ]
    assert [i.index for i in items if isinstance(i, Frame)] == [0, 1, 2, 3]
    reasons = {Path(i.path).name: i.reason for i in items if isinstance(i, SourceError)}
    assert "truncated" in reasons["1_truncated.jpg"]
    assert reasons["2_empty.png"] == "the file is empty"
    assert "not a picture" in reasons["3_text.jpg"]
    assert "decompression bomb" in reasons["4_bomb.png"]
    assert reasons["missing.jpg"] == "no such file"
    assert all("\n" not in str(i) for i in items if isinstance(i, SourceError))


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, about the damaged tags
def test_corrupted_bytes_never_escape_as_other_errors(tmp_path) -> None:
    """Random damage in each format gives a frame or a SourceError, nothing else."""
    rng = np.random.default_rng(0)
    for suffix in ("jpg", "png", "gif", "tif", "webp", "bmp", "ppm", "tga"):
        data = bytearray(save(tmp_path / f"x.{suffix}", picture()).read_bytes())
        for _ in range(25):
            damaged = bytearray(data)
            for place in rng.integers(0, min(len(data), 200), 6):
                damaged[place] = rng.integers(0, 256)
            path = tmp_path / f"damaged.{suffix}"
            path.write_bytes(damaged)
            (item,) = open_sources(path)
            assert isinstance(item, Frame | SourceError)


def test_folder_without_images(tmp_path) -> None:
    (tmp_path / "readme.txt").write_text("x")
    assert "without images" in error(tmp_path).reason


def test_text_file_as_image(tmp_path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("a.jpg\nb.jpg\n")
    assert "not a picture" in error(path).reason


@pytest.mark.parametrize("source", ["", "no\0byte.jpg", "x" * 5000, "missing/deep/a.jpg"])
def test_impossible_paths(source) -> None:
    assert isinstance(error(source), UserError)


def test_other_types_are_reported_in_place() -> None:
    items = list(open_sources([picture(), 7, None, picture()]))
    assert [isinstance(i, Frame) for i in items] == [True, False, False, True]
    assert "expected a path" in items[1].reason
    with pytest.raises(SourceError, match="int"):
        raise items[1]


# --- Formats ---


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "o.png", picture(20, 30), exif=exif)
    turned = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
        8: lambda a: np.rot90(a, 1),
    }[orientation](picture(20, 30))
    np.testing.assert_array_equal(pixels(path), turned)
    np.testing.assert_array_equal(pixels(Image.open(path)), turned)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_keeps_the_pixels(tmp_path) -> None:
    path = save(tmp_path / "x.jpg", picture(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff junk")
    assert pixels(path).shape == (24, 32, 3)


def test_gray_and_bilevel(tmp_path) -> None:
    gray = picture()[..., 0]
    np.testing.assert_array_equal(pixels(save(tmp_path / "g.png", gray)), np.dstack([gray] * 3))
    bits = Image.fromarray(gray).convert("1", dither=Image.Dither.NONE)
    expected = np.where(np.dstack([gray] * 3) >= 128, 255, 0)
    np.testing.assert_array_equal(pixels(save(tmp_path / "b.png", bits)), expected)


def test_palette_with_transparency(tmp_path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1]) if not hasattr(image, "frombytes") else image.frombytes(b"\0\1")
    path = save(tmp_path / "p.png", image, transparency=1)
    np.testing.assert_array_equal(pixels(path), [[[10, 20, 30], [200, 100, 50]]])


def test_alpha_is_dropped_in_files_images_and_arrays(tmp_path) -> None:
    rgba = np.dstack([picture(), np.full((24, 32), 3, np.uint8)])
    path = save(tmp_path / "a.png", rgba)
    for source in (path, Image.fromarray(rgba), rgba, rgba.astype(np.float32) / 255):
        np.testing.assert_array_equal(pixels(source), picture())
    np.testing.assert_array_equal(cv2.imread(str(path))[..., ::-1], picture())
    la = Image.merge("LA", [Image.fromarray(picture()[..., 0]), Image.new("L", (32, 24), 9)])
    np.testing.assert_array_equal(pixels(la), np.dstack([picture()[..., 0]] * 3))


def test_cmyk(tmp_path) -> None:
    flat = np.full((16, 16, 3), (200, 40, 90), np.uint8)
    path = save(tmp_path / "c.jpg", Image.fromarray(flat).convert("CMYK"), quality=100)
    assert np.abs(pixels(path).astype(int) - flat).max() <= 4


def test_16_bit_gray_file_image_and_array_agree_with_opencv(tmp_path) -> None:
    deep = np.random.default_rng(3).integers(0, 65536, (24, 32), dtype=np.uint16)
    path = tmp_path / "deep.png"
    assert cv2.imwrite(str(path), deep)
    expected = np.dstack([deep >> 8] * 3)
    sources = (path, deep, deep.astype(">u2"), Image.open(path), deep[..., None])
    for source in sources:
        np.testing.assert_array_equal(pixels(source), expected)
    tif = save(tmp_path / "deep.tif", Image.fromarray(deep))
    np.testing.assert_array_equal(pixels(tif), expected)


def test_16_bit_colour_file_and_array_agree_with_opencv(tmp_path) -> None:
    deep = np.random.default_rng(3).integers(0, 65536, (24, 32, 3), dtype=np.uint16)
    path = tmp_path / "deep.png"
    assert cv2.imwrite(str(path), deep[..., ::-1])
    expected = deep >> 8
    np.testing.assert_array_equal(pixels(path), expected)
    np.testing.assert_array_equal(pixels(deep), expected)
    np.testing.assert_array_equal(cv2.imread(str(path))[..., ::-1], expected)


def test_integer_and_float_images() -> None:
    wide = np.array([[0, 255, 256, 65535]], np.int32)
    np.testing.assert_array_equal(image_from_pil(Image.fromarray(wide))[0, :, 0], [0, 0, 1, 255])
    with pytest.raises(SourceError, match="16 bits"):
        image_from_pil(Image.fromarray(wide + 70000))
    unit = np.array([[0, 0.5, 1]], np.float32)
    np.testing.assert_array_equal(image_from_pil(Image.fromarray(unit))[0, :, 0], [0, 128, 255])


def test_animation_gives_its_first_picture(tmp_path) -> None:
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    for suffix in ("gif", "png", "webp", "tif"):
        extra = {"lossless": True} if suffix == "webp" else {}
        path = save(tmp_path / f"a.{suffix}", red, save_all=True, append_images=[blue], **extra)
        np.testing.assert_array_equal(pixels(path)[0, 0], [255, 0, 0])


def test_unusual_modes() -> None:
    image = Image.fromarray(picture())
    for mode in ("YCbCr", "HSV", "RGBX", "RGBa", "La"):
        source = image.convert({"RGBa": "RGBA", "La": "LA"}.get(mode, mode)).convert(mode)
        assert pixels(source).shape == (24, 32, 3)
    (lab,) = open_sources(Image.new("LAB", (4, 4)))  # Pillow before 12 cannot convert it
    assert isinstance(lab, Frame | SourceError)
    assert "0x4" in error(Image.new("RGB", (0, 4))).reason


def test_lazy_pil_image_of_a_truncated_file(tmp_path) -> None:
    path = save(tmp_path / "x.jpg", picture(64, 64))
    path.write_bytes(path.read_bytes()[:900])
    items = list(open_sources([Image.open(path), picture()]))
    assert isinstance(items[0], SourceError)
    assert str(path) == items[0].path
    assert isinstance(items[1], Frame)


def test_encoded_bytes() -> None:
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, "PNG")
    np.testing.assert_array_equal(pixels(file.getvalue()), picture())
    np.testing.assert_array_equal(pixels(bytearray(file.getvalue())), picture())
    assert error(b"").reason == "no bytes"
    assert "not a picture" in error(b"hello").reason


# --- Arrays ---


def test_file_image_and_array_agree_on_colour(tmp_path) -> None:
    path = save(tmp_path / "a.png", picture())
    for source in (path, Image.open(path), np.asarray(Image.open(path))):
        np.testing.assert_array_equal(pixels(source), picture())
        if not isinstance(source, np.ndarray):  # files know their order: color= is for arrays
            np.testing.assert_array_equal(pixels(source, color="bgr"), picture())
    np.testing.assert_array_equal(pixels(cv2.imread(str(path)), color="bgr"), picture())


@pytest.mark.parametrize("shape", [(24, 32), (24, 32, 1), (24, 32, 3), (24, 32, 4)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_array_shapes_and_types(shape, dtype, color) -> None:
    values = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        array = (values / 255).astype(kind)
    else:
        array = values.astype(kind) << (8 * (kind.itemsize - 1))
    got = pixels(array, color=color)
    expected = values if values.ndim == 3 else values[..., None]
    expected = expected[..., :3] if expected.shape[2] >= 3 else np.repeat(expected, 3, axis=2)
    if color == "bgr":
        expected = expected[..., ::-1]
    # float16 has 11 bits: v / 255 · 255 is within 0.07 of v, so rounding restores it.
    np.testing.assert_array_equal(got, expected)


def test_array_memory_orders() -> None:
    base = picture()
    for view in (np.asfortranarray(base), base[::-1], base[:, ::-2], base.transpose(1, 0, 2)):
        np.testing.assert_array_equal(pixels(view), view)
    frozen = base.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(pixels(frozen), base)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((3, 64, 64), np.uint8), "transpose"),
        (np.zeros((2, 64, 64, 3), np.uint8), "list"),
        (np.zeros((64, 64, 2), np.uint8), "C = 1, 3 or 4"),
        (np.zeros((64,), np.uint8), "H x W"),
        (np.zeros((0, 64, 3), np.uint8), "empty"),
        (np.zeros((64, 64, 3), np.int64), "int64"),
        (np.zeros((64, 64, 3), bool), "bool"),
        (np.full((64, 64, 3), 255.0), "astype"),
        (np.full((64, 64, 3), -0.5), "0..1"),
        (np.full((64, 64, 3), np.nan), "nan"),
        (np.full((64, 64), np.inf, np.float16), "inf"),
        (np.array([["a"]]), "<U1"),
    ],
)
def test_arrays_that_are_refused(array, reason) -> None:
    assert reason in error([array]).reason


def test_float_rounding_noise_is_accepted() -> None:
    np.testing.assert_array_equal(
        image_from_array(np.array([[-1e-7, 1 + 1e-7]]))[0, :, 0], [0, 255]
    )


def test_alpha_values_do_not_matter() -> None:
    rgba = np.dstack([picture() / 255, np.full((24, 32), np.nan)])
    np.testing.assert_array_equal(pixels(rgba), picture())


def test_bad_options_are_refused_before_reading() -> None:
    with pytest.raises(UserError, match="color='gbr'"):
        open_sources("x.jpg", color="gbr")
    with pytest.raises(UserError, match="video_stride"):
        open_sources("x.jpg", video_stride=0)


# --- URLs ---


@pytest.fixture
def server():
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, "PNG")
    png = file.getvalue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/missing"):
                self.send_error(404)
                return
            short = 100 if self.path.startswith("/broken") else 0
            body = b"<html>" if self.path.startswith("/page") else png
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) - short])

        def log_message(self, *args: object) -> None:
            return

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_urls(server) -> None:
    url = f"{server}/cat.png?size=[3]"
    np.testing.assert_array_equal(pixels(url), picture())
    (frame,) = frames(url)
    assert (frame.name, file_stem(frame.name)) == (url, "cat")
    assert "404" in error(f"{server}/missing.png").reason
    assert "connection broke" in error(f"{server}/broken.png").reason
    page = error(f"{server}/page.png")
    assert "not a picture" in page.reason
    assert page.path == f"{server}/page.png"
    assert [type(i) for i in open_sources([f"{server}/missing.png", url])] == [SourceError, Frame]


def test_server_that_is_not_there() -> None:
    assert "cannot be fetched" in error("http://127.0.0.1:9/x.png", timeout_s=2).reason
    assert "cannot be fetched" in error("http://[bad/x.png").reason


# --- Videos ---


def write_video(path: Path, count: int = 12, size: tuple[int, int] = (48, 64)) -> Path:
    """Frames whose brightness is ten times their number, the right half brighter by 100."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for number in range(count):
            image = np.full((*size, 3), number * 10, np.uint8)
            image[:, size[1] // 2 :] += 100
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_video(tmp_path) -> None:
    path = write_video(tmp_path / "clip.mp4")
    got = frames([path, picture()])
    assert [f.frame_number for f in got] == [*range(12), None]
    assert [f.index for f in got] == list(range(13))
    assert got[3].name == f"{path} frame 3"
    assert file_stem(got[3].name) == "clip_000003"
    assert got[3].time_s == pytest.approx(0.3)
    for number, frame in enumerate(got[:12]):
        assert frame.image.flags.c_contiguous
        assert abs(int(frame.image[24, 10].mean()) - number * 10) <= 6
        assert abs(int(frame.image[24, 50].mean()) - number * 10 - 100) <= 6


def test_video_stride(tmp_path) -> None:
    path = write_video(tmp_path / "clip.avi")
    assert [f.frame_number for f in frames(path, video_stride=5)] == [0, 5, 10]


def test_rotated_phone_video(tmp_path) -> None:
    """A quarter turn clockwise in the track header's matrix: right becomes bottom."""
    path = write_video(tmp_path / "phone.mp4", 2)
    av = sys.modules["av"]
    if not hasattr(av.VideoFrame, "rotation"):
        pytest.skip("this PyAV does not tell a frame's rotation")
    data = path.read_bytes()
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    place = data.index(identity, data.index(b"tkhd"))
    path.write_bytes(data[:place] + turned + data[place + len(identity) :])
    image = frames(path)[0].image
    assert image.shape == (64, 48, 3)
    assert image[50, 24].mean() - image[10, 24].mean() > 80


def test_broken_videos(tmp_path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    text = tmp_path / "text.mp4"
    text.write_text("no video " * 100)
    empty = tmp_path / "empty.mkv"
    empty.write_bytes(b"")
    items = list(open_sources([text, empty, tmp_path / "none.mov", picture()]))
    assert [type(i) for i in items] == [SourceError, SourceError, SourceError, Frame]
    assert "not a readable video" in items[0].reason
    assert items[2].reason == "no such file"


def test_video_without_pyav(tmp_path, monkeypatch) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "av", None)
    reason = error(path).reason
    assert "PyAV" in reason
    assert "yolomlir[video]" in reason


def test_memory_stays_flat_over_a_long_run(tmp_path) -> None:
    """Frames are not held: only one is alive at a time."""
    import gc
    import weakref

    path = save(tmp_path / "a.png", picture())
    alive: list[weakref.ref] = []
    for number, frame in enumerate(open_sources([path] * 50)):
        alive.append(weakref.ref(frame))
        if number % 16 == 0:
            gc.collect()
        assert sum(ref() is not None for ref in alive) <= 2


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a/b.c.jpg", "b.c"),
        ("C:\\photos\\x.png", "x"),
        ("image 3", "image_3"),
        ("clip.mp4 frame 7", "clip_000007"),
        ("https://host/a/cat.jpeg?size=3#top", "cat"),
        ("https://host/", "image"),
        ('a"b<c>.png', "a_b_c_"),
    ],
)
def test_file_stems(name: str, stem: str) -> None:
    assert file_stem(name) == stem


def test_read_image_raises() -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_image("nowhere.jpg")
