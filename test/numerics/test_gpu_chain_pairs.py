"""Chains that begin with several convolutions of more than one tap, in the simulator, against
float64."""

from __future__ import annotations

import pytest
from chain_cases import ChainCase, Link, Part
from test_gpu_chain import run
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain_tile import ChainTile


@pytest.fixture(autouse=True)
def context():
    with yolo.new_context(), ir.Location.unknown():
        yield


BOTTLENECK = ChainCase(
    9, 11, 16, (Link(8), Link(16, (Part(8, 0),), add="argument", kernel=3)), kernel=3, batch=2
)
BLOCK = ChainCase(
    10, 7, 32,
    (
        Link(16),
        Link(32, (Part(16, 0),), add="argument", kernel=3),
        Link(24, (Part(16), Part(32, 1))),
    ),
    kernel=3,
)  # fmt: skip
TILES = [
    ChainTile(16, 1, 4, 8, 4, rows=4),
    ChainTile(32, 1, 4, 2, 2, rows=4),
    ChainTile(32, 1, 8, 8, 12, rows=2),
    ChainTile(64, 1, 8, 1, 3, rows=8),
    ChainTile(128, 1, 8, 16, 4, rows=8),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", [BOTTLENECK, BLOCK], ids=["bottleneck", "block"])
def test_forms(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8)


MORE = [
    # Channels that no block of 8 divides; K that ends in half a product; a result of 10 channels.
    ChainCase(7, 10, 12, (Link(4), Link(10, (Part(4, 0),), kernel=3, silu=False)), kernel=3),
    ChainCase(6, 9, 8, (Link(12, add="argument"), Link(6, (Part(12, 0),), kernel=5)), kernel=3),
    # Three in a row; a first one of stride 2, of a larger kernel.
    ChainCase(
        8, 6, 8, (Link(8), Link(16, (Part(8, 0),), kernel=3), Link(8, (Part(16, 1),), kernel=3)),
        kernel=3,
    ),
    ChainCase(11, 14, 8, (Link(8), Link(8, (Part(8, 0),), kernel=3)), kernel=5, stride=2, batch=2),
    # A 1x1 layer that is stored, and one that adds it; two inputs, one of half the size.
    ChainCase(
        6, 10, 24,
        (
            Link(16),
            Link(16, (Part(16, 0),), kernel=3),
            Link(16, (Part(16, 1),), add=1),
            Link(24, (Part(8), Part(16, 2))),
        ),
        kernel=3, stored=(1, 2), joined=((16, 2), (8, 1)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", MORE, ids=range(len(MORE)))
def test_more_forms(case):
    run(case, ChainTile(16, 1, 4, 8, 4, rows=4), extra=8)
    run(case, ChainTile(64, 1, 8, 2, 2, rows=4))


@pytest.mark.parametrize("case", [BLOCK, MORE[4]], ids=["block", "stored"])
@pytest.mark.parametrize("tile", [ChainTile(16, 2, 4, 2, 3, rows=4), ChainTile(32, 2, 8, 8, 12, 4)])
def test_divided_among_blocks(case, tile):
    run(case, tile)
    run(case, tile, "fp16", extra=8)


def test_a_larger_cluster():
    case = ChainCase(
        5, 6, 32, (Link(32), Link(32, (Part(32, 0),), add="argument", kernel=3)), kernel=3
    )
    run(case, ChainTile(16, 4, 8, 4, 3, rows=4))
    run(case, ChainTile(16, 4, 8, 16, 12, rows=4), "fp16", extra=8)


@pytest.mark.parametrize("case", [BOTTLENECK, MORE[1]], ids=["bottleneck", "larger"])
def test_float32(case):
    run(case, ChainTile(32, 1, 8, 1, 2, rows=4), precision="fp32", extra=0)
