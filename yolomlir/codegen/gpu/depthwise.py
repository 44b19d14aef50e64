"""Depthwise convolution of NHWC maps, with its epilogue: a thread has a strip of one output row.

Bound by memory, so there are no tensor cores and no shared memory: neighbouring threads have
neighbouring groups of channels (coalesced rows of 4 channels a thread), and a thread reads every
input of its strip once for all the outputs and taps that use it. Arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.bindings import func, ir
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Int,
    KernelBuilder,
    f32,
    guard,
    loop,
    select,
    select_float,
    widen,
)
from yolomlir.codegen.gpu.element import FLOAT32, element_named
from yolomlir.codegen.gpu.epilogue import Epilogue, match_epilogue
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import fma, release_dependents, wait_for_predecessors
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Kernel, Parameter
from yolomlir.codegen.gpu.tile import later_option, tile_or
from yolomlir.target import Target

ROOT = "linalg.depthwise_conv_2d_nhwc_hwc"
_VECTOR_BYTES = 16
_REGISTERS = 128
"""What a thread may hold of weights, inputs and outputs before taps are loaded as they are used."""


@dataclass(frozen=True)
class DepthwiseShape:
    """Sizes in elements; `weight_strides`: of a row, a column and a channel of the kernel."""

    batch: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: match.Padding
    weight_strides: tuple[int, int, int]

    def strip_inputs(self, pixels: int) -> int:
        """Input columns that `pixels` neighbouring outputs read."""
        return (pixels - 1) * self.strides[1] + (self.kernel[1] - 1) * self.dilations[1] + 1


@dataclass(frozen=True)
class DepthwiseProblem:
    """A dispatch: its shape, the arguments that are its input and weight, its epilogue.

    vector: channels of one access (4, 2, 1), of 16 bytes or less.
    """

    shape: DepthwiseShape
    source: int
    weight: int
    epilogue: Epilogue
    parameters: tuple[Parameter, ...]
    vector: int


@dataclass(frozen=True)
class DepthwiseTile:
    """Output pixels of a thread's strip, and a block's threads; carveout: see `tile.CARVEOUTS`."""

    pixels: int
    threads: int
    carveout: int = later_option(0)


def default_tile(problem: DepthwiseProblem, target: Target) -> DepthwiseTile:
    """The longest strip, then the largest block, that give every multiprocessor a block.

    A strip of P outputs reads P + 2 columns for a 3x3 kernel instead of 3 P; a warp of strips of 4
    has 9 KB of loads on their way, so few warps a multiprocessor hide the latency of L2.
    """
    shape = problem.shape
    rows = shape.batch * shape.out_height * (shape.channels // problem.vector)
    for pixels in (4, 2):
        items = rows * -(-shape.out_width // pixels)
        for threads in (256, 128, 64):
            if items >= target.multiprocessors * threads:
                return DepthwiseTile(pixels, threads)
    return DepthwiseTile(2 if shape.out_width > 1 else 1, 64)


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> DepthwiseProblem:
    """The problem of a dispatch function. Raises UnsupportedError for another form."""
    root = match.only(function, ROOT)
    padded, kernel, _ = root.operands
    value, padding = match.unpadded(padded)
    source = match.argument_number(value)
    raw = match.through(kernel, "tensor.collapse_shape", "linalg.transpose")
    weight = match.argument_number(raw)
    if source is None or weight is None:
        match.refuse(root, "computes the input or the weight of a depthwise convolution")
    batch, height, width, channels = match.shape(value)
    _, out_height, out_width, _ = match.shape(root.results[0])
    kh, kw, _ = match.shape(kernel)
    moved = match.made_by(kernel, "linalg.transpose") is not None
    shape = DepthwiseShape(
        batch, height, width, channels, out_height, out_width, (kh, kw),
        match.pair(root, "strides"), match.pair(root, "dilations"), padding,
        (kw, 1, kh * kw) if moved else (kw * channels, channels, 1),
    )  # fmt: skip
    epilogue = match_epilogue(function, root.results[0])
    weights = {weight, *epilogue.channel}
    count = len(function.regions[0].blocks[0].arguments)
    activations = set(range(count + 1)) - weights
    dtypes = _dtypes(function)
    # A thread's sums are float32, so 4 channels are its registers' worth at every type.
    vector = min(
        FLOAT32.chunk,
        *(
            match.vector_width(function, channels, [n], element_named(dtypes[n]))
            for n in activations
        ),
    )
    parameters = [
        Parameter(WEIGHT, dtype, alignment_bytes=_VECTOR_BYTES)
        if number in weights
        else Parameter(ACTIVATION, dtype, element_named(dtype).bytes * vector)
        for number, dtype in enumerate(dtypes)
    ]
    return DepthwiseProblem(shape, source, weight, epilogue, tuple(parameters), vector)


def _dtypes(function: ir.Operation) -> list[str]:
    """Of the arguments and then the result."""
    block = function.regions[0].blocks[0]
    returned = block.operations[-1].operation.operands[0]
    return [match.dtype_of(value) for value in [*block.arguments, returned]]


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("depthwise")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a depthwise dispatch; products are float32 at every precision."""
    del precision
    problem = parse(function.operation)
    tile = tile_or(function.operation, DepthwiseTile, lambda: default_tile(problem, target))
    return build(problem, tile, target, name, function.location)


