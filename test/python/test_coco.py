"""The COCO protocol against pycocotools fed by a separate implementation of the protocol."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from yolomlir.diagnostics import InternalError, UserError
from yolomlir.evaluate.class_map import class_map
from yolomlir.evaluate.coco import (
    EvaluationSettings,
    ModelDescription,
    evaluate,
    select_rows,
)
from yolomlir.evaluate.datasets import load_coco, load_dataset
from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS
from yolomlir.evaluate.scoring import FIGURES
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.plan import Plan

MODEL = ModelDescription("fake", 80, "fp32", digest="abc")
IMGSZ = (128, 128)


# --- A generated dataset: crowds, empties, tiny objects, 300 objects, classes that never occur ---


def make_dataset(folder: Path, category_ids: tuple[int, ...] = COCO_CATEGORY_IDS) -> Path:
    rng = np.random.default_rng(2026)
    images, annotations = [], []
    folder = folder / "data"
    (folder / "val2017").mkdir(parents=True)
    (folder / "annotations").mkdir()
    counts = [0, 1, 5, 0, 8, 300, 12, 3, 0, 7, 20, 6, 2, 9, 4, 30]
    used = category_ids[: max(len(category_ids) * 3 // 4, 1)]
    for number, count in enumerate(counts):
        height, width = (int(v) for v in rng.integers(30, 420, 2))
        if number == 7:
            height, width = 1, 400
        image_id = 1000 - 7 * number  # not in the order of the names, nor of the file
        name = f"{number:03d}.png"
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "val2017" / name)
        record = {"id": image_id, "file_name": name, "width": width, "height": height}
        images.append(record)
        for k in range(count):
            largest = 3 if number == 6 else 1000
            w = float(rng.uniform(0.5, min(largest, width)))
            h = float(rng.uniform(0.5, min(largest, height)))
            x, y = float(rng.uniform(0, width - w)), float(rng.uniform(0, height - h))
            annotations.append(
                {
                    "id": 10 + len(annotations),
                    "image_id": image_id,
                    "category_id": int(rng.choice(used[:5] if number == 10 else used)),
                    "bbox": [round(v, 2) for v in (x, y, w, h)],
                    "area": w * h * float(rng.uniform(0.5, 1)),  # of a mask, as in COCO
                    "iscrowd": int(number in (4, 10, 15) and k % 4 == 0),
                    "segmentation": [],
                }
            )
    truth = {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": c, "name": f"thing {c}"} for c in category_ids],
    }
    (folder / "annotations" / "instances_val2017.json").write_text(json.dumps(truth))
    return folder


def truth_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "annotations" / "instances_val2017.json").read_text())


# --- The protocol once more, written from its description and sharing no code with the product ---


def independent_input(image: np.ndarray, imgsz: tuple[int, int]) -> tuple[np.ndarray, list[float]]:
    """The input, and [ratio x, ratio y, left, top]."""
    height, width = image.shape[:2]
    long_side = max(imgsz)
    r = long_side / max(height, width)
    h, w = height, width
    if r != 1:
        h, w = min(math.ceil(height * r), long_side), min(math.ceil(width * r), long_side)
        image = cv2.resize(image, (w, h), interpolation=cv2.INTER_LINEAR)
    shrink = min(imgsz[0] / h, imgsz[1] / w, 1.0)
    new_h, new_w = max(round(h * shrink), 1), max(round(w * shrink), 1)
    if (new_h, new_w) != (h, w):
        image = cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    top, left = (imgsz[0] - new_h) / 2, (imgsz[1] - new_w) / 2
    borders = round(top - 0.1), round(top + 0.1), round(left - 0.1), round(left + 0.1)
    padded = cv2.copyMakeBorder(image, *borders, cv2.BORDER_CONSTANT, value=(114, 114, 114))
    return padded, [new_w / width, new_h / height, borders[2], borders[0]]


class ScriptedDetector:
    """Gives prepared rows for the images that it knows, by their exact pixels."""

    def __init__(
        self,
        folder: Path,
        rows_of,
        imgsz: tuple[int, int] = IMGSZ,
        batch: int = 3,
        fail_after: int | None = None,
    ) -> None:
        self.imgsz, self.batch = imgsz, batch
        self.fail_after = fail_after
        self.seen: list[int] = []
        self.batches: list[int] = []
        self.rows: dict[int, np.ndarray] = {}
        self.geometry: dict[int, list[float]] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self._by_pixels: dict[bytes, int] = {}
        truth = truth_of(folder)
        for record in truth["images"]:
            path = folder / "val2017" / record["file_name"]
            image = np.asarray(Image.open(path).convert("RGB"))
            padded, self.geometry[record["id"]] = independent_input(image, imgsz)
            self.sizes[record["id"]] = image.shape[:2]
            self._by_pixels[padded.tobytes()] = record["id"]
            objects = [a for a in truth["annotations"] if a["image_id"] == record["id"]]
            rows = rows_of(objects, self.geometry[record["id"]], record["id"])
            self.rows[record["id"]] = np.asarray(rows, np.float32).reshape(-1, 6)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        assert images.dtype == np.uint8
        assert images.shape[1:] == (*self.imgsz, 3)
        assert 1 <= len(images) <= self.batch
        if self.fail_after is not None and len(self.batches) == self.fail_after:
            raise KeyboardInterrupt
        self.batches.append(len(images))
        ids = [self._by_pixels[image.tobytes()] for image in images]
        self.seen += ids
        longest = max([1, *(len(self.rows[i]) for i in ids)])
        out = np.zeros((len(images), longest, 6), np.float32)
        for row, image_id in zip(out, ids, strict=True):
            row[: len(self.rows[image_id])] = self.rows[image_id]
        return out


def to_input(box: list[float], geometry: list[float]) -> np.ndarray:
    x, y, w, h = box
    rx, ry, left, top = geometry
    return np.array([x * rx + left, y * ry + top, (x + w) * rx + left, (y + h) * ry + top])


def noisy_rows(objects, geometry, image_id, classes: int = 80, ids=COCO_CATEGORY_IDS):
    """Misses, jitter, doubles, wrong classes, inventions; tied and tiny scores; best first."""
    rng = np.random.default_rng(image_id)
    rows = []
    for a in objects:
        index = ids.index(a["category_id"])
        for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
            box = to_input(a["bbox"], geometry)
            box += rng.normal(0, 0.06, 4) * (box[2:] - box[:2]).repeat(2)
            kind = index if rng.random() < 0.9 else int(rng.integers(classes))
            rows.append([*box, round(float(rng.uniform(0, 1)), 1 + int(rng.integers(5))), kind])
    for _ in range(int(rng.integers(0, 60))):
        box = np.sort(rng.uniform(-20, 150, (2, 2)), axis=0).ravel()
        rows.append([*box, float(rng.uniform(0, 0.5)) ** 3, int(rng.integers(classes))])
    rows += [[1, 1, 50, 50, 0.001, 0], [1, 1, 50, 50, 0.0, 1]]
    return sorted(rows, key=lambda row: -np.float32(row[4]))


def perfect_rows(objects, geometry, image_id):
    return [
        [*to_input(a["bbox"], geometry), 0.9, COCO_CATEGORY_IDS.index(a["category_id"])]
        for a in objects
        if not a["iscrowd"]
    ]


def expected_detections(detector: ScriptedDetector, category_ids) -> list[dict[str, Any]]:
    found = []
    for image_id, rows in detector.rows.items():
        height, width = detector.sizes[image_id]
        rx, ry, left, top = detector.geometry[image_id]
        for x1, y1, x2, y2, confidence, kind in rows[rows[:, 4] > 0.001][:300].tolist():
            x1, x2 = (min(max((x - left) / rx, 0), width) for x in (x1, x2))
            y1, y2 = (min(max((y - top) / ry, 0), height) for y in (y1, y2))
            box = [round(v, 3) for v in (x1, y1, x2 - x1, y2 - y1)]
            category = category_ids[int(kind)]
            entry = {"image_id": image_id, "category_id": category, "bbox": box}
            found.append({**entry, "score": round(confidence, 5)})
    return found


def pycocotools_figures(folder: Path, detections: list[dict[str, Any]]) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(folder / "annotations" / "instances_val2017.json"))
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(FIGURES, evaluation.stats, strict=True))


def settings(**changes: Any) -> EvaluationSettings:
    return replace(EvaluationSettings(workers=2), **changes)


@pytest.fixture(scope="module")
def full_folder(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A few of COCO's categories, for what does not depend on their number: scoring is slow."""
    return make_dataset(tmp_path_factory.mktemp("few"), (*range(1, 12), 90))


