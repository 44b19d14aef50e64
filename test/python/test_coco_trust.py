"""What would make a score wrong is said or refused: images, annotations, rows, settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coco_protocol import (
    MODEL,
    ScriptedDetector,
    evaluated,
    make_dataset,
    noisy_rows,
    perfect_rows,
    settings,
    truth_of,
)

from yolomlir.diagnostics import InternalError, UserError
from yolomlir.evaluate.coco import evaluate
from yolomlir.evaluate.datasets import load_coco, load_dataset


@pytest.mark.parametrize(
    ("parts", "suspicious"),
    [
        (("coco128", "images", "train2017"), True),
        (("coco8", "images", "val"), True),
        (("coco", "train2017"), True),
        (("mine", "train"), True),
        (("coco", "val2017"), False),
        (("train-station", "images", "val"), False),
    ],
)
def test_training_images_are_pointed_out(tmp_path, few_categories, parts, suspicious) -> None:
    images = tmp_path.joinpath(*parts)
    images.parent.mkdir(parents=True)
    images.symlink_to(few_categories / "val2017")
    dataset = load_coco(images, few_categories / "annotations" / "instances_val2017.json")
    assert any("training images" in w for w in dataset.warnings) == suspicious
    if parts[-1] == "train2017":
        result = evaluate(ScriptedDetector(few_categories, noisy_rows), dataset, settings(), MODEL)
        assert any("training images" in w for w in result.warnings)


def test_unreadable_image_is_reported_and_counts_as_missed(tmp_path) -> None:
    folder = make_dataset(tmp_path)
    detector = ScriptedDetector(folder, perfect_rows)
    broken = folder / "val2017" / "005.png"  # the one with 300 objects
    broken.write_bytes(broken.read_bytes()[:200])
    result = evaluate(detector, load_dataset(folder), settings(), MODEL)
    assert len(result.unreadable) == 1
    assert "005.png" in result.unreadable[0]
    assert result.images == 16
    assert result.figures["AR100"] < 0.9


def test_missing_images_are_refused_unless_a_subset_is_meant(tmp_path) -> None:
    folder = make_dataset(tmp_path)
    detector = ScriptedDetector(folder, perfect_rows)
    (folder / "val2017" / "005.png").unlink()
    dataset = load_dataset(folder)
    with pytest.raises(UserError, match=r"1 of 16 annotated images are missing.*--subset"):
        evaluate(detector, dataset, settings(), MODEL)
    result = evaluate(detector, dataset, settings(subset=True), MODEL)
    assert result.images == 15
    assert result.figures["AP"] == pytest.approx(1, abs=1e-9)
    assert any("subset" in w for w in result.warnings)


def test_annotated_size_that_differs_is_reported(tmp_path) -> None:
    folder = make_dataset(tmp_path)
    detector = ScriptedDetector(folder, perfect_rows)
    path = folder / "annotations" / "instances_val2017.json"
    truth = truth_of(folder)
    truth["images"][2]["width"] += 5
    path.write_text(json.dumps(truth))
    result = evaluate(detector, load_dataset(folder), settings(), MODEL)
    assert any("another size" in w for w in result.warnings)


@pytest.mark.parametrize(
    ("value", "column", "message"),
    [
        (np.nan, 4, "not finite"),
        (np.inf, 0, "not finite"),
        (80, 5, "class index"),
        (0.5, 5, "class"),
    ],
)
def test_broken_rows_are_a_bug_not_a_low_score(few_categories, value, column, message) -> None:
    def rows(*_):
        row = [1, 1, 20, 20, 0.9, 3]
        row[column] = value
        return [row]

    with pytest.raises(InternalError, match=message):
        evaluated(few_categories, rows)


def test_bad_settings_and_datasets_are_refused(tmp_path, few_categories) -> None:
    detector = ScriptedDetector(few_categories, noisy_rows)
    for change in ({"confidence": 1.5}, {"max_det": 0}, {"workers": 0}, {"letterbox": "rect"}):
        with pytest.raises(UserError, match="expected"):
            evaluate(detector, load_dataset(few_categories), settings(**change), MODEL)
    with pytest.raises(UserError, match="no annotations in this folder"):
        load_dataset(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_dataset(tmp_path / "nowhere")
    bad = tmp_path / "bad.json"
    for text, message in [
        ("{", "not JSON"),
        ("[]", "no list of images"),
        ('{"images": []}', "annotations"),
    ]:
        bad.write_text(text)
        with pytest.raises(UserError, match=message):
            load_coco(few_categories / "val2017", bad)
    truth = truth_of(few_categories)
    truth["annotations"].append(dict(truth["annotations"][0]))
    bad.write_text(json.dumps(truth))
    with pytest.raises(UserError, match="occurs 2 times"):
        load_coco(few_categories / "val2017", bad)
    bad.write_text(json.dumps({**truth, "annotations": [{"id": 1}]}))
    with pytest.raises(UserError, match="lacks or misuses 'image_id'"):
        load_coco(few_categories / "val2017", bad)
    bad.write_text(json.dumps({**truth, "annotations": []}))
    with pytest.raises(UserError, match="no object to find"):
        evaluate(detector, load_coco(few_categories / "val2017", bad), settings(), MODEL)
