"""Pixels from files, PIL images and arrays: always uint8, H x W x 3, RGB, C-contiguous.

One set of rules, so that a file, the PIL image of it and the array of it give equal pixels:

- EXIF orientation is applied. Of animations and multi-page files the first picture is taken.
- Gray is repeated in three channels; palettes and CMYK are converted by Pillow.
- Alpha is dropped, not composited, as `cv2.imread` and `Image.convert("RGB")` do.
- 16-bit values keep their high byte (`>> 8`), as libpng and `cv2.imread` do.
- Floating-point values are 0..1, scaled by 255 and rounded; others are refused, never guessed.
- Arrays are RGB as Pillow's are, unless `color="bgr"` says that they come from OpenCV.
"""

from __future__ import annotations

import io
import logging
import os
import stat
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from yolomlir.diagnostics import UserError

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]

# A float image made by dividing and resampling may leave 0..1 by rounding, not by more.
_FLOAT_SLACK = 1e-3


class SourceError(UserError):
    """A picture that cannot be read: `path` (or name) and `reason`. Raised by this module, and
    yielded, not raised, by `open_sources`, so that one bad file does not stop the rest."""

    def __init__(self, path: object, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason, where=path, hint=hint)
        self.path = str(path)
        self.reason = reason if hint is None else f"{reason} ({hint})"


def read_image(path: str | os.PathLike[str]) -> Pixels:
    """The picture in a file, H x W x 3 RGB uint8.

    Raises SourceError for a file that is missing, empty, truncated, not a picture, or so large
    that it looks like a decompression bomb (Pillow's `Image.MAX_IMAGE_PIXELS`).
    """
    return _decode(os.fspath(path), path)


def image_from_bytes(data: bytes, name: str = "bytes") -> Pixels:
    """The picture in an encoded file's bytes (JPEG, PNG, …). Raises SourceError as `read_image`."""
    if not data:
        raise SourceError(name, "no bytes")
    return _decode(io.BytesIO(data), name)


def _decode(file: str | io.BytesIO, name: object) -> Pixels:
    # Pillow's plug-ins raise nearly anything on a damaged file (struct.error, KeyError,
    # IndexError, …). Every failure is reported with its reason, so nothing is swallowed here.
    try:
        if isinstance(file, str):
            file = _checked(file, name)
        with Image.open(file) as image:
            return image_from_pil(image, str(name))
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceError(name, "no such file") from error
    except IsADirectoryError as error:
        raise SourceError(name, "a folder, not a picture") from error
    except PermissionError as error:
        raise SourceError(name, "no permission to read it") from error
    except UnidentifiedImageError as error:
        message = "not a picture in a format that Pillow reads"
        raise SourceError(name, message, hint="JPEG, PNG, WebP, TIFF and others are") from error
    except MemoryError as error:
        raise SourceError(name, "not enough memory to decode it") from error
    except Exception as error:
        raise undecodable(name, error) from error


def _checked(path: str, name: object) -> str | io.BytesIO:
    """The file, or what a pipe holds, which Pillow could not read twice. Refuses an empty one."""
    status = os.stat(path)
    if stat.S_ISFIFO(status.st_mode):
        with open(path, "rb") as pipe:
            return io.BytesIO(pipe.read() or _refuse_empty(name))
    return path if status.st_size else _refuse_empty(name)


def _refuse_empty(name: object) -> NoReturn:
    raise SourceError(name, "the file is empty")


def undecodable(name: object, error: Exception) -> SourceError:
    """The SourceError for whatever a decoder raised about a picture."""
    large = isinstance(error, Image.DecompressionBombError)
    hint = "scale it down, or cut it into pieces" if large else None
    return SourceError(name, f"cannot be decoded: {_describe(error)}", hint=hint)


def _describe(error: Exception) -> str:
    plain = isinstance(error, OSError | ValueError | Image.DecompressionBombError)
    return str(error) if plain and str(error) else f"{type(error).__name__}: {error}"


def image_from_pil(image: Image.Image, name: str = "image") -> Pixels:
    """A PIL image of any mode as H x W x 3 RGB uint8, EXIF orientation applied.

    Raises SourceError for an image without pixels and for values out of range.
    Errors that Pillow raises while it decodes the file behind a lazy image pass through.
    """
    image.load()  # a lazy image decodes here: a truncated file fails before anything is converted
    image = _oriented(image, name)
    if 0 in image.size:
        raise SourceError(name, f"an image of {image.width}x{image.height} pixels")
    if image.mode.startswith("I"):
        return _three_channels(_integers_to_bytes(np.asarray(image), name))
    if image.mode == "F":
        return _three_channels(_floats_to_bytes(np.asarray(image), name))
    if image.mode == "La":  # gray with premultiplied alpha, which Pillow only turns into LA
        image = image.convert("LA")
    if image.mode != "RGB":
        image = image.convert("RGB")
    return np.array(image, dtype=np.uint8, order="C")


