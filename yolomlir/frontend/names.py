"""Class names: the checkpoint's own, else COCO's."""

from __future__ import annotations

from yolomlir.frontend.checkpoint import Checkpoint

COCO_NAMES: tuple[str, ...] = tuple(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
    fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,
    bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard,
    sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle,
    wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
    hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
    vase, scissors, teddy bear, hair drier, toothbrush""".replace("\n    ", " ").split(", ")
)
"""The 80 classes of COCO in the order in which detectors number them."""


def class_names(checkpoint: Checkpoint, classes: int) -> tuple[str, ...]:
    """A name for every class index in [0, classes).

    The checkpoint's names where it has them (`class 7` for an index that it leaves out), else
    COCO's for 80 classes, else `class 0`, `class 1`, ….
    """
    if checkpoint.names:
        return tuple(checkpoint.names.get(i, f"class {i}") for i in range(classes))
    if classes == len(COCO_NAMES):
        return COCO_NAMES
    return tuple(f"class {i}" for i in range(classes))
