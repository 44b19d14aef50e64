"""Annotated pictures, and the packaged photo."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from yolomlir.diagnostics import UserError
from yolomlir.results import Detection, Result
from yolomlir.vision.decode import read_image
from yolomlir.vision.demo import demo_image
from yolomlir.vision.drawing import (
    AnnotatedImages,
    class_color,
    draw_detections,
    save_annotated,
    text_color,
)


@dataclass
class Found:
    box: tuple[float, float, float, float]
    score: float = 0.5
    class_id: int = 0
    class_name: str = "person"


def gray(height: int = 200, width: int = 300) -> np.ndarray:
    return np.full((height, width, 3), 128, np.uint8)


def test_box_edges_lie_on_the_box() -> None:
    image = gray()
    got = draw_detections(image, [Found((50, 60, 150, 160))], line_width=1)
    color = class_color(0)
    for y, x in [(60, 149), (160, 100), (110, 50), (110, 150)]:
        assert tuple(got[y, x]) == color
    assert tuple(got[110, 100]) == (128, 128, 128)
    assert (image == 128).all()  # the original is untouched


def test_label_is_drawn_within_the_picture() -> None:
    boxes = [(0, 0, 300, 200), (280, 5, 299, 20), (-40, -40, 900, 900), (299, 199, 299, 199)]
    for box in boxes:
        got = draw_detections(gray(), [Found(box, class_name="a long class name")])
        label = np.array(class_color(0))
        assert ((got == label).all(axis=-1)).sum() > 200  # the label's background
        assert got.shape == (200, 300, 3)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (3, 2), (4000, 3000)])
def test_any_image_size(size: tuple[int, int]) -> None:
    got = draw_detections(gray(*size), [Found((0, 0, size[1], size[0]))])
    assert got.shape == (*size, 3)
    assert (got != 128).any()


def test_line_and_font_grow_with_the_picture() -> None:
    def coloured(height: int, width: int) -> float:
        got = draw_detections(gray(height, width), [Found((0, 0, width, height))])
        return float((got != 128).any(axis=-1).mean())

    assert coloured(300, 400) / coloured(1500, 2000) < 2.0


def test_certain_detections_lie_above() -> None:
    low, high = Found((20, 50, 90, 90), 0.2, 1), Found((20, 50, 90, 90), 0.9, 2)
    for order in ([low, high], [high, low]):
        got = draw_detections(gray(), order, line_width=2)
        assert tuple(got[89, 60]) == class_color(2)


def test_colours_differ_and_labels_are_readable() -> None:
    colors = [class_color(i) for i in range(80)]
    assert len(set(colors)) == 80
    neighbours = np.abs(np.diff(np.array(colors, int), axis=0)).sum(axis=1)
    assert neighbours.min() > 100
    assert text_color((255, 255, 0)) == (0, 0, 0)
    assert text_color((0, 0, 128)) == (255, 255, 255)


def test_names_beyond_ascii() -> None:
    got = draw_detections(gray(), [Found((50, 60, 150, 160), class_name="Fußgänger 行人")])
    assert (got != 128).any()


def test_refuses_a_box_that_is_none() -> None:
    with pytest.raises(UserError, match="finite"):
        draw_detections(gray(), [Found((0, 0, float("nan"), 5))])


def test_saves_without_overwriting(tmp_path) -> None:
    image = gray()
    first = save_annotated(image, "a/bus.jpg", tmp_path / "out")
    second = save_annotated(image + 9, "b/bus.jpg", tmp_path / "out")
    assert [first.name, second.name] == ["bus.jpg", "bus_2.jpg"]
    assert abs(int(read_image(first)[0, 0, 0]) - 128) <= 2
    assert abs(int(read_image(second)[0, 0, 0]) - 137) <= 2


def test_saving_into_the_source_folder_keeps_the_source(tmp_path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(gray()).save(path)
    before = path.read_bytes()
    saved = save_annotated(gray(), str(path), tmp_path)
    assert path.read_bytes() == before
    assert saved.name == "x_2.png"


def test_suffix_follows_the_source(tmp_path) -> None:
    def saved(name: str) -> str:
        return save_annotated(gray(), name, tmp_path).name

    assert saved("clip.mp4 frame 7") == "clip_000007.jpg"
    assert saved("image 3") == "image_3.png"
    assert saved("https://host/a/cat.jpeg?size=3") == "cat.jpg"
    assert saved("scan.tif") == "scan.png"


def test_results_are_saved_with_their_boxes(tmp_path) -> None:
    found = Detection((50, 60, 150, 160), 0.5, 0, "person")
    with AnnotatedImages(tmp_path / "new") as folder:
        path = folder.save(Result("x.png", 300, 200, (found,), gray()))
    assert path == tmp_path / "new" / "x.png"
    assert tuple(read_image(path)[110, 50]) == class_color(0)


def test_unwritable_folder(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(UserError, match="cannot save"):
        save_annotated(gray(), "x.jpg", blocked)


def test_packaged_photo() -> None:
    path = demo_image()
    assert os.path.getsize(path) < 150_000
    assert read_image(path).shape == (512, 512, 3)
