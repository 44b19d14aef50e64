"""Convolutions whose tile is a window, in the simulator, against float64 and the other tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conv_cases import Case, Operands, linalg_text
from conv_kernels import SM_90, run

from yolomlir.autotune.untuned import assign_default_tiles, default_tile
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain_tile import ChainTile
from yolomlir.codegen.gpu.conv2d_kinds import stated_tile
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import match_conv
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.target import target_named

pytestmark = pytest.mark.usefixtures("context")


SMALL, LARGE = ChainTile(16, 1, 4, 8, 4, rows=4), ChainTile(64, 1, 8, 8, 2, rows=8)
CASES = {
    "residual": Case(9, 11, ((16, 1),), 16, residual=True, batch=2),
    "sources": Case(8, 10, ((16, 1), (8, 2)), 24),
    "ragged": Case(7, 13, ((8, 1),), 10, extra_pitch=8),
    "stride": Case(13, 18, ((16, 1),), 32, stride=2),
    "kernel": Case(9, 9, ((8, 1),), 8, kernel=(5, 5)),
    "plain": Case(8, 8, ((24, 1),), 8, silu=False, pad=False),
}


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_windows_agree_with_float64(name: str, precision: str, tile: ChainTile) -> None:
    element = "f16" if precision == "fp16" else "f32"
    run(dataclasses.replace(CASES[name], element=element), tile, precision)


def test_a_float32_result_of_float16_operands() -> None:
    run(Case(8, 9, ((16, 1),), 8, element="f16", result="f32"), SMALL, "fp16")


def test_channels_divided_among_the_blocks_of_a_cluster() -> None:
    run(Case(8, 9, ((16, 1),), 32, residual=True), ChainTile(32, 2, 4, 8, 4, rows=4))


@pytest.mark.parametrize("name", ["residual", "sources", "stride"])
def test_both_kinds_of_tile_compute_the_same(name: str) -> None:
    """Bit for bit where every sum is exact, which is how the tuner compares candidates."""
    case = dataclasses.replace(CASES[name], silu=True)
    operands = Operands.random(case)
    rng = np.random.default_rng(5)

    def whole(x: np.ndarray, scale: float) -> np.ndarray:
        return (rng.integers(-8, 9, x.shape) * scale).astype(x.dtype)

    operands = Operands(
        [whole(x, 0.25) for x in operands.sources],
        whole(operands.weights, 2.0**-6),
        whole(operands.bias, 2.0**-6),
        None if operands.residual is None else whole(operands.residual, 0.25),
    )
    gathered, _ = run(case, ConvTile(32, 16, 16, 2, 1, 2, 3), operands=operands)
    for tile in (SMALL, LARGE):
        window, _ = run(case, tile, operands=operands)
        assert np.array_equal(window, gathered)


def test_functions_without_a_tile_get_the_default_one_which_may_be_a_window() -> None:
    case = Case(160, 160, ((16, 1),), 8)
    module = ir.Module.parse(linalg_text(case))
    function = module.body.operations[0]
    shape = match_conv(function.operation, precision="tf32").shape
    tile = default_tile(shape, SM_90, "tf32")
    assert isinstance(tile, ChainTile)
    assign_default_tiles(module, SM_90, "tf32")
    kernel = generate_kernel(function, SM_90, precision="tf32")
    down, across = -(-160 // tile.rows), -(-160 // tile.columns)
    assert kernel.launch.grid == (down * across, tile.cluster_n, 1)
    sm_80 = target_named("sm_80")
    assign_default_tiles(module, sm_80, "tf32")
    assert stated_tile(function.operation) == tile  # one that is there stays
    del function.operation.attributes["yolo.tile"]
    assign_default_tiles(module, sm_80, "tf32")
    older = generate_kernel(function, sm_80, precision="tf32")
    assert older.launch.cluster == (1, 1, 1)
