"""A plan's kernels as one CUDA graph: true dependencies, programmatic where kernels allow it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yolomlir.runtime.cuda_driver import call, driver

_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC


@dataclass
class Launch:
    """One kernel launch with its arguments: pointers as ctypes.c_uint64, pitches as c_int32.

    programmatic: the kernel executes `griddepcontrol.wait` before it reads what others wrote, and
    may therefore start before they end. depends: indices of launches it waits for.
    """

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: list[Any]
    programmatic: bool
    depends: tuple[int, ...]
    layer: str

    def __post_init__(self) -> None:
        addresses = [ctypes.addressof(a) for a in self.arguments]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)

    @property
    def parameters(self) -> int:
        """The address of the array of argument addresses, read at launch or when a node is made."""
        return ctypes.addressof(self._pointers)

    def enqueue(self, stream: Any) -> None:
        """Launch it by itself."""
        call(
            driver.cuLaunchKernel,
            self.function,
            *self.grid,
            *self.block,
            self.shared_bytes,
            stream,
            self.parameters,
            0,
            where=self.layer,
        )


class KernelGraph:
    """An instantiated graph of launches. Raises CudaError where the driver refuses it."""

    def __init__(self, launches: Sequence[Launch], *, programmatic: bool = True) -> None:
        self._graph = call(driver.cuGraphCreate, 0)
        self._nodes: list[Any] = []
        self._executable = None
        try:
            for launch in launches:
                self._nodes.append(self._add(launch, launches, programmatic))
            self._executable = call(driver.cuGraphInstantiate, self._graph, 0)
        except Exception:
            self.destroy()
            raise

    def _add(self, launch: Launch, launches: Sequence[Launch], programmatic: bool) -> Any:
        dependencies = [self._nodes[i] for i in launch.depends]
        edges = []
        for i in launch.depends:
            edge = driver.CUgraphEdgeData()
            if programmatic and launch.programmatic and launches[i].programmatic:
                edge.from_port = _PROGRAMMATIC_PORT
                edge.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
            edges.append(edge)
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        _fill(params.kernel, launch)
        return call(
            driver.cuGraphAddNode,
            self._graph,
            dependencies or None,
            edges or None,
            len(dependencies),
            params,
            where=launch.layer,
        )

    def update(self, index: int, launch: Launch) -> None:
        """Take over the changed arguments of a launch; from the next run on."""
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        _fill(params, launch)
        call(
            driver.cuGraphExecKernelNodeSetParams,
            self._executable,
            self._nodes[index],
            params,
            where=launch.layer,
        )

    def enqueue(self, stream: Any) -> None:
        """Run it once on a stream."""
        call(driver.cuGraphLaunch, self._executable, stream)

    def destroy(self) -> None:
        """Free it; a second call does nothing."""
        if self._executable is not None:
            call(driver.cuGraphExecDestroy, self._executable)
            self._executable = None
        if self._graph is not None:
            call(driver.cuGraphDestroy, self._graph)
            self._graph = None


def kernel_node(graph: Any, launch: Launch, dependencies: Sequence[Any]) -> Any:
    """Add a launch with plain edges to a graph that is being made; the node."""
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    _fill(params, launch)
    return call(
        driver.cuGraphAddKernelNode,
        graph,
        list(dependencies) or None,
        len(dependencies),
        params,
        where=launch.layer,
    )


def _fill(params: Any, launch: Launch) -> None:
    params.func = launch.function
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared_bytes
    params.kernelParams = launch.parameters
