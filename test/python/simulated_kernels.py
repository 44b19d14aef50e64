"""Write a `gpu.func` as text and run it in the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from yolomlir.bindings import ir
from yolomlir.simulator import SimulationReport, simulate

SHARED = "#gpu.address_space<workgroup>"

_PRELUDE = """
    %tid = gpu.thread_id x
    %lane = arith.index_cast %tid : index to i32
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c4 = arith.constant 4 : index
    %c31 = arith.constant 31 : index
    %c32 = arith.constant 32 : index
    %c64 = arith.constant 64 : index
    %zero = arith.constant 0.0 : f32
    %one = arith.constant 1.0 : f32
"""


def kernel_text(body: str, arguments: str, *, shared: str = "", constants: str = "") -> str:
    """A module with the kernel `@k`; `shared` is a workgroup attribution `%s: memref<…>`."""
    workgroup = f" workgroup({shared})" if shared else ""
    return f"""
module attributes {{gpu.container_module}} {{
  gpu.module @kernels {{
    {constants}
    gpu.func @k({arguments}){workgroup} kernel {{
      {_PRELUDE}
      {body}
      gpu.return
    }}
  }}
}}
"""


def run(
    body: str,
    arrays: list[Any],
    arguments: str = "%x: memref<?xf32>, %y: memref<?xf32>",
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared: str = "",
    shared_bytes: int = 0,
    constants: str = "",
    **options: Any,
) -> SimulationReport:
    """Parse and simulate; the arrays are changed in place."""
    launch = SimpleNamespace(
        function="k", grid=grid, block=block, cluster=cluster, shared_bytes=shared_bytes
    )
    text = kernel_text(body, arguments, shared=shared, constants=constants)
    with ir.Context():
        return simulate(ir.Module.parse(text), launch, arrays, **options)
