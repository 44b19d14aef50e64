"""A model's time by kernel: measured inside the CUDA graph, or by the CPU program's own clock."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.api import Model
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.evaluate.environment import environment
from yolomlir.evaluate.graph import Graph, network_graph
from yolomlir.evaluate.statistics import Statistics, summarize
from yolomlir.evaluate.step_layers import StepLayers, node_flops, step_layers
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cupti import Cupti, KernelRecord, find_library
from yolomlir.runtime.plan import Step, View
from yolomlir.target import Target, target_named

_log = logging.getLogger(__name__)

Times = NDArray[np.float64]
CUPTI, EVENTS, CLOCK = "CUPTI", "events", "time-stamp counter"
METHODS = {
    CUPTI: "CUPTI's kernel records, inside the CUDA graph",
    EVENTS: "events between kernels that run one by one in a graph of their own, without CUPTI",
    CLOCK: "the processor's time-stamp counter, read by the running program between steps",
}


@dataclass(frozen=True)
class KernelProfile:
    """One step of the plan. times: of its executions, in microseconds.

    flops: operations of convolutions and attention, 2 a multiply-add. bytes: activations read and
    written and weights read, once each. begin_us: of one execution, from the inference's start.
    """

    layer: str
    kernel: str
    family: str
    times: Statistics
    flops: int
    bytes: int
    begin_us: float

    @property
    def flops_per_s(self) -> float:
        """Achieved operations a second, at the median time."""
        return self.flops / self.times.median * 1e6 if self.times.median else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Achieved bytes a second, at the median time; of any level of the memory."""
        return self.bytes / self.times.median * 1e6 if self.times.median else 0.0

    def roof_us(self, target: Target, precision: str) -> float:
        """The least time that the chip's peak rates allow; 0 where the target has none."""
        if not target.dram_gb_per_s:
            return 0.0
        peak = target.peak_tflops(precision)
        return max(self.flops / peak / 1e6, self.bytes / target.dram_gb_per_s / 1e3)


@dataclass(frozen=True)
class Overlap:
    """Two kernels that ran at the same time, and for how long, in microseconds (the median)."""

    first: str
    second: str
    us: float


@dataclass(frozen=True)
class Transfer:
    """A copy between host and GPU."""

    name: str
    bytes: int
    times: Statistics


