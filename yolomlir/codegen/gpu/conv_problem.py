"""What a `conv2d` dispatch computes, read off its linalg function: geometry, sources, epilogue."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.element import CHUNK_BYTES, FLOAT32, Element, element_named
from yolomlir.codegen.gpu.epilogue import Epilogue, match_epilogue
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Parameter
from yolomlir.codegen.gpu.linalg_match import (
    argument_number,
    constant_float,
    dtype_of,
    made_by,
    only,
    pair,
    shape,
    unpadded,
)
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo

_HINT = "docs/architecture.md, section 4, lists the forms that kernels are made from"
ROOT = "linalg.conv_2d_nhwc_fhwc"


@dataclass(frozen=True)
class Source:
    """A tensor that the convolution reads, as channels [first, first + channels) of its input.

    height, width: of the tensor itself. upsample: each element is read for upsample x upsample
    pixels. scale: what an element of an image is multiplied by.
    """

    argument: int
    height: int
    width: int
    first: int
    channels: int
    upsample: int = 1
    dtype: str = "float32"
    scale: float = 1.0
    rounded: bool = False


@dataclass(frozen=True)
class ConvShape:
    """The implicit GEMM: M = batch out_h out_w pixels, N = out_channels, K = kernel_h kernel_w
    in_channels, in that order of K. Sizes in elements; height and width after upsampling, without
    the padding."""

    batch: int
    height: int
    width: int
    in_channels: int
    out_h: int
    out_w: int
    out_channels: int
    kernel_h: int
    kernel_w: int
    stride_h: int = 1
    stride_w: int = 1
    pad_top: int = 0
    pad_left: int = 0
    dilation_h: int = 1
    dilation_w: int = 1
    source_vector: int = 4
    """Elements of a copy of an input (16 bytes and less), or 0 where it is converted."""
    dtype: str = "float32"
    """Of the operands of the products."""

    @property
    def element(self) -> Element:
        """The type of the operands of the products."""
        return element_named(self.dtype)

    @property
    def pixels(self) -> int:
        """M."""
        return self.batch * self.out_h * self.out_w

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return self.kernel_h * self.kernel_w

    @property
    def k(self) -> int:
        """K."""
        return self.taps * self.in_channels

    @property
    def weight_vector(self) -> int:
        """Elements of a copy of the weights, whose rows are K long."""
        return self.element.widest(self.k)

    @property
    def flops(self) -> int:
        """Two for a multiply-add."""
        return 2 * self.pixels * self.out_channels * self.k

    @property
    def in_bounds(self) -> bool:
        """Whether no tap of any output pixel falls outside the input."""
        last_row = (self.out_h - 1) * self.stride_h + (self.kernel_h - 1) * self.dilation_h
        last_column = (self.out_w - 1) * self.stride_w + (self.kernel_w - 1) * self.dilation_w
        inside = last_row < self.height and last_column < self.width
        return inside and self.pad_top == 0 and self.pad_left == 0


@dataclass(frozen=True)
class ConvProblem:
    """A `conv2d` dispatch: its shape, where its operands are, and its epilogue."""

    shape: ConvShape
    sources: tuple[Source, ...]
    weight: int
    epilogue: Epilogue
    parameters: tuple[Parameter, ...]
    store_vector: int
    """Elements that one store of the result may have (16 bytes and less)."""
    residual_vectors: dict[int, int]
    """The same for the loads of the epilogue's element operands, by argument."""

    @property
    def result(self) -> int:
        """The parameter that is the result."""
        return len(self.parameters) - 1


def widest(count: int) -> int:
    """The largest of 4, 2 and 1 that divides a count of float32."""
    return FLOAT32.widest(count)


