"""Annotated pictures: boxes and labels drawn with Pillow, and saved without overwriting."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from yolomlir.diagnostics import UserError
from yolomlir.results import Result
from yolomlir.vision.decode import Pixels
from yolomlir.vision.sources import file_stem, is_url, split_frame_number

Rgb = tuple[int, int, int]

# Hues a golden angle apart never repeat, and neighbours in the class list differ most.
_GOLDEN_ANGLE = 0.61803398875
_JPEG_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"})


class Drawable(Protocol):
    """What is drawn. box: x1, y1, x2, y2 in pixels of the picture; score: 0..1."""

    @property
    def box(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def score(self) -> float: ...  # noqa: D102
    @property
    def class_id(self) -> int: ...  # noqa: D102
    @property
    def class_name(self) -> str: ...  # noqa: D102


def class_color(class_id: int) -> Rgb:
    """The colour of a class: the same in every picture, far from its neighbours'."""
    hue = (class_id * _GOLDEN_ANGLE + 0.08) % 1
    # Three rings of lightness keep hues apart that come close again after some classes.
    value = (1.0, 0.85, 0.7)[class_id % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def text_color(background: Rgb) -> Rgb:
    """Black or white, whichever has the higher WCAG 2 contrast on this background."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in background)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 1.05 * 0.05 else (255, 255, 255)


def draw_detections(
    pixels: Pixels,
    detections: Iterable[Drawable],
    *,
    line_width: int | None = None,
    font_size: int | None = None,
) -> Pixels:
    """A copy of an image, uint8 H x W x 3 RGB, with a labelled box for each detection.

    line_width and font_size, in pixels, follow the image's size when not given. The most certain
    detection is drawn last, above the others.
    """
    image = Image.fromarray(pixels)
    extent = (image.width + image.height) / 2
    width = line_width or max(round(extent * 0.003), 1)
    font = _font(font_size or min(max(round(extent * 0.018), 10), 80))
    draw = ImageDraw.Draw(image)
    for detection in sorted(detections, key=lambda d: d.score):
        _draw_one(draw, image.size, detection, width, font)
    return np.array(image)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # Without FreeType Pillow has one bitmap font of one size.
    return ImageFont.load_default(size if features.check("freetype2") else None)


def _draw_one(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    detection: Drawable,
    width: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    box = np.asarray(detection.box, np.float64)
    if box.shape != (4,) or not np.isfinite(box).all():
        raise UserError(f"a box of {list(detection.box)}: expected four finite numbers")
    x1, x2 = sorted(np.clip(box[[0, 2]], 0, size[0] - 1).round().astype(int).tolist())
    y1, y2 = sorted(np.clip(box[[1, 3]], 0, size[1] - 1).round().astype(int).tolist())
    color = class_color(detection.class_id)
    draw.rectangle((x1, y1, x2, y2), outline=color, width=width)
    _draw_label(draw, size, (x1, y1), f"{detection.class_name} {detection.score:.2f}", color, font)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corner: tuple[int, int],
    text: str,
    color: Rgb,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """A label above the box's upper left corner; inside where the picture ends, shifted to fit."""
    if not isinstance(font, ImageFont.FreeTypeFont):
        text = text.encode("latin-1", "replace").decode("latin-1")  # all that a bitmap font has
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    margin = max(round((bottom - top) * 0.2), 1)
    label_width, label_height = right - left + 2 * margin, bottom - top + 2 * margin
    x = max(min(corner[0], round(size[0] - label_width)), 0)
    y = corner[1] - label_height if corner[1] >= label_height else corner[1]
    draw.rectangle((x, y, x + label_width - 1, y + label_height - 1), fill=color)
    draw.text((x + margin - left, y + margin - top), text, fill=text_color(color), font=font)


def save_annotated(image: Pixels, name: str, folder: str | os.PathLike[str]) -> Path:
    """Save an image, uint8 H x W x 3 RGB, made from the frame `name`; returns the new file's path.

    Never overwrites: the second `bus.jpg` becomes `bus_2.jpg`. JPEG stays JPEG, as do frames of a
    video; the rest becomes PNG. Raises UserError when the folder cannot be written.
    """
    folder = Path(folder)
    suffix = ".jpg" if _is_photo(name) else ".png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _save_new(Image.fromarray(image), folder, file_stem(name), suffix)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot save the annotated picture: {reason}",
            where=folder,
            hint="name a folder that you may write to, with space left",
        ) from error


class AnnotatedImages:
    """A folder that annotated pictures are written to, one a result."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def save(self, result: Result) -> Path:
        """Draw a result's detections on its image and save it, as `save_annotated` does."""
        return save_annotated(draw_detections(result.image, result), result.name, self.folder)

    def __enter__(self) -> AnnotatedImages:
        return self

    def __exit__(self, *error: object) -> None:
        """Every picture is whole already."""


def _is_photo(name: str) -> bool:
    path, number = split_frame_number(name)
    path = urlsplit(path).path if is_url(path) else path
    return number is not None or Path(path).suffix.lower() in _JPEG_SUFFIXES


def _save_new(image: Image.Image, folder: Path, stem: str, suffix: str) -> Path:
    number = 1
    while True:
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}_{number}{suffix}")
        try:
            file = path.open("xb")  # exclusive: two processes cannot take the same name either
        except FileExistsError:
            number += 1
            continue
        try:
            with file:
                image.save(file, format="JPEG" if suffix == ".jpg" else "PNG", quality=92)
        except BaseException:
            path.unlink(missing_ok=True)  # half a picture, of a full disk or Ctrl-C
            raise
        return path
