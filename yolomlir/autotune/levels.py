"""The optimisation level of a compile that names none: measured where it was, else 2.

Level 3 fuses chains of pointwise convolutions. Whether that pays is a matter of sizes: at scale n
the launches it saves outweigh the parallelism it gives up, at m they do not.
`tables/levels.json` has what was measured, and how.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

DEFAULT_LEVEL = 2
"""Where nothing was measured."""


def measured_level(
    target: str, scale: str, precision: str, height: int, width: int, batch: int
) -> int:
    """The faster level of the same model on the same target, or `DEFAULT_LEVEL`."""
    wanted = {
        "target": target, "scale": scale, "precision": precision,
        "height": height, "width": width, "batch": batch,
    }  # fmt: skip
    for record in _records():
        if all(record[key] == value for key, value in wanted.items()):
            return 3 if record["level_3_us"] < record["level_2_us"] else 2
    return DEFAULT_LEVEL


@cache
def _records() -> list[dict[str, Any]]:
    file = resources.files("yolomlir.autotune") / "tables" / "levels.json"
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["measured"]
    return records
