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