def match_conv(function: ir.Operation, *, precision: str) -> ConvProblem:
    """Read a dispatch function of family `conv2d`.

    Optional attributes of the function: `yolo.alignments` (bytes an argument and then a result;
    0 or absent for what the channel count gives), `yolo.tf32_rounded` (arguments whose values are
    already rounded to TF32) and `yolo.round_result`. Raises UnsupportedError for other forms.
    """
    root = only(function, ROOT)
    weight = argument_number(root.operands[1])
    epilogue = match_epilogue(function, root.results[0])
    parameters = _parameters(function, {weight}, precision, epilogue)
    sources, geometry, weight = match_conv_input(root, _rounded(function), parameters)
    if geometry.source_vector == 0:
        parameters = _with_dense(parameters, sources[0])
    channels = geometry.out_channels
    return ConvProblem(
        shape=geometry,
        sources=sources,
        weight=weight,
        epilogue=epilogue,
        parameters=parameters,
        store_vector=vector_of(parameters[-1], channels),
        residual_vectors={a: vector_of(parameters[a], channels) for a in epilogue.element},
    )


def match_conv_input(
    root: ir.Operation, rounded: set[int], parameters: tuple[Parameter, ...]
) -> tuple[tuple[Source, ...], ConvShape, int]:
    """The sources, the shape and the weight's number of a convolution.

    rounded: arguments whose values are rounded to TF32 already. parameters: the kernel's ABI.
    Raises UnsupportedError for a form that kernels cannot read.
    """
    padded, weight, _ = root.operands
    value, (top, left, _, _) = unpadded(padded)
    if made_by(padded, "tensor.pad") is not None:
        require_zero_padding(root, padded)
    weight_number = argument_number(weight)
    if weight_number is None:
        raise _refusal(root, "computes its weights")
    batch, height, width, channels = shape(value)
    _, out_h, out_w, out_channels = shape(root.results[0])
    _, kernel_h, kernel_w, weight_channels = shape(weight)
    if weight_channels != channels:
        raise _refusal(root, f"has {channels} channels for weights of {weight_channels}")
    sources = _sources(root, value, rounded)
    dtype = dtype_of(weight)
    vectors = [
        0 if s.dtype != dtype else vector_of(parameters[s.argument], s.channels, s.first)
        for s in sources
    ]
    if 0 in vectors and len(sources) > 1:
        raise _refusal(root, "concatenates an image with another tensor")
    if 0 in vectors and sources[0].upsample > 1:
        raise _refusal(root, "upsamples an image that it converts")
    stride, dilation = pair(root, "strides"), pair(root, "dilations")
    geometry = ConvShape(
        batch, height, width, channels, out_h, out_w, out_channels, kernel_h, kernel_w,
        *stride, top, left, *dilation, source_vector=min(vectors), dtype=dtype,
    )  # fmt: skip
    return sources, geometry, weight_number


def _with_dense(parameters: tuple[Parameter, ...], image: Source) -> tuple[Parameter, ...]:
    """An image that is converted is copied in pieces of rows, so they must not have gaps."""
    dense = dataclasses.replace(parameters[image.argument], alignment_bytes=CHUNK_BYTES, dense=True)
    return tuple(dense if i == image.argument else p for i, p in enumerate(parameters))


def _refusal(op: ir.Operation, message: str) -> UnsupportedError:
    return UnsupportedError(
        f"the convolution {message}", where=yolo.layer_of(op.location), hint=_HINT
    )


def vector_of(parameter: Parameter, *counts: int) -> int:
    """Elements of the widest access of rows so aligned, beginning at multiples of the counts."""
    element = element_named(parameter.dtype)
    aligned = element.in_chunk(parameter.alignment_bytes)
    return min(aligned, *(element.widest(count) for count in counts))


def require_zero_padding(root: ir.Operation, padded: ir.Value) -> None:
    """Raises UnsupportedError where a convolution's input is padded with something else than 0."""
    pad = made_by(padded, "tensor.pad")
    if pad is None:
        return
    yielded = pad.regions[0].blocks[0].operations[-1].operation.operands[0]
    if constant_float(yielded) != 0.0:
        raise _refusal(root, "pads with something other than 0")


def _rounded(function: ir.Operation) -> set[int]:
    if "yolo.tf32_rounded" not in function.attributes:
        return set()
    return {int(v) for v in ir.DenseI64ArrayAttr(function.attributes["yolo.tf32_rounded"])}


