"""YOLO text labels as COCO ground truth.

A label file holds one object a line: its class index, then its box as x centre, y centre, width
and height, or a polygon's points, all as fractions of the image's sides. A polygon counts as the
box around it. `images/` in an image's path becomes `labels/` in its label's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.ground_truth import (
    COCO_CATEGORY_IDS,
    Dataset,
    ImageEntry,
    training_warnings,
)
from yolomlir.vision.sources import IMAGE_SUFFIXES, list_files

# Fractions printed with few digits may pass 1 by a rounding.
_FRACTION_SLACK = 1e-3
_EXIF_ORIENTATION = 0x0112


def load_yolo_yaml(path: Path, split: str = "val") -> Dataset:
    """The dataset of a YAML file with `path`, `val` (or another split), and `names` or `nc`.

    Raises UserError for a file that says something else, and for bad labels by file and line.
    """
    data = _read_yaml(path)
    names = _class_names(data, path)
    root = _root(data.get("path"), path)
    entries = data.get(split)
    if not entries:
        raise UserError(f"names no '{split}' images", where=path)
    listed = [entries] if isinstance(entries, str) else list(entries)
    folders = [_resolve(root, str(entry), path) for entry in listed]
    files = [file for folder in folders for file in _image_files(folder)]
    dataset = _from_files(path.name, files, names)
    warnings = training_warnings([path, *folders])
    if split != "train" and data.get("train") == entries:
        warnings.append(f"'{split}' and 'train' of {path.name} are the same images")
    if split == "train":
        warnings.append("scored on the training split")
    return replace(dataset, sources=(path, *folders), warnings=(*dataset.warnings, *warnings))


def load_yolo_folder(path: Path, split: str, classes: int, names: Sequence[str]) -> Dataset:
    """The dataset of a folder with `images/` (or `images/<split>*/`) beside `labels/`."""
    folders = sorted(p for p in (path / "images").glob(f"{split}*") if p.is_dir())
    folder = folders[0] if len(folders) == 1 else path / "images"
    full = tuple(names) if len(names) == classes else tuple(f"class {i}" for i in range(classes))
    dataset = _from_files(path.name, _image_files(folder), full)
    warnings = training_warnings([folder])
    return replace(dataset, sources=(folder,), warnings=(*dataset.warnings, *warnings))


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"is not YAML: {reason}", where=path) from error
    if not isinstance(data, dict):
        raise UserError("is not a dataset: expected keys path, val and names", where=path)
    return data


def _class_names(data: dict[str, Any], path: Path) -> tuple[str, ...]:
    names = data.get("names")
    if isinstance(names, list):
        return tuple(map(str, names))
    if isinstance(names, dict):
        by_index = {str(key): str(name) for key, name in names.items()}
        indices = [str(i) for i in range(len(names))]
        if set(by_index) != set(indices):
            raise UserError("names: expected the indices 0, 1, 2, … as keys", where=path)
        return tuple(by_index[i] for i in indices)
    count = data.get("nc")
    if isinstance(count, int) and count > 0:
        return tuple(f"class {i}" for i in range(count))
    raise UserError("has neither names nor nc", where=path)


def _root(stated: object, path: Path) -> Path:
    if not stated:
        return path.parent
    root = Path(str(stated)).expanduser()
    # Relative to the file as people expect; some write it relative to where they work.
    for candidate in (path.parent / root, root):
        if candidate.is_dir():
            return candidate
    return path.parent


def _resolve(root: Path, entry: str, path: Path) -> Path:
    for candidate in (root / entry, path.parent / entry):
        if candidate.exists():
            return candidate
    raise UserError(f"'{entry}' is neither in {root} nor beside the file", where=path)


def _image_files(folder: Path) -> list[Path]:
    """Images below a folder, or listed in a text file, in a fixed order."""
    if folder.is_dir():
        files = [p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES]
    elif folder.suffix == ".txt":
        lines = folder.read_text(encoding="utf-8", errors="replace").split("\n")
        files = [folder.parent / line.strip() for line in lines if line.strip()]
    else:
        files = list_files(folder)
    if not files:
        raise UserError("no images", where=folder)
    return sorted(files)


def _from_files(name: str, files: Sequence[Path], names: Sequence[str]) -> Dataset:
    ids = _image_ids(files)
    categories = _categories(names)
    entries: list[ImageEntry] = []
    annotations: list[dict[str, Any]] = []
    duplicates = 0
    for image_id, file in zip(ids, files, strict=True):
        width, height = _image_size(file)
        entries.append(ImageEntry(image_id, file, width, height))
        rows = _read_labels(_label_path(file), len(names))
        kept = np.unique(rows, axis=0) if len(rows) else rows
        duplicates += len(rows) - len(kept)
        for row in kept:
            annotation = _annotation(row, width, height, categories)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image_id, "iscrowd": 0, **annotation}
            )
    warnings = [f"{duplicates} labels occur twice and count once"] if duplicates else []
    truth = {
        "images": [
            {"id": e.image_id, "file_name": e.path.name, "width": e.width, "height": e.height}
            for e in entries
        ],
        "annotations": annotations,
        "categories": [{"id": c, "name": n} for c, n in zip(categories, names, strict=True)],
    }
    images = tuple(sorted(entries, key=lambda e: e.image_id))
    return Dataset(name, "yolo", images, truth, (), tuple(warnings))


def _image_ids(files: Sequence[Path]) -> list[int]:
    """COCO's ids where the names are numbers, as its images' are; else 1, 2, 3, …."""
    stems = [file.stem for file in files]
    if all(re.fullmatch(r"[0-9]+", stem) for stem in stems):
        ids = [int(stem) for stem in stems]
        if len(set(ids)) == len(ids):
            return ids
    return list(range(1, len(files) + 1))


def _categories(names: Sequence[str]) -> list[int]:
    """COCO's category ids for 80 classes, so that detections can be scored elsewhere too."""
    if len(names) == len(COCO_CATEGORY_IDS):
        return list(COCO_CATEGORY_IDS)
    return list(range(len(names)))


