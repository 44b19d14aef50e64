"""What a `chain` dispatch computes, read off its linalg function: its stages and what links them.

The first stage is any convolution. Convolutions of several taps may follow it, each of which reads
the whole result of the one before; nothing else reads that. Each later one is a 1x1 convolution of
stride 1 whose input is put together, along its channels, from results of earlier stages and from
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.conv_problem import (
    ROOT,
    ConvProblem,
    ConvShape,
    Source,
    match_conv_input,
    natural_alignment,
    require_zero_padding,
    vector_of,
)
from yolomlir.codegen.gpu.epilogue import Epilogue, match_epilogue_generic
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Parameter
from yolomlir.codegen.gpu.linalg_match import (
    argument_number,
    dtype_of,
    made_by,
    pair,
    refuse,
    shape,
    through,
    unpadded,
    walk,
)

DEPTHWISE_ROOT = "linalg.depthwise_conv_2d_nhwc_hwc"
STAGE = 1 << 16
"""Operand number of an epilogue that is the result of stage 0; stage s is STAGE + s."""


@dataclass(frozen=True)
class Piece:
    """Channels [first, first + channels) of a stage's input.

    They are `argument` (vector: elements that one copy of it may have), or channels from `offset`
    on of the result of `stage`.
    """

    first: int
    channels: int
    argument: int | None = None
    stage: int | None = None
    offset: int = 0
    vector: int = 4
    rounded: bool = False


@dataclass(frozen=True)
class Stage:
    """One convolution of the chain, its epilogue, and the parameter that is its result, if any."""

    shape: ConvShape
    weight: int
    epilogue: Epilogue
    pieces: tuple[Piece, ...] = ()
    result: int | None = None


@dataclass(frozen=True)
class ChainProblem:
    """A `chain` dispatch. first: its first stage as a `conv2d` problem, for the loads.

    depthwise: the first stage is, its weights KH x KW x C, its one source read directly.
    round_results: what is stored to global memory is rounded to TF32.
    """

    first: ConvProblem
    stages: tuple[Stage, ...]
    parameters: tuple[Parameter, ...]
    round_results: bool
    depthwise: bool = False

    @property
    def inner(self) -> tuple[ConvShape, ...]:
        """The stages of several taps behind the first."""
        return tuple(stage.shape for stage in self.stages[1:] if stage.shape.taps > 1)

    def vector(self, number: int, channels: int) -> int:
        """Elements that one access (16 bytes or less) of so many channels of one may have."""
        return vector_of(self.parameters[number], channels)


def match_chain(function: ir.Operation, *, precision: str) -> ChainProblem:
    """Read a dispatch function of family `chain`.

    Attributes of the function are those of `match_conv`. Raises UnsupportedError for other forms.
    """
    depthwise = list(walk(function, DEPTHWISE_ROOT))
    roots = [*depthwise, *walk(function, ROOT)]
    if len(depthwise) > 1:
        refuse(function, "holds several depthwise convolutions")
    if not roots:
        refuse(function, "holds no convolution")
    block = function.regions[0].blocks[0]
    returned = list(block.operations[-1].operation.operands)
    arguments = len(block.arguments)
    numbers: dict[ir.Value, int] = {}
    found: list[tuple[ir.Operation, Epilogue, int | None]] = []
    for index, root in enumerate(roots):
        value, epilogue = _epilogue(root, numbers)
        numbers[value] = index
        position = arguments + returned.index(value) if value in returned else None
        found.append((root, epilogue, position))
    if any(value not in numbers for value in returned):
        refuse(function, "returns something other than the results of its convolutions")
    parameters = _parameters(function, found, precision)
    rounded = _rounded(function)
    if depthwise:
        sources, geometry, weight = _depthwise_input(roots[0], parameters)
    else:
        sources, geometry, weight = match_conv_input(roots[0], rounded, parameters)
    if geometry.source_vector == 0:
        refuse(roots[0], "begins with the convolution of an image")
    stages = [Stage(geometry, weight, found[0][1], (), found[0][2])]
    for root, epilogue, position in found[1:]:
        if shape(root.operands[1])[1:3] != (1, 1):
            stages.append(_inner_stage(root, epilogue, position, numbers, stages))
            continue
        pixels = stages[-1].shape
        stages.append(_stage(root, epilogue, position, numbers, parameters, rounded, pixels))
    _require_inner_results(roots, stages)
    first = ConvProblem(geometry, sources, weight, found[0][1], parameters, 1, {})
    round_results = "yolo.round_result" in function.attributes
    return ChainProblem(first, tuple(stages), parameters, round_results, bool(depthwise))


def _depthwise_input(
    root: ir.Operation, parameters: tuple[Parameter, ...]
) -> tuple[tuple[Source, ...], ConvShape, int]:
    """The source, the shape and the weight's number of a depthwise first stage."""
    value, (top, left, _, _) = unpadded(root.operands[0])
    source = argument_number(value)
    weight = argument_number(through(root.operands[1], "tensor.collapse_shape"))
    if source is None or weight is None:
        refuse(root, "computes the input or the weight of a depthwise convolution")
    batch, height, width, channels = shape(value)
    _, out_h, out_w, _ = shape(root.results[0])
    kernel_h, kernel_w, _ = shape(root.operands[1])
    geometry = ConvShape(
        batch, height, width, channels, out_h, out_w, channels, kernel_h, kernel_w,
        *pair(root, "strides"), top, left, *pair(root, "dilations"),
        source_vector=vector_of(parameters[source], channels), dtype=dtype_of(value),
    )  # fmt: skip
    read = Source(source, height, width, 0, channels, dtype=geometry.dtype)
    return (read,), geometry, weight


