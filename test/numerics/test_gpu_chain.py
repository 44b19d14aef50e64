"""Chain kernels, run by the simulator, against float64 within derived tolerances."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from chain_cases import (
    TF32_ROUNDING,
    ChainCase,
    Link,
    Part,
    chain_module,
    expected_results,
    random_operands,
)
from conv_cases import round_to_tf32
from gpu_dispatches import assert_close
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.chain import shape_of
from yolomlir.codegen.gpu.chain_problem import match_chain
from yolomlir.codegen.gpu.chain_space import default_tile, tile_space
from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, objection, plan
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import ACTIVATION
from yolomlir.codegen.gpu.ptx import assemble, compile_kernels, to_ptx
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.compiler import CompileOptions, emit
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend import network
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.runtime.packing import packed
from yolomlir.simulator.report import SimulationReport
from yolomlir.simulator.simulate import simulate
from yolomlir.target import target_named

SM_90 = target_named("sm_90")


@pytest.fixture(autouse=True)
def context():
    with yolo.new_context(), ir.Location.unknown():
        yield


def spread(x: np.ndarray, extra: int) -> tuple[np.ndarray, int]:
    """A dense N x H x W x C array as a flat one of a larger pitch, and that pitch."""
    pitch = x.shape[-1] + extra
    wide = np.full((*x.shape[:-1], pitch), np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide.reshape(-1), pitch


def run(
    case: ChainCase,
    tile: ChainTile | None = None,
    precision: str = "tf32",
    *,
    target: str = "sm_90",
    extra: int = 4,
    seed: int = 0,
    blocks: int | None = None,
    rounded: bool = False,
) -> tuple[list[np.ndarray], SimulationReport]:
    """Simulate a case and check what it computed; the results and the report."""
    half = precision == "fp16"
    module, roles = chain_module(case, half=half)
    function = module.body.operations[0]
    chip = target_named(target)
    problem = match_chain(function.operation, precision=precision)
    tile = tile or default_tile(shape_of(problem), chip, precision)
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    kernel = generate_kernel(function, chip, precision=precision)
    operands = random_operands(case, roles, seed)
    flat: list[Any] = []
    parameters = kernel.launch.parameters
    pairs = zip(operands, parameters, strict=False)
    operands = [operand.astype(parameter.dtype) for operand, parameter in pairs]
    for operand, parameter in zip(operands, parameters, strict=False):
        if parameter.role == ACTIVATION:
            flat += spread(operand, extra)
        else:
            values = round_to_tf32(operand) if parameter.tf32 else operand
            flat.append(packed(values, parameter.packed).reshape(-1))
    outputs, places = {}, []
    for index in case.results:
        shape = (case.batch, *case.out_size, case.links[index].out)
        dtype = np.float16 if half else np.float32
        y, pitch = spread(np.full(shape, np.nan, dtype), extra)
        mask = np.zeros((*shape[:-1], pitch), bool)
        mask[..., : shape[-1]] = True
        outputs[len(flat)] = mask.reshape(-1)
        places.append((len(flat), (*shape[:-1], pitch), shape[-1]))
        flat += [y, pitch]
    report = simulate(kernel.module, kernel.launch, flat, seed=seed, blocks=blocks, outputs=outputs)
    slices = max(stage.warps_k for stage in plan(tile, shape_of(problem)).stages)
    operands = [operand.astype(np.float32) for operand in operands]
    wanted = expected_results(case, roles, operands, precision, slices + 4)
    results = []
    for (place, shape, channels), (value, tolerance) in zip(places, wanted, strict=True):
        written = report.written[place].reshape(shape)[..., :channels]
        got = flat[place].reshape(shape)[..., :channels]
        assert written.all() if blocks is None else written.any()
        if rounded:
            tolerance = tolerance + TF32_ROUNDING * np.abs(value)
        assert_close(got[written], value[written], tolerance[written])
        results.append(got)
    return results, report


PAIR = (Link(32), Link(16, (Part(32, 0),)))
TWO = ChainCase(5, 7, 24, PAIR)


@pytest.mark.parametrize(
    "tile",
    [
        ChainTile(16, 1, 4),
        ChainTile(16, 1, 8, 2, 2),
        ChainTile(32, 1, 2, 1, 3),
        ChainTile(16, 2, 4),
        ChainTile(64, 1, 16),
        ChainTile(16, 2, 4, release_early=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_two_stages(tile, precision):
    run(TWO, tile, precision, extra=8 if precision == "fp16" else 4)


CASES = [
    # A C3k2's first convolution, of which half goes on and all is stored.
    ChainCase(5, 8, 32, (Link(32), Link(24, (Part(16, 0, 16),))), stored=(0,)),
    # Its last: two sources from outside, one from inside.
    ChainCase(4, 5, 16, (Link(16), Link(32, (Part(16), Part(8), Part(16, 0))))),
    # An attention block: projection with residual, its two layers, the block's own last one.
    ChainCase(
        5, 4, 32,
        (
            Link(32, silu=False, add="argument"),
            Link(64, (Part(32, 0),)),
            Link(32, (Part(64, 1),), silu=False, add=0),
            Link(48, (Part(16), Part(32, 2))),
        ),
        stored=(2,),
    ),
    # A box head, and a 3x3 of stride 2 before.
    ChainCase(9, 7, 16, (Link(16), Link(4, (Part(16, 0),), silu=False)), kernel=3),
    ChainCase(9, 10, 8, (Link(24), Link(80, (Part(24, 0),))), kernel=3, stride=2, batch=2),
    # Channels that nothing divides.
    ChainCase(
        3, 5, 6,
        (Link(10, add="argument"), Link(7, (Part(5), Part(6, 0, 3)), add="argument")),
    ),
    ChainCase(4, 4, 80, (Link(80), Link(80, (Part(80, 0),), silu=False)), stored=(0,)),
    # A class head's depthwise 3x3, at two strides.
    ChainCase(
        7, 9, 16, (Link(16), Link(24, (Part(16, 0),)), Link(8, (Part(24, 1),), silu=False)),
        kernel=3, depthwise=True,
    ),
    ChainCase(
        8, 9, 6, (Link(6, add="argument"), Link(16, (Part(6, 0),))),
        kernel=3, stride=2, batch=2, depthwise=True, stored=(0,),
    ),
    # Two readers of one stage, one of them after another stage.
    ChainCase(
        4, 6, 16,
        (Link(16), Link(8, (Part(16, 0),)), Link(16, (Part(8, 1), Part(8, 0, 8)), add=0)),
    ),
]  # fmt: skip


CLUSTERED = (0, 1, 2, 4, 6)
"""Cases of which every stage has channels for two blocks."""


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_forms(case):
    run(case, ChainTile(16, 1, 4, 2, 3))
    run(case, ChainTile(16, 1, 4, 2, 3), "fp16", extra=8)


@pytest.mark.parametrize("case", [CASES[i] for i in CLUSTERED], ids=CLUSTERED)
def test_forms_of_a_cluster(case):
    run(case, ChainTile(16, 2, 4, 2, 3))
    run(case, ChainTile(16, 2, 4, 2, 3), "fp16", extra=8)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_forms_with_the_default_tile(case, precision):
    run(case, precision=precision, extra=8)


@pytest.mark.parametrize("index", [2, 5, 8])
def test_forms_in_float32(index):
    run(CASES[index], precision="fp32")
    run(CASES[index], ChainTile(32, 1, 8, 1, 2), precision="fp32", extra=0)


def test_a_depthwise_stage_divided_among_blocks():
    links = (Link(32), Link(40, (Part(32, 0),)), Link(24, (Part(40, 1),)))
    case = ChainCase(6, 7, 32, links, kernel=3, depthwise=True, stored=(0,))
    run(case, ChainTile(16, 2, 4, 2, 3))
    run(case, ChainTile(32, 2, 8, 1, 2), precision="fp32")
    run(case, ChainTile(16, 2, 4, 2, 3), "fp16", extra=8)


def test_a_larger_cluster_and_many_slices():
    case = ChainCase(3, 6, 64, (Link(64), Link(64, (Part(64, 0),), add=0)), stored=(0,))
    run(case, ChainTile(16, 8, 8, 4, 2))
    run(case, ChainTile(16, 4, 16, 16, 2))
    run(case, ChainTile(16, 4, 16, 16, 2), "fp16", extra=8)


@pytest.mark.parametrize(("extra", "bytes_"), [(2, 8), (1, 4)])
def test_rows_less_aligned_than_their_channels(extra, bytes_):
    """Nine operands: input, w, b, part, w, b, residual, two results."""
    stated = [0 if i in (1, 2, 4, 5) else bytes_ for i in range(9)]
    case = ChainCase(
        4, 4, 8, (Link(8), Link(8, (Part(8), Part(8, 0)), add="argument")), stored=(0,),
        attributes=f", yolo.alignments = array<i64: {', '.join(map(str, stated))}>",
    )  # fmt: skip
    run(case, extra=extra)


@pytest.mark.parametrize("extra", [4, 2, 1])
def test_float16_rows_less_aligned_than_their_channels(extra):
    stated = [0 if i in (1, 2, 4, 5) else 2 * extra for i in range(9)]
    case = ChainCase(
        4, 4, 8, (Link(8), Link(8, (Part(8), Part(8, 0)), add="argument")), stored=(0,),
        attributes=f", yolo.alignments = array<i64: {', '.join(map(str, stated))}>",
    )  # fmt: skip
    run(case, precision="fp16", extra=extra)


def test_results_rounded_for_their_readers():
    """Within TF32's rounding of what they are otherwise, and with its low bits zero."""
    links = (Link(16), Link(8, (Part(16, 0),)))
    plain, _ = run(ChainCase(4, 4, 8, links, stored=(0,)))
    case = ChainCase(4, 4, 8, links, stored=(0,), attributes=", yolo.round_result")
    for rounded, value in zip(run(case, rounded=True)[0], plain, strict=True):
        np.testing.assert_array_equal(rounded, round_to_tf32(value))


