"""The dispatches that a compile of YOLO26 makes, for tests of every kernel of a family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from yolomlir.dialects import yolo

from yolomlir.bindings import func, ir
from yolomlir.compiler import CompileOptions, emit
from yolomlir.frontend import network
from yolomlir.frontend.checkpoint import Checkpoint


@cache
def _linalg(scale: str, chip: str, precision: str, level: int) -> str:
    """The network's module at the linalg level; weights are of the right shape, no more."""
    shapes = network.parameters(network.SCALES[scale], 80, fused=True)
    weights = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    options = CompileOptions(target=chip, precision=precision, level=level)
    return emit(Checkpoint(weights), options, "linalg")


def dispatches(
    family: str, scale: str, chip: str, precision: str, *, level: int = 3
) -> Iterator[func.FuncOp]:
    """The functions of a family, which live as long as the iterator."""
    module = ir.Module.parse(_linalg(scale, chip, precision, level))
    for view in module.body.operations:
        op = view.operation
        if "yolo.family" in op.attributes and yolo.string(op, "yolo.family") == family:
            yield view