@dataclass(frozen=True)
class Profile:
    """Kernels in the plan's order.

    total_us: GPU time of one inference without the profiler (on the CPU: from the first step's
    begin to the last one's end). sum_us: an inference's kernels added up; busy_us: time in which at
    least one of them ran; both the median of the inferences. overlaps: pairs of kernels that ran
    side by side, longest first.
    """

    target: str
    precision: str
    method: str
    count: int
    kernels: tuple[KernelProfile, ...]
    total_us: Statistics
    sum_us: float
    busy_us: float
    overlaps: tuple[Overlap, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def overlap_us(self) -> float:
        """How much of the sum ran beside something else."""
        return max(0.0, self.sum_us - self.busy_us)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `profile_from` reads them."""
        return {"kind": "profile", **asdict(self)}


def profile_from(data: dict[str, Any]) -> Profile:
    """The inverse of `Profile.to_dict`. Raises UserError for another structure."""
    if data.get("kind") != "profile":
        raise UserError("is not a profile written by `yolomlir profile --json`")
    values = {k: v for k, v in data.items() if k != "kind"}
    kernels = tuple(
        KernelProfile(**{**k, "times": Statistics(**k["times"])}) for k in values["kernels"]
    )
    transfers = tuple(
        Transfer(t["name"], t["bytes"], Statistics(**t["times"])) for t in values["transfers"]
    )
    overlaps = tuple(Overlap(**o) for o in values["overlaps"])
    total = Statistics(**values["total_us"])
    return Profile(
        **{
            **values,
            "kernels": kernels,
            "transfers": transfers,
            "overlaps": overlaps,
            "total_us": total,
        }
    )


@dataclass(frozen=True)
class _Measured:
    """begins, ends: [count, steps] in microseconds."""

    method: str
    begins: Times
    ends: Times
    totals: Sequence[float]
    transfers: tuple[Transfer, ...] = ()


def profile(
    load: Callable[[], Model], image: NDArray[Any], *, count: int = 100, method: str | None = None
) -> Profile:
    """Measure a model's kernels over `count` inferences of one input.

    load: makes the model; CUPTI has to be there before it. image: [N, H, W, 3] of the model's type.
    method: `CUPTI` or `EVENTS`, on a GPU; None takes CUPTI where it can be had. Raises UserError
    where a method is asked for in vain.
    """
    library = None if method == EVENTS or not _has_gpu() else find_library()
    if method == CUPTI and library is None:
        raise UserError("CUPTI cannot be used", hint="pip install nvidia-cuda-cupti, on a GPU")
    if library is not None:
        with load() as model:  # a process that has had CUPTI runs graphs slower ever after
            parts = _parts(model, image, count)
        try:
            with Cupti(library) as recorder, load() as model:
                return _assemble(model, _measure(model, image, count, recorder, parts), count)
        except InternalError as error:
            if method == CUPTI:
                raise
            _log.warning("%s; timing by events instead", error)
    with load() as model:
        parts = _parts(model, image, count)
        return _assemble(model, _measure(model, image, count, None, parts), count)


def _has_gpu() -> bool:
    """Whether CUPTI has anything to record."""
    from yolomlir.runtime.device import cuda_device

    return not isinstance(cuda_device(), str)


def _parts(model: Model, image: NDArray[Any], count: int) -> list[dict[str, float]]:
    """Milliseconds of `count` inferences' parts (`run_parts`) on a GPU; none on the CPU."""
    if model.target == "cpu":
        return []
    executor: Any = model.executor
    inputs = {"image": np.ascontiguousarray(image)}
    for _ in range(10):
        executor.run(inputs)
    return [executor.run_parts(inputs) for _ in range(count)]


def _measure(
    model: Model,
    image: NDArray[Any],
    count: int,
    recorder: Cupti | None,
    parts: list[dict[str, float]],
) -> _Measured:
    executor: Any = model.executor
    inputs = {"image": np.ascontiguousarray(image)}
    if model.target == "cpu":
        return _by_clock(executor, inputs, count)
    for _ in range(10):
        executor.run(inputs)
    if recorder is not None:
        recorder.records()
        for _ in range(count):
            executor.run(inputs)
        begins, ends = _by_step(recorder.records(), model.artifact.programs[model.target], count)
        recorder.close()
        found = CUPTI
    else:
        times = executor.run_events(inputs, count)
        ends = np.cumsum(times, axis=1)
        begins, found = ends - times, EVENTS
    totals = [1e3 * part["gpu"] for part in parts]
    plan = model.artifact.programs[model.target].plan
    places = (("H2D image", "h2d", plan.inputs), ("D2H detections", "d2h", plan.outputs))
    transfers = tuple(
        Transfer(
            name, sum(map(view_bytes, views.values())), summarize([1e3 * p[key] for p in parts])
        )
        for name, key, views in places
    )
    return _Measured(found, begins, ends, totals, transfers)


def _by_clock(executor: Any, inputs: dict[str, Any], count: int) -> _Measured:
    """The CPU program's own stamps; ticks are set against another clock over the whole run."""
    for _ in range(3):
        executor.run_timed(inputs)
    ticks, walls = [], []
    for _ in range(max(count, 2)):
        walls.append(time.perf_counter_ns())
        ticks.append(executor.run_timed(inputs))
    stamps = np.stack(ticks).astype(np.float64)
    per_us = (stamps[-1, 0, 0] - stamps[0, 0, 0]) / ((walls[-1] - walls[0]) / 1e3)
    if not np.isfinite(per_us) or per_us <= 0:
        raise InternalError("the program wrote no time stamps", hint="compile the model again")
    start = stamps[:, :1, :1]
    relative = (stamps - start) / per_us
    begins, ends = relative[..., 0], relative[..., 1]
    return _Measured(CLOCK, begins, ends, list(ends[:, -1]))


def _by_step(records: Sequence[KernelRecord], program: Program, count: int) -> tuple[Times, Times]:
    """Records by inference and step: nodes of a graph are numbered in the order they were made."""
    names = [program.kernels[step.kernel]["function"] for step in program.plan.steps]
    by_node: dict[int, list[KernelRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.start_ns):
        by_node[record.graph_node].append(record)
    if set(by_node) == {0}:
        by_node = {i: by_node[0][i :: len(names)] for i in range(len(names))}
    nodes = [by_node[node] for node in sorted(by_node)]
    recorded = [node[0].name for node in nodes]
    if recorded != names or any(len(node) != count for node in nodes):
        raise InternalError(
            f"CUPTI recorded {len(nodes)} kernels, {sum(map(len, nodes))} times; the plan has "
            f"{len(names)} steps, which ran {count} times",
            hint="profile with --method events",
        )
    begins = np.array([[r.start_ns for r in node] for node in nodes], np.float64).T / 1e3
    ends = np.array([[r.end_ns for r in node] for node in nodes], np.float64).T / 1e3
    start = begins.min(axis=1, keepdims=True)
    return begins - start, ends - start


def _assemble(model: Model, measured: _Measured, count: int) -> Profile:
    program = model.artifact.programs[model.target]
    info = model.info
    graph = network_graph(info.scale, info.classes)
    layers = step_layers(program, graph)
    times = measured.ends - measured.begins
    typical = int(np.argsort(measured.ends.max(axis=1))[len(times) // 2])
    kernels = tuple(
        KernelProfile(
            step.layer,
            step.kernel,
            known.family,
            summarize(times[:, index].tolist()),
            _flops(step, known, graph),
            _bytes(step, program),
            float(measured.begins[typical, index]),
        )
        for index, (step, known) in enumerate(zip(program.plan.steps, layers, strict=True))
    )
    return Profile(
        target=model.target,
        precision=info.precision,
        method=measured.method,
        count=count,
        kernels=kernels,
        total_us=summarize(measured.totals),
        sum_us=float(np.median(times.sum(axis=1))),
        busy_us=float(
            np.median([_union(b, e) for b, e in zip(measured.begins, measured.ends, strict=True)])
        ),
        overlaps=_overlaps(measured, [step.layer for step in program.plan.steps]),
        transfers=measured.transfers,
        model={
            "source": info.source,
            "scale": info.scale,
            "classes": info.classes,
            "height": info.height,
            "width": info.width,
            "batch": info.batch,
        },
        environment=environment(),
    )


def _union(begins: Times, ends: Times) -> float:
    """The length of the union of intervals."""
    covered, reach = 0.0, -np.inf
    for index in np.argsort(begins):
        covered += max(0.0, ends[index] - max(begins[index], reach))
        reach = max(reach, ends[index])
    return float(covered)


def _overlaps(measured: _Measured, names: Sequence[str]) -> tuple[Overlap, ...]:
    """Pairs of steps that run side by side in at least half of the inferences."""
    begins, ends = measured.begins, measured.ends
    found = []
    for i, j in combinations(range(len(names)), 2):
        shared = np.minimum(ends[:, i], ends[:, j]) - np.maximum(begins[:, i], begins[:, j])
        us = float(np.median(shared))
        if us > 0:
            found.append(Overlap(names[i], names[j], us))
    return tuple(sorted(found, key=lambda o: -o.us))


def view_bytes(view: View) -> int:
    """Bytes of a view's elements."""
    return int(np.prod(view.shape)) * np.dtype(view.dtype).itemsize


def _bytes(step: Step, program: Program) -> int:
    reads = sum(
        view_bytes(a.view) if a.view is not None else program.weights[str(a.weight)].nbytes
        for a in dict.fromkeys(step.arguments)
    )
    return reads + sum(map(view_bytes, step.results))


def _flops(step: Step, known: StepLayers, graph: Graph) -> int:
    """All nodes of a step have its result's position count; attention's is of its own channels."""
    if not known.nodes:
        return 0
    n, _, height, width = step.results[0].shape
    return sum(
        node_flops(graph, name, {name: (n, graph.node(name).channels, height, width)})
        for name in known.nodes
    )


def target_of(found: Profile) -> Target:
    """The row of the profile's target."""
    return target_named(found.target)


def load_profile(path: str | Path) -> Profile:
    """Read a profile's JSON. Raises UserError for another file."""
    import json

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from error
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", where=path) from error
    try:
        return profile_from(data)
    except (UserError, AttributeError, KeyError, TypeError) as error:
        message = "is not a profile written by `yolomlir profile --json`"
        raise UserError(message, where=path) from error
