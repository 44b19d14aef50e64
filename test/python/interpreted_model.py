"""A program for a GPU, run by interpreting its kernels' functions through the plan's arena."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import small_model
from yolomlir.passes.base import PassContext

from yolomlir import arena_interpreter, interpreter
from yolomlir.arena_interpreter import Arena
from yolomlir.codegen.build_plan import build_plan
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.yolo26 import import_model
from yolomlir.pipeline import Pipeline, pipeline_for
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.plan import Step
from yolomlir.target import target_named

HEIGHT, WIDTH = small_model.SIZE


class Interpreted:
    """What `ProgramSubject` needs of a model; 3 classes, 126 rows, one image."""

    target = "sm_90"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        level: int = 3,
        precision: str = "tf32",
        pairs: str = "",
        tuned: bool = False,
    ) -> None:
        """tuned: with the tiles of the shipped table."""
        imported = import_model(checkpoint, height=HEIGHT, width=WIDTH)
        context = PassContext(weights=imported.weights, target=target_named(self.target))
        steps = Pipeline.parse(pipeline_for("gpu", level, precision, pairs)).steps
        steps = [s for s in steps if tuned or s.name != "yolo-assign-tiles"]
        Pipeline(steps).run(imported.module, context)
        self._module, self._weights = imported.module, imported.weights
        text = str(imported.module)
        weights = {name: imported.weights[name] for name in imported.weights}
        plan = build_plan(imported.module)
        self.info = ModelInfo(
            "n", small_model.CLASSES, ("a", "b", "c"), HEIGHT, WIDTH, 1, 126, precision
        )
        program = Program(self.target, plan, weights, {}, {}, ir=text)
        self.artifact = Artifact(self.info, {self.target: program})

    @property
    def program(self) -> Program:
        return self.artifact.programs[self.target]

    def trace(self, batch: np.ndarray) -> Iterator[tuple[Step, list[np.ndarray]]]:
        plan = self.program.plan
        arena = Arena(plan.arena_bytes)
        arena.write(plan.inputs["image"], batch.transpose(0, 3, 1, 2))
        run = interpreter.Interpreter(self._module, self._weights)
        types = arena_interpreter._weight_types(self._module)
        for step in plan.steps:
            arena_interpreter._run_step(step, arena, run, types)
            yield step, [arena.read(view).astype(np.float32) for view in step.results]
