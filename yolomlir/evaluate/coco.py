"""The COCO protocol: run a detector over a dataset, and score what it finds.

Each image: its long side to the model's, letterbox without enlarging, score > 0.001, at most 300
detections; boxes back to the original by the exact ratio and padding, clipped to it; x, y, width,
height to 3 decimals, score to 5. Scored by pycocotools.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from yolomlir import __version__
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.evaluate.class_map import ClassMap, class_map, name_mismatches
from yolomlir.evaluate.ground_truth import Dataset, ImageEntry, restrict
from yolomlir.evaluate.journal import ImageRecord, Journal
from yolomlir.evaluate.report import EvaluationResult
from yolomlir.evaluate.scoring import score
from yolomlir.progress import ProgressCallback
from yolomlir.vision.decode import Pixels, SourceError, read_image
from yolomlir.vision.letterbox import Letterbox, letterbox, letterbox_coco

CONFIDENCE = 0.001
MAX_DETECTIONS = 300


class Detector(Protocol):
    """What is evaluated: a batch, uint8 [n, H, W, 3] RGB with n up to `batch`, to rows [n, K, 6].

    A row is x1, y1, x2, y2 in input pixels, score, class index. imgsz: height and width.
    """

    @property
    def imgsz(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def batch(self) -> int: ...  # noqa: D102
    def __call__(self, images: Pixels, /) -> npt.NDArray[np.float32]: ...  # noqa: D102


@dataclass(frozen=True)
class ModelDescription:
    """What the report says of the model.

    digest: identifies weights and compile; "" means unknown, and then nothing can be resumed.
    """

    name: str
    classes: int
    precision: str
    names: tuple[str, ...] = ()
    target: str = ""
    digest: str = ""


@dataclass(frozen=True)
class EvaluationSettings:
    """How a detector is evaluated; the defaults are the COCO protocol.

    confidence: scores must exceed it. max_det: most detections an image. letterbox: `coco`, or
    `predict` for the letterbox of predict. class_map: see `class_map.class_map`. subset: score only
    the images that are there, instead of refusing a folder that lacks some. workers: threads that
    decode and resize. journal: where detections are recorded, to go on after an interruption; it is
    removed at the end unless keep_journal.
    """

    confidence: float = CONFIDENCE
    max_det: int = MAX_DETECTIONS
    letterbox: Literal["coco", "predict"] = "coco"
    class_map: str = "auto"
    subset: bool = False
    workers: int = field(default_factory=lambda: min(os.cpu_count() or 1, 8))
    journal: Path | None = None
    keep_journal: bool = False

    def check(self) -> None:
        """Raise UserError for a value out of range."""
        if not 0 <= self.confidence < 1:
            raise UserError(f"confidence {self.confidence}: expected 0 or more, below 1")
        if self.max_det < 1:
            raise UserError(f"max_det {self.max_det}: expected 1 or more")
        if self.workers < 1:
            raise UserError(f"workers {self.workers}: expected 1 or more")
        if self.letterbox not in ("coco", "predict"):
            raise UserError(f"letterbox {self.letterbox!r}: expected 'coco' or 'predict'")


def evaluate(
    detector: Detector,
    dataset: Dataset,
    settings: EvaluationSettings,
    model: ModelDescription,
    *,
    progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Run `detector` over `dataset` and score it.

    An image that cannot be decoded is reported in the result and keeps its place in the score, its
    objects missed. Raises UserError for missing images (see `EvaluationSettings.subset`), a class
    map that does not fit, and settings out of range; InternalError for rows that are no detections.
    """
    settings.check()
    dataset, warnings = _present(dataset, settings.subset)
    mapping = class_map(dataset, model.classes, settings.class_map)
    begin = time.perf_counter()
    ids = [entry.image_id for entry in dataset.images]
    if settings.journal and not model.digest:
        raise UserError("a journal needs ModelDescription.digest, to know its run again")
    with Journal.open(
        settings.journal, run_key(detector, dataset, settings, model), ids
    ) as journal:
        _run(detector, dataset, settings, model, journal, progress)
        records = [journal.records[i] for i in ids]
        # Scored before the journal goes: a failure there costs no detection.
        detections = [d for record in records for d in to_coco(record, mapping)]
        if progress:
            progress("scoring", 0, 1)
        scored = score(dataset, detections)
        if not settings.keep_journal:
            journal.discard()
    warnings += [*dataset.warnings, *_class_warnings(dataset, mapping, model)]
    warnings += _size_warnings(dataset, records)
    return EvaluationResult(
        figures=scored.figures,
        classes=scored.classes,
        precision_curves=scored.precision,
        detections=detections,
        settings=describe(detector, dataset, settings, model, mapping),
        images=len(ids),
        unreadable=[r.error for r in records if r.error],
        resumed=journal.resumed,
        seconds=time.perf_counter() - begin,
        warnings=warnings,
    )


