"""What is to be tuned in a model: its distinct dispatch functions, and where each is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from yolomlir.autotune import signature, space
from yolomlir.autotune.space import Problem, Tile, problem_of
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.tile import TILE
from yolomlir.compiler import CompileOptions, _import, _lower, _optimize
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.dialects import yolo
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.weights import WeightStore
from yolomlir.runtime.plan import Plan, Step
from yolomlir.target import Target, target_named

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One function to tune.

    text: of the function at the linalg level, without locations and tile. yolo_text, signature: of
    it at the `yolo` level (see `signature.py`). steps: the plan's launches of it. tile: that a
    compile takes.
    """

    name: str
    text: str
    yolo_text: str
    signature: str
    problem: Problem
    steps: tuple[Step, ...]
    tile: Tile

    @property
    def count(self) -> int:
        """Launches an inference."""
        return len(self.steps)

    @property
    def layer(self) -> str:
        """Of the first launch."""
        return self.steps[0].layer


@dataclass
class Workload:
    """A model's cases by the name of their function, and what else measuring needs."""

    target: Target
    precision: str
    scale: str
    plan: Plan
    weights: WeightStore
    cases: dict[str, Case] = field(default_factory=dict)


def collect(
    checkpoint: Checkpoint, options: CompileOptions, layers: list[str] | None = None
) -> Workload:
    """The workload of a checkpoint, from the module that a compile makes.

    layers: only functions of which a launch's layer begins with one of these. Raises UserError for
    a target that is no GPU, and for layers that no kernel belongs to.
    """
    from yolomlir.codegen.build_plan import build_plan

    options = options.resolved()
    target = target_named(options.target)
    if target.kind != "gpu":
        raise UserError(
            f"target '{target.name}' has nothing to tune", hint="tuning is for GPUs: --target sm_90"
        )
    with yolo.new_context(), ir.Location.unknown():
        imported = _import(checkpoint, options)
        module = _optimize(imported, options, target)
        plan = build_plan(module)
        named = {
            name: (signature.function_text(op), signature.signature(op))
            for name, op in _functions(module).items()
        }
        _lower(module, imported.weights, target)
        workload = Workload(target, str(options.precision), imported.scale, plan, imported.weights)
        for name, function in _functions(module).items():
            steps = tuple(s for s in plan.steps if s.kernel == name)
            if not _wanted(steps, layers):
                continue
            case = _case(function, name, named[name], steps, workload)
            if case is not None:
                workload.cases[name] = case
    if not workload.cases:
        known = ", ".join(s.layer for s in plan.steps[:4])
        raise UserError(f"no kernel belongs to {', '.join(layers or [])}", hint=f"such as {known}")
    return workload


def _wanted(steps: tuple[Step, ...], layers: list[str] | None) -> bool:
    if not steps:
        return False
    return not layers or any(s.layer.startswith(prefix) for s in steps for prefix in layers)


def _functions(module: ir.Module) -> dict[str, ir.Operation]:
    from yolomlir.passes.outlining import functions

    return {n: op for n, op in functions(module).items() if "yolo.family" in op.attributes}


def _case(
    function: ir.Operation,
    name: str,
    described: tuple[str, str],
    steps: tuple[Step, ...],
    workload: Workload,
) -> Case | None:
    """None for a family whose tiles nobody has listed: its kernels keep their defaults."""
    chosen = None
    if TILE in function.attributes:
        chosen = function.attributes[TILE]
        del function.attributes[TILE]
    try:
        problem = problem_of(function, workload.target, workload.precision)
    except UnsupportedError as error:
        logger.info("%s is not tuned: %s", name, error)
        return None
    tile = space.tile_in(problem.family, chosen) if chosen else space.default(problem)
    text = str(function.get_asm(use_local_scope=True, enable_debug_info=False))
    return Case(name, text, described[0], described[1], problem, steps, tile)
