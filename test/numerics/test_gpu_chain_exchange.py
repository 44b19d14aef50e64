"""How the blocks of a chain's cluster exchange results: what is sent, counted and waited for."""

from __future__ import annotations

import re

import numpy as np
import pytest
from chain_cases import ChainCase, Link, Part, chain_module, random_operands
from test_gpu_chain import run, spread
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain_tile import ChainTile
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import ACTIVATION, Kernel
from yolomlir.codegen.gpu.ptx import assemble, to_ptx
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.simulator import SimulationError, simulate
from yolomlir.target import target_named

WAIT = re.compile(r"\n *llvm\.inline_asm has_side_effects \"\{[^\n]*try_wait[^\n]*")


@pytest.fixture(autouse=True)
def context():
    with yolo.new_context(), ir.Location.unknown():
        yield


def kernel_of(
    case: ChainCase, tile: ChainTile, target: str = "sm_90", precision: str = "tf32"
) -> Kernel:
    module, _ = chain_module(case, half=precision == "fp16")
    function = module.body.operations[0]
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    return generate_kernel(function, target_named(target), precision=precision)


# A result for two stages, the second of which reads another one, too; what is read begins within a
# block's part or covers none of it; the last stage reads nothing of the one before it.
CASES = [
    ChainCase(
        4, 6, 16,
        (
            Link(32),
            Link(32, (Part(32, 0),)),
            Link(32, (Part(16, 1), Part(24, 0, 8))),
            Link(32, (Part(16, 0, 16),), add=0),
        ),
        stored=(0, 1),
    ),
    ChainCase(3, 5, 16, (Link(56), Link(32, (Part(8), Part(32, 0, 8))))),
    ChainCase(3, 5, 16, (Link(32), Link(40, (Part(10), Part(22, 0, 6))))),
]  # fmt: skip


@pytest.mark.parametrize("tile", [ChainTile(16, 2, 4, 2, 3), ChainTile(32, 2, 8, 1, 2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_forms(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8, seed=1)


@pytest.mark.parametrize("case", CASES[:2], ids=range(2))
def test_four_blocks(case):
    run(case, ChainTile(16, 4, 4, 2, 3))
    run(case, ChainTile(16, 4, 8, 4, 2), "fp16", extra=8, seed=1)


def test_no_thread_waits_for_its_writes():
    """Only the arrival at the start is left, which makes nothing visible."""
    for precision, values in (("tf32", "v4"), ("fp16", "v2")):
        for target in ("sm_90", "sm_120"):
            kernel = kernel_of(CASES[0], ChainTile(16, 2, 4, 2, 3), target, precision)
            ptx = to_ptx(kernel.module, target_named(target))
            assert re.findall(r"barrier\.cluster\.arrive\S*", ptx) == [
                "barrier.cluster.arrive.relaxed.aligned;"
            ]
            assert len(re.findall(r"barrier\.cluster\.wait", ptx)) == 1
            assert f"complete_tx::bytes.{values}.b32" in ptx
            cubin = assemble(ptx, target_named(target).chip)
            assert cubin.spill_bytes == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_one_block_needs_none_of_this(target):
    text = str(kernel_of(CASES[0], ChainTile(16, 1, 4, 2, 3), target).module)
    assert "mbarrier" not in text
    assert "cluster" not in text


# ---- faults -------------------------------------------------------------------------------------


def simulated(kernel: Kernel, text: str, case: ChainCase, seed: int, schedule: str) -> None:
    _, roles = chain_module(case)
    flat = []
    for operand, parameter in zip(
        random_operands(case, roles, 0), kernel.launch.parameters, strict=False
    ):
        activation = parameter.role == ACTIVATION
        flat += spread(operand, 0) if activation else [operand.reshape(-1)]
    for index in case.results:
        shape = (case.batch, *case.out_size, case.links[index].out)
        flat += [np.zeros(shape, np.float32).reshape(-1), shape[-1]]
    simulate(ir.Module.parse(text), kernel.launch, flat, seed=seed, schedule=schedule)


def faults(text: str, kernel: Kernel, case: ChainCase) -> set[str]:
    kinds = set()
    for schedule in ("lockstep", "warps"):
        for seed in range(2):
            with pytest.raises(SimulationError) as error:
                simulated(kernel, text, case, seed, schedule)
            kinds.add(error.value.kind)
    return kinds


def test_every_wait_is_needed():
    case = CASES[0]
    kernel = kernel_of(case, ChainTile(16, 2, 4, 2, 3))
    text = str(kernel.module)
    simulated(kernel, text, case, 0, "warps")
    waits = list(WAIT.finditer(text))
    assert len(waits) == 2
    for wait in waits:
        without = text[: wait.start()] + text[wait.end() :]
        assert faults(without, kernel, case) <= {"in-flight", "race", "uninitialised"}


def test_a_wrong_count_is_found():
    """One byte more is waited for for ever; one less is more than was expected."""
    case = CASES[1]
    kernel = kernel_of(case, ChainTile(16, 2, 4, 2, 3))
    text = str(kernel.module)
    expected = re.search(r"nvvm\.mbarrier\.arrive\.expect_tx %\w+, (%\w+)", text)
    assert expected is not None
    for change in (4, -4):
        other = f"%wrong_by = arith.constant {change} : i32\n"
        other += f"%wrong = arith.addi {expected[1]}, %wrong_by : i32\n"
        other += expected[0].replace(f", {expected[1]}", ", %wrong")
        assert faults(text.replace(expected[0], other, 1), kernel, case) == {"barrier"}


def test_the_meeting_at_the_start_is_needed():
    case = CASES[1]
    kernel = kernel_of(case, ChainTile(16, 2, 4, 2, 3))
    text = str(kernel.module)
    assert text.count("nvvm.cluster.wait") == 1
    early = re.sub(r"nvvm\.cluster\.(wait|arrive\.relaxed)[^\n]*", "", text)
    assert faults(early, kernel, case) <= {"race", "uninitialised"}
