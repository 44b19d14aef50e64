"""Fitting the cost model's constants to a database of measurements."""

from __future__ import annotations

import logging

import numpy as np

from yolomlir.autotune import space
from yolomlir.autotune.cost_model import Constants, Device, Features
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
