"""Times of a model's kernels on a GPU that is not there, by the cost model, and tiles for it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from yolomlir.autotune import space, tables
from yolomlir.autotune.build import Builder, Job
from yolomlir.autotune.constants import shipped_calibration
from yolomlir.autotune.cost_model import Constants, Device
from yolomlir.autotune.space import Problem, Tile
from yolomlir.autotune.tables import Table, TableEntry
from yolomlir.autotune.workload import Case, Workload
from yolomlir.codegen.build_plan import ITEM_BYTES
from yolomlir.codegen.gpu import chain_model
from yolomlir.codegen.gpu.element import FLOAT32, element_of
from yolomlir.diagnostics import UserError
from yolomlir.runtime.plan import Step, View
from yolomlir.target import target_named

GPUS = {"rtx5070": "sm_120", "h200": "sm_90", "rtx4090": "sm_89", "rtx3090": "sm_86",
        "a100": "sm_80"}  # fmt: skip
"""The GPUs whose published figures `target.TARGETS` has, by target."""
NAMES = {
    "rtx5070": "NVIDIA GeForce RTX 5070", "h200": "NVIDIA H200",
    "rtx4090": "NVIDIA GeForce RTX 4090", "rtx3090": "NVIDIA GeForce RTX 3090",
    "a100": "NVIDIA A100",
}  # fmt: skip
_MEASURED = "sm_90"
"""The target whose table is measured."""
_TF32_SHARE = 0.5
"""Of the tensor cores' rate that attention's short products reach."""


@dataclass(frozen=True)
class StepPrediction:
    """One launch: microseconds, what it computes and moves, and the tile assumed."""

    layer: str
    family: str
    us: float
    flops: float
    bytes: float
    tile: str


@dataclass(frozen=True)
class Prediction:
    """Of a whole inference. sum_us: all launches, one after the other. path_us: the longest path
    of launches that wait for each other, which is the least a graph with branches can take."""

    steps: list[StepPrediction]
    sum_us: float
    path_us: float


def gpu_named(name: str) -> tuple[str, str]:
    """Target and full name of a GPU such as `rtx5070`. Raises UserError that lists the names."""
    plain = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if plain not in GPUS:
        raise UserError(f"no figures are known of '{name}'", hint=f"one of: {', '.join(GPUS)}")
    return GPUS[plain], NAMES[plain]


def predict(workload: Workload) -> Prediction:
    """Every launch of a workload on its target's GPU, with the tiles that a compile would take."""
    by_case = {}
    for name, case in workload.cases.items():
        us = _time(case, workload.precision, case.tile)
        by_case[name] = (space.key_of(case.tile), us)
    steps = []
    for step in workload.plan.steps:
        if step.kernel not in by_case:
            raise UserError(f"no model of kernel '{step.kernel}'", where=step.layer)
        family = workload.cases[step.kernel].problem.family
        key, us = by_case[step.kernel]
        problem = workload.cases[step.kernel].problem
        steps.append(StepPrediction(step.layer, family, us, flops(problem), moved(step), key))
    return Prediction(steps, sum(s.us for s in steps), _longest(workload, steps))


def as_facts(prediction: Prediction, gpu: str, workload: Workload) -> dict[str, Any]:
    """Plain dictionaries and lists, with a note that says what the numbers are."""
    launches = [
        {
            "layer": s.layer, "family": s.family, "us": round(s.us, 3), "tile": s.tile,
            "gflop": round(s.flops / 1e9, 4), "mb": round(s.bytes / 1e6, 3),
        }
        for s in prediction.steps
    ]  # fmt: skip
    fitted = shipped_calibration().device
    source = f"fitted to measurements of an {fitted}" if fitted else "that was not fitted"
    note = (
        f"This is a prediction, not a measurement, for {gpu} ({workload.target.name}, "
        f"{workload.precision}): from its published figures, by a cost model {source}. "
        f"{len(launches)} launches: {prediction.sum_us:.0f} us one after the other, "
        f"{prediction.path_us:.0f} us along the longest path of dependent ones."
    )
    if any(s.family == "chain" for s in prediction.steps):
        note += (
            " Chains are estimated more roughly than single convolutions, and too slow where a "
            "GPU needs several waves of blocks; they are comparable only with one another."
        )
    return {
        "predicted": True, "gpu": gpu, "target": workload.target.name,
        "precision": workload.precision, "sum_us": prediction.sum_us,
        "path_us": prediction.path_us, "launches": launches, "note": note,
    }  # fmt: skip