def _epilogue(root: ir.Operation, stages: Mapping[ir.Value, int]) -> tuple[ir.Value, Epilogue]:
    """A convolution's result after its epilogue, and the epilogue."""
    accumulator = root.results[0]
    users = [use.owner.operation for use in accumulator.uses]
    if len(users) != 1 or users[0].name != "linalg.generic":
        return accumulator, Epilogue(None)

    def number(value: ir.Value) -> int | None:
        return STAGE + stages[value] if value in stages else argument_number(value)

    return users[0].results[0], match_epilogue_generic(users[0], accumulator, number)


def _stage(
    root: ir.Operation,
    epilogue: Epilogue,
    result: int | None,
    stages: Mapping[ir.Value, int],
    parameters: tuple[Parameter, ...],
    rounded: set[int],
    first: ConvShape,
) -> Stage:
    value, weight, _ = root.operands
    number = argument_number(weight)
    if number is None:
        refuse(root, "computes its weights")
    out_channels, kernel_h, kernel_w, channels = shape(weight)
    pointwise = (kernel_h, kernel_w) == (1, 1) and pair(root, "strides") == (1, 1)
    if not pointwise or shape(value) != (first.batch, first.out_h, first.out_w, channels):
        refuse(root, "has a later stage that is no 1x1 convolution of stride 1")
    size = (first.out_h, first.out_w)
    if dtype_of(weight) != first.dtype:
        refuse(root, f"multiplies {dtype_of(weight)} after {first.dtype}")
    geometry = ConvShape(
        first.batch, *size, channels, *size, out_channels, 1, 1,
        source_vector=first.element.chunk, dtype=first.dtype,
    )  # fmt: skip
    pieces = _pieces(root, value, stages, parameters, rounded)
    return Stage(geometry, number, epilogue, pieces, result)


def _inner_stage(
    root: ir.Operation,
    epilogue: Epilogue,
    result: int | None,
    numbers: Mapping[ir.Value, int],
    stages: Sequence[Stage],
) -> Stage:
    """A later stage of several taps, which reads the result of the one before."""
    before = len(stages) - 1
    value, (top, left, _, _) = unpadded(root.operands[0])
    if made_by(root.operands[0], "tensor.pad") is not None:
        require_zero_padding(root, root.operands[0])
    if numbers.get(value) != before or any(s.shape.taps == 1 for s in stages[1:]):
        refuse(root, "is of several taps, and not of the first stage's result alone")
    number = argument_number(root.operands[1])
    if number is None:
        refuse(root, "computes its weights")
    first = stages[0].shape
    if dtype_of(root.operands[1]) != first.dtype:
        refuse(root, f"multiplies {dtype_of(root.operands[1])} after {first.dtype}")
    batch, height, width, channels = shape(value)
    _, out_h, out_w, out_channels = shape(root.results[0])
    _, kernel_h, kernel_w, _ = shape(root.operands[1])
    stride_h, stride_w = pair(root, "strides")
    dilation_h, dilation_w = pair(root, "dilations")
    geometry = ConvShape(
        batch, height, width, channels, out_h, out_w, out_channels, kernel_h, kernel_w,
        stride_h, stride_w, top, left, dilation_h, dilation_w,
        source_vector=first.element.chunk, dtype=first.dtype,
    )  # fmt: skip
    return Stage(geometry, number, epilogue, (Piece(0, channels, stage=before),), result)


