"""Time of candidates on the GPU: chains of launches inside a CUDA graph, outputs checked."""

from __future__ import annotations

import ctypes
import logging
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from yolomlir.autotune.build import Built
from yolomlir.autotune.workload import Case, Workload
from yolomlir.codegen.build_plan import ITEM_BYTES, Footprint
from yolomlir.codegen.gpu.kernel import Launch as KernelLaunch
from yolomlir.diagnostics import InternalError
from yolomlir.runtime.packing import Order, packed
from yolomlir.runtime.plan import Step, View

logger = logging.getLogger(__name__)

CHAIN = 20
"""Launches of a graph, each after the one before by a programmatic edge, as in the real graph."""
_SPAN = 8
"""Values are whole numbers of at most this size, times a power of two: sums of their products are
exact in any order, so that the outputs of all tiles of a convolution are equal bit for bit."""
_SMOOTH = ("attention", "detect", "merge_detections")
"""Families that get normal numbers instead: whole ones make a softmax flat, and scores equal."""
_RANKED = "merge_detections"
"""The family that reads rows in order, of which the last says which logits are of interest."""
_LARGEST, _LAST_LOGIT = 4.0, 2.5
"""Of normal numbers; and of such rows the last one's, which few of a level's logits exceed."""
_ARENA = "activations"
"""What the values of the inputs' arenas are drawn by."""
_WARM_UP_REPLAYS = 3000
_WARM_UP, _REPLAYS = 5, 40
"""Of a graph in one turn of a comparison: replays that do not count, and those that do."""
_SLACK = 1 << 16
"""Bytes behind an arena: the last row of a view with a pitch is shorter than the pitch."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: the median of samples, and their median absolute deviation."""

    us: float
    spread: float = 0.0


class CandidateError(Exception):
    """A candidate cannot be run; others still can."""


class Measure(Protocol):
    """Whoever times candidates; the GPU, or a fake in tests."""

    device: str
    """Name of the GPU, for the database."""

    def check(self, case: Case, built: Built) -> str | None:
        """What is wrong with the candidate's output; None where it agrees with the reference.

        The first candidate of a case that is checked is its reference: the default tile.
        """

    def time(self, case: Case, built: Built, samples: int) -> Timing:
        """The time of one launch in a chain. Raises CandidateError."""

    def network(self, chosen: Mapping[str, Built], samples: int) -> Timing:
        """The time of a whole inference, microseconds, with a candidate for each function."""

    def compare(
        self, one: Mapping[str, Built], other: Mapping[str, Built], rounds: int
    ) -> tuple[float, float]:
        """The times of two whole inferences, microseconds, replayed in turns so many times: what
        changes from one moment to the next meets both."""

    def close(self) -> None:
        """Free everything."""


def tolerance(case: Case, largest: float, largest_output: float = 0.0) -> float:
    """How far outputs of two right kernels may differ, given the largest magnitude of the input.

    largest_output: the largest magnitude of the outputs.

    0 where the values make every sum exact. Attention weights values by probabilities that are
    rounded to TF32 relative to a maximum so far, which depends on the tile: two kernels' averages
    differ by at most twice 2**-11 of the largest value for the weights, and as much for the total.
    A chain's first sums are exact, but what its later stages read is rounded to TF32: another order
    of sums may round it the other way, 2**-11 of a product, for K products some sqrt(K) / 4 times
    as much of the largest output; 2**-6 for four stages of K = 512. Averages that are stored as
    float16 are rounded once more each.
    """
    if case.problem.family == "chain":
        return 2.0**-6 * largest_output
    stored = 2 if case.problem.precision == "fp16" else 0
    return (4 + stored) * 2.0**-11 * largest if case.problem.family == "attention" else 0.0