def predicted_table(workload: Workload, builder: Builder | None = None) -> Table:
    """For each convolution the tile that the model ranks first of the whole space, as a table.

    builder: assembles candidates; those that do not assemble, or spill, are passed over.
    """
    constants = shipped_calibration().constants
    convolutions = [c for c in workload.cases.values() if c.problem.family == "conv2d"]
    ranked = {c.name: space.ranked(c.problem, constants) for c in convolutions}
    if builder is not None:
        ranked = {c.name: _assembling(c, ranked[c.name], builder) for c in convolutions}
    rows = []
    for case in convolutions:
        usual = space.default(case.problem)
        best = (*ranked[case.name], usual)[0]
        best_us, usual_us = space.predicted_us(case.problem, [best, usual], constants)
        entry = TableEntry(space.key_of(best), best_us, usual_us)
        rows.append((workload.precision, case.signature, entry))
    note = "predicted by the cost model fitted on another GPU; nothing was measured on this one"
    device = next(NAMES[g] for g, t in GPUS.items() if t == workload.target.name)
    return tables.table_of(workload.target.name, device, tables.PREDICTED, rows, note)


def _assembling(case: Case, tiles: tuple[Tile, ...], builder: Builder) -> tuple[Tile, ...]:
    """The tiles from the first one on that assembles without spills, of the first few."""
    for number, tile in enumerate(tiles[:_TRIES]):
        problem = case.problem
        job = Job(
            case.name, problem.family, case.text, (space.key_of(tile),), problem.target,
            problem.precision,
        )  # fmt: skip
        if builder.submit(job).result()[0].fault is None:
            return tiles[number:]
    return ()


_TRIES = 8


# ---- one launch ---------------------------------------------------------------------------------


def _time(case: Case, precision: str, tile: Tile) -> float:
    """Microseconds. Convolutions by the model; chains by the estimate that their tiles are chosen
    by, the others by a roofline, times what its result was off by where the same function (at fp16
    also that of float32) has been measured, on the GPU of the measured table."""
    constants = shipped_calibration().constants
    problem, step = case.problem, case.steps[0]
    if problem.family == "conv2d":
        return space.predicted_us(problem, [tile], constants)[0]
    us = _rough(problem, tile, step, constants)
    measured = tables.shipped(_MEASURED)
    entry = measured.find(precision, case.signature) if measured else None
    if entry is None and measured and precision == "fp16" and problem.family != "chain":
        entry = measured.find("tf32", case.signature.replace("f16", ""))  # off by as much
    if entry is None:
        return us
    there = dataclasses.replace(problem, target=target_named(_MEASURED))
    measured_tile = space.tile_of(problem.family, entry.tile)
    return us * entry.us / _rough(there, measured_tile, step, constants)


def _rough(problem: Problem, tile: Tile, step: Step, constants: Constants) -> float:
    """Microseconds of a launch whose family the cost model does not know."""
    if problem.family == "chain":
        return chain_model.estimate_us(tile, problem.shape, problem.target, problem.precision)
    return _roofline(problem, step, constants)


def _roofline(problem: Problem, step: Step, constants: Constants) -> float:
    """The slower of arithmetic and bytes from L2, after what a convolution's start and epilogue
    take."""
    device = Device.of(problem.target)
    sms = device.multiprocessors * device.clock_hz
    if problem.family == "attention":
        products = element_of(problem.precision).k_step / FLOAT32.k_step  # of TF32 in one's time
        rate = 2 * _TF32_SHARE * min(device.tf32_peak, constants.mma_peak) * products * sms
    else:
        rate = problem.target.fp32_tflops * 1e12
    seconds = max(flops(problem) / rate, moved(step) / (constants.l2_bytes * sms))
    fixed = constants.start + constants.epilogue + constants.latency
    return 1e6 * (seconds + fixed / device.clock_hz)


def flops(problem: Problem) -> float:
    """Two for a multiply-add, of the products alone."""
    shape = problem.shape
    if problem.family == "conv2d":
        return float(shape.flops)
    if problem.family == "depthwise":
        s = shape.shape
        outputs = s.batch * s.out_height * s.out_width * s.channels
        return float(2 * outputs * math.prod(s.kernel))
    if problem.family == "attention":
        channels = shape.heads * (shape.key_dim + shape.head_dim)
        taps = math.prod(shape.kernel) if shape.kernel else 0
        own = 2.0 * shape.tokens * taps * shape.heads * shape.head_dim
        return float(shape.batch * (2.0 * shape.tokens**2 * channels + own))
    if problem.family == "chain":
        return float(2 * shape.first.pixels * sum(k * n for k, n in shape.sizes()))
    return 0.0


def moved(step: Step) -> float:
    """Bytes of activations read and written, each once."""
    views = [a.view for a in step.arguments if a.view is not None] + list(step.results)
    return float(sum(_bytes(view) for view in views))


def _bytes(view: View) -> int:
    return math.prod(view.shape) * ITEM_BYTES[view.dtype]


def _longest(workload: Workload, steps: list[StepPrediction]) -> float:
    ends: list[float] = []
    for step, prediction in zip(workload.plan.steps, steps, strict=True):
        start = max((ends[i] for i in step.depends), default=0.0)
        ends.append(start + prediction.us)
    return max(ends, default=0.0)
