"""From a model's class index to a dataset's category id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.ground_truth import COCO_CATEGORY_IDS, Dataset

CLASS_MAPS = ("auto", "coco", "identity", "sorted")


@dataclass(frozen=True)
class ClassMap:
    """ids[i] is the category id of class i. name: how it was chosen, for the report."""

    name: str
    ids: tuple[int, ...]


def class_map(dataset: Dataset, classes: int, choice: str = "auto") -> ClassMap:
    """The category id of each of a model's classes.

    choice: `coco` is COCO's ids 1 to 90 with their gaps, for 80 classes; `identity` takes the
    index; `sorted` takes the i-th category by id. `auto` is `coco` for 80 classes on COCO's ids,
    `identity` where the ids are indices, and `sorted` where there are as many categories as
    classes. Raises UserError where none fits: a wrong map gives an AP near 0 that looks like a bad
    model.
    """
    ids = dataset.category_ids
    if choice not in CLASS_MAPS:
        raise UserError(f"class map {choice!r}: expected one of {', '.join(CLASS_MAPS)}")
    if choice == "auto":
        choice = _choose(ids, classes, dataset.name)
    if choice == "coco":
        if classes != len(COCO_CATEGORY_IDS):
            raise UserError(f"class map 'coco' is for 80 classes; the model has {classes}")
        return ClassMap(choice, COCO_CATEGORY_IDS)
    if choice == "identity":
        return ClassMap(choice, tuple(range(classes)))
    if len(ids) != classes:
        raise UserError(
            f"class map 'sorted': the model has {classes} classes, the dataset {len(ids)} "
            "categories",
            where=dataset.name,
        )
    return ClassMap(choice, tuple(ids))


def _choose(ids: Sequence[int], classes: int, where: str) -> str:
    if classes == len(COCO_CATEGORY_IDS) and set(ids) <= set(COCO_CATEGORY_IDS):
        return "coco"
    if set(ids) <= set(range(classes)):
        return "identity"
    if len(ids) == classes:
        return "sorted"
    raise UserError(
        f"the model has {classes} classes; the dataset's {len(ids)} category ids, {min(ids)} to "
        f"{max(ids)}, fit neither COCO's nor the class indices",
        where=where,
        hint="is it the dataset that the model was trained for? else pass --class-map",
    )


def name_mismatches(dataset: Dataset, ids: Sequence[int], names: Sequence[str]) -> list[str]:
    """`model's name / dataset's name` of the classes that are called differently."""
    theirs = {c["id"]: c["name"] for c in dataset.ground_truth["categories"]}
    pairs = [(n, theirs[i]) for i, n in zip(ids, names, strict=False) if i in theirs]
    if any(n.startswith("class ") for pair in pairs for n in pair):
        return []  # one side has numbers for names
    return [f"{a} / {b}" for a, b in pairs if a.strip().lower() != b.strip().lower()]
