"""Every kernel of YOLO26 assembles for the shipped targets, without spills, within their limits."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from yolomlir.dialects import yolo

from yolomlir.autotune.untuned import assign_default_tiles, best_gathered
from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv2d_registers import available, overfull
from yolomlir.codegen.gpu.conv2d_tile import ConvTile, objection, tile_space
from yolomlir.codegen.gpu.conv_problem import ConvShape, match_conv
from yolomlir.codegen.gpu.element import FLOAT16
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.ptx import assemble, compile_kernels, to_ptx
from yolomlir.compiler import CompileOptions, emit
from yolomlir.diagnostics import UserError
from yolomlir.frontend import network
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.target import Target, target_named

CHIPS = ["sm_90", "sm_120"]
MAX_SHARED_BYTES = {"sm_90": 227 * 1024, "sm_120": 99 * 1024}
DISTINCT_CONVOLUTIONS = 50
"""At least so many kernels of YOLO26n are convolutions (56 now)."""


def linalg_module(scale: str, chip: str, precision: str) -> str:
    """The linalg level of a whole network, each convolution by itself; weights do not matter."""
    shapes = network.parameters(network.SCALES[scale], 80, fused=True)
    weights = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    options = CompileOptions(target=chip, precision=precision, level=2)
    return emit(Checkpoint(weights), options, "linalg")


def dispatches(module: ir.Module, family: str) -> dict[str, object]:
    """The dispatch functions of a family, by name."""
    found = {}
    for view in module.body.operations:
        op = view.operation
        if "yolo.family" in op.attributes and yolo.string(op, "yolo.family") == family:
            found[yolo.string(op, "sym_name")] = view
    return found


def check(kernels: dict, target: Target) -> None:
    for name, compiled in compile_kernels(kernels, target).items():
        assert compiled.spill_bytes == 0, name
        assert compiled.launch.shared_bytes <= MAX_SHARED_BYTES[target.name], name
        threads = compiled.launch.block[0]
        assert compiled.registers * threads <= target.registers_per_sm, name


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_sample_of_the_smallest_network(chip, precision):
    target = target_named(chip)
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(linalg_module("n", chip, precision))
        functions = dispatches(module, "conv2d")
        assert len(functions) >= DISTINCT_CONVOLUTIONS
        names = random.Random(chip).sample(sorted(functions), 6)
        kernels = {n: generate_kernel(functions[n], target, precision=precision) for n in names}
        check(kernels, target)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scale", ["n", "s", "m"])
def test_every_convolution(scale, chip, precision):
    target = target_named(chip)
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(linalg_module(scale, chip, precision))
        functions = dispatches(module, "conv2d")
        kernels = {
            name: generate_kernel(function, target, precision=precision)
            for name, function in functions.items()
        }
        check(kernels, target)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("scale", ["n", "s", "m"])
def test_every_other_kernel_of_float16(scale, chip):
    target = target_named(chip)
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(linalg_module(scale, chip, "fp16"))
        kernels = {}
        for family in ("depthwise", "max_pool", "attention"):
            functions = dispatches(module, family)
            assert functions, family
            for name, function in functions.items():
                kernels[name] = generate_kernel(function, target, precision="fp16")
        check(kernels, target)


SHAPES = [
    ConvShape(1, 160, 160, 64, 80, 80, 64, 3, 3, 2, 2, 1, 1),
    ConvShape(1, 20, 20, 256, 20, 20, 16, 3, 3, 1, 1, 1, 1),
    ConvShape(1, 80, 80, 96, 80, 80, 80, 1, 1),
    ConvShape(1, 64, 64, 3, 32, 32, 16, 3, 3, 2, 2, 1, 1, source_vector=0),
]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.in_channels}to{s.out_channels}")
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_every_candidate_is_within_the_limits(shape, chip, precision):
    target = target_named(chip)
    shape = of_precision(shape, precision)
    candidates = list(tile_space(shape, target, precision))
    assert best_gathered(shape, target, precision) is not None
    assert len(candidates) == len(set(candidates)) >= 50
    for tile in candidates[:: max(1, len(candidates) // 200)]:
        assert tile.shared_bytes(shape) <= MAX_SHARED_BYTES[chip]
        assert tile.threads <= 512
        assert objection(tile, shape, target, precision) is None


def of_precision(shape: ConvShape, precision: str) -> ConvShape:
    """The shape with the operands that a precision has."""
    if precision != "fp16":
        return shape
    vector = FLOAT16.widest(shape.in_channels) if shape.source_vector else 0
    return dataclasses.replace(shape, dtype=FLOAT16.name, source_vector=vector)


def conv_text(shape: ConvShape, element: str = "f32") -> str:
    """A dispatch function of this shape, without epilogue. element: of input and weights."""
    pad = f"[0, {shape.pad_top}, {shape.pad_left}, 0]"
    high = [
        (shape.out_h - 1) * shape.stride_h + shape.kernel_h - shape.height - shape.pad_top,
        (shape.out_w - 1) * shape.stride_w + shape.kernel_w - shape.width - shape.pad_left,
    ]
    inner = f"{shape.batch}x{shape.height}x{shape.width}x{shape.in_channels}"
    padded = (
        f"{shape.batch}x{shape.height + shape.pad_top + high[0]}"
        f"x{shape.width + shape.pad_left + high[1]}x{shape.in_channels}"
    )
    out = f"{shape.batch}x{shape.out_h}x{shape.out_w}x{shape.out_channels}"
    weights = f"{shape.out_channels}x{shape.kernel_h}x{shape.kernel_w}x{shape.in_channels}"
    return f"""
    func.func @conv(%x: tensor<{inner}x{element}>, %w: tensor<{weights}x{element}>)
        -> tensor<{out}xf32> attributes {{yolo.family = "conv2d"}} {{
      %zero = arith.constant 0.0 : f32
      %none = arith.constant 0.0 : {element}
      %p = tensor.pad %x low{pad} high[0, {max(0, high[0])}, {max(0, high[1])}, 0] {{
      ^bb0(%i: index, %j: index, %k: index, %l: index):
        tensor.yield %none : {element}
      }} : tensor<{inner}x{element}> to tensor<{padded}x{element}>
      %e = tensor.empty() : tensor<{out}xf32>
      %f = linalg.fill ins(%zero : f32) outs(%e : tensor<{out}xf32>) -> tensor<{out}xf32>
      %y = linalg.conv_2d_nhwc_fhwc {{strides = dense<[{shape.stride_h}, {shape.stride_w}]>
          : tensor<2xi64>, dilations = dense<1> : tensor<2xi64>}}
          ins(%p, %w : tensor<{padded}x{element}>, tensor<{weights}x{element}>)
          outs(%f : tensor<{out}xf32>) -> tensor<{out}xf32>
      return %y : tensor<{out}xf32>
    }}"""


def assemble_candidates(count: int, chip: str, precision: str) -> None:
    target = target_named(chip)
    random_ = random.Random(f"{chip} {precision}")
    with yolo.new_context(), ir.Location.unknown():
        kernels = {}
        for shape in SHAPES[:3]:
            element = "f16" if precision == "fp16" else "f32"
            module = ir.Module.parse(conv_text(shape, element))
            function = module.body.operations[0]
            matched = match_conv(function.operation, precision=precision).shape
            for tile in random_.sample(list(tile_space(matched, target, precision)), count):
                function.operation.attributes["yolo.tile"] = tile.to_attribute()
                kernel = generate_kernel(function, target, precision=precision)
                kernels[f"{matched.k} {tile}"] = kernel
        check(kernels, target)


@pytest.mark.parametrize(
    ("chip", "precision"), [("sm_90", "tf32"), ("sm_120", "fp32"), ("sm_120", "fp16")]
)
def test_random_candidates_assemble_without_spills(chip, precision):
    assemble_candidates(3, chip, precision)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16"])
def test_many_random_candidates_assemble_without_spills(chip, precision):
    assemble_candidates(60, chip, precision)


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_89"])
def test_older_chips_get_no_newer_instructions(chip):
    target = target_named(chip)
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(conv_text(SHAPES[1]))
        assign_default_tiles(module, target, "tf32")
        kernel = generate_kernel(module.body.operations[0], target, precision="tf32")
        text = to_ptx(kernel.module, target)
        assert not kernel.launch.programmatic
        assert kernel.launch.cluster == (1, 1, 1)
        assert "griddepcontrol" not in text
        assert "cluster" not in text
        assert assemble(text, chip).spill_bytes == 0


def test_a_tile_round_trips_through_its_attribute():
    tile = ConvTile(64, 32, 16, 2, 1, 2, 4, unroll=True, release_early=True)
    with ir.Context():
        text = str(tile.to_attribute())
        assert ConvTile.from_attribute(ir.Attribute.parse(text)) == tile
        table = "{block_m = 16, block_n = 8, block_k = 8, unroll = 1, staged = false}"
        read = ConvTile.from_attribute(ir.Attribute.parse(table))
        assert read == ConvTile(16, 8, 8, unroll=True)
        assert read.unroll is True
        with pytest.raises(UserError, match="no option 'warps'"):
            ConvTile.from_attribute(ir.Attribute.parse("{block_m = 16, warps = 4}"))
        with pytest.raises(UserError, match="block_n"):
            ConvTile.from_attribute(ir.Attribute.parse("{block_m = 16, block_k = 8}"))


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (ConvTile(24, 32, 32), "block_m = 24"),
        (ConvTile(32, 12, 32), "block_n = 12"),
        (ConvTile(32, 32, 24), "block_k = 24"),
        (ConvTile(32, 32, 16, warps_k=4), "warps_k = 4"),
        (ConvTile(256, 256, 32), "accumulators"),
        (ConvTile(128, 128, 128, 4, 4, stages=8), "shared memory"),
        (ConvTile(256, 128, 32, 16, 2), "threads"),
        (ConvTile(32, 32, 32, stages=1), "one stage"),
        (ConvTile(128, 64, 128, 2, 2, 4, stages=2, unroll=True), "spills"),
    ],
)
def test_an_illegal_tile_says_why(tile, reason):
    assert reason in (objection(tile, SHAPES[0], target_named("sm_120"), "tf32") or "")


def overfull_on(tile: ConvTile, chip: str = "sm_90") -> bool:
    """Whether the tile is refused for a convolution of 3x3, K 576, with padding."""
    shape = SHAPES[0]
    return bool(overfull(tile, shape, target_named(chip), "tf32", tile.copies(shape)))


def test_a_loop_is_overfull_with_too_many_conditions_and_too_few_registers():
    tile = ConvTile(128, 64, 128, 2, 2, 4, stages=2, unroll=True)
    assert tile.copies(SHAPES[0]) == (8, 4)
    assert tile.k_tiles(SHAPES[0]) == 5
    assert overfull_on(tile)
    rolled = dataclasses.replace(tile, unroll=False)
    all_copied_ahead = dataclasses.replace(tile, stages=5)
    four_rows = dataclasses.replace(tile, block_m=64)
    half_the_warps = dataclasses.replace(tile, warps_k=2)
    few_sums = ConvTile(128, 16, 64, 8, 1, 1, stages=2, unroll=True)
    assert few_sums.copies(SHAPES[0])[0] == 8
    others = [rolled, all_copied_ahead, four_rows, half_the_warps, few_sums]
    assert [overfull_on(other) for other in others] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("warps", "registers"), [(1, 255), (8, 255), (9, 168), (10, 168), (12, 168), (16, 128)]
)
def test_registers_of_a_thread(warps, registers):
    assert available(ConvTile(16, 8, 8, warps_k=warps), target_named("sm_90")) == registers


def test_a_convolution_without_a_tile_is_a_user_error():
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(conv_text(SHAPES[2]))
        with pytest.raises(UserError, match=r"without `yolo\.tile`"):
            generate_kernel(module.body.operations[0], target_named("sm_90"), precision="tf32")


def test_an_illegal_tile_attribute_is_a_user_error():
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(conv_text(SHAPES[2]))
        function = module.body.operations[0]
        function.operation.attributes["yolo.tile"] = ConvTile(24, 32, 32).to_attribute()
        with pytest.raises(UserError, match="block_m = 24"):
            generate_kernel(function, target_named("sm_90"), precision="tf32")