def build(
    problem: DepthwiseProblem,
    tile: DepthwiseTile,
    target: Target,
    name: str,
    location: ir.Location,
) -> Kernel:
    """The kernel for this problem and tile."""
    shape = problem.shape
    kernel = KernelBuilder(
        name, problem.parameters, threads=tile.threads, shared_bytes=0, location=location
    )
    strips = -(-shape.out_width // tile.pixels)
    items = shape.batch * shape.out_height * strips * (shape.channels // problem.vector)
    with kernel:
        _Body(kernel, problem, tile, strips, items).emit(target.programmatic_launch)
    grid = (-(-items // tile.threads), 1, 1)
    return kernel.finish(grid, programmatic=target.programmatic_launch)


class _Body:
    """The kernel's body for one thread: one group of channels of one strip of outputs."""

    def __init__(
        self,
        kernel: KernelBuilder,
        problem: DepthwiseProblem,
        tile: DepthwiseTile,
        strips: int,
        items: int,
    ) -> None:
        self.kernel, self.problem, self.shape, self.tile = kernel, problem, problem.shape, tile
        groups = self.shape.channels // problem.vector
        item = kernel.block_x * tile.threads + kernel.thread
        self.live = item < items if items % tile.threads else TRUE
        item = select(self.live, item, 0)
        self.channel = (item % groups) * problem.vector
        strip = item // groups
        self.column = (strip % strips) * tile.pixels
        row = strip // strips
        self.row, self.image = row % self.shape.out_height, row // self.shape.out_height

    def emit(self, programmatic: bool) -> None:
        """The whole body. Weights are read before the wait for earlier kernels."""
        shape, vector = self.shape, self.problem.vector
        held = vector * (
            shape.kernel[0] * shape.kernel[1]
            + self.tile.pixels
            + shape.strip_inputs(self.tile.pixels)
        )
        early = held <= _REGISTERS
        rows = range(shape.kernel[0])
        taps = [self.read_weights(Int.of(kh)) for kh in rows] if early else []
        per_channel = {
            number: self.read_channel(number) for number in self.problem.epilogue.channel
        }
        if programmatic:
            wait_for_predecessors()
        zero = f32(0.0)
        sums = [[zero] * vector for _ in range(self.tile.pixels)]
        for kh, weights in enumerate(taps):
            sums = self.accumulate(sums, self.read_row(Int.of(kh)), weights)
        if not early:
            sums = self.accumulate_rows(sums)
        if programmatic:
            release_dependents()
        self.store(sums, per_channel)

    def accumulate_rows(self, sums: list[list[ir.Value]]) -> list[list[ir.Value]]:
        """The sums with every row of taps, a row at a time: for kernels too large to hold."""
        vector = self.problem.vector
        flat = [value for pixel in sums for value in pixel]
        with loop(0, self.shape.kernel[0], carried=flat) as state:
            values = [v for v in state.carried if not isinstance(v, Int)]
            known = _groups(values, vector)
            weights = self.read_weights(state.index)
            known = self.accumulate(known, self.read_row(state.index), weights)
            state.advance([value for pixel in known for value in pixel])
        return _groups([v for v in state.results if not isinstance(v, Int)], vector)

    def read_weights(self, kh: Int) -> list[list[ir.Value]]:
        """One row of the kernel's taps, each for the thread's channels."""
        row, column, channel = self.shape.weight_strides
        buffer, vector = self.kernel.arguments[self.problem.weight].buffer, self.problem.vector
        offsets = [self.channel * channel + kh * row + kw * column for kw in self.columns()]
        if channel == 1:
            taps = [buffer.load_vector(offset, vector) for offset in offsets]
        else:
            taps = [[buffer.load(o + i * channel) for i in range(vector)] for o in offsets]
        return [[widen(value) for value in tap] for tap in taps]

    def columns(self) -> range:
        """The kernel's columns."""
        return range(self.shape.kernel[1])

    def read_channel(self, number: int) -> list[ir.Value]:
        """A bias: one value for each of the thread's channels."""
        return self.kernel.arguments[number].buffer.load_vector(self.channel, self.problem.vector)

    def read_row(self, kh: Int) -> list[list[ir.Value]]:
        """The inputs of the strip for one row of the kernel, zero outside the map."""
        shape, source = self.shape, self.kernel.arguments[self.problem.source]
        top, left, _, _ = shape.padding
        row = self.row * shape.strides[0] + kh * shape.dilations[0] - top
        row_inside = row < shape.height if self.may_leave_rows(kh) else TRUE
        base = self.image * shape.height + select(row_inside, row, 0)
        first = self.column * shape.strides[1] - left
        inputs = []
        for i in range(shape.strip_inputs(self.tile.pixels)):
            column = first + i
            column_inside = column < shape.width if self.may_leave_columns(i) else TRUE
            pixel = base * shape.width + select(column_inside, column, 0)
            offset = pixel * source.pitch_or_fail() + self.channel
            values = source.buffer.load_vector(offset, self.problem.vector)
            values = [widen(value) for value in values]
            inputs.append(_or_zero(row_inside & column_inside, values))
        return inputs

    def may_leave_rows(self, kh: Int) -> bool:
        """Whether a row of the kernel falls outside the map for some output row."""
        shape = self.shape
        if kh.known is None:
            return True
        first = kh.known * shape.dilations[0] - shape.padding[0]
        return first < 0 or (shape.out_height - 1) * shape.strides[0] + first >= shape.height

    def may_leave_columns(self, place: int) -> bool:
        """Whether the input at `place` of a strip falls outside the map for some strip."""
        shape = self.shape
        first = place - shape.padding[1]
        last = (-(-shape.out_width // self.tile.pixels) - 1) * self.tile.pixels
        return first < 0 or last * shape.strides[1] + first >= shape.width

    def accumulate(
        self,
        sums: list[list[ir.Value]],
        inputs: list[list[ir.Value]],
        weights: list[list[ir.Value]],
    ) -> list[list[ir.Value]]:
        """The sums with one row of taps added."""
        stride, dilation = self.shape.strides[1], self.shape.dilations[1]
        for kw, weight in enumerate(weights):
            for pixel in range(self.tile.pixels):
                values = inputs[pixel * stride + kw * dilation]
                terms = zip(values, weight, sums[pixel], strict=True)
                sums[pixel] = [fma(x, w, s) for x, w, s in terms]
        return sums

    def store(self, sums: list[list[ir.Value]], per_channel: dict[int, list[ir.Value]]) -> None:
        """Apply the epilogue and write the strip's outputs that exist."""
        shape, vector, epilogue = self.shape, self.problem.vector, self.problem.epilogue
        base = (self.image * shape.out_height + self.row) * shape.out_width + self.column
        result = self.kernel.arguments[-1]
        for pixel, values in enumerate(sums):
            inside = self.live & self.pixel_inside(pixel)
            with guard(inside):
                per_element = {
                    number: self.read_element(number, base + pixel) for number in epilogue.element
                }
                operands = {**per_channel, **per_element}
                outputs = [
                    epilogue.apply(value, {number: o[i] for number, o in operands.items()})
                    for i, value in enumerate(values[:vector])
                ]
                offset = (base + pixel) * result.pitch_or_fail() + self.channel
                result.buffer.store_vector(offset, outputs)

    def pixel_inside(self, pixel: int) -> Bool:
        """Whether a pixel of the strip lies in the output row."""
        if self.shape.out_width % self.tile.pixels == 0:
            return TRUE
        return self.column + pixel < self.shape.out_width

    def read_element(self, number: int, pixel: Int) -> list[ir.Value]:
        """A residual: the values at the output's place."""
        argument = self.kernel.arguments[number]
        offset = pixel * argument.pitch_or_fail() + self.channel
        return argument.buffer.load_vector(offset, self.problem.vector)


def _groups(values: list[ir.Value], size: int) -> list[list[ir.Value]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _or_zero(inside: Bool, values: list[ir.Value]) -> list[ir.Value]:
    if inside.known is True:
        return values
    zero = f32(0.0)
    return [select_float(inside, value, zero) for value in values]


__all__ = ["DepthwiseProblem", "DepthwiseShape", "DepthwiseTile", "build", "default_tile", "parse"]
