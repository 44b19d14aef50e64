"""A small seeded model in a file, and a cache folder that the tests of one run share."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint

SIZE = (64, 96)
IMGSZ = "64x96"
CLASSES = 3


@cache
def folder() -> Path:
    """A folder that goes away with the process."""
    path = Path(tempfile.mkdtemp(prefix="yolomlir-test-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def checkpoint() -> Checkpoint:
    """YOLO26n with 3 classes, batch norms folded."""
    return seeded_checkpoint("n", CLASSES, 7, fused=True)


@cache
def checkpoint_file() -> str:
    """The checkpoint as a file."""
    return save("model", checkpoint())


def save(name: str, model: Checkpoint) -> str:
    """Write a checkpoint; its path."""
    path = folder() / f"{name}.safetensors"
    save_file(model.tensors, path)
    return str(path)


def planted(name: str, change: float = 1.0) -> Checkpoint:
    """The checkpoint with one wrong element in a weight: the first of the middle channel."""
    tensors = dict(checkpoint().tensors)
    weight = tensors[name].copy()
    weight[weight.shape[0] // 2].flat[0] += np.float32(change)
    return Checkpoint({**tensors, name: weight})