# --- Figures ---


@pytest.mark.parametrize(("imgsz", "batch"), [((128, 128), 1), ((96, 160), 3), ((512, 512), 64)])
def test_figures_equal_pycocotools(full_folder: Path, imgsz, batch) -> None:
    detector = ScriptedDetector(full_folder, noisy_rows, imgsz, batch)
    result = evaluate(detector, load_dataset(full_folder), settings(), MODEL)
    expected = pycocotools_figures(full_folder, expected_detections(detector, COCO_CATEGORY_IDS))
    assert list(result.figures) == list(expected)
    assert 0.05 < expected["AP"] < 0.9  # the fixture tests something
    for name, value in expected.items():
        assert result.figures[name] == pytest.approx(value, abs=1e-6), name
    assert len(detector.seen) == len(set(detector.seen)) == 16
    assert max(detector.batches) == min(batch, 16)


def test_detections_equal_in_every_digit(full_folder: Path) -> None:
    detector = ScriptedDetector(full_folder, noisy_rows)
    result = evaluate(detector, load_dataset(full_folder), settings(), MODEL)
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


def test_perfect_detector_has_ap_1(full_folder: Path) -> None:
    result = evaluate(
        ScriptedDetector(full_folder, perfect_rows), load_dataset(full_folder), settings(), MODEL
    )
    for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR100"):
        assert result.figures[name] == pytest.approx(1, abs=1e-9), name


