"""Letterbox: geometry over thousands of sizes, and pixels bit for bit."""

from __future__ import annotations

import math
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from yolomlir.diagnostics import UserError
from yolomlir.vision.decode import read_image
from yolomlir.vision.letterbox import (
    Letterbox,
    apply_letterbox,
    letterbox,
    letterbox_coco,
    plan_letterbox,
    plan_letterbox_coco,
)

PLANS = [plan_letterbox, plan_letterbox_coco]
MODEL_SIZES = [(640, 640), (320, 640), (640, 384), (1280, 1280), (32, 32), (416, 416)]


def image_of(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 256, (*size, 3), dtype=np.uint8)


def random_sizes(count: int, largest: int = 6000) -> list[tuple[int, int]]:
    """Sides from 1 to `largest`, evenly on a logarithmic scale, so that small ones occur too."""
    sides = np.exp(np.random.default_rng(7).uniform(0, math.log(largest), (count, 2)))
    return [(int(h), int(w)) for h, w in sides]


# --- An independent model of OpenCV's INTER_LINEAR on uint8: 11-bit fixed-point weights ---


def linear_axis(source: int, target: int, *, clamp: bool) -> tuple[np.ndarray, ...]:
    scale = 1 / (target / source)
    position = ((np.arange(target) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(position).astype(int)
    weight = position - first.astype(np.float32)
    if clamp:
        weight[(first < 0) | (first >= source - 1)] = 0
    second = (first + 1).clip(0, source - 1)
    first = first.clip(0, source - 1)
    one = np.float32(2048)
    return first, second, np.rint((1 - weight) * one).astype(int), np.rint(weight * one).astype(int)


def resize_linear(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    height, width = image.shape[:2]
    wide = image.astype(int)
    if (height, width) == (2 * size[0], 2 * size[1]):  # OpenCV averages areas when halving
        quads = wide[::2, ::2] + wide[1::2, ::2] + wide[::2, 1::2] + wide[1::2, 1::2]
        return ((quads + 2) >> 2).astype(np.uint8)
    left, right, a0, a1 = linear_axis(width, size[1], clamp=True)
    top, bottom, b0, b1 = linear_axis(height, size[0], clamp=False)
    rows = (wide[:, left] * a0[:, None] + wide[:, right] * a1[:, None]) >> 4
    mixed = ((b0[:, None, None] * rows[top]) >> 16) + ((b1[:, None, None] * rows[bottom]) >> 16)
    return ((mixed + 2) >> 2).clip(0, 255).astype(np.uint8)


def reference_letterbox(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    height, width = image.shape[:2]
    r = min(size[0] / height, size[1] / width)
    new = (max(round(height * r), 1), max(round(width * r), 1))
    dh, dw = (size[0] - new[0]) / 2, (size[1] - new[1]) / 2
    inside = image if new == (height, width) else resize_linear(image, new)
    rows = (round(dh - 0.1), round(dh + 0.1))
    columns = (round(dw - 0.1), round(dw + 0.1))
    return np.pad(inside, (rows, columns, (0, 0)), constant_values=114)


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_pixels_equal_the_published_preprocessing(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    originals = [(1080, 810), (640, 640), (1280, 1280), (1, 1), (1, 700), (700, 1), (2, 3)]
    originals += random_sizes(12, 900)
    for original in originals:
        image = image_of(rng, original)
        result, record = letterbox(image, size)
        assert record == plan_letterbox(original, size)
        np.testing.assert_array_equal(result, reference_letterbox(image, size), str(original))


def test_opencv_resamples_as_the_model_says() -> None:
    rng = np.random.default_rng(5)
    for source, target in zip(random_sizes(60, 400), reversed(random_sizes(60, 400)), strict=True):
        image = image_of(rng, source)
        got = cv2.resize(image, target[::-1], interpolation=cv2.INTER_LINEAR)
        np.testing.assert_array_equal(got, resize_linear(image, target))


def test_bus_photo() -> None:
    record = plan_letterbox((1080, 810), (640, 640))
    assert record.resized == (640, 480)
    assert record.pads == (0, 0, 80, 80)
    box = record.from_original([[0, 0, 810, 1080]])
    np.testing.assert_array_equal(box, [[80, 0, 560, 640]])
    assert plan_letterbox((1080, 810), (640, 480)).pads == (0, 0, 0, 0)


def test_reference_input_bit_for_bit() -> None:
    folder = os.environ.get("YOLOMLIR_TEST_REFERENCE")
    if not folder:
        pytest.skip("YOLOMLIR_TEST_REFERENCE names no folder with the reference input")
    expected = np.load(Path(folder) / "input_bus_640.npy")
    got, _ = letterbox(read_image(Path(folder) / "bus.jpg"), (640, 640))
    normalised = (got.astype(np.float32) / 255).transpose(2, 0, 1)[None]
    np.testing.assert_array_equal(normalised, expected)


@pytest.mark.parametrize("plan", PLANS)
def test_boxes_come_back_over_5000_sizes(plan) -> None:
    """The way there is measured on the picture itself: where its edges lie in the input."""
    rng = np.random.default_rng(11)
    for number, original in enumerate(random_sizes(5000)):
        size = MODEL_SIZES[number % len(MODEL_SIZES)]
        record = plan(original, size)
        top, bottom, left, right = record.pads
        assert min(record.pads) >= 0
        assert 0 <= bottom - top <= 1
        assert 0 <= right - left <= 1
        height, width = original
        fractions = np.sort(rng.uniform(0, 1, (8, 2, 2)), axis=1).reshape(8, 4)
        boxes = fractions * [width, height, width, height]
        inner = [record.resized[1], record.resized[0]] * 2
        there = fractions * inner + [left, top, left, top]
        back = record.to_original(there.astype(np.float32))
        # float32's last digit at the model's size, in original pixels: far below half a pixel
        # for every size here but slivers enlarged or shrunk by thousands.
        shrink = max(original[0] / record.resized[0], original[1] / record.resized[1])
        tolerance = min(0.5, 2 * 1280 * np.finfo(np.float32).eps * shrink + 1e-3)
        assert np.abs(back - boxes).max() <= tolerance, (original, size)
        np.testing.assert_allclose(record.from_original(boxes), there, rtol=0, atol=1e-3)


@pytest.mark.parametrize("original", [(480, 640), (427, 640), (333, 500), (1200, 1600), (37, 1000)])
def test_drawn_rectangle_is_found_where_the_record_says(original: tuple[int, int]) -> None:
    """Through the pixels: a white rectangle's edges, half-way between black and white."""
    height, width = original
    x1, y1, x2, y2 = width // 4, height // 4, 3 * width // 4, 3 * height // 4
    image = np.zeros((height, width, 3), np.uint8)
    image[y1:y2, x1:x2] = 255
    for function in (letterbox, letterbox_coco):
        got, record = function(image, (640, 640))
        top, bottom, left, right = record.pads
        inside = got[top : 640 - bottom, left : 640 - right, 0].astype(float) / 255
        # The mass of an edge profile is its length, to the pixel of a bilinear ramp.
        row, column = inside[inside.shape[0] // 2], inside[:, inside.shape[1] // 2]
        first_x = left + np.argmax(row >= 0.5)
        first_y = top + np.argmax(column >= 0.5)
        measured = [first_x, first_y, first_x + row.sum(), first_y + column.sum()]
        expected = record.from_original([x1, y1, x2, y2])
        assert np.abs(np.array(measured) - expected).max() <= 1.0


def test_clip_keeps_what_follows_and_empties_padding() -> None:
    record = plan_letterbox((100, 200), (640, 640))
    rows = np.array([[-50, 0, 700, 640, 0.5, 3], [10, 0, 20, 100, 0.25, 7]], np.float32)
    before = rows.copy()
    back = record.to_original(rows)
    np.testing.assert_array_equal(back[0], [0, 0, 200, 100, 0.5, 3])
    assert back[1, 1] == back[1, 3] == 0
    np.testing.assert_array_equal(back[:, 4:], rows[:, 4:])
    np.testing.assert_array_equal(rows, before)
    assert record.to_original(rows, clip=False)[0, 0] < 0
    assert record.to_original([]).shape == (0, 4)
    assert record.to_original(np.zeros((0, 6))).shape == (0, 6)


def test_coco_protocol_geometry() -> None:
    # 333 x 500: long side to 640, the other ceil(426.24); nothing is left for the letterbox.
    assert plan_letterbox_coco((333, 500), (640, 640)).steps == ((427, 640),)
    assert plan_letterbox((333, 500), (640, 640)).steps == ((426, 640),)
    assert plan_letterbox_coco((427, 640), (640, 640)).steps == ()
    # A model that is not square: long side first, then shrunk to fit, never enlarged.
    assert plan_letterbox_coco((500, 400), (384, 640)).steps == ((640, 512), (384, 307))
    assert plan_letterbox_coco((640, 100), (640, 640)).pads == (0, 0, 270, 270)


def test_coco_pixels() -> None:
    image = image_of(np.random.default_rng(9), (333, 500))
    got, record = letterbox_coco(image, (640, 640))
    np.testing.assert_array_equal(got[106 : 106 + 427], resize_linear(image, (427, 640)))
    assert record.top == 106
    assert (got[:106] == 114).all()
    assert (got[533:] == 114).all()


def test_writes_into_a_batch() -> None:
    batch = np.zeros((2, 64, 96, 3), np.uint8)
    image = image_of(np.random.default_rng(1), (50, 20))
    result, record = letterbox(image, (64, 96), out=batch[1])
    assert np.shares_memory(result, batch)
    np.testing.assert_array_equal(batch[1], letterbox(image, (64, 96))[0])
    assert not batch[0].any()
    np.testing.assert_array_equal(apply_letterbox(image, record), batch[1])


def test_accepts_any_strides() -> None:
    image = image_of(np.random.default_rng(2), (60, 80))
    flipped = image[::-1, ::-1]
    expected = letterbox(flipped.copy(), (64, 64))[0]
    np.testing.assert_array_equal(letterbox(flipped, (64, 64))[0], expected)


def test_refuses_what_is_no_image() -> None:
    with pytest.raises(UserError, match="float32"):
        letterbox(np.zeros((4, 4, 3), np.float32), (32, 32))
    with pytest.raises(UserError, match="H x W x 3"):
        letterbox(np.zeros((4, 4), np.uint8), (32, 32))
    with pytest.raises(UserError, match="at least 1"):
        letterbox(np.zeros((0, 4, 3), np.uint8), (32, 32))
    with pytest.raises(UserError, match="out is"):
        letterbox(np.zeros((4, 4, 3), np.uint8), (32, 32), out=np.zeros((32, 31, 3), np.uint8))
    record = Letterbox((5, 5), (32, 32), (), 0, 0)
    with pytest.raises(UserError, match="letterbox is for"):
        apply_letterbox(np.zeros((4, 4, 3), np.uint8), record)
    with pytest.raises(UserError, match="4 or more"):
        record.to_original([1, 2, 3])
