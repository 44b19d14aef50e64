"""The COCO protocol against pycocotools fed by a separate implementation of the protocol."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_protocol import (
    MODEL,
    ScriptedDetector,
    evaluated,
    expected_detections,
    make_dataset,
    noisy_rows,
    perfect_rows,
    pycocotools_figures,
    settings,
)
from PIL import Image

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.class_map import class_map
from yolomlir.evaluate.coco import evaluate, select_rows
from yolomlir.evaluate.datasets import load_dataset
from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS
from yolomlir.evaluate.scoring import FIGURES

# --- Figures ---


@pytest.mark.parametrize(("imgsz", "batch"), [((128, 128), 1), ((96, 160), 3), ((512, 512), 64)])
def test_figures_equal_pycocotools(all_categories: Path, imgsz, batch) -> None:
    detector = ScriptedDetector(all_categories, noisy_rows, imgsz, batch)
    result = evaluate(detector, load_dataset(all_categories), settings(), MODEL)
    expected = pycocotools_figures(all_categories, expected_detections(detector, COCO_CATEGORY_IDS))
    assert list(result.figures) == list(expected)
    assert 0.05 < expected["AP"] < 0.9  # the fixture tests something
    for name, value in expected.items():
        assert result.figures[name] == pytest.approx(value, abs=1e-6), name
    assert len(detector.seen) == len(set(detector.seen)) == 16
    assert max(detector.batches) == min(batch, 16)


def test_detections_equal_in_every_digit(all_categories: Path) -> None:
    detector = ScriptedDetector(all_categories, noisy_rows)
    result = evaluate(detector, load_dataset(all_categories), settings(), MODEL)
    expected = expected_detections(detector, COCO_CATEGORY_IDS)

    def key(d: dict[str, Any]) -> tuple:
        return d["image_id"], -d["score"], d["category_id"], d["bbox"]

    got, expected = sorted(result.detections, key=key), sorted(expected, key=key)
    assert len(got) == len(expected) > 300
    for ours, theirs in zip(got, expected, strict=True):
        assert ours["image_id"] == theirs["image_id"]
        assert ours["score"] == theirs["score"]
        # The product's boxes are float32: one step of the third decimal at 400 pixels.
        np.testing.assert_allclose(ours["bbox"], theirs["bbox"], rtol=0, atol=1.001e-3)
        assert all(round(v, 3) == v for v in ours["bbox"])
        assert round(ours["score"], 5) == ours["score"] > 0.001


def test_perfect_detector_has_ap_1(all_categories: Path) -> None:
    result = evaluated(all_categories, perfect_rows)
    for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100"):
        assert result.figures[name] == pytest.approx(1, abs=1e-9), name


def test_blind_detector_has_ap_0(all_categories: Path) -> None:
    blind = ScriptedDetector(all_categories, lambda *_: [])
    result = evaluate(blind, load_dataset(all_categories), settings(), MODEL)
    assert result.detections == []
    assert result.figures["AP"] == result.figures["AR100"] == 0


def test_shifted_boxes_lose(all_categories: Path) -> None:
    """A matcher that were lenient about position would not notice."""

    def shifted(objects, geometry, image_id):
        rows = np.array(perfect_rows(objects, geometry, image_id)).reshape(-1, 6)
        rows[:, [0, 2]] += (
            rows[:, [2]] - rows[:, [0]]
        ) * 0.6  # IoU 0.25, and 0.4 where it is clipped
        return rows

    result = evaluated(all_categories, shifted)
    assert result.figures["AP50"] < 0.15


def test_doubled_boxes_lose(all_categories: Path) -> None:
    """A matcher that were not one to one would reward them."""

    def doubled(objects, geometry, image_id):
        return [row for row in perfect_rows(objects, geometry, image_id) for _ in range(2)]

    result = evaluated(all_categories, doubled)
    assert result.figures["AP"] < 0.9


def test_at_most_max_det_and_strict_confidence() -> None:
    rows = np.zeros((5, 6), np.float32)
    rows[:, 4] = [0.2, np.float32(0.001), 0.5, 0.2, 0.0011]
    rows[:, 0] = range(5)
    # 0.001 in float32 is a little above 0.001: compared in float32 it is not above itself.
    assert select_rows(rows, 0.001, 300)[:, 0].tolist() == [0, 2, 3, 4]
    assert select_rows(rows, 0.001, 2)[:, 0].tolist() == [0, 2]
    assert select_rows(rows, 0.2, 300)[:, 0].tolist() == [2]


# --- Classes ---


def test_the_class_map_follows_the_category_ids(tmp_path) -> None:
    def dataset(ids: tuple[int, ...]):
        return load_dataset(make_dataset(tmp_path / str(len(list(tmp_path.iterdir()))), ids))

    assert class_map(dataset(COCO_CATEGORY_IDS), 80).ids == COCO_CATEGORY_IDS
    assert len(COCO_CATEGORY_IDS) == len(set(COCO_CATEGORY_IDS)) == 80
    assert not {12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91} & set(COCO_CATEGORY_IDS)
    assert class_map(dataset((1, 3, 90)), 80).name == "coco"
    assert class_map(dataset((0, 1, 2)), 3).ids == (0, 1, 2)
    assert class_map(dataset((1, 2, 3)), 3).ids == (1, 2, 3)
    assert class_map(dataset((1, 2, 3)), 3).name == "sorted"
    assert class_map(dataset(tuple(range(80))), 80).name == "identity"
    assert class_map(dataset((5, 6)), 7, "identity").ids == tuple(range(7))
    with pytest.raises(UserError, match="fit neither"):
        class_map(dataset((1, 2, 300)), 5)
    with pytest.raises(UserError, match="80 classes"):
        class_map(dataset((0, 1, 2)), 3, "coco")
    with pytest.raises(UserError, match="expected one of"):
        class_map(dataset((0, 1, 2)), 3, "guess")


@pytest.mark.parametrize("ids", [(0, 1, 2), (1, 2, 3), (7,), tuple(range(81))])
def test_figures_equal_pycocotools_for_other_class_counts(tmp_path, ids) -> None:
    folder = make_dataset(tmp_path, ids)

    def rows(objects, geometry, image_id):
        return noisy_rows(objects, geometry, image_id, len(ids), ids)

    detector = ScriptedDetector(folder, rows)
    model = replace(MODEL, classes=len(ids))
    result = evaluate(detector, load_dataset(folder), settings(), model)
    expected = pycocotools_figures(folder, expected_detections(detector, ids))
    assert result.figures == pytest.approx(expected, abs=1e-6)
    assert expected["AP"] > 0.01


def test_differing_names_are_reported(few_categories: Path) -> None:
    model = replace(MODEL, names=tuple(f"object {i}" for i in range(80)))
    result = evaluated(few_categories, noisy_rows, model)
    assert any("12 classes are named differently" in w for w in result.warnings)
    same = replace(MODEL, names=tuple(f"Thing {i}" for i in COCO_CATEGORY_IDS))
    result = evaluated(few_categories, noisy_rows, same)
    assert result.warnings == []


# --- Reports ---


def test_written_reports_can_be_read_and_scored_again(tmp_path, few_categories) -> None:
    detector = ScriptedDetector(few_categories, noisy_rows)
    result = evaluate(detector, load_dataset(few_categories), settings(), MODEL)
    result.write_json(tmp_path / "figures.json")
    result.write_detections(tmp_path / "detections.json")
    data = json.loads((tmp_path / "figures.json").read_text())
    assert list(data)[:12] == list(FIGURES)
    assert data["AP"] == result.figures["AP"]
    shown = {k: data["settings"][k] for k in ("imgsz", "letterbox", "confidence", "max_det")}
    assert shown == {"imgsz": [128, 128], "letterbox": "coco", "confidence": 0.001, "max_det": 300}
    assert data["settings"]["precision"] == "fp32"
    assert data["images"] == 16
    mean = np.mean([c["AP"] for c in data["classes"] if c["AP"] is not None])
    assert mean == pytest.approx(data["AP"], abs=1e-12)
    detections = json.loads((tmp_path / "detections.json").read_text())
    assert set(detections[0]) == {"image_id", "category_id", "bbox", "score"}
    rescored = pycocotools_figures(few_categories, detections)
    assert result.figures == pytest.approx(rescored, abs=1e-12)
    with pytest.raises(UserError, match="cannot be written"):
        result.write_json(tmp_path / "no" / "such" / "folder.json")


def test_printed_report_states_the_protocol(few_categories) -> None:
    from rich.console import Console

    result = evaluated(few_categories, noisy_rows)
    console = Console(file=io.StringIO(), width=300)
    result.print(console, by_class=True)
    text = console.file.getvalue()
    for part in (
        *("16 images", "imgsz 128x128", "letterbox coco", "confidence > 0.001", "max_det 300"),
        *("precision fp32", "class map coco", f"{result.figures['AP']:.4f}", "AR100", "thing 90"),
    ):
        assert part in text


def test_plots_are_pictures(tmp_path, few_categories) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = evaluated(few_categories, noisy_rows)
    for path in result.plot(tmp_path / "plots"):
        assert Image.open(path).size[0] > 500
