"""Letterbox: an image of any size into the model's size, and boxes back into the image.

Two protocols, both resampled by OpenCV's INTER_LINEAR on uint8, which the published weights were
trained and scored with; a resampler that differs by one level gives other detections.

- `letterbox`, Ultralytics' predict: r = min(H / h, W / w); the new sides are round(side · r).
- `letterbox_coco`, its validation: the long side to the model's long side first, the other
  rounded up; then a letterbox that never enlarges.

Both pad in halves with gray 114; an odd pixel goes to the bottom or right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from yolomlir.diagnostics import UserError
from yolomlir.vision.decode import Pixels

PAD_VALUE = 114
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Letterbox:
    """How an image lies in the model's input. Sizes are (height, width) in pixels.

    steps: the sizes that it is resized to, one after the other; empty when it already fits.
    top, left: where it begins. Along an axis, input = original · ratio + offset holds exactly for
    coordinates that count from the image's edge, as those of boxes do: OpenCV maps pixel centres
    by the same line.
    """

    original: Size
    size: Size
    steps: tuple[Size, ...]
    top: int
    left: int

    @property
    def resized(self) -> Size:
        """The image's size within the input."""
        return self.steps[-1] if self.steps else self.original

    @property
    def ratio(self) -> tuple[float, float]:
        """Input pixels per original pixel, vertically and horizontally.

        They differ by the rounding of the sides. Using one ratio for both axes, as is often done,
        misplaces boxes by up to half an input pixel.
        """
        return self.resized[0] / self.original[0], self.resized[1] / self.original[1]

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Rows above and below, columns left and right: (top, bottom, left, right)."""
        bottom = self.size[0] - self.resized[0] - self.top
        right = self.size[1] - self.resized[1] - self.left
        return self.top, bottom, self.left, right

    def to_original(self, boxes: npt.ArrayLike, *, clip: bool = True) -> npt.NDArray[np.float32]:
        """Boxes of the model in pixels of the original image.

        boxes: [..., 4 or more], x1, y1, x2, y2 first; what follows (score, class) is kept. clip
        limits them to the image, so that one wholly in the padding becomes empty.
        Returns a new float32 array.
        """
        return self._map(boxes, self._scale(), self._offset(), clip)

    def from_original(self, boxes: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Boxes of the original image in pixels of the model's input: `to_original`'s inverse."""
        scale = self._scale()
        return self._map(boxes, 1 / scale, -self._offset() * scale, False)

    def _scale(self) -> npt.NDArray[np.float64]:
        y, x = self.ratio
        return np.array([1 / x, 1 / y, 1 / x, 1 / y])

    def _offset(self) -> npt.NDArray[np.float64]:
        return np.array([self.left, self.top, self.left, self.top], np.float64)

    def _map(
        self,
        boxes: npt.ArrayLike,
        scale: npt.NDArray[np.float64],
        offset: npt.NDArray[np.float64],
        clip: bool,
    ) -> npt.NDArray[np.float32]:
        rows = np.array(boxes, dtype=np.float32)
        if rows.size == 0 and rows.ndim == 1:
            return rows.reshape(0, 4)
        if rows.ndim < 1 or rows.shape[-1] < 4:
            raise UserError(f"boxes of shape {rows.shape}: expected [..., 4 or more]")
        # float64 within, so that a box survives the way there and back in float32's last digit.
        mapped = (rows[..., :4].astype(np.float64) - offset) * scale
        if clip:
            height, width = self.original
            mapped = np.clip(mapped, 0, [width, height, width, height])
        rows[..., :4] = mapped
        return rows


def plan_letterbox(original: Size, size: Size) -> Letterbox:
    """Where predict's letterbox puts an image of `original` in an input of `size`."""
    _check_sizes(original, size)
    return _centred(original, size, (), original, allow_upscale=True)


def plan_letterbox_coco(original: Size, size: Size) -> Letterbox:
    """Where the COCO protocol's letterbox puts an image of `original` in an input of `size`."""
    _check_sizes(original, size)
    long_side = max(size)
    ratio = long_side / max(original)
    if ratio == 1:
        return _centred(original, size, (), original, allow_upscale=False)
    height, width = (min(math.ceil(side * ratio), long_side) for side in original)
    return _centred(original, size, ((height, width),), (height, width), allow_upscale=False)


def _centred(
    original: Size, size: Size, steps: tuple[Size, ...], current: Size, *, allow_upscale: bool
) -> Letterbox:
    ratio = min(size[0] / current[0], size[1] / current[1])
    if not allow_upscale:
        ratio = min(ratio, 1.0)
    height, width = (max(round(side * ratio), 1) for side in current)
    if (height, width) != current:
        steps = (*steps, (height, width))
    # Halves of an odd sum: 0.1 makes the upper one round down and the lower one up.
    top = round((size[0] - height) / 2 - 0.1)
    left = round((size[1] - width) / 2 - 0.1)
    return Letterbox(original, size, steps, top, left)


def letterbox(image: Pixels, size: Size, *, out: Pixels | None = None) -> tuple[Pixels, Letterbox]:
    """An image, uint8 H x W x 3, in the model's input size, as predict does it.

    Returns the input, uint8 [*size, 3], and how the image lies in it. `out` receives the input
    without an allocation (a staging buffer, a slice of a batch); it is returned then.
    Raises UserError for another shape or type.
    """
    record = plan_letterbox(_size_of(image), size)
    return apply_letterbox(image, record, out=out), record


def letterbox_coco(
    image: Pixels, size: Size, *, out: Pixels | None = None
) -> tuple[Pixels, Letterbox]:
    """As `letterbox`, by the COCO protocol of Ultralytics' validation."""
    record = plan_letterbox_coco(_size_of(image), size)
    return apply_letterbox(image, record, out=out), record


def apply_letterbox(image: Pixels, record: Letterbox, *, out: Pixels | None = None) -> Pixels:
    """Resize and pad an image as `record` says. Raises UserError when they do not fit."""
    import cv2  # 140 ms and 17 MB: only where pictures are resized

    if _size_of(image) != record.original:
        raise UserError(f"an image of {_size_of(image)}: this letterbox is for {record.original}")
    shape = (*record.size, 3)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8:
        raise UserError(f"out is {out.dtype} {out.shape}: expected uint8 {shape}")
    pixels: npt.NDArray[Any] = np.ascontiguousarray(image)
    for height, width in record.steps:
        pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    top, bottom, left, right = record.pads
    inside_rows = slice(top, record.size[0] - bottom)
    out[:top] = PAD_VALUE
    out[inside_rows.stop :] = PAD_VALUE
    out[inside_rows, :left] = PAD_VALUE
    out[inside_rows, record.size[1] - right :] = PAD_VALUE
    out[inside_rows, left : record.size[1] - right] = pixels
    return out


def _size_of(image: Pixels) -> Size:
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise UserError(f"an image of {image.dtype} {image.shape}: expected uint8 H x W x 3")
    return image.shape[0], image.shape[1]


def _check_sizes(original: Size, size: Size) -> None:
    if min(original) < 1 or min(size) < 1:
        raise UserError(f"an image of {original} into {size}: every side must be at least 1")