def test_blind_detector_has_ap_0(full_folder: Path) -> None:
    blind = ScriptedDetector(full_folder, lambda *_: [])
    result = evaluate(blind, load_dataset(full_folder), settings(), MODEL)
    assert result.detections == []
    assert result.figures["AP"] == result.figures["AR100"] == 0


def test_shifted_boxes_lose(full_folder: Path) -> None:
    """A matcher that were lenient about position would not notice."""

    def shifted(objects, geometry, image_id):
        rows = np.array(perfect_rows(objects, geometry, image_id)).reshape(-1, 6)
        rows[:, [0, 2]] += (
            rows[:, [2]] - rows[:, [0]]
        ) * 0.6  # IoU 0.25, and 0.4 where it is clipped
        return rows

    result = evaluate(
        ScriptedDetector(full_folder, shifted), load_dataset(full_folder), settings(), MODEL
    )
    assert result.figures["AP50"] < 0.15


def test_doubled_boxes_lose(full_folder: Path) -> None:
    """A matcher that were not one to one would reward them."""

    def doubled(objects, geometry, image_id):
        return [row for row in perfect_rows(objects, geometry, image_id) for _ in range(2)]

    result = evaluate(
        ScriptedDetector(full_folder, doubled), load_dataset(full_folder), settings(), MODEL
    )
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


def test_class_maps(tmp_path) -> None:
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
def test_other_class_counts(tmp_path, ids) -> None:
    folder = make_dataset(tmp_path, ids)

    def rows(objects, geometry, image_id):
        return noisy_rows(objects, geometry, image_id, len(ids), ids)

    detector = ScriptedDetector(folder, rows)
    model = replace(MODEL, classes=len(ids))
    result = evaluate(detector, load_dataset(folder), settings(), model)
    expected = pycocotools_figures(folder, expected_detections(detector, ids))
    assert result.figures == pytest.approx(expected, abs=1e-6)
    assert expected["AP"] > 0.01


def test_differing_names_are_reported(folder: Path) -> None:
    model = replace(MODEL, names=tuple(f"object {i}" for i in range(80)))
    result = evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), settings(), model)
    assert any("12 classes are named differently" in w for w in result.warnings)
    same = replace(MODEL, names=tuple(f"Thing {i}" for i in COCO_CATEGORY_IDS))
    result = evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), settings(), same)
    assert result.warnings == []


# --- YOLO labels ---


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
def test_yolo_labels_score_as_coco_annotations_do(tmp_path, full_folder, count) -> None:
    ids = COCO_CATEGORY_IDS if count == 80 else (0, 1, 2)
    source = full_folder if count == 80 else make_dataset(tmp_path, ids)
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


def test_yolo_polygons_and_doubles(tmp_path) -> None:
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
def test_bad_yaml(tmp_path, yaml, message) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset(yolo_with_label(tmp_path, "", yaml))


# --- Trust ---


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
def test_training_images_are_pointed_out(tmp_path, folder, parts, suspicious) -> None:
    images = tmp_path.joinpath(*parts)
    images.parent.mkdir(parents=True)
    images.symlink_to(folder / "val2017")
    dataset = load_coco(images, folder / "annotations" / "instances_val2017.json")
    assert any("training images" in w for w in dataset.warnings) == suspicious
    if parts[-1] == "train2017":
        result = evaluate(ScriptedDetector(folder, noisy_rows), dataset, settings(), MODEL)
        assert any("training images" in w for w in result.warnings)


