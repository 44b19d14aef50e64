"""How the blocks of a cluster that divide K add their sums: sent, counted, waited for."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conv_cases import Case, Operands
from test_gpu_conv2d import build, run, spread
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.ptx import assemble, to_ptx
from yolomlir.simulator import SimulationError, simulate
from yolomlir.target import target_named

WAIT = re.compile(r"\n *llvm\.inline_asm has_side_effects \"\{[^\n]*try_wait[^\n]*")


@pytest.fixture(autouse=True)
def context():
    with yolo.new_context(), ir.Location.unknown():
        yield


# Sums of one warp go from registers; of several through the ring. Two to sixteen rows of a block.
TILES = [
    ConvTile(16, 16, 16, 1, 1, 1, 2, cluster_k=8),
    ConvTile(32, 16, 16, 2, 1, 1, 2, cluster_k=2),
    ConvTile(32, 24, 32, 1, 1, 2, 3, cluster_k=4),
    ConvTile(64, 16, 16, 2, 2, 1, 2, True, cluster_k=4),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("channels", [16, 22])
def test_forms(tile, channels):
    case = Case(7, 9, ((28, 1),), channels, residual=channels == 22, extra_pitch=4)
    run(case, tile)
    case = Case(7, 9, ((28, 1),), channels, residual=channels == 22, extra_pitch=8, element="f16")
    run(case, deeper(tile), "fp16", seed=1)


def deeper(tile: ConvTile) -> ConvTile:
    """The same for products that are twice as deep."""
    return ConvTile(
        tile.block_m, tile.block_n, 2 * tile.block_k, tile.warps_m, tile.warps_n, tile.warps_k,
        tile.stages, cluster_k=min(tile.cluster_k, 4),
    )  # fmt: skip


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_results_repeat_bit_by_bit(tile):
    case = Case(6, 7, ((24, 1),), 16)
    operands = Operands.random(case, 0)
    first, *others = (run(case, tile, operands=operands, seed=seed)[0] for seed in range(3))
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_no_thread_waits_for_its_writes(tile, target):
    """Only the arrival at the start is left, which makes nothing visible."""
    gpu = target_named(target)
    kernel, _ = build(Case(8, 8, ((64, 1),), 32), tile, "tf32", gpu)
    ptx = to_ptx(kernel.module, gpu)
    assert re.findall(r"barrier\.cluster\.arrive\S*", ptx) == [
        "barrier.cluster.arrive.relaxed.aligned;"
    ]
    assert len(re.findall(r"barrier\.cluster\.wait", ptx)) == 1
    assert "complete_tx::bytes.v4.b32" in ptx
    assert assemble(ptx, gpu.chip).spill_bytes == 0


def test_one_block_needs_none_of_this():
    text = str(
        build(Case(8, 8, ((16, 1),), 16), ConvTile(32, 16, 16, 2, 1, 1, 2), "tf32")[0].module
    )
    assert "mbarrier" not in text
    assert "cluster" not in text


# ---- faults -------------------------------------------------------------------------------------

CASE = Case(6, 7, ((24, 1),), 16)


def simulated(kernel: Kernel, text: str, seed: int, schedule: str) -> None:
    operands = Operands.random(CASE, 0)
    flat = [*spread(operands.sources[0], 0, np.nan), operands.weights.reshape(-1), operands.bias]
    y, pitch = spread(np.full(CASE.out_shape, np.nan, np.float32), 0, np.nan)
    arguments = [*flat, y, pitch]
    simulate(ir.Module.parse(text), kernel.launch, arguments, seed=seed, schedule=schedule)


def faults(kernel: Kernel, text: str) -> set[str]:
    kinds = set()
    for schedule in ("lockstep", "warps"):
        for seed in range(2):
            with pytest.raises(SimulationError) as error:
                simulated(kernel, text, seed, schedule)
            kinds.add(error.value.kind)
    return kinds


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_the_wait_is_needed(tile):
    kernel, _ = build(CASE, tile, "tf32")
    text = str(kernel.module)
    simulated(kernel, text, 0, "warps")
    (wait,) = WAIT.finditer(text)
    assert faults(kernel, text[: wait.start()] + text[wait.end() :]) <= {
        "in-flight", "race", "uninitialised"
    }  # fmt: skip


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_a_wrong_count_is_found(tile):
    """One sum more is waited for for ever; one less is more than was expected."""
    kernel, _ = build(CASE, tile, "tf32")
    text = str(kernel.module)
    expected = re.search(r"nvvm\.mbarrier\.arrive\.expect_tx %\w+, (%\w+)", text)
    assert expected is not None
    for change in (4, -4):
        other = f"%wrong_by = arith.constant {change} : i32\n"
        other += f"%wrong = arith.addi {expected[1]}, %wrong_by : i32\n"
        other += expected[0].replace(f", {expected[1]}", ", %wrong")
        assert faults(kernel, text.replace(expected[0], other, 1)) == {"barrier"}


@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_the_meeting_at_the_start_is_needed(tile):
    kernel, _ = build(CASE, tile, "tf32")
    text = str(kernel.module)
    assert text.count("nvvm.cluster.wait") == 1
    early = re.sub(r"nvvm\.cluster\.(wait|arrive\.relaxed)[^\n]*", "", text)
    assert faults(kernel, early) <= {"race", "uninitialised"}


def test_the_threads_of_a_block_meet_before_they_read():
    """Else one could miss another's sums of the block's own rows."""
    kernel, _ = build(CASE, TILES[1], "tf32")
    text = str(kernel.module)
    at = text.rindex("gpu.barrier", 0, WAIT.search(text).start())
    assert faults(kernel, text[:at] + text[at + len("gpu.barrier") :]) <= {"race", "uninitialised"}
