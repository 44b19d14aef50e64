"""Engines side by side, each in its own process: checked, then timed in interleaved rounds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.detections import match_detections
from yolomlir.evaluate.environment import environment
from yolomlir.evaluate.graph import Graph
from yolomlir.evaluate.peers.base import COLUMNS, PEERS, Problem
from yolomlir.evaluate.peers.ours import ARTIFACT
from yolomlir.evaluate.peers.worker import OURS
from yolomlir.evaluate.statistics import Statistics, summarize
from yolomlir.evaluate.tolerance import DEVIATIONS, HALF, Reference, exact_reference
from yolomlir.runtime.artifact import Artifact

_log = logging.getLogger(__name__)

REST_S = 0.25
"""Pause before an engine's turn: the threads of the one before may spin for as long."""
_CHECKED_ROWS, _CHECKED_CONFIDENCE = 20, 0.25
_LIMIT_S = 600.0
"""An engine that has not answered a command by then is given up."""
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "YOLOMLIR_NUM_THREADS",
)


@dataclass
class EngineResult:
    """One engine. state: `ok`, `absent`, `failed` or `wrong`, with the reason.

    columns: statistics in milliseconds. rounds_ms: each round's median wall time. check: how its
    detections compare with the reference. build_s: making it ready, the first inference included.
    """

    name: str
    device: str
    precision: str
    state: str = "ok"
    reason: str = ""
    notes: str = ""
    check: str = ""
    build_s: float | None = None
    peak_mb: float | None = None
    gpu_mb: float | None = None
    columns: dict[str, Statistics] = field(default_factory=dict)
    rounds_ms: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float | None:
        """Inferences a second, one after the other: of the median wall time."""
        wall = self.columns.get("wall")
        return None if wall is None else 1e3 / wall.median


@dataclass
class BenchmarkResult:
    """A table of engines, in the order they were asked for, and what it was measured on."""

    engines: list[EngineResult]
    settings: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "bench",
            "environment": self.environment,
            "settings": self.settings,
            "engines": [
                {
                    **{k: v for k, v in vars(engine).items() if k != "columns"},
                    "inferences_per_s": engine.throughput,
                    "columns_ms": {name: vars(s) for name, s in engine.columns.items()},
                }
                for engine in self.engines
            ],
        }


def benchmark_from(data: dict[str, Any]) -> BenchmarkResult:
    """The inverse of `BenchmarkResult.to_dict`. Raises UserError for another structure."""
    if data.get("kind") != "bench":
        raise UserError("is not a result written by `yolomlir bench --json`")
    engines = []
    for record in data["engines"]:
        values = {k: v for k, v in record.items() if k not in ("columns_ms", "inferences_per_s")}
        columns = {name: Statistics(**s) for name, s in record["columns_ms"].items()}
        engines.append(EngineResult(**values, columns=columns))
    return BenchmarkResult(engines, data["settings"], data["environment"])


@dataclass(frozen=True)
class Candidate:
    """One engine to time. artifact: for yolomlir, what was compiled, and how long that took."""

    name: str
    precision: str
    artifact: Artifact | None = None
    build_s: float | None = None
    notes: str = ""

    @property
    def title(self) -> str:
        """Its name in tables."""
        if self.artifact is None:
            return f"{self.name} {HALF}" if self.precision == HALF else self.name
        return f"{OURS} {next(iter(self.artifact.programs))} {self.precision}"


Progress = Callable[[str, int, int], None]