def test_training_yaml(tmp_path) -> None:
    yaml = "train: images\nval: images\nnc: 3\n"
    dataset = load_dataset(yolo_with_label(tmp_path, "0 0.5 0.5 0.1 0.1", yaml))
    assert any("the same images" in w for w in dataset.warnings)


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
def test_broken_rows_are_a_bug_not_a_low_score(folder, value, column, message) -> None:
    def rows(*_):
        row = [1, 1, 20, 20, 0.9, 3]
        row[column] = value
        return [row]

    with pytest.raises(InternalError, match=message):
        evaluate(ScriptedDetector(folder, rows), load_dataset(folder), settings(), MODEL)


def test_bad_settings_and_datasets(tmp_path, folder) -> None:
    detector = ScriptedDetector(folder, noisy_rows)
    for change in ({"confidence": 1.5}, {"max_det": 0}, {"workers": 0}, {"letterbox": "rect"}):
        with pytest.raises(UserError, match="expected"):
            evaluate(detector, load_dataset(folder), settings(**change), MODEL)
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
            load_coco(folder / "val2017", bad)
    truth = truth_of(folder)
    truth["annotations"].append(dict(truth["annotations"][0]))
    bad.write_text(json.dumps(truth))
    with pytest.raises(UserError, match="occurs 2 times"):
        load_coco(folder / "val2017", bad)
    bad.write_text(json.dumps({**truth, "annotations": [{"id": 1}]}))
    with pytest.raises(UserError, match="lacks or misuses 'image_id'"):
        load_coco(folder / "val2017", bad)
    bad.write_text(json.dumps({**truth, "annotations": []}))
    with pytest.raises(UserError, match="no object to find"):
        evaluate(detector, load_coco(folder / "val2017", bad), settings(), MODEL)


# --- Resuming ---


def test_interrupted_run_goes_on(tmp_path, folder) -> None:
    journal = tmp_path / "cache" / "journal.jsonl"
    whole = evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), settings(), MODEL)
    first = ScriptedDetector(folder, noisy_rows, fail_after=3)
    options = settings(journal=journal)
    with pytest.raises(KeyboardInterrupt):
        evaluate(first, load_dataset(folder), options, MODEL)
    assert len(first.seen) == 9
    # As a kill leaves it: the last line cut off.
    journal.write_bytes(journal.read_bytes()[:-20])
    second = ScriptedDetector(folder, noisy_rows)
    progress: list[tuple[str, int, int]] = []
    result = evaluate(
        second, load_dataset(folder), options, MODEL, progress=lambda *a: progress.append(a)
    )
    assert len(second.seen) == 16 - 8
    assert result.resumed == 8
    assert result.detections == whole.detections
    assert result.figures == whole.figures
    assert progress[0] == ("evaluating", 8, 16)
    assert ("evaluating", 16, 16) in progress
    assert not journal.exists()


def test_journal_of_another_run_is_not_continued(tmp_path, folder) -> None:
    journal = tmp_path / "journal.jsonl"
    options = settings(journal=journal, keep_journal=True)
    evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), options, MODEL)
    assert journal.exists()
    again = ScriptedDetector(folder, noisy_rows)
    evaluate(again, load_dataset(folder), options, MODEL)
    assert again.seen == []
    for change, model in [
        ({"confidence": 0.5}, MODEL),
        ({"letterbox": "predict"}, MODEL),
        ({}, replace(MODEL, digest="other")),
    ]:
        before = journal.read_bytes()
        other = ScriptedDetector(folder, lambda *_: [])
        other._by_pixels = _AnyImage()  # another letterbox gives other pixels
        evaluate(other, load_dataset(folder), replace(options, **change), model)
        assert len(other.seen) == 16
        journal.write_bytes(before)


class _AnyImage(dict):
    def __missing__(self, key: bytes) -> int:
        return 1000


