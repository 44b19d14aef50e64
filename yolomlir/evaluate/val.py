"""`yolomlir val` from Python: a compiled model against an annotated dataset."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.coco import (
    MAX_DETECTIONS,
    EvaluationSettings,
    ModelDescription,
    evaluate,
)
from yolomlir.evaluate.datasets import load_coco, load_dataset
from yolomlir.evaluate.ground_truth import Dataset
from yolomlir.evaluate.report import EvaluationResult
from yolomlir.progress import ProgressCallback
from yolomlir.vision.decode import Pixels

if TYPE_CHECKING:
    from yolomlir.api import Model


class ModelDetector:
    """A compiled model as a `coco.Detector`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.imgsz = (model.info.height, model.info.width)
        self.batch = model.info.batch

    def __call__(self, images: Pixels, /) -> npt.NDArray[np.float32]:
        """Rows [n, max_det, 6] of images, uint8 [n, H, W, 3]."""
        return self._model(images)


def describe_model(model: Model, name: str = "") -> ModelDescription:
    """What an evaluation reports of a compiled model."""
    info = model.info
    return ModelDescription(
        name=name or info.source or f"yolo26{info.scale}",
        classes=info.classes,
        precision=info.precision,
        names=tuple(info.names),
        target=model.target,
        digest=model_digest(model),
    )


def model_digest(model: Model) -> str:
    """Identifies a compiled model by its code and its weights."""
    program = model.artifact.programs[model.target]
    digest = hashlib.sha256()
    for part in (asdict(model.info), model.artifact.versions, program.plan.to_json()):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    for name, binary in sorted(program.binaries.items()):
        digest.update(name.encode() + binary)
    for name, tensor in sorted(program.weights.items()):
        digest.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def open_dataset(
    model: ModelDescription,
    *,
    data: str | Path | None = None,
    images: str | Path | None = None,
    annotations: str | Path | None = None,
    split: str = "val",
) -> Dataset:
    """The dataset that the options of `yolomlir val` name: `data`, or `images` and `annotations`.

    Raises UserError for neither, for both, and for what cannot be read.
    """
    if data is not None and images is None and annotations is None:
        return load_dataset(data, split=split, classes=model.classes, names=model.names)
    if data is None and images is not None and annotations is not None:
        return load_coco(images, annotations)
    raise UserError(
        "expected either --data DIR|FILE.yaml, or both --images DIR and --annotations FILE.json"
    )


def run_val(
    model: Model,
    settings: EvaluationSettings | None = None,
    *,
    name: str = "",
    data: str | Path | None = None,
    images: str | Path | None = None,
    annotations: str | Path | None = None,
    split: str = "val",
    progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Evaluate a compiled model; see `open_dataset` and `coco.evaluate`.

    A model compiled for fewer detections than the protocol's 300 is scored with those. Raises
    UserError when `settings.max_det` asks for more than both.
    """
    settings = settings or EvaluationSettings()
    if settings.max_det > max(model.info.max_det, MAX_DETECTIONS):
        raise UserError(
            f"max_det is {settings.max_det}; this model was compiled for {model.info.max_det}",
            hint=f"compile with max_det={settings.max_det}",
        )
    settings = replace(settings, max_det=min(settings.max_det, model.info.max_det))
    description = describe_model(model, name)
    dataset = open_dataset(
        description, data=data, images=images, annotations=annotations, split=split
    )
    return evaluate(ModelDetector(model), dataset, settings, description, progress=progress)
