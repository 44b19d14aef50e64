"""The optimisation level of a compile that names none, and what level 3 fuses: as it was measured.

Level 3 fuses chains of pointwise convolutions. Whether that pays is a matter of sizes: at scale n
the launches it saves outweigh the parallelism it gives up, at m they do not. The same holds of each
pair of 3x3 convolutions that `yolo-fuse-bottlenecks` could fuse beyond that. `tables/levels.json`
has what was measured, and how.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from yolomlir.autotune.sizes import Size, standing_for

DEFAULT_LEVEL = 2
"""Where nothing was measured."""


def measured_level(
    target: str, scale: str, precision: str, height: int, width: int, batch: int
) -> int:
    """The faster level of the same model on the same target, at this size or one that stands for
    it; or `DEFAULT_LEVEL`."""
    record = _record(target, scale, precision, height, width, batch)
    if record is None:
        return DEFAULT_LEVEL
    return 3 if record["level_3_us"] < record["level_2_us"] else 2


def measured_pairs(
    target: str, scale: str, precision: str, height: int, width: int, batch: int
) -> str:
    """The pairs of 3x3 convolutions that level 3 was measured with, each of which made it faster.

    As `pipeline_for` takes them, for this size; empty where nothing was measured, or none helped.
    """
    record = _record(target, scale, precision, height, width, batch)
    if record is None or "pairs" not in record:
        return ""
    return "+".join(
        _resized(pair, (height, record["height"]), (width, record["width"]))
        for pair in record["pairs"].split("+")
    )


def _resized(pair: str, height: tuple[int, int], width: tuple[int, int]) -> str:
    """`CxHxW` or `CxHxW:N`, for the first of two heights and widths of images in place of the
    second."""
    size, *length = pair.split(":")
    channels, rows, columns = map(int, size.split("x"))
    resized = f"{channels}x{rows * height[0] // height[1]}x{columns * width[0] // width[1]}"
    return ":".join([resized, *length])


def _record(
    target: str, scale: str, precision: str, height: int, width: int, batch: int
) -> dict[str, Any] | None:
    wanted = {"target": target, "scale": scale, "precision": precision}
    found = {
        Size(record["batch"], record["height"], record["width"]): record
        for record in _records()
        if all(record[key] == value for key, value in wanted.items())
    }
    return next((found[near] for near in standing_for(Size(batch, height, width), found)), None)


@cache
def _records() -> list[dict[str, Any]]:
    file = resources.files("yolomlir.autotune") / "tables" / "levels.json"
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["measured"]
    return records
