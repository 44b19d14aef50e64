"""What a prediction is: detections of one image, in pixels of the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

DEFAULT_CONFIDENCE = 0.25
"""The least score of a prediction's detections, unless another is asked for."""


@dataclass(frozen=True)
class Detection:
    """One object.

    box: x1, y1, x2, y2 in pixels of the original image, clipped to it. score: 0 to 1.
    """

    box: tuple[float, float, float, float]
    score: float
    class_id: int
    class_name: str

    def to_dict(self) -> dict[str, Any]:
        """The detection as `predict --json` writes it."""
        return {
            "box": [round(v, 3) for v in self.box],
            "score": round(self.score, 5),
            "class_id": self.class_id,
            "class": self.class_name,
        }


@dataclass(frozen=True)
class Result(Sequence[Detection]):
    """The detections of one image, best first; equal to another if all but the pixels is.

    name: the file's path, or what the source is called. image: the original, uint8 [height, width,
    3] RGB. frame_number, time_s: of a video's, camera's or stream's frame, as `Frame` has them.
    latency_s: from a live frame's arrival to this result, in seconds; None for anything that waits
    to be read.
    """

    name: str
    width: int
    height: int
    detections: tuple[Detection, ...]
    image: NDArray[np.uint8] = field(repr=False, compare=False)
    frame_number: int | None = None
    time_s: float | None = None
    latency_s: float | None = None

    def __len__(self) -> int:
        return len(self.detections)

    @overload
    def __getitem__(self, index: int) -> Detection: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Detection]: ...
    def __getitem__(self, index: int | slice) -> Detection | Sequence[Detection]:
        return self.detections[index]

    def __iter__(self) -> Iterator[Detection]:
        return iter(self.detections)

    def to_dict(self) -> dict[str, Any]:
        """The result as `predict --json` writes it."""
        record = {
            "image": self.name,
            "width": self.width,
            "height": self.height,
            "detections": [d.to_dict() for d in self.detections],
        }
        if self.latency_s is None:
            return record
        times = {"time_s": self.time_s, "latency_s": self.latency_s}
        rounded = {key: None if value is None else round(value, 6) for key, value in times.items()}
        return {**record, "frame_number": self.frame_number, **rounded}