def candidates_named(
    names: Sequence[str], device: str, precisions: Sequence[str]
) -> list[Candidate]:
    """The engines of `--against`: names, groups (`torch`) or `all`, of those for the device.

    precisions: those that yolomlir is timed at. An engine is timed at the first, and at float16 as
    well where it is among them and the engine has it. Raises UserError for an unknown name.
    """
    chosen: list[str] = []
    for name in names:
        found = [
            kind.name
            for kind in PEERS.values()
            if device in kind.devices and name in ("all", kind.name, kind.group)
        ]
        if not found and name in PEERS:
            found = [name]
        if not found:
            known = ", ".join(("all", "torch", *PEERS))
            raise UserError(f"unknown engine '{name}'", hint=f"one of: {known}")
        chosen += [n for n in found if n not in chosen]
    others = [p for p in precisions if p != HALF] or ["tf32"]
    candidates = []
    for name in chosen:
        half = HALF in precisions and PEERS[name].has_half
        if not half or len(precisions) > 1:
            candidates.append(Candidate(name, others[0]))
        if half:
            candidates.append(Candidate(name, HALF))
    return candidates


def benchmark(
    candidates: Sequence[Candidate],
    problem: Problem,
    graph: Graph,
    image: NDArray[np.uint8],
    *,
    rounds: int = 10,
    seconds: float = 0.5,
    progress: Progress | None = None,
) -> BenchmarkResult:
    """Build and check every engine, then time them: A B C, A B C, …, so that drift cancels.

    problem: its folder is replaced by a temporary one. image: [N, H, W, 3]. seconds: a turn. An
    interrupt after the first round ends the timing: the result has what was measured until then.
    """
    report = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="yolomlir-bench-") as folder:
        _lay_out(Path(folder), graph, image, candidates)
        checker = _Checker(graph, image, problem.max_det)
        engines: list[_Engine] = []
        try:
            for index, candidate in enumerate(candidates):
                report("building", index, len(candidates))
                engines.append(_start(candidate, replace(problem, folder=folder), checker))
            report("building", len(candidates), len(candidates))
            rounds = _time(engines, rounds, seconds, report)
        finally:
            for engine in engines:
                engine.stop()
    settings = {
        "height": problem.height,
        "width": problem.width,
        "batch": problem.batch,
        "threads": problem.threads,
        "max_det": problem.max_det,
        "rounds": rounds,
        "seconds_a_turn": seconds,
        "scale": graph.scale,
        "classes": graph.class_count,
    }
    return BenchmarkResult([e.result for e in engines], settings, environment())


def _lay_out(
    folder: Path, graph: Graph, image: NDArray[np.uint8], candidates: Sequence[Candidate]
) -> None:
    """What the engines' processes read."""
    tensors = {}
    for name, (weight, bias) in graph.weights.items():
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight, bias
    save_file(tensors, folder / "network.safetensors")
    np.save(folder / "image.npy", image)
    for candidate in candidates:
        if candidate.artifact is not None:
            candidate.artifact.save(folder / ARTIFACT.format(precision=candidate.precision))


class _Checker:
    """Whether an engine's detections are those of the float64 reference."""

    def __init__(self, graph: Graph, image: NDArray[np.uint8], max_det: int) -> None:
        self._graph = graph
        self._pixels = image.transpose(0, 3, 1, 2)
        self._max_det = max_det
        self._references: dict[tuple[str, bool], Reference] = {}

    def __call__(self, rows: NDArray[Any], precision: str, *, each_layer: bool) -> tuple[bool, str]:
        """The verdict and what it rests on. each_layer: see `exact_reference`."""
        key = precision, each_layer and precision == HALF
        if key not in self._references:
            self._references[key] = exact_reference(
                self._graph, self._pixels, precision, max_det=self._max_det, each_layer=key[1]
            )
        exact = self._references[key]
        if rows.shape != exact.rows.shape:
            return False, f"rows have shape {rows.shape}; expected {exact.rows.shape}"
        box, score = DEVIATIONS * exact.box_deviation, DEVIATIONS * exact.score_deviation
        best = np.sort(exact.rows[..., 4], axis=1)[:, ::-1]
        twentieth = float(best[:, min(_CHECKED_ROWS, best.shape[1]) - 1].min())
        match = match_detections(
            rows, exact.rows, confidence=min(_CHECKED_CONFIDENCE, twentieth), cut=score
        )
        return match.within(box, score), str(match)