def _oriented(image: Image.Image, name: str) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:
        # EXIF is an attachment: pixels that decode are worth more than a broken tag beside them.
        log.warning("%s: EXIF data is damaged (%s); orientation not applied", name, error)
        return image


def image_from_array(array: Any, name: str = "array", color: str = "rgb") -> Pixels:
    """An array H x W, or H x W x C with C = 1, 3 or 4, as H x W x 3 RGB uint8.

    dtype: uint8; uint16 (0..65535); float16, float32 or float64 (0..1). `color` is the order of
    the first three channels. The result may share the array's memory where nothing had to change.
    Raises SourceError for other shapes and types, and for floats that are not finite or in 0..1.
    """
    check_color(color)
    try:
        pixels = np.asarray(array)
    except Exception as error:  # an __array__ method is the caller's code and may raise anything
        raise SourceError(name, f"cannot be read as an array: {_describe(error)}") from error
    _check_shape(pixels, name)
    # Channels are dropped before values are looked at: alpha may hold anything.
    if pixels.ndim == 3:
        pixels = pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., 0]
    if pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2:  # of either byte order
        pixels = _integers_to_bytes(pixels, name)
    elif pixels.dtype.kind == "f":
        pixels = _floats_to_bytes(pixels, name)
    elif pixels.dtype != np.uint8:
        raise SourceError(
            name,
            f"an array of {pixels.dtype}",
            hint="expected uint8 (0..255), uint16 (0..65535) or floats (0..1)",
        )
    if color == "bgr" and pixels.ndim == 3:
        pixels = pixels[..., ::-1]
    return _three_channels(pixels)


def check_color(color: str) -> None:
    """Raise UserError unless `color` is "rgb" or "bgr"."""
    if color not in ("rgb", "bgr"):
        raise UserError(f"color={color!r}: expected 'rgb' (Pillow's order) or 'bgr' (OpenCV's)")


def _check_shape(pixels: npt.NDArray[Any], name: str) -> None:
    shape = pixels.shape
    if pixels.ndim == 2 or (pixels.ndim == 3 and shape[2] in (1, 3, 4)):
        if 0 in shape:
            raise SourceError(name, f"an empty array of shape {shape}")
        return
    hint = "expected H x W, or H x W x C with C = 1, 3 or 4"
    if pixels.ndim == 3 and shape[0] in (1, 3, 4):
        hint = f"{hint}; this one looks like C x H x W: pass array.transpose(1, 2, 0)"
    elif pixels.ndim == 4:
        hint = f"{hint}; pass a batch as a list of images: list(array)"
    raise SourceError(name, f"an array of shape {shape}", hint=hint)


def _integers_to_bytes(values: npt.NDArray[Any], name: str) -> Pixels:
    """16-bit values (perhaps held in int32, as Pillow's mode I) to their high bytes."""
    if values.dtype.itemsize > 2 and (values.min() < 0 or values.max() > 0xFFFF):
        low, high = int(values.min()), int(values.max())
        raise SourceError(name, f"integer values {low}..{high}", hint="expected 16 bits, 0..65535")
    shifted: Pixels = (values >> 8).astype(np.uint8)
    return shifted


def _floats_to_bytes(values: npt.NDArray[Any], name: str) -> Pixels:
    # Largest and smallest are NaN when any value is, and a NaN compares as false.
    low, high = float(values.min()), float(values.max())
    if not (low >= -_FLOAT_SLACK and high <= 1 + _FLOAT_SLACK):
        raise SourceError(
            name,
            f"floating-point values {low:g}..{high:g}",
            hint="expected 0..1; for 0..255 pass array.astype(numpy.uint8)",
        )
    # float32 holds every half-integer up to 255 exactly; float16 would round the products.
    wide = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    scaled: Pixels = np.rint(np.clip(wide, 0, 1) * 255).astype(np.uint8)
    return scaled


def _three_channels(pixels: npt.NDArray[Any]) -> Pixels:
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    return np.ascontiguousarray(pixels, dtype=np.uint8)
