"""Times of kernels without a profiler: a graph of the kernels one by one, an event between each."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.runtime.cuda_driver import call, driver
from yolomlir.runtime.cuda_graph import KernelGraph, Launch, kernel_node

_BASELINE = 8
"""Intervals with nothing in them, which tell what an event costs."""


def chain_us(launch: Launch, stream: Any, length: int, replays: int) -> float:
    """Microseconds of one launch in a chain of itself, warm: the median of `replays` replays.

    Each launch follows the one before as in a real graph, by a programmatic edge where it can.
    """
    links = [dataclasses.replace(launch, depends=(i - 1,) if i else ()) for i in range(length)]
    graph = KernelGraph(links)
    events = [call(driver.cuEventCreate, 0) for _ in range(2)]
    samples = []
    try:
        for _ in range(replays + 3):
            call(driver.cuEventRecord, events[0], stream)
            graph.enqueue(stream)
            call(driver.cuEventRecord, events[1], stream)
            call(driver.cuEventSynchronize, events[1])
            samples.append(1e3 * float(call(driver.cuEventElapsedTime, *events)) / length)
    finally:
        graph.destroy()
        for event in events:
            call(driver.cuEventDestroy, event)
    return statistics.median(samples[3:])


class EventGraph:
    """Launches in order as one graph, none beside another, with an event before and after each."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._graph = call(driver.cuGraphCreate, 0)
        self._events: list[Any] = []
        self._executable = None
        self._last: list[Any] = []
        try:
            self._mark()
            for _ in range(_BASELINE):
                self._mark()
            for launch in launches:
                self._last = [kernel_node(self._graph, launch, self._last)]
                self._mark()
            self._executable = call(driver.cuGraphInstantiate, self._graph, 0)
        except Exception:
            self.destroy()
            raise

    def _mark(self) -> None:
        event = call(driver.cuEventCreate, 0)
        self._events.append(event)
        node = call(
            driver.cuGraphAddEventRecordNode,
            self._graph,
            self._last or None,
            len(self._last),
            event,
        )
        self._last = [node]

    def run(self, stream: Any) -> NDArray[np.float64]:
        """Run it once and wait; each launch's time in microseconds, an event's cost taken off."""
        call(driver.cuGraphLaunch, self._executable, stream)
        call(driver.cuStreamSynchronize, stream)
        intervals = np.array(
            [
                1e3 * float(call(driver.cuEventElapsedTime, first, last))
                for first, last in zip(self._events, self._events[1:], strict=False)
            ]
        )
        cost = float(np.median(intervals[:_BASELINE]))
        return np.maximum(intervals[_BASELINE:] - cost, 0.0)

    def destroy(self) -> None:
        """Free it; a second call does nothing."""
        if self._executable is not None:
            call(driver.cuGraphExecDestroy, self._executable)
            self._executable = None
        if self._graph is not None:
            call(driver.cuGraphDestroy, self._graph)
            self._graph = None
        for event in self._events:
            call(driver.cuEventDestroy, event)
        self._events = []
