"""Annotated images, in COCO's form: what `yolomlir val` scores against.

Two kinds are read: COCO's (a folder of images and a JSON file), and YOLO text labels (a YAML file,
or `images/` beside `labels/`), which become COCO annotations in pixels (`yolo_labels.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.ground_truth import Dataset, ImageEntry, training_warnings
from yolomlir.evaluate.yolo_labels import load_yolo_folder, load_yolo_yaml


def load_dataset(
    path: str | Path, *, split: str = "val", classes: int = 80, names: Sequence[str] = ()
) -> Dataset:
    """The dataset that a folder or a YAML file holds.

    A folder is searched for, in this order: `annotations/instances_<split>*.json` with its images
    in `<split>2017/`, `images/<split>2017/` and the like; `_annotations.coco.json` among its
    images; one YAML file; `images/` beside `labels/`. classes, names: the model's, which YOLO
    labels without a YAML file are read with. Raises UserError when there is none, or it is bad.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() in (".yaml", ".yml"):
        return load_yolo_yaml(path, split)
    if not path.is_dir():
        raise UserError("no such folder" if not path.exists() else "not a folder", where=path)
    annotations = _find_annotations(path, split)
    if annotations:
        return load_coco(_find_images(path, annotations), annotations)
    yamls = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
    if len(yamls) == 1:
        return load_yolo_yaml(yamls[0], split)
    if (path / "images").is_dir() and (path / "labels").is_dir():
        return load_yolo_folder(path, split, classes, names)
    raise UserError(
        "no annotations in this folder",
        where=path,
        hint="expected annotations/instances_val2017.json, one dataset .yaml, or images/ beside "
        "labels/; or pass --images DIR --annotations FILE.json",
    )


def _find_annotations(folder: Path, split: str) -> Path | None:
    patterns = (
        f"annotations/instances_{split}*.json",
        "annotations/instances_default.json",
        "_annotations.coco.json",
    )
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(str(p.relative_to(folder)) for p in found)
            raise UserError(
                f"several annotation files: {names}",
                where=folder,
                hint="choose one with --images DIR --annotations FILE.json",
            )
        if found:
            return found[0]
    return None


def _find_images(folder: Path, annotations: Path) -> Path:
    if annotations.name == "_annotations.coco.json":
        return folder
    split = annotations.stem.removeprefix("instances_")
    candidates = [folder / split, folder / "images" / split, folder / "images"]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    listed = ", ".join(map(str, candidates))
    raise UserError(f"no folder of images for {annotations.name}; looked for {listed}")


def load_coco(images: str | Path, annotations: str | Path) -> Dataset:
    """A COCO dataset: a folder of images and its `instances_*.json`.

    Raises UserError, naming the file and the record, when the JSON is not such a file.
    """
    images, annotations = Path(images).expanduser(), Path(annotations).expanduser()
    if not images.is_dir():
        raise UserError("no such folder of images", where=images)
    data = _read_json(annotations)
    for key in ("images", "annotations", "categories"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise UserError(
                f"no list of {key}: not COCO's instances format",
                where=annotations,
                hint="expected an object with images, annotations and categories",
            )
    try:
        truth, warnings = _check_ground_truth(data, annotations)
        entries = tuple(
            ImageEntry(i["id"], _image_path(images, i["file_name"]), i["width"], i["height"])
            for i in truth["images"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"a record lacks or misuses {error}", where=annotations) from error
    if not entries:
        raise UserError("lists no image", where=annotations)
    dataset = Dataset(
        name=annotations.name,
        kind="coco",
        images=tuple(sorted(entries, key=lambda e: e.image_id)),
        ground_truth=truth,
        sources=(images, annotations),
        warnings=tuple(warnings),
    )
    return replace(dataset, warnings=(*dataset.warnings, *training_warnings(dataset.sources)))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from error
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", where=path) from error


def _image_path(folder: Path, file_name: str) -> Path:
    path = folder / file_name
    # Some exports write the split's folder into file_name; COCO's own does not.
    return path if path.exists() else folder / Path(file_name).name


def _check_ground_truth(data: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """The parts that scoring needs, checked; and warnings. Nothing is dropped or renumbered."""
    warnings = []
    _refuse_duplicates("image id", [i["id"] for i in data["images"]], path)
    _refuse_duplicates("annotation id", [a["id"] for a in data["annotations"]], path)
    _refuse_duplicates("category id", [c["id"] for c in data["categories"]], path)
    known_images = {i["id"] for i in data["images"]}
    known_categories = {c["id"] for c in data["categories"]}
    annotations, without_area = [], 0
    for record in data["annotations"]:
        where = f"{path}: annotation {record['id']}"
        if record["image_id"] not in known_images:
            raise UserError(f"image {record['image_id']} is not in the file", where=where)
        if record["category_id"] not in known_categories:
            raise UserError(f"category {record['category_id']} is not in the file", where=where)
        box = [float(v) for v in record["bbox"]]
        if len(box) != 4 or min(box[2:]) < 0:
            raise UserError(f"bbox {record['bbox']}: expected x, y, width, height", where=where)
        without_area += "area" not in record
        area = float(record.get("area", box[2] * box[3]))
        # Scoring boxes needs no masks, which are most of the file.
        kept = {k: record[k] for k in ("id", "image_id", "category_id")}
        annotations.append({**kept, "bbox": box, "area": area, "iscrowd": _crowd(record)})
    if any(a["id"] == 0 for a in annotations):
        warnings.append(
            "an annotation has the id 0: COCO's scorer counts a match with it as a miss; number "
            "annotations from 1"
        )
    if without_area:
        warnings.append(f"{without_area} annotations state no area; their box's area is used")
    images = [
        {
            **{k: i[k] for k in ("id", "file_name")},
            **{k: int(i.get(k) or 0) for k in ("width", "height")},
        }
        for i in data["images"]
    ]
    categories = [{"id": c["id"], "name": str(c["name"])} for c in data["categories"]]
    return {"images": images, "annotations": annotations, "categories": categories}, warnings


def _crowd(record: dict[str, Any]) -> int:
    return int(record.get("iscrowd", 0))


def _refuse_duplicates(what: str, ids: list[int], path: Path) -> None:
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{what} {value!r}: expected an integer", where=path)
    value, count = Counter(ids).most_common(1)[0] if ids else (0, 0)
    if count > 1:
        raise UserError(f"{what} {value} occurs {count} times", where=path)
