"""The file of the cost model's constants that the package ships: reading and writing it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from importlib import resources

from yolomlir.autotune.correction import Correction
from yolomlir.autotune.cost_model import DEFAULT, Constants
from yolomlir.autotune.fitting import Quality

_FILE = "constants.json"
_CORRECTION = "correction"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The shipped constants. device: the GPU they were fitted on, None where they are guesses."""

    constants: Constants
    device: str | None = None
    quality: str = ""


@cache
def shipped_calibration() -> Calibration:
    """What the package ships; cycles and ratios, so they are used for every GPU."""
    file = resources.files("yolomlir.autotune") / "tables" / _FILE
    if not file.is_file():
        return Calibration(DEFAULT)
    data = json.loads(file.read_text(encoding="utf-8"))
    known = {f.name for f in dataclasses.fields(Constants)} - {_CORRECTION}
    values = {k: float(v) for k, v in data["constants"].items() if k in known}
    trees = data.get(_CORRECTION)
    correction = Correction.from_json(trees) if trees else None
    constants = Constants(**values, correction=correction)
    return Calibration(constants, str(data["device"]), str(data["quality"]))


def constants_text(constants: Constants, device: str, quality: Quality) -> str:
    """The file of shipped constants: where they are from, and how good they are."""
    names = [f.name for f in dataclasses.fields(Constants) if f.name != _CORRECTION]
    data = {
        "device": device,
        "quality": str(quality),
        "constants": {k: float(f"{getattr(constants, k):.5g}") for k in names},
    }
    text = json.dumps(data, indent=2)
    if constants.correction is not None:  # a line a tree
        trees = constants.correction.as_json()
        lines = ",\n".join(f"      {json.dumps(tree)}" for tree in trees.pop("trees"))
        head = json.dumps(trees)[:-1]
        text = f'{text[:-2]},\n  "{_CORRECTION}": {head}, "trees": [\n{lines}\n  ]}}\n}}'
    return text + "\n"


__all__ = ["Calibration", "constants_text", "shipped_calibration"]
