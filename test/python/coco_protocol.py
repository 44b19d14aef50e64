"""A generated dataset, a detector that a script plays, and the COCO protocol written once more.

The protocol is written from its description and shares no code with the product; the figures come
from pycocotools.
"""

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
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from yolomlir.evaluate.coco import (
    EvaluationResult,
    EvaluationSettings,
    ModelDescription,
    evaluate,
)
from yolomlir.evaluate.datasets import load_dataset
from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS
from yolomlir.evaluate.scoring import FIGURES

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


def evaluated(
    folder: Path, rows_of, model: ModelDescription = MODEL, **changes: Any
) -> EvaluationResult:
    """What a scripted detector scores on a dataset, with `changes` to the settings."""
    detector = ScriptedDetector(folder, rows_of)
    return evaluate(detector, load_dataset(folder), settings(**changes), model)