def test_the_same_bits_in_any_order_of_blocks_and_warps():
    module, roles = chain_module(CASES[2])
    function = module.body.operations[0]
    function.operation.attributes["yolo.tile"] = to_attribute(ChainTile(16, 2, 8, 2, 3))
    kernel = generate_kernel(function, SM_90, precision="tf32")
    operands = random_operands(CASES[2], roles, 0)
    found = []
    for seed in (0, 1, 2):
        flat, places = [], []
        for operand, parameter in zip(operands, kernel.launch.parameters, strict=False):
            activation = parameter.role == ACTIVATION
            flat += spread(operand, 0) if activation else [operand.reshape(-1)]
        for index in CASES[2].results:
            shape = (1, *CASES[2].out_size, CASES[2].links[index].out)
            places.append(len(flat))
            flat += [np.full(shape, np.nan, np.float32).reshape(-1), shape[-1]]
        simulate(kernel.module, kernel.launch, flat, seed=seed, outputs=places)
        found.append([flat[place] for place in places])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- tiles --------------------------------------------------------------------------------------


def shape_of_case(case: ChainCase) -> ChainShape:
    module, _ = chain_module(case)
    return shape_of(match_chain(module.body.operations[0].operation, precision="tf32"))


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120"])
def test_candidates_are_within_the_limits_and_assemble(name):
    """sm_80 has no clusters and no programmatic launch."""
    target = target_named(name)
    case = ChainCase(40, 40, 64, (Link(64, add="argument"), Link(80, (Part(32), Part(64, 0)))))
    shape = shape_of_case(case)
    tiles = list(tile_space(shape, target, "tf32"))
    assert len(tiles) == len(set(tiles)) >= 50
    assert all(plan(t, shape).shared_bytes <= target.shared_memory_bytes for t in tiles)
    assert target.clusters or all(t.cluster_n == 1 for t in tiles)
    module, _ = chain_module(case)
    function = module.body.operations[0]
    for tile in (default_tile(shape, target, "tf32"), *tiles[:: len(tiles) // 2]):
        function.operation.attributes["yolo.tile"] = to_attribute(tile)
        kernel = generate_kernel(function, target, precision="tf32")
        text = to_ptx(kernel.module, target)
        cubin = assemble(text, target.chip)
        assert cubin.spill_bytes == 0
        assert cubin.registers * kernel.launch.block[0] <= target.registers_per_sm
        assert kernel.launch.programmatic == target.programmatic_launch
        assert ("griddepcontrol" in text) == target.programmatic_launch


@pytest.mark.parametrize("early", [False, True])
def test_dependents_are_released_before_the_last_epilogue_or_after_the_wait(early):
    module, _ = chain_module(TWO)
    function = module.body.operations[0]
    tile = ChainTile(16, 2, 4, release_early=early)
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    text = to_ptx(generate_kernel(function, SM_90, precision="tf32").module, SM_90)
    assert text.count("griddepcontrol.launch_dependents") == 1
    before, after = text.split("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in before
    assert ("mma.sync" in before) != early
    assert ("mma.sync" in after) == early


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (ChainTile(24, 1, 4), "block_m = 24"),
        (ChainTile(16, 3, 4), "cluster_n = 3"),
        (ChainTile(16, 8, 4), "without channels"),
        (ChainTile(16, 1, 3), "warps = 3"),
        (ChainTile(16, 1, 4, 16, 1), "slots"),
        (ChainTile(256, 1, 2), "runs a thread"),
    ],
)
def test_an_illegal_tile_says_why(tile, reason):
    shape = shape_of_case(CASES[0])
    assert reason in (objection(tile, shape, SM_90, "tf32") or "")
    module, _ = chain_module(CASES[0])
    function = module.body.operations[0]
    function.operation.attributes["yolo.tile"] = to_attribute(tile)
    with pytest.raises(UserError, match="illegal tile"):
        generate_kernel(function, SM_90, precision="tf32")


def test_a_chain_that_fits_nowhere_is_unsupported():
    case = ChainCase(2, 2, 8, (Link(2048), Link(2048, (Part(2048, 0),))))
    with pytest.raises(UnsupportedError, match="no chain tile fits"):
        default_tile(shape_of_case(case), target_named("sm_80"), "tf32")


def test_other_forms_are_refused():
    pool = """func.func private @f(%x: tensor<1x4x4x8xf32>) -> tensor<1x4x4x8xf32>
        attributes {yolo.family = "chain"} { return %x : tensor<1x4x4x8xf32> }"""
    with pytest.raises(UnsupportedError, match="holds no convolution"):
        match_chain(ir.Module.parse(pool).body.operations[0].operation, precision="tf32")


# ---- the whole network --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scale", "precision"),
    [*product(("n", "s"), ("tf32", "fp32", "fp16")), ("m", "fp16")],
)
@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
def test_every_chain_assembles(scale, chip, precision):
    shapes = network.parameters(network.SCALES[scale], 80, fused=True)
    weights = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    options = CompileOptions(target=chip, precision=precision, level=3)
    target = target_named(chip)
    module = ir.Module.parse(emit(Checkpoint(weights), options, "linalg"))
    kernels = {}
    for view in module.body.operations:
        op = view.operation
        if "yolo.family" in op.attributes and yolo.string(op, "yolo.family") == "chain":
            kernels[yolo.string(op, "sym_name")] = generate_kernel(
                view, target, precision=precision
            )
    assert len(kernels) >= 15
    for name, compiled in compile_kernels(kernels, target).items():
        assert compiled.spill_bytes == 0, name
        assert compiled.launch.shared_bytes <= target.shared_memory_bytes, name
        assert compiled.registers * compiled.launch.block[0] <= target.registers_per_sm, name