def test_foreign_file_is_not_overwritten_by_a_journal(tmp_path, folder) -> None:
    path = tmp_path / "thesis.txt"
    for text in ("years of work\n", '{"a": 1}\n'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a journal"):
            evaluate(
                ScriptedDetector(folder, noisy_rows),
                load_dataset(folder),
                settings(journal=path),
                MODEL,
            )
        assert path.read_text() == text
    with pytest.raises(UserError, match="digest"):
        evaluate(
            ScriptedDetector(folder, noisy_rows),
            load_dataset(folder),
            settings(journal=path),
            replace(MODEL, digest=""),
        )


# --- Reports ---


def test_reports(tmp_path, folder) -> None:
    detector = ScriptedDetector(folder, noisy_rows)
    result = evaluate(detector, load_dataset(folder), settings(), MODEL)
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
    rescored = pycocotools_figures(folder, detections)
    assert result.figures == pytest.approx(rescored, abs=1e-12)
    with pytest.raises(UserError, match="cannot be written"):
        result.write_json(tmp_path / "no" / "such" / "folder.json")


def test_printed_report_states_the_protocol(folder) -> None:
    from rich.console import Console

    result = evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), settings(), MODEL)
    console = Console(file=io.StringIO(), width=300)
    result.print(console, by_class=True)
    text = console.file.getvalue()
    for part in (
        *("16 images", "imgsz 128x128", "letterbox coco", "confidence > 0.001", "max_det 300"),
        *("precision fp32", "class map coco", f"{result.figures['AP']:.4f}", "AR100", "thing 90"),
    ):
        assert part in text


def test_plots(tmp_path, folder) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = evaluate(ScriptedDetector(folder, noisy_rows), load_dataset(folder), settings(), MODEL)
    for path in result.plot(tmp_path / "plots"):
        assert Image.open(path).size[0] > 500


# --- The command ---


class FakeModel:
    """A compiled model whose rows are a scripted detector's."""

    def __init__(self, detector: ScriptedDetector) -> None:
        self._detector = detector
        height, width = detector.imgsz
        self.info = ModelInfo(
            scale="n",
            classes=80,
            names=tuple(f"thing {i}" for i in COCO_CATEGORY_IDS),
            height=height,
            width=width,
            batch=detector.batch,
            max_det=300,
            precision="fp32",
        )
        program = Program("cpu", Plan(0, {}, {}, ()), {"w": np.ones(3, np.float32)}, {}, {})
        self.target = "cpu"
        self.artifact = Artifact(self.info, {"cpu": program})
        self.closed = False

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self._detector(images)

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """Runs `yolomlir val` with a scripted model; returns the exit code and that model."""
    from yolomlir.cli import main, val

    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(val, "resolve_weights", lambda name: name)

    def run(*arguments: object, fail_after: int | None = None) -> tuple[int, FakeModel]:
        model = FakeModel(ScriptedDetector(folder, noisy_rows, fail_after=fail_after))
        monkeypatch.setattr(val, "compile", lambda *_, **__: model)
        return main.main(["val", "yolo26n.pt", "--device", "cpu", *map(str, arguments)]), model

    return run


def test_command(command, folder, tmp_path, capsys) -> None:
    annotations = folder / "annotations" / "instances_val2017.json"
    figures, found = tmp_path / "figures.json", tmp_path / "found.json"
    code, model = command(
        *("--images", folder / "val2017", "--annotations", annotations),
        *("--json", figures, "--save-json", found, "--workers", 1),
    )
    assert code == 0
    assert model.closed
    data = json.loads(figures.read_text())
    expected = pycocotools_figures(folder, json.loads(found.read_text()))
    assert {k: data[k] for k in FIGURES} == pytest.approx(expected, abs=1e-12)
    assert data["settings"]["model"] == "yolo26n.pt"
    assert f"{data['AP']:.4f}" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_command_goes_on_after_an_interruption(command, folder, tmp_path, capsys) -> None:
    code, _ = command("--data", folder, fail_after=2)
    assert code == 130
    code, model = command("--data", folder)
    assert code == 0
    assert len(model._detector.seen) == 16 - 6
    assert "6 images were taken from an interrupted run" in capsys.readouterr().out
    command("--data", folder, fail_after=2)
    _, model = command("--data", folder, "--no-resume")
    assert len(model._detector.seen) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --data"),
        (("--images", "."), "expected either --data"),
        (("--data", ".", "--images", ".", "--annotations", "x"), "expected either --data"),
        (("--data", "nowhere"), "nowhere: no such file or folder"),
        (("--data", ".", "--conf", "2"), "confidence 2.0"),
        (("--data", ".", "--batch", "0"), "--batch 0"),
        (("--data", ".", "--max-det", "1000"), "compiled for 300"),
        (("--data", ".", "--json", "no/folder/x.json"), "no/folder/x.json: cannot be written"),
    ],
)
def test_command_errors_are_one_line_and_exit_2(
    command, capsys, arguments, message, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = command(*arguments)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
