"""Datasets with YOLO's text labels: read, scored as COCO annotations are, refused by line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from coco_protocol import (
    MODEL,
    ScriptedDetector,
    expected_detections,
    make_dataset,
    noisy_rows,
    pycocotools_figures,
    settings,
    truth_of,
)
from PIL import Image

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.coco import evaluate
from yolomlir.evaluate.datasets import load_dataset
from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS


def make_yolo(folder: Path, coco: Path) -> Path:
    """The same images with text labels; classes are indices into the categories."""
    truth = truth_of(coco)
    ids = [c["id"] for c in truth["categories"]]
    for part in ("images", "labels"):
        (folder / part / "val").mkdir(parents=True)
    for record in truth["images"]:
        stem = f"{record['id']:012d}"
        source = coco / "val2017" / record["file_name"]
        (folder / "images" / "val" / f"{stem}.png").write_bytes(source.read_bytes())
        lines = []
        for a in truth["annotations"]:
            if a["image_id"] == record["id"] and not a["iscrowd"]:
                x, y, w, h = a["bbox"]
                size = record["width"], record["height"]
                centre = (x + w / 2) / size[0], (y + h / 2) / size[1], w / size[0], h / size[1]
                lines.append(f"{ids.index(a['category_id'])} " + " ".join(map(repr, centre)))
        if lines:
            (folder / "labels" / "val" / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    names = {i: c["name"] for i, c in enumerate(truth["categories"])}
    (folder / "data.yaml").write_text(
        json.dumps({"path": ".", "val": "images/val", "names": names})
    )
    return folder


def without_crowds(folder: Path, target: Path) -> Path:
    truth = truth_of(folder)
    for a in truth["annotations"]:
        a["area"] = a["bbox"][2] * a["bbox"][3]
    truth["annotations"] = [a for a in truth["annotations"] if not a["iscrowd"]]
    (target / "annotations").mkdir(parents=True)
    (target / "annotations" / "instances_val2017.json").write_text(json.dumps(truth))
    (target / "val2017").symlink_to(folder / "val2017")
    return target


@pytest.mark.parametrize("count", [80, 3])
def test_yolo_labels_score_as_coco_annotations_do(tmp_path, all_categories, count) -> None:
    ids = COCO_CATEGORY_IDS if count == 80 else (0, 1, 2)
    source = all_categories if count == 80 else make_dataset(tmp_path, ids)
    coco = without_crowds(source, tmp_path / "coco")
    yolo = make_yolo(tmp_path / "yolo", coco)

    def rows(objects, geometry, image_id):
        return noisy_rows(objects, geometry, image_id, count, ids)

    detector = ScriptedDetector(coco, rows)
    model = replace(MODEL, classes=count, names=tuple(f"thing {i}" for i in ids))
    expected = pycocotools_figures(coco, expected_detections(detector, ids))
    for path in (yolo, yolo / "data.yaml"):
        result = evaluate(detector, load_dataset(path), settings(), model)
        assert result.figures == pytest.approx(expected, abs=1e-6)
        assert result.warnings == []
    (yolo / "data.yaml").unlink()
    bare = load_dataset(yolo, classes=count, names=model.names)
    assert evaluate(detector, bare, settings(), model).figures == pytest.approx(expected, abs=1e-6)


def yolo_with_label(tmp_path: Path, label: str, yaml: str = "val: images\nnc: 3\n") -> Path:
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()
    Image.new("RGB", (100, 50)).save(tmp_path / "images" / "a.png")
    (tmp_path / "labels" / "a.txt").write_text(label)
    (tmp_path / "data.yaml").write_text(yaml)
    return tmp_path


def test_polygons_become_boxes_and_doubles_count_once(tmp_path) -> None:
    label = "1 0.1 0.2 0.5 0.2 0.3 0.6\n\n2 0.5 0.5 0.2 0.4\n2 0.5 0.5 0.2 0.4\n"
    dataset = load_dataset(yolo_with_label(tmp_path, label))
    first, second = dataset.ground_truth["annotations"]
    assert first["category_id"] == 1
    np.testing.assert_allclose(first["bbox"], [10, 10, 40, 20])
    np.testing.assert_allclose(second["bbox"], [40, 15, 20, 20])
    assert any("occur twice" in w for w in dataset.warnings)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("3 0.5 0.5 0.1 0.1", "class 3 of 3"),
        ("0 50 50 10 10", "outside 0..1"),
        ("0 0.5 0.5 0.1", "4 numbers"),
        ("person 0.5 0.5 0.1 0.1", "not numbers"),
        ("0 0.5 0.5 nan 0.1", "outside 0..1"),
    ],
)
def test_bad_labels_are_named_by_line(tmp_path, label, message) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_dataset(yolo_with_label(tmp_path, "0 0.5 0.5 0.1 0.1\n" + label))
    assert "a.txt:2" in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("- a\n- b\n", "not a dataset"),
        ("val: [", "not YAML"),
        ("val: images\n", "neither names nor nc"),
        ("nc: 3\n", "names no 'val'"),
        ("nc: 3\nval: nowhere\n", "neither in"),
        ("val: images\nnames: {1: a, 2: b}\n", "indices 0, 1"),
    ],
)
def test_a_bad_yaml_says_what_is_wrong(tmp_path, yaml, message) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset(yolo_with_label(tmp_path, "", yaml))


def test_a_yaml_that_validates_on_its_training_images_is_pointed_out(tmp_path) -> None:
    yaml = "train: images\nval: images\nnc: 3\n"
    dataset = load_dataset(yolo_with_label(tmp_path, "0 0.5 0.5 0.1 0.1", yaml))
    assert any("the same images" in w for w in dataset.warnings)
