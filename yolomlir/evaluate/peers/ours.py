"""yolomlir itself, as an engine among others: a compiled model in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import yolomlir
from yolomlir.api import Model
from yolomlir.evaluate.peers.base import COLUMNS, Array, Problem, timed
from yolomlir.runtime.executor import TimedExecutor

ARTIFACT = "model-{precision}.ylm"
"""Where in the problem's folder the compiled model lies."""


class OursPeer:
    """A loaded `.ylm`, fed with uint8 pixels from its input buffer."""

    def __init__(self, model: Model, problem: Problem) -> None:
        image = problem.image
        self._image = model.input_buffer()
        self._image[...] = image if model.info.input_dtype == "uint8" else image / np.float32(255)
        self._model = model
        self.precision = model.info.precision
        where = " from page-locked memory" if problem.device == "cuda" else ""
        self.notes = f"{model.info.input_dtype} input{where}"

    def run(self) -> Array:
        """One inference through the public API."""
        return self._model(self._image)

    def time(self, seconds: float) -> dict[str, list[float]]:
        """The wall clock; on a GPU its parts too, in inferences of their own."""
        executor = self._model.executor
        if not isinstance(executor, TimedExecutor):
            return {"wall": timed(self.run, seconds)}
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        columns["wall"] = timed(self.run, seconds / 2)
        inputs = {"image": self._image}

        def parts() -> None:
            for name, value in executor.run_parts(inputs).items():
                columns[name].append(value)

        timed(parts, seconds / 2)
        return columns

    def close(self) -> None:
        """Free the model."""
        self._model.close()


def make(problem: Problem) -> OursPeer:
    """Load the compiled model of the problem's precision."""
    path = Path(problem.folder) / ARTIFACT.format(precision=problem.precision)
    return OursPeer(yolomlir.load(path, threads=problem.threads), problem)
