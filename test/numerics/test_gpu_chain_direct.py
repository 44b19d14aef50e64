"""Stages of a chain whose sums stay in the registers of the warps that have them."""

from __future__ import annotations

import pytest
from chain_cases import ChainCase, Link, Part
from chain_kernels import run, shape_of_case

from yolomlir.codegen.gpu.chain_tile import ChainTile, direct_stages, plan

pytestmark = pytest.mark.usefixtures("context")


def direct(case: ChainCase, tile: ChainTile) -> tuple[bool, ...]:
    additions = [
        (link.add, later) for later, link in enumerate(case.links) if isinstance(link.add, int)
    ]
    return direct_stages(plan(tile, shape_of_case(case)).stages, tile.warps, additions)


# A result that a later stage adds; one that is stored, too; channels that no tile divides.
ADDED = ChainCase(
    5, 7, 16,
    (
        Link(64, add="argument"),
        Link(64, (Part(64, 0),)),
        Link(64, (Part(64, 1),), add=0),
        Link(32, (Part(16), Part(64, 2))),
    ),
    stored=(2,),
)  # fmt: skip
DOWN = ChainCase(9, 10, 16, (Link(32), Link(64, (Part(32, 0),))), 3, 2, 2, stored=(0,))
RAGGED = ChainCase(5, 7, 24, (Link(56), Link(60, (Part(56, 0),)), Link(50, (Part(60, 1),))))

FORMS = [
    (ADDED, ChainTile(32, 1, 4, 4, 3), (True, True, True, True)),
    (ADDED, ChainTile(16, 1, 4, 2, 3), (True, True, True, False)),
    (ADDED, ChainTile(32, 2, 4, 8, 2), (True, True, True, False)),
    (ADDED, ChainTile(32, 2, 2, 8, 2), (True, True, True, True)),
    (DOWN, ChainTile(16, 1, 4, 2, 3), (False, True)),
    (DOWN, ChainTile(64, 1, 4, 8, 4, 8), (True, True)),
    (DOWN, ChainTile(32, 2, 2, 8, 2, 4), (True, True)),
    (RAGGED, ChainTile(64, 1, 8, 8, 4), (False, True, False)),
    (RAGGED, ChainTile(32, 4, 2, 8, 2), (True, True, True)),
]


@pytest.mark.parametrize(("case", "tile", "which"), FORMS, ids=lambda x: str(x)[:60])
def test_which_stages_keep_their_sums(case, tile, which):
    assert direct(case, tile) == which
    run(case, tile)
    run(case, tile, "fp16", extra=8, seed=1)


@pytest.mark.parametrize("number", [0, 5, 8])
def test_fp32_has_float32_errors(number):
    case, tile, _ = FORMS[number]
    run(case, tile, "fp32")


def test_threads_meet_once_a_stage():
    """A stage's threads meet before its products, and not for its sums."""
    case = ChainCase(4, 8, 16, (Link(32), Link(32, (Part(32, 0),))))
    tile = ChainTile(32, 1, 4, 16, 4)
    assert direct(case, tile) == (True, True)
    assert run(case, tile)[1].barriers == 2


def test_a_stage_and_the_one_that_adds_its_result_have_the_same_runs():
    """The second stage's sums are those of several warps, so the first's go that way, too."""
    stages = plan(ChainTile(16, 1, 4, 2, 3), shape_of_case(ADDED)).stages
    assert [s.warps_k for s in stages] == [1, 1, 1, 2]
    assert direct_stages(stages, 4, [(0, 2)]) == (True, True, True, False)
    assert direct_stages(stages, 4, [(0, 3)]) == (False, True, True, False)
    assert direct_stages(stages, 4, [(0, 1), (1, 3), (0, 2)]) == (False, False, False, False)
