"""COCO's figures by pycocotools, the reference implementation: no matcher of our own exists."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.ground_truth import Dataset

log = logging.getLogger(__name__)

FIGURES = (
    *("AP", "AP50", "AP75", "APs", "APm", "APl"),
    *("AR1", "AR10", "AR100", "ARs", "ARm", "ARl"),
)
"""The twelve figures of `COCOeval.summarize`, in its order."""

_ALL_AREAS, _MOST_DETECTIONS = 0, 2  # indices into COCOeval's areaRng and maxDets


@dataclass(frozen=True)
class ClassScore:
    """One category's figures; NaN where the dataset has no object of it."""

    name: str
    category_id: int
    objects: int
    ap: float
    ap50: float


@dataclass(frozen=True)
class Score:
    """figures: by the names of FIGURES, 0..1, and -1 where there is nothing to score, as in COCO.

    precision: [10 IoU thresholds .50:.95, 101 recalls, categories], -1 for absent categories.
    """

    figures: dict[str, float]
    classes: tuple[ClassScore, ...]
    precision: npt.NDArray[np.float64]


def score(dataset: Dataset, detections: Sequence[dict[str, Any]]) -> Score:
    """Score detections in COCO's format (image_id, category_id, bbox x y w h, score).

    Over every image and category of the dataset, IoU .50:.95, at most 100 detections an image and
    category: `COCOeval`'s defaults. Raises UserError when the dataset has no object at all.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise UserError("pycocotools is not installed", hint="pip install pycocotools") from error
    if not any(not a["iscrowd"] for a in dataset.ground_truth["annotations"]):
        raise UserError("the dataset has no object to find", where=dataset.name)
    no_outline: list[float] = []
    # pycocotools prints its progress; it goes to our log.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        truth, found = COCO(), COCO()
        # Copies: pycocotools writes into the records it is given.
        truth.dataset = {
            **dataset.ground_truth,
            "annotations": [dict(a) for a in dataset.ground_truth["annotations"]],
        }
        truth.createIndex()
        if detections:
            # Boxes are scored; an outline, which loadRes would add, is most of the memory.
            found = truth.loadRes([{**d, "segmentation": no_outline} for d in detections])
        else:  # which loadRes cannot do
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    log.debug("pycocotools: %s", printed.getvalue())
    figures = dict(zip(FIGURES, map(float, evaluation.stats), strict=True))
    precision = evaluation.eval["precision"][:, :, :, _ALL_AREAS, _MOST_DETECTIONS]
    return Score(figures, _class_scores(dataset, evaluation.params.catIds, precision), precision)


def _class_scores(
    dataset: Dataset, category_ids: Sequence[int], precision: npt.NDArray[np.float64]
) -> tuple[ClassScore, ...]:
    names = {c["id"]: c["name"] for c in dataset.ground_truth["categories"]}
    objects = dict.fromkeys(names, 0)
    for annotation in dataset.ground_truth["annotations"]:
        objects[annotation["category_id"]] += not annotation["iscrowd"]
    return tuple(
        ClassScore(
            names[category_id],
            int(category_id),
            objects[category_id],
            _mean(precision[:, :, k]),
            _mean(precision[0, :, k]),
        )
        for k, category_id in enumerate(category_ids)
    )


def _mean(values: npt.NDArray[np.float64]) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else float("nan")