def _require_inner_results(roots: Sequence[ir.Operation], stages: Sequence[Stage]) -> None:
    """Results of other pixels than the last ones go to the next stage and nowhere else."""
    inner = sum(stage.shape.taps > 1 for stage in stages[1:])
    for index, (root, stage) in enumerate(zip(roots, stages, strict=True)):
        if index < inner and stage.result is not None:
            refuse(root, "has a result that is stored, and that a window is read of")
        read = [piece.stage for piece in stage.pieces if piece.stage is not None]
        read += [number - STAGE for number in stage.epilogue.element if number >= STAGE]
        if any(other < inner and (index > inner or other != index - 1) for other in read):
            refuse(root, "reads or adds a result that a window is read of")


def _pieces(
    root: ir.Operation,
    value: ir.Value,
    stages: Mapping[ir.Value, int],
    parameters: tuple[Parameter, ...],
    rounded: set[int],
) -> tuple[Piece, ...]:
    concat = made_by(value, "tensor.concat")
    if concat is not None and int(ir.IntegerAttr(concat.attributes["dim"]).value) != 3:
        refuse(root, "concatenates along another dimension than the channels")
    pieces: list[Piece] = []
    for operand in [value] if concat is None else list(concat.operands):
        first = sum(p.channels for p in pieces)
        channels = shape(operand)[3]
        number = argument_number(operand)
        if number is not None:
            vector = vector_of(parameters[number], channels, first)
            piece = Piece(first, channels, number, vector=vector, rounded=number in rounded)
        else:
            stage, offset = _part_of_stage(root, operand, stages)
            piece = Piece(first, channels, stage=stage, offset=offset)
        pieces.append(piece)
    return tuple(pieces)


def _part_of_stage(
    root: ir.Operation, value: ir.Value, stages: Mapping[ir.Value, int]
) -> tuple[int, int]:
    """The stage that a value is the result of, or some channels of, and the first of them."""
    offset = 0
    part = made_by(value, "tensor.extract_slice")
    if part is not None:
        starts = list(ir.DenseI64ArrayAttr(part.attributes["static_offsets"]))
        value, offset = part.operands[0], starts[3]
    if value not in stages:
        refuse(root, "reads something other than arguments and results of earlier stages")
    return stages[value], offset


def _rounded(function: ir.Operation) -> set[int]:
    if "yolo.tf32_rounded" not in function.attributes:
        return set()
    return {int(v) for v in ir.DenseI64ArrayAttr(function.attributes["yolo.tf32_rounded"])}


def _parameters(
    function: ir.Operation,
    found: list[tuple[ir.Operation, Epilogue, int | None]],
    precision: str,
) -> tuple[Parameter, ...]:
    """The ABI: arguments that are neither weights nor vectors by channel are activations."""
    block = function.regions[0].blocks[0]
    plain = {
        argument_number(through(root.operands[1], "tensor.collapse_shape"))
        for root, _, _ in found
        if root.name == DEPTHWISE_ROOT
    }
    weights = {argument_number(root.operands[1]) for root, _, _ in found} - {None} | plain
    vectors = {number for _, epilogue, _ in found for number in epilogue.channel}
    alignments: list[int] = []
    if "yolo.alignments" in function.attributes:
        alignments = [int(v) for v in ir.DenseI64ArrayAttr(function.attributes["yolo.alignments"])]
    parameters = []
    values = [*block.arguments, *block.operations[-1].operation.operands]
    for number, value in enumerate(values):
        dtype = dtype_of(value)
        if number in weights or number in vectors:
            tf32 = precision != "fp32" and dtype == "float32" and number in weights - plain
            parameters.append(Parameter(WEIGHT, dtype, 16, tf32))
            continue
        stated = alignments[number] if number < len(alignments) else 0
        parameters.append(Parameter(ACTIVATION, dtype, stated or natural_alignment(value)))
    return tuple(parameters)
