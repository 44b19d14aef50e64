"""The tile of a convolution that nobody has measured: the one that the cost models say is fastest.

Whoever generates kernels of convolutions gives their functions tiles before: `yolo-assign-tiles`
does so at the `yolo` level, `assign_default_tiles` at the linalg level. The code generator knows
what is legal (`codegen/gpu/conv2d_kinds.py`), not what is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from yolomlir.autotune import window_model
from yolomlir.autotune.constants import shipped_calibration
from yolomlir.autotune.cost_model import Constants, Device, Features
from yolomlir.autotune.cost_model import predict_us as gathered_us
from yolomlir.bindings import ir
from yolomlir.codegen.gpu import conv2d_kinds, conv2d_space
from yolomlir.codegen.gpu.chain_tile import ChainTile
from yolomlir.codegen.gpu.conv2d_kinds import Conv2dTile
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.codegen.gpu.conv2d_tile import ConvTile, objection
from yolomlir.codegen.gpu.conv_problem import ConvShape, match_conv
from yolomlir.codegen.gpu.tile import TILE
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo
from yolomlir.target import Target

_WITH_FLAGS = 64
"""Geometries of which every combination of flags is considered."""
_CLEARLY = 0.9
"""Of the other kind's predicted time, what a window is taken at without measurements: both are
predicted within some 5 %."""


def assign_default_tiles(module: ir.Module, target: Target, precision: str) -> None:
    """Give the convolutions of a linalg-level module that have no `yolo.tile` the default one.

    target: a GPU. Raises UnsupportedError where no tile is legal, or for a form that is none of
    section 4 of the architecture.
    """
    for view in module.body.operations:
        op = view.operation
        attributes = op.attributes
        if "yolo.family" not in attributes or TILE in attributes:
            continue
        if yolo.string(op, "yolo.family") == "conv2d":
            shape = match_conv(op, precision=precision).shape
            attributes[TILE] = conv2d_kinds.attribute_of(default_tile(shape, target, precision))


@lru_cache(maxsize=1024)
def default_tile(shape: ConvShape, target: Target, precision: str) -> Conv2dTile:
    """The legal tile that the cost models say is fastest; a window only where it clearly is.

    Raises UnsupportedError where no tile is legal.
    """
    window = best_window(shape, target, precision)
    gathered = best_gathered(shape, target, precision)
    if window is None:
        if gathered is None:
            raise UnsupportedError(f"no conv2d tile fits {shape} on {target.name}")
        return gathered
    if gathered is None:
        return window
    constants = shipped_calibration().constants
    times = predict_us([window, gathered], shape, target, precision, constants)
    return window if times[0] < _CLEARLY * times[1] else gathered


def best_window(shape: ConvShape, target: Target, precision: str) -> ChainTile | None:
    """The window of the lowest predicted time; None where none is legal."""
    tiles = conv2d_kinds.window_tiles(shape, target, precision)
    us = window_model.predict_us(tiles, shape, target, precision)
    return min(zip(us, tiles, strict=True), key=lambda item: item[0], default=(0.0, None))[1]


@lru_cache(maxsize=1024)
def best_gathered(shape: ConvShape, target: Target, precision: str) -> ConvTile | None:
    """The usual tile that is no window of the lowest predicted time, the first among equals; None
    where none is legal."""
    constants = shipped_calibration().constants
    every = conv2d_space.deep_pipelines(conv2d_space.geometries(shape, target), target, precision)
    usual = conv2d_space.usual(every)
    tiles = usual if len(usual) else every
    us = gathered_us(Features.of(tiles, precision), Device.of(target), constants)
    first = tiles.where(np.argsort(us, kind="stable")[:_WITH_FLAGS])
    tiles, us = with_flags(first, target, precision, constants)
    for row in np.argsort(us, kind="stable"):
        tile = tiles.tile(int(row))
        if objection(tile, shape, target, precision) is None:
            return tile
    return None


def with_flags(
    tiles: ConvTiles, target: Target, precision: str, constants: Constants
) -> tuple[ConvTiles, NDArray[np.float64]]:
    """Rows with every legal combination of flags, and their predicted times, microseconds."""
    flagged = conv2d_space.flags(tiles)
    flagged = flagged.where(conv2d_space.legal(flagged, target, precision))
    return flagged, gathered_us(Features.of(flagged, precision), Device.of(target), constants)


def predict_us(
    tiles: Sequence[Conv2dTile],
    shape: ConvShape,
    target: Target,
    precision: str,
    constants: Constants,
) -> list[float]:
    """Microseconds of each tile's kernel, of either kind, by the model of its kind."""
    windows = [t for t in tiles if isinstance(t, ChainTile)]
    gathered = [t for t in tiles if not isinstance(t, ChainTile)]
    of_windows = iter(window_model.predict_us(windows, shape, target, precision))
    features = Features.of(ConvTiles.of(shape, gathered), precision)
    of_gathered = iter(gathered_us(features, Device.of(target), constants))
    return [float(next(of_windows if isinstance(t, ChainTile) else of_gathered)) for t in tiles]


__all__ = [
    "assign_default_tiles", "best_gathered", "best_window", "default_tile", "predict_us",
    "with_flags",
]  # fmt: skip