class CudaMeasure:
    """The first GPU. Inputs come from one arena and results go to another, so that every launch of
    a chain sees the same data."""

    def __init__(self, workload: Workload) -> None:
        from yolomlir.runtime.cuda_driver import Context, DeviceMemory, call, driver

        self._workload = workload
        self._context = Context()
        self._context.make_current()
        self.device = self._context.device.name
        self._call, self._driver = call, driver
        self._stream = call(driver.cuStreamCreate, 1)  # CU_STREAM_NON_BLOCKING
        self._events = [call(driver.cuEventCreate, 0) for _ in range(2)]
        self._size = workload.plan.arena_bytes + _SLACK
        self._memory: list[DeviceMemory] = []
        self._results = self._allocate(self._size)
        self._arenas: dict[tuple[bool, bool], int] = {}
        self._network: int | None = None
        self._rows: dict[str, int] = {}
        self._warm = False
        self._weights: dict[tuple[str, Order], int] = {}
        self._packed: dict[tuple[str, Order], int] = {}
        self._network_weights: dict[str, NDArray[Any]] = {}
        self._workspaces: dict[tuple[str, int], int] = {}
        self._modules: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._references: dict[str, list[NDArray[Any]]] = {}
        self._graphs: dict[Any, Any] = {}

    # ---- memory -----------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> Any:
        from yolomlir.runtime.cuda_driver import DeviceMemory

        memory = DeviceMemory(size_bytes, "tuner")
        self._memory.append(memory)
        # Its zeros come by the default stream, which ours does not wait for.
        self._call(self._driver.cuCtxSynchronize)
        return memory

    def _arena(self, *, smooth: bool, dtype: str) -> int:
        """The address of an arena full of values of a dtype; bytes are a float32's."""
        half = dtype == "float16"
        if (smooth, half) not in self._arenas:
            count = self._size // (2 if half else 4)
            values = _normal((count,), _ARENA) if smooth else _exact((count,), _ARENA, 0.25)
            memory = self._allocate(self._size)
            memory.upload(values.astype(np.float16) if half else values)
            self._arenas[smooth, half] = memory.address
        return self._arenas[smooth, half]

    def _network_arena(self) -> int:
        """The address of the arena that whole inferences read and write: not one of those whose
        values the checks rely on."""
        if self._network is None:
            memory = self._allocate(self._size)
            memory.upload(_exact((self._size // 4,), _ARENA, 0.25))
            self._network = memory.address
        return self._network

    def _ranked(self, layer: str, view: View) -> int:
        """The address of rows that end in a falling logit and their anchor's largest, which it
        is."""
        if layer not in self._rows:
            images, count, columns = view.shape
            rows = np.zeros((images, count, view.pitch), np.float32)
            logits = np.linspace(_LARGEST, _LAST_LOGIT, count, dtype=np.float32)
            rows[..., columns - 2 : columns] = logits[:, None]
            memory = self._allocate(rows.nbytes)
            memory.upload(rows)
            self._rows[layer] = memory.address
        return self._rows[layer]

    def _weight(self, name: str, order: Order) -> int:
        """The address of a weight's substitute, exact products of which do not round."""
        if (name, order) not in self._weights:
            like = self._workload.weights[name]
            values = _exact(tuple(like.shape), name, 2.0**-6).astype(like.dtype)
            self._weights[name, order] = self._uploaded(values, order)
        return self._weights[name, order]

    def _network_weight(self, name: str, order: Order) -> int:
        """The address of the model's own weight."""
        if (name, order) not in self._packed:
            self._packed[name, order] = self._uploaded(self._network_weights[name], order)
        return self._packed[name, order]

    def _uploaded(self, values: NDArray[Any], order: Order) -> int:
        values = np.ascontiguousarray(packed(values, order))
        memory = self._allocate(values.nbytes)
        memory.upload(values)
        return int(memory.address)

    # ---- launches ---------------------------------------------------------------------------

    def _function(self, built: Built) -> Any:
        from yolomlir.runtime.cuda_driver import load_function, load_module

        known = self._modules.get((built.function, built.key))
        if known is not None:
            return known[1]
        launch = _launch_of(built)
        module = load_module(built.cubin, None, self._context.device, built.function)
        function = load_function(
            module, launch.function, launch.shared_bytes, built.function, launch.carveout
        )
        self._modules[built.function, built.key] = (module, function)
        return function

    def _unload(self, built: Built) -> None:
        module, _ = self._modules.pop((built.function, built.key), (None, None))
        if module is not None:
            self._keep_graphs(())  # some may launch it
            self._call(self._driver.cuModuleUnload, module)

    def _graph_launch(
        self, step: Step, built: Built, depends: tuple[int, ...], *, network: bool = False
    ) -> Any:
        """network: read and write one arena, as an inference does, with the model's weights."""
        from yolomlir.runtime.cuda_graph import Launch

        kernel = _launch_of(built)
        smooth = built.family in _SMOOTH and not network
        results = self._network_arena() if network else self._results.address
        arguments: list[Any] = []
        for argument, parameter in zip(step.arguments, kernel.parameters, strict=False):
            if argument.view is not None:
                dtype = argument.view.dtype
                inputs = results if network else self._arena(smooth=smooth, dtype=dtype)
                if built.family == _RANKED and len(argument.view.shape) == 3 and not network:
                    inputs = self._ranked(step.layer, argument.view) - argument.view.offset_bytes
                arguments += _view(inputs, argument.view)
            else:
                weight = self._network_weight if network else self._weight
                at = weight(str(argument.weight), parameter.packed)
                arguments.append(ctypes.c_uint64(at))
        for view in step.results:
            arguments += _view(results, view)
        if kernel.workspace_bytes:
            arguments.append(ctypes.c_uint64(self._workspace(step.layer, kernel.workspace_bytes)))
        return Launch(
            self._function(built), kernel.grid, kernel.block, kernel.shared_bytes, arguments,
            kernel.programmatic, depends, step.layer,
        )  # fmt: skip

    def _workspace(self, layer: str, size_bytes: int) -> int:
        """Zeroed scratch that belongs to one size and launch; kernels leave it as they found it."""
        if (layer, size_bytes) not in self._workspaces:
            self._workspaces[layer, size_bytes] = self._allocate(size_bytes).address
        return self._workspaces[layer, size_bytes]

    # ---- the protocol -----------------------------------------------------------------------

    def check(self, case: Case, built: Built) -> str | None:
        """Run it once on poisoned results and compare them with the reference's."""
        self._context.make_current()
        try:
            with self._loaded(built):
                found = self._outputs(case.steps[0], built)
        except CandidateError as fault:
            return str(fault)
        reference = self._references.setdefault(case.name, found)
        for ours, theirs in zip(found, reference, strict=True):
            allowed = tolerance(case, _LARGEST, float(np.abs(theirs).max()))
            if not np.isfinite(ours).all():
                return "leaves outputs unwritten, or not finite"
            worst = float(np.abs(ours.astype(np.float64) - theirs).max())
            if worst > allowed:
                return f"differs from the default tile's output by {worst:g} (allowed: {allowed:g})"
        return None

    @contextmanager
    def _loaded(self, built: Built) -> Iterator[None]:
        """Load a candidate for a while. An error that leaves the GPU usable is the candidate's."""
        from yolomlir.runtime.cuda_driver import CudaError

        try:
            try:
                yield
            finally:
                self._unload(built)
        except CudaError as error:
            self._call(self._driver.cuCtxSynchronize)  # fails again where nothing can go on
            raise CandidateError(str(error)) from error

    def _outputs(self, step: Step, built: Built) -> list[NDArray[Any]]:
        for view in step.results:
            self._poison(view)
        self._call(self._driver.cuCtxSynchronize)  # the poison comes by the default stream
        self._graph_launch(step, built, ()).enqueue(self._stream)
        self._call(self._driver.cuStreamSynchronize, self._stream)
        return [self._download(view) for view in step.results]

    def _poison(self, view: View) -> None:
        foot = Footprint.of(view)
        start = self._driver.CUdeviceptr(self._results.address + foot.start)
        self._call(self._driver.cuMemsetD8, start, 0xFF, foot.end - foot.start)

    def _download(self, view: View) -> NDArray[Any]:
        """The values of a view, without what lies between its rows: positions x channels."""
        item = ITEM_BYTES[view.dtype]
        channels = view.shape[1] if len(view.shape) == 4 else view.shape[-1]
        positions = int(np.prod(view.shape)) // channels
        rows = np.empty((positions, view.pitch), view.dtype)
        size = ((positions - 1) * view.pitch + channels) * item
        start = self._driver.CUdeviceptr(self._results.address + view.offset_bytes)
        self._call(self._driver.cuMemcpyDtoH, rows.ctypes.data, start, size)
        return np.ascontiguousarray(rows[:, :channels])

    def time(self, case: Case, built: Built, samples: int) -> Timing:
        """Chains over the function's real views, one launch after the other."""
        from yolomlir.runtime.cuda_graph import KernelGraph

        self._context.make_current()
        with self._loaded(built):
            launches = [
                self._graph_launch(case.steps[i % case.count], built, (i - 1,) if i else ())
                for i in range(CHAIN)
            ]
            graph = KernelGraph(launches)
            try:
                self._warm_up(graph)
                return self._time(graph, samples, CHAIN)
            finally:
                graph.destroy()

    def _warm_up(self, graph: Any) -> None:
        """Work for a while, once: an idle GPU's clock is low."""
        if self._warm:
            return
        self._warm = True
        for _ in range(_WARM_UP_REPLAYS):
            graph.enqueue(self._stream)
        self._call(self._driver.cuStreamSynchronize, self._stream)

    def network(self, chosen: Mapping[str, Built], samples: int) -> Timing:
        """The plan's graph with its own dependencies; modules stay loaded from call to call."""
        self._context.make_current()
        graph = self._whole_graph(chosen)
        try:
            return self._time(graph, samples, 1)
        finally:
            graph.destroy()

    def _whole_graph(self, chosen: Mapping[str, Built]) -> Any:
        from yolomlir.runtime.cuda_graph import KernelGraph

        self._pack(chosen)
        return KernelGraph(
            [
                self._graph_launch(step, chosen[step.kernel], step.depends, network=True)
                for step in self._workload.plan.steps
            ]
        )

    def compare(
        self, one: Mapping[str, Built], other: Mapping[str, Built], rounds: int
    ) -> tuple[float, float]:
        """Medians over the rounds of each round's median. The two graphs are kept for the next
        comparison, one side of which is one of them as a rule."""
        self._context.make_current()
        pair = [tuple(sorted((n, b.key) for n, b in chosen.items())) for chosen in (one, other)]
        for key, chosen in zip(pair, (one, other), strict=True):
            if key not in self._graphs:
                self._graphs[key] = self._whole_graph(chosen)
        self._keep_graphs(pair)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for key, found in zip(pair, times, strict=True):
                found.append(self._replayed_us(self._graphs[key]))
        return statistics.median(times[0]), statistics.median(times[1])

    def _keep_graphs(self, keys: Sequence[Any]) -> None:
        for key in [k for k in self._graphs if k not in keys]:
            self._graphs.pop(key).destroy()

    def _replayed_us(self, graph: Any) -> float:
        """The median of replays that wait for each other; the first ones only warm up."""
        call, driver = self._call, self._driver
        times = []
        for _ in range(_WARM_UP + _REPLAYS):
            call(driver.cuEventRecord, self._events[0], self._stream)
            graph.enqueue(self._stream)
            call(driver.cuEventRecord, self._events[1], self._stream)
            call(driver.cuEventSynchronize, self._events[1])
            times.append(1e3 * float(call(driver.cuEventElapsedTime, *self._events)))
        return statistics.median(times[_WARM_UP:])

    def _pack(self, chosen: Mapping[str, Built]) -> None:
        if self._network_weights:
            return
        from yolomlir.codegen.gpu.program import _pack_weights

        launches = {name: _launch_of(built) for name, built in chosen.items()}
        plan, weights = self._workload.plan, self._workload.weights
        self._network_weights = _pack_weights(plan, launches, weights)

    def _time(self, graph: Any, samples: int, launches: int) -> Timing:
        """Events around a few replays each; the first ones only warm up."""
        call, driver = self._call, self._driver
        replays = 4
        times = []
        for sample in range(samples + 2):
            call(driver.cuEventRecord, self._events[0], self._stream)
            for _ in range(replays):
                graph.enqueue(self._stream)
            call(driver.cuEventRecord, self._events[1], self._stream)
            call(driver.cuEventSynchronize, self._events[1])
            if sample >= 2:
                times.append(call(driver.cuEventElapsedTime, *self._events))
        each = [1e3 * t / replays / launches for t in times]
        middle = statistics.median(each)
        return Timing(middle, statistics.median(abs(t - middle) for t in each))

    def close(self) -> None:
        """Free everything on the GPU; a second call does nothing."""
        if self._context is None:
            return
        self._context.make_current()
        self._keep_graphs(())
        for module, _ in self._modules.values():
            self._call(self._driver.cuModuleUnload, module)
        for memory in self._memory:
            memory.free()
        for event in self._events:
            self._call(self._driver.cuEventDestroy, event)
        self._call(self._driver.cuStreamDestroy, self._stream)
        self._context.release()
        self._context = None  # type: ignore[assignment]

    def __enter__(self) -> CudaMeasure:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _launch_of(built: Built) -> KernelLaunch:
    if built.launch is None:
        raise InternalError(f"candidate {built.key} was not built: {built.fault}")
    return built.launch


def _view(base: int, view: View) -> list[Any]:
    return [ctypes.c_uint64(base + view.offset_bytes), ctypes.c_int32(view.pitch)]


def _normal(shape: Sequence[int], name: str) -> NDArray[np.float32]:
    """Normal numbers up to _LARGEST, the same for the same name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(tuple(shape), np.float32)
    return np.clip(values, -_LARGEST, _LARGEST)


def _exact(shape: Sequence[int], name: str, unit: float) -> NDArray[np.float32]:
    """Whole numbers from -_SPAN to _SPAN times `unit`, the same for the same name."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.integers(-_SPAN, _SPAN, tuple(shape), endpoint=True)
    return (values * unit).astype(np.float32)


__all__ = ["CHAIN", "CandidateError", "CudaMeasure", "Measure", "Timing", "tolerance"]