class _Engine:
    """An engine's process and its result so far."""

    def __init__(self, result: EngineResult, process: subprocess.Popen[str] | None = None) -> None:
        self.result = result
        self.process = process
        self.samples: dict[str, list[float]] = {name: [] for name in COLUMNS}

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command; the answer. A process that died is an answer with an error."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return {"error": "not running"}
        limit = threading.Timer(_LIMIT_S, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except KeyboardInterrupt:
            self.process.kill()  # its answer would be taken for that to the next command
            raise
        finally:
            limit.cancel()
        if not line:
            code = self.process.wait()
            return {"error": f"no answer in {_LIMIT_S:.0f} s, or crashed (exit code {code})"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def fail(self, state: str, reason: str) -> None:
        """Give up on it."""
        self.result.state, self.result.reason = state, reason
        _log.warning("%s: %s", self.result.name, reason)
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self.process is None:
            return
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None


def _start(candidate: Candidate, problem: Problem, checker: _Checker) -> _Engine:
    """Build one engine in its process, and check what it gives."""
    problem = replace(problem, precision=candidate.precision)
    result = EngineResult(candidate.title, problem.device, candidate.precision)
    kind = PEERS.get(candidate.name)
    if kind is not None and problem.device not in kind.devices:
        result.device = kind.devices[0]
        problem = replace(problem, device=kind.devices[0], precision="fp32")
    absent = kind.missing() if kind else None
    if absent:
        result.state, result.reason = "absent", absent
        return _Engine(result)
    problem.save()
    engine = _Engine(result, _spawn(candidate.name, problem))
    answer = engine.ask("build")
    if "error" in answer:
        engine.fail("absent" if answer.get("absent") else "failed", answer["error"])
        return engine
    result.precision, result.notes = answer["precision"], answer["notes"]
    result.build_s, result.gpu_mb = answer["build_s"], answer["gpu_mb"]
    if candidate.build_s is not None:
        result.build_s = candidate.build_s + answer["build_s"]
    result.notes = ", ".join(filter(None, (result.notes, candidate.notes)))
    rows = np.load(answer["rows"])
    right, result.check = checker(rows, result.precision, each_layer=candidate.artifact is None)
    if not right:
        engine.fail("wrong", f"other detections than the reference: {result.check}")
    return engine


def _spawn(name: str, problem: Problem) -> subprocess.Popen[str]:
    threads = {variable: str(problem.threads) for variable in _THREAD_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", "yolomlir.evaluate.peers.worker", problem.folder, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if _log.isEnabledFor(logging.INFO) else subprocess.DEVNULL,
        text=True,
        env={**os.environ, **threads},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    )


def _round(engines: Sequence[_Engine], seconds: float) -> None:
    """A turn of every engine, which counts when all have had theirs."""
    turns: list[tuple[_Engine, dict[str, list[float]]]] = []
    for engine in engines:
        if engine.process is None:
            continue
        time.sleep(REST_S)
        answer = engine.ask("time", seconds=seconds)
        if "error" in answer:
            engine.fail("failed", answer["error"])
            continue
        turns.append((engine, answer["samples"]))
    for engine, taken in turns:
        for name, samples in taken.items():
            engine.samples[name] += samples
        engine.result.rounds_ms.append(float(np.median(taken["wall"])))


def _time(engines: Sequence[_Engine], rounds: int, seconds: float, report: Progress) -> int:
    """Time the engines that run; the number of whole rounds."""
    running = [engine for engine in engines if engine.process is not None]
    done = 0
    try:
        for done in range(rounds):
            report("timing", done, rounds)
            _round(running, seconds)
        done = rounds
    except KeyboardInterrupt:
        if not done:
            raise
        _log.warning("interrupted: the times are of %d of %d rounds", done, rounds)
    report("timing", done, rounds)
    for engine in running:
        engine.result.peak_mb = engine.ask("memory").get("peak_mb")
        medians = engine.result.rounds_ms
        for name, samples in engine.samples.items():
            if samples and engine.result.state == "ok":
                spread = medians if name == "wall" else None
                engine.result.columns[name] = summarize(samples, spread)
    return done
