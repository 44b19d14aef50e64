"""How the blocks of a chain's cluster exchange results: what is sent, counted and waited for."""

from __future__ import annotations

import mutations
import pytest
from chain_cases import ChainCase, Link, Part
from chain_kernels import kernel_of, launch_of, run
from gpu_dispatches import START_ALONE, assembled, cluster_barriers

from yolomlir.codegen.gpu.chain_tile import ChainTile

pytestmark = pytest.mark.usefixtures("context")


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
def test_parts_of_results_reach_the_stages_that_read_them(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8, seed=1)


@pytest.mark.parametrize("case", CASES[:2], ids=range(2))
def test_four_blocks_exchange_with_each_other(case):
    run(case, ChainTile(16, 4, 4, 2, 3))
    run(case, ChainTile(16, 4, 8, 4, 2), "fp16", extra=8, seed=1)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize(("precision", "values"), [("tf32", "v4"), ("fp16", "v2")])
def test_no_thread_waits_for_its_writes(precision, values, target):
    ptx = assembled(kernel_of(CASES[0], ChainTile(16, 2, 4, 2, 3), target, precision), target)
    assert cluster_barriers(ptx) == START_ALONE
    assert f"complete_tx::bytes.{values}.b32" in ptx


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_one_block_needs_none_of_this(target):
    text = str(kernel_of(CASES[0], ChainTile(16, 1, 4, 2, 3), target).module)
    assert "mbarrier" not in text
    assert "cluster" not in text


# ---- faults -------------------------------------------------------------------------------------


def test_every_wait_is_needed():
    kernel = kernel_of(CASES[0], ChainTile(16, 2, 4, 2, 3))
    launch, text = launch_of(CASES[0], kernel)[0], str(kernel.module)
    launch(schedule="warps")
    waits = list(mutations.WAIT.finditer(text))
    assert len(waits) == 2
    for wait in waits:
        found = mutations.kinds(launch, mutations.without(text, wait))
        assert found <= {"in-flight", "race", "uninitialised"}


def test_a_wrong_count_is_found():
    """One byte more is waited for for ever; one less is more than was expected."""
    kernel = kernel_of(CASES[1], ChainTile(16, 2, 4, 2, 3))
    launch, text = launch_of(CASES[1], kernel)[0], str(kernel.module)
    for change in (4, -4):
        wrong = mutations.with_wrong_count(text, change)
        assert mutations.kinds(launch, wrong) == {"barrier"}


def test_the_meeting_at_the_start_is_needed():
    kernel = kernel_of(CASES[1], ChainTile(16, 2, 4, 2, 3))
    early = mutations.without_meeting(str(kernel.module))
    assert mutations.kinds(launch_of(CASES[1], kernel)[0], early) <= {"race", "uninitialised"}
