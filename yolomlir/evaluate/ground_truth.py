"""Images and their ground truth in COCO's form, from wherever they were read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COCO_CATEGORY_IDS = (
    *range(1, 12),
    *range(13, 26),
    *(27, 28),
    *range(31, 45),
    *range(46, 66),
    *(67, 70),
    *range(72, 83),
    *range(84, 91),
)
"""The category id of each of COCO's 80 classes: 1 to 90 with gaps."""

_TRAINING_SETS = re.compile(r"coco(8|128)\b.*")
_TRAINING_FOLDERS = re.compile(r"(instances_)?train(ing)?(2014|2017)?(\.json|\.txt)?")


@dataclass(frozen=True)
class ImageEntry:
    """One image to run. width, height: as the annotations say, in pixels; 0 where they do not."""

    image_id: int
    path: Path
    width: int
    height: int


@dataclass(frozen=True)
class Dataset:
    """Images and their ground truth.

    ground_truth: a dictionary in COCO's format (`images`, `annotations`, `categories`) of exactly
    these images. kind: `coco` or `yolo`. sources: the folders and files it was read from.
    warnings: what a reader of the score should know.
    """

    name: str
    kind: str
    images: tuple[ImageEntry, ...]
    ground_truth: dict[str, Any]
    sources: tuple[Path, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def category_ids(self) -> list[int]:
        """The ids of its categories, ascending."""
        return sorted(c["id"] for c in self.ground_truth["categories"])

    def digest(self) -> str:
        """Identifies images, sizes and annotations, but not the pixels."""
        images = [[i.image_id, str(i.path), i.width, i.height] for i in self.images]
        text = json.dumps([images, self.ground_truth], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def training_warnings(sources: Sequence[Path]) -> list[str]:
    """Warnings when folders or files look like images that published weights were trained on."""
    for source in sources:
        parts = [part.lower() for part in source.parts[-3:]]
        known = [p for p in parts if _TRAINING_SETS.fullmatch(p)]
        if known or (parts and _TRAINING_FOLDERS.fullmatch(parts[-1])):
            return [
                f"{source} looks like training images of COCO weights ({(known or parts)[-1]}): a "
                "score on them says how well they were learnt by heart, and is not comparable"
            ]
    return []


def restrict(dataset: Dataset, keep: Sequence[ImageEntry]) -> Dataset:
    """The dataset with only these of its images, and their annotations."""
    ids = {entry.image_id for entry in keep}
    truth = dataset.ground_truth
    return replace(
        dataset,
        images=tuple(e for e in dataset.images if e.image_id in ids),
        ground_truth={
            "images": [i for i in truth["images"] if i["id"] in ids],
            "annotations": [a for a in truth["annotations"] if a["image_id"] in ids],
            "categories": truth["categories"],
        },
    )
