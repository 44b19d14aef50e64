"""The cost model's constants of a target, and fitting them to a database of measurements."""

from __future__ import annotations

import dataclasses
import json
import logging
from functools import cache
from importlib import resources

import numpy as np

from yolomlir.autotune import space
from yolomlir.autotune.correction import Correction
from yolomlir.autotune.cost_model import DEFAULT, Constants, Device, Features
from yolomlir.autotune.database import Database
from yolomlir.autotune.fitting import Measured, Quality, fit, held_out_quality
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.diagnostics import UserError
from yolomlir.target import target_named

logger = logging.getLogger(__name__)

_FEWEST_POINTS = 4
"""Of a function, for it to count: fewer say nothing of an order."""
_FEWEST_SHAPES = 10
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


def measured_convolutions(database: Database, precision: str = "tf32") -> list[Measured]:
    """The measurements of a database as the model needs them, an item a function.

    Functions of one shape differ in their epilogues, and so do their times: they are kept apart.
    """
    data = []
    for key, times in database.times.items():
        case = database.cases.get(key)
        if case is None or case.family != "conv2d" or case.precision != precision:
            continue
        points = {r.tile: r.us for r in times.values() if not r.fault}
        item = _measured(ConvShape(**case.shape), points, precision)
        if item is not None:
            data.append(item)
    return data


def _measured(shape: ConvShape, points: dict[str, float], precision: str) -> Measured | None:
    tiles, us = [], []
    for key, value in sorted(points.items()):
        try:
            tile = space.tile_of("conv2d", key)
        except UserError as error:
            logger.debug("left out: %s", error)
            continue
        if isinstance(tile, ConvTile):  # windows have their own model
            tiles.append(tile)
            us.append(value)
    if len(tiles) < _FEWEST_POINTS:
        return None
    features = Features.of(ConvTiles.of(shape, tiles), precision)
    return Measured(repr(shape), features, np.array(us))


def calibrate(database: Database, precision: str = "tf32") -> tuple[Constants, Quality]:
    """Constants fitted to all measurements, and how good the model is on shapes it has not seen.

    Raises UserError where there are too few measurements.
    """
    data = measured_convolutions(database, precision)
    shapes = len({d.name for d in data})
    if shapes < _FEWEST_SHAPES:
        raise UserError(
            f"{shapes} measured shapes are too few to fit the cost model; it needs "
            f"{_FEWEST_SHAPES}",
            hint="tune a whole model first: yolomlir tune yolo26n",
        )
    device = Device.of(target_named(database.target))
    return fit(data, device), held_out_quality(data, device)