def _sources(root: ir.Operation, value: ir.Value, rounded: set[int]) -> tuple[Source, ...]:
    concat = made_by(value, "tensor.concat")
    if concat is None:
        return (_source(root, value, 0, rounded),)
    if int(ir.IntegerAttr(concat.attributes["dim"]).value) != 3:
        raise _refusal(root, "concatenates along another dimension than the channels")
    sources: list[Source] = []
    for operand in concat.operands:
        first = sum(s.channels for s in sources)
        sources.append(_source(root, operand, first, rounded))
    return tuple(sources)


def _source(root: ir.Operation, value: ir.Value, first: int, rounded: set[int]) -> Source:
    """An argument, or the generic that upsamples or normalises one."""
    upsample, scale = 1, 1.0
    generic = made_by(value, "linalg.generic")
    outer = shape(value)
    if generic is not None:
        value = generic.operands[0]
        upsample = _upsampling(root, generic)
        scale = _scale(root, generic)
    number = argument_number(value)
    if number is None:
        raise _refusal(root, "reads something other than an argument, upsampled or normalised")
    batch, height, width, channels = shape(value)
    if (height * upsample, width * upsample, channels) != outer[1:] or batch != outer[0]:
        raise _refusal(root, f"reads {outer} from a tensor of {shape(value)}")
    dtype = dtype_of(value)
    return Source(number, height, width, first, channels, upsample, dtype, scale, number in rounded)


def _upsampling(root: ir.Operation, generic: ir.Operation) -> int:
    """The factor of a nearest-neighbour upsampling: its input map is (n, h/f, w/f, c)."""
    input_map = next(iter(ir.ArrayAttr(generic.attributes["indexing_maps"])))
    for factor in (1, 2, 4, 8):
        n, h, w, c = (ir.AffineDimExpr.get(i) for i in range(4))
        rows = h if factor == 1 else ir.AffineExpr.get_floor_div(h, factor)
        columns = w if factor == 1 else ir.AffineExpr.get_floor_div(w, factor)
        if input_map == ir.AffineMapAttr.get(ir.AffineMap.get(4, 0, [n, rows, columns, c])):
            return factor
    raise _refusal(root, f"reads its input through {input_map}")


def _scale(root: ir.Operation, generic: ir.Operation) -> float:
    """The factor of a generic that converts and scales its input, or only copies it (1)."""
    scale = 1.0
    for view in generic.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "arith.mulf":
            factors = [constant_float(v) for v in op.operands]
            known = [f for f in factors if f is not None]
            if len(known) != 1:
                raise _refusal(root, "normalises its input by something not constant")
            scale *= known[0]
        elif op.name not in ("arith.uitofp", "arith.truncf", "arith.constant", "linalg.yield"):
            raise _refusal(root, f"uses '{op.name}' on its input")
    return scale


def _parameters(
    function: ir.Operation, weights: set[int | None], precision: str, epilogue: Epilogue
) -> tuple[Parameter, ...]:
    """The ABI: 4-D tensors other than the weights are activations."""
    block = function.regions[0].blocks[0]
    returned = block.operations[-1].operation.operands[0]
    alignments: list[int] = []
    if "yolo.alignments" in function.attributes:
        given = ir.DenseI64ArrayAttr(function.attributes["yolo.alignments"])
        alignments = [int(v) for v in given]
    parameters = []
    for number, value in enumerate([*block.arguments, returned]):
        dtype = dtype_of(value)
        if number in weights or number in epilogue.channel:
            tf32 = precision != "fp32" and dtype == "float32" and number in weights
            parameters.append(Parameter(WEIGHT, dtype, 16, tf32))
            continue
        given_here = alignments[number] if number < len(alignments) else 0
        parameters.append(Parameter(ACTIVATION, dtype, given_here or natural_alignment(value)))
    return tuple(parameters)


def natural_alignment(value: ir.Value) -> int:
    """The alignment in bytes that dense rows of a tensor have."""
    dtype = dtype_of(value)
    if dtype == "uint8":
        return 1
    element = element_named(dtype)
    return element.bytes * element.widest(shape(value)[-1])
