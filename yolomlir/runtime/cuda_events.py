"""Times of kernels without a profiler: a graph of the kernels one by one, an event between each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.runtime.cuda_driver import call, driver
from yolomlir.runtime.cuda_graph import Launch, kernel_node

_BASELINE = 8
"""Intervals with nothing in them, which tell what an event costs."""


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