def _image_size(path: Path) -> tuple[int, int]:
    """Width and height as shown: labels are drawn on the picture with its EXIF orientation.

    An unreadable image has the size 1 x 1 here; evaluation reports it and counts its objects as
    missed.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(_EXIF_ORIENTATION, 1) >= 5
    except Exception:  # damaged headers raise nearly anything; decoding reports the reason
        return 1, 1
    return (height, width) if turned else (width, height)


def _label_path(image: Path) -> Path:
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _read_labels(path: Path, classes: int) -> npt.NDArray[np.float64]:
    """Rows [n, 5]: class, x centre, y centre, width, height. No file means no objects."""
    if not path.exists():
        return np.empty((0, 5))
    rows = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        if line.strip():
            rows.append(_parse_label(line, classes, f"{path}:{number}"))
    return np.array(rows).reshape(-1, 5)


def _parse_label(line: str, classes: int, where: str) -> list[float]:
    try:
        values = [float(v) for v in line.split()]
    except ValueError as error:
        raise UserError(f"not numbers: '{line.strip()[:60]}'", where=where) from error
    polygon = len(values) >= 7 and len(values) % 2 == 1
    if len(values) != 5 and not polygon:
        raise UserError(f"{len(values)} numbers", where=where, hint="expected class x y w h")
    index, fractions = values[0], values[1:]
    if index != int(index) or not 0 <= index < classes:
        raise UserError(f"class {values[0]:g} of {classes} classes", where=where)
    if not all(-_FRACTION_SLACK <= v <= 1 + _FRACTION_SLACK for v in fractions):
        raise UserError(
            "a coordinate outside 0..1", where=where, hint="expected fractions of the image's sides"
        )
    if not polygon:
        return values
    xs, ys = fractions[::2], fractions[1::2]
    return [
        *(index, (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2),
        *(max(xs) - min(xs), max(ys) - min(ys)),
    ]


def _annotation(
    row: npt.NDArray[np.float64], width: int, height: int, categories: Sequence[int]
) -> dict[str, Any]:
    index, x, y, w, h = (float(v) for v in row)
    box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
    return {"category_id": categories[int(index)], "bbox": box, "area": box[2] * box[3]}
