"""The simulator on a generated convolution: right as generated, and every planted fault is caught.

A mutation takes one synchronisation out of the kernel, as a bug in a generator would.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import simulated_faults
from conv_cases import Case, Operands, expected
from conv_kernels import build, launch_of

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.simulator import Checks, SimulationError, SimulationReport

CASE = Case(9, 7, ((32, 1),), 16)
TILE = ConvTile(32, 16, 32, 2, 1, 1, 3)
WANTED = 4
"""Faults that a kernel with a ragged edge, a border and stages must show at least."""
SPLIT = ConvTile(32, 16, 32, 2, 1, 2, 2)
"""Two warps share the K of an output and add up in the stage that was read last."""

pytestmark = pytest.mark.usefixtures("context")


def kernel_of(tile: ConvTile = TILE) -> Kernel:
    return build(CASE, tile)[0]


def launch(kernel: Kernel, schedule: str, seed: int) -> tuple[np.ndarray, SimulationReport]:
    operands = Operands.random(CASE)
    check = Checks(written_once=True, outputs_written=True)
    outcome = launch_of(CASE, kernel, operands)(schedule=schedule, seed=seed, check=check)
    outcome.check([expected(CASE, operands, "tf32", SPLIT.warps_k)])
    return outcome.values[0], outcome.report


def operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from operations(view.operation)


def named(kernel: Kernel, name: str) -> list[Any]:
    return [op for op in operations(kernel.module.operation) if op.name == name]


def caught(kernel: Kernel) -> set[str]:
    return simulated_faults.kinds(partial(launch, kernel), seeds=1)


def test_as_generated_all_orders_give_the_same_bits():
    """All schedules and seeds give the same bits, within tolerance, written once and wholly."""
    kernel = kernel_of()
    results = [launch(kernel, s, seed) for s in ("lockstep", "warps") for seed in (0, 1)]
    for y, _ in results[1:]:
        np.testing.assert_array_equal(y, results[0][0])
    report = results[0][1]
    tiles = -(-63 // 32) * (16 // 16)
    # Per block: K / 8 steps of 32 x 16 outputs, in tiles of 16 x 8.
    assert report.mma_count == tiles * (9 * 32 // 8) * (32 // 16) * (16 // 8)


@pytest.mark.parametrize("tile", [TILE, SPLIT], ids=str)
def test_every_barrier_is_needed(tile):
    count = len(named(kernel_of(tile), "gpu.barrier"))
    assert count >= tile.warps_k
    for i in range(count):
        kernel = kernel_of(tile)
        named(kernel, "gpu.barrier")[i].erase()
        assert caught(kernel) <= {"race", "in-flight", "uninitialised"}


def test_the_wait_for_copies_is_needed():
    """The one of the main loop; that behind it has nothing left to wait for."""
    kernel = kernel_of()
    (wait,) = [w for w in named(kernel, "nvvm.cp.async.wait.group") if w.parent.name == "scf.for"]
    wait.erase()
    assert caught(kernel) == {"in-flight"}


def test_waiting_for_a_group_less_is_caught():
    kernel = kernel_of()
    wait = named(kernel, "nvvm.cp.async.wait.group")[0]
    left = ir.IntegerAttr(wait.attributes["n"])
    wait.attributes["n"] = ir.IntegerAttr.get(left.type, left.value + 1)
    assert caught(kernel) == {"in-flight"}


def test_the_wait_for_the_previous_kernel_is_needed():
    kernel = kernel_of()
    for op in named(kernel, "nvvm.griddepcontrol"):
        if "wait" in str(op.attributes["kind"]):
            op.erase()
    assert caught(kernel) == {"programmatic-launch"}


def test_a_wrong_bound_is_caught():
    """Comparisons that guard edges and stages, each made always true: some must show."""
    faults = 0
    count = len(named(kernel_of(), "arith.cmpi"))
    for i in range(count):
        kernel = kernel_of()
        op = named(kernel, "arith.cmpi")[i]
        with ir.InsertionPoint(op):
            true = ir.Operation.create(
                "arith.constant",
                results=[op.results[0].type],
                attributes={"value": ir.IntegerAttr.get(op.results[0].type, 1)},
            )
        op.results[0].replace_all_uses_with(true.results[0])
        op.erase()
        try:
            launch(kernel, "lockstep", 0)
        except (SimulationError, AssertionError):
            faults += 1
        if faults == WANTED:
            return
    raise AssertionError(f"only {faults} of {count} comparisons were needed")