def describe(
    detector: Detector,
    dataset: Dataset,
    settings: EvaluationSettings,
    model: ModelDescription,
    mapping: ClassMap,
) -> dict[str, Any]:
    """Everything that a comparable score must say of itself."""
    return {
        "model": model.name,
        "precision": model.precision,
        "target": model.target,
        "classes": model.classes,
        "imgsz": list(detector.imgsz),
        "batch": detector.batch,
        "letterbox": settings.letterbox,
        "confidence": settings.confidence,
        "max_det": settings.max_det,
        "class_map": mapping.name,
        "dataset": dataset.name,
        "sources": [str(s) for s in dataset.sources],
        "images": len(dataset.images),
        "yolomlir": __version__,
        "model_digest": model.digest,
    }


def run_key(
    detector: Detector, dataset: Dataset, settings: EvaluationSettings, model: ModelDescription
) -> str:
    """A digest of all that can change the detections."""
    parts = [
        *(__version__, asdict(model), list(detector.imgsz), settings.letterbox),
        *(settings.confidence, settings.max_det, dataset.digest()),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def to_coco(record: ImageRecord, mapping: ClassMap) -> Iterator[dict[str, Any]]:
    """An image's detections in COCO's results format."""
    for *box, confidence, index in record.rows:
        yield {
            "image_id": record.image_id,
            "category_id": mapping.ids[int(index)],
            "bbox": box,
            "score": confidence,
        }


# --- Warnings ---


def _present(dataset: Dataset, subset: bool) -> tuple[Dataset, list[str]]:
    there = [entry for entry in dataset.images if entry.path.exists()]
    missing = len(dataset.images) - len(there)
    if not missing:
        return dataset, []
    lost = next(entry.path for entry in dataset.images if not entry.path.exists())
    if not there or not subset:
        raise UserError(
            f"{missing} of {len(dataset.images)} annotated images are missing",
            where=lost,
            hint="--subset scores only those that are there",
        )
    warning = f"a subset: {missing} of {len(dataset.images)} annotated images are missing"
    return restrict(dataset, there), [warning]


def _class_warnings(dataset: Dataset, mapping: ClassMap, model: ModelDescription) -> list[str]:
    different = name_mismatches(dataset, mapping.ids, model.names)
    if not different:
        return []
    shown = "; ".join(different[:3])
    return [
        f"{len(different)} classes are named differently by the model and the dataset ({shown}): "
        f"is the class map '{mapping.name}' right?"
    ]


def _size_warnings(dataset: Dataset, records: Sequence[ImageRecord]) -> list[str]:
    wrong = [
        entry.path.name
        for entry, record in zip(dataset.images, records, strict=True)
        if record.width and entry.width
        if (record.width, record.height) != (entry.width, entry.height)
    ]
    if not wrong:
        return []
    return [
        f"{len(wrong)} images have another size than their annotations say (first: {wrong[0]}): "
        "their boxes may not fit"
    ]


# --- Running ---


@dataclass(frozen=True)
class _Prepared:
    """A letterboxed image, or why there is none."""

    entry: ImageEntry
    image: Pixels | None
    letterbox: Letterbox | None
    error: str = ""


def _run(
    detector: Detector,
    dataset: Dataset,
    settings: EvaluationSettings,
    model: ModelDescription,
    journal: Journal,
    progress: ProgressCallback | None,
) -> None:
    todo = [entry for entry in dataset.images if entry.image_id not in journal.records]
    total = len(dataset.images)
    if progress:
        progress("evaluating", total - len(todo), total)
    batch: list[_Prepared] = []
    for prepared in _prepare_all(todo, detector, settings):
        if prepared.image is None:
            journal.add([ImageRecord(prepared.entry.image_id, [], error=prepared.error)])
        else:
            batch.append(prepared)
        if len(batch) == detector.batch:
            journal.add(_detect(detector, batch, settings, model))
            batch = []
        if progress:
            progress("evaluating", len(journal.records), total)
    if batch:
        journal.add(_detect(detector, batch, settings, model))
        if progress:
            progress("evaluating", len(journal.records), total)


def _prepare_all(
    entries: Sequence[ImageEntry], detector: Detector, settings: EvaluationSettings
) -> Iterator[_Prepared]:
    """Decoded and letterboxed images in order, a bounded number of them ahead."""
    ahead = 2 * settings.workers + detector.batch
    pending: deque[Future[_Prepared]] = deque()
    with ThreadPoolExecutor(settings.workers, thread_name_prefix="yolomlir-decode") as pool:
        try:
            for entry in entries:
                pending.append(
                    pool.submit(_prepare, entry, detector.imgsz, settings.letterbox == "coco")
                )
                if len(pending) >= ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _prepare(entry: ImageEntry, imgsz: tuple[int, int], coco: bool) -> _Prepared:
    try:
        image = read_image(entry.path)
    except SourceError as error:
        return _Prepared(entry, None, None, str(error))
    boxed, record = (letterbox_coco if coco else letterbox)(image, imgsz)
    return _Prepared(entry, boxed, record)


def _detect(
    detector: Detector,
    batch: Sequence[_Prepared],
    settings: EvaluationSettings,
    model: ModelDescription,
) -> list[ImageRecord]:
    images = np.stack([p.image for p in batch if p.image is not None])
    rows = np.asarray(detector(images))
    if rows.ndim != 3 or rows.shape[0] != len(batch) or rows.shape[2] != 6:
        raise InternalError(f"the detector gave {rows.shape}; expected [{len(batch)}, K, 6]")
    return [
        _record(prepared, image_rows, settings, model.classes)
        for prepared, image_rows in zip(batch, rows, strict=True)
    ]


def _record(
    prepared: _Prepared,
    rows: npt.NDArray[np.float32],
    settings: EvaluationSettings,
    classes: int,
) -> ImageRecord:
    entry, record = prepared.entry, prepared.letterbox
    if record is None:
        raise InternalError("a prepared image has no letterbox", where=entry.path)
    if not np.isfinite(rows).all():
        # NaN fails every comparison: without this a broken model would only look like a poor one.
        raise InternalError("the detector gave values that are not finite", where=entry.path)
    kept = select_rows(rows, settings.confidence, settings.max_det)
    indices = kept[:, 5]
    if ((indices < 0) | (indices >= classes) | (indices != np.floor(indices))).any():
        raise InternalError(f"a class index that is not one of 0..{classes - 1}", where=entry.path)
    boxes = record.to_original(kept[:, :4]).astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    found = [
        [*(round(v, 3) for v in box), round(float(confidence), 5), int(index)]
        for box, confidence, index in zip(boxes.tolist(), kept[:, 4], indices, strict=True)
    ]
    height, width = record.original
    return ImageRecord(entry.image_id, found, width, height)


def select_rows(
    rows: npt.NDArray[np.float32], confidence: float, max_det: int
) -> npt.NDArray[np.float32]:
    """Rows [n, 6] with score > confidence, the best `max_det` of them, in their order."""
    kept = rows[rows[:, 4] > confidence]
    if len(kept) <= max_det:
        return kept
    best = np.argsort(-kept[:, 4], kind="stable")[:max_det]
    return kept[np.sort(best)]
