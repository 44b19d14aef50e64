"""Self-attention over the positions of a map, with the positional convolution, in one kernel.

A block has a few queries of one head; its warps share the keys among them and meet once, at the
end. Queries, keys and values go from global memory (L2) straight to the registers of the tensor
cores' fragments: the sums over channels and over keys do not care for their order, so a lane takes
what lies together in memory, and shared memory is only used to combine the warps. Softmax is
online, in float32 and base 2; the combination is in the order of the warps, so the result does not
depend on their timing.

Lane l of a warp is g = l / 4, t = l % 4 below (rows and columns of the fragments of
`mma.sync.m16n8k8`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, func, ir
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Int,
    KernelBuilder,
    f32,
    guard,
    loop,
    select,
    select_float,
)
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    exp2,
    fma,
    multiply_tf32,
    round_to_tf32,
    shuffle_xor,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Kernel, Parameter
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.dialects import yolo
from yolomlir.target import Target

_VECTOR_BYTES = 16
_LOWEST = -3.0e38
"""The maximum before the first key: finite, so that a warp without keys weighs 0, not NaN."""

Value: TypeAlias = ir.Value


@dataclass(frozen=True)
class AttentionShape:
    """`tokens` are the positions of the height x width map; channels of the input lie a head after
    the other, each query, key, value. kernel: of the positional convolution, None without one."""

    batch: int
    height: int
    width: int
    heads: int
    key_dim: int
    head_dim: int
    scale: float
    kernel: tuple[int, int] | None
    padding: match.Padding = (0, 0, 0, 0)

    @property
    def tokens(self) -> int:
        """Positions of one image."""
        return self.height * self.width

    @property
    def depth(self) -> int:
        """Channels of one head in the input."""
        return 2 * self.key_dim + self.head_dim


@dataclass(frozen=True)
class AttentionTile:
    """query_tiles: of 16 queries, a block. key_tiles: of 8 keys, a step of a warp. warps: of a
    block; they share the keys."""

    query_tiles: int = 1
    key_tiles: int = 2
    warps: int = 8

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return 16 * self.query_tiles

    @property
    def keys(self) -> int:
        """Keys of one step of a warp."""
        return 8 * self.key_tiles


def default_tile(shape: AttentionShape, target: Target, precision: str) -> AttentionTile:
    """16 queries a block until there are several blocks a multiprocessor, then 32, which read
    every key half as often. Registers bound the keys of a step: more of either spill."""
    blocks = -(-shape.tokens // 32) * shape.heads * shape.batch
    if blocks >= 4 * target.multiprocessors:
        return AttentionTile(query_tiles=2, key_tiles=1)
    return AttentionTile(key_tiles=1 if precision == "fp32" else 2)


def shared_bytes(shape: AttentionShape, tile: AttentionTile) -> int:
    """Every warp's sums, and its maximum and total a query."""
    return 4 * tile.warps * tile.queries * (shape.head_dim + 2)


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> AttentionShape:
    """The shape of a dispatch function. Raises UnsupportedError for another form.

    Arguments: qkv, then the weight (KH x KW x C in memory) and bias of the positional convolution
    where there is one.
    """
    arguments = list(function.regions[0].blocks[0].arguments)
    batch, height, width, channels = match.shape(arguments[0])
    heads, key_dim, head_dim = (yolo.integer(function, f"yolo.{k}") for k in _INTEGERS)
    kernel: tuple[int, int] | None = None
    padding = (0, 0, 0, 0)
    if len(arguments) == 3:
        conv = match.only(function, "linalg.depthwise_conv_2d_nhwc_hwc")
        rows, columns, _ = match.shape(conv.operands[1])
        kernel = (rows, columns)
        padding = match.unpadded(conv.operands[0])[1]
        weight = match.through(conv.operands[1], "tensor.collapse_shape")
        stretched = (match.pair(conv, "strides"), match.pair(conv, "dilations")) != ((1, 1),) * 2
        if match.argument_number(weight) != 1 or stretched:
            match.refuse(conv, "transposes the positional weight, or strides or dilates it")
    elif len(arguments) != 1:
        match.refuse(function, f"has {len(arguments)} arguments; expected qkv, weight and bias")
    shape = AttentionShape(
        batch, height, width, heads, key_dim, head_dim,
        yolo.real(function, "yolo.scale"), kernel, padding,
    )  # fmt: skip
    ends = (0, len(arguments))
    if match.vector_width(function, 4, ends) != 4:
        match.refuse(function, "has rows that are not aligned to 16 bytes")
    if channels != heads * shape.depth:
        match.refuse(function, f"has {channels} channels for {heads} heads of {shape.depth}")
    return shape


_INTEGERS = ("heads", "key_dim", "head_dim")


def _check(shape: AttentionShape, tile: AttentionTile, target: Target, name: str) -> None:
    bytes_ = shared_bytes(shape, tile)
    if shape.key_dim % 16 or shape.head_dim not in (32, 64, 128) or shape.scale <= 0:
        raise UnsupportedError(
            f"attention with key_dim {shape.key_dim}, head_dim {shape.head_dim}, scale "
            f"{shape.scale}; expected a multiple of 16, one of 32, 64, 128, and more than 0",
            where=name,
        )
    if bytes_ > target.shared_memory_bytes:
        raise UnsupportedError(
            f"{tile} needs {bytes_} bytes of shared memory; {target.name} has "
            f"{target.shared_memory_bytes}",
            where=name,
        )


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("attention")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of an attention dispatch at `tf32` or `fp32` (three TF32 products for one)."""
    shape = parse(function.operation)
    tile = tile_or(
        function.operation, AttentionTile, lambda: default_tile(shape, target, precision)
    )
    rounded = "yolo.round_result" in function.operation.attributes
    return build(shape, tile, target, precision, name, function.location, round_result=rounded)


def build(
    shape: AttentionShape,
    tile: AttentionTile,
    target: Target,
    precision: str,
    name: str,
    location: ir.Location,
    *,
    round_result: bool = False,
) -> Kernel:
    """The kernel for this shape and tile. Raises UnsupportedError where it does not fit."""
    _check(shape, tile, target, name)
    activation = Parameter(ACTIVATION, alignment_bytes=_VECTOR_BYTES)
    weight = Parameter(WEIGHT, alignment_bytes=_VECTOR_BYTES)
    weights = [weight, weight] if shape.kernel is not None else []
    kernel = KernelBuilder(
        name,
        [activation, *weights, activation],
        threads=32 * tile.warps,
        shared_bytes=shared_bytes(shape, tile),
        location=location,
    )
    with kernel:
        body = _Body(kernel, shape, tile, precise=precision == "fp32", round_result=round_result)
        body.emit(target.programmatic_launch)
    grid = (-(-shape.tokens // tile.queries), shape.heads, shape.batch)
    return kernel.finish(grid, programmatic=target.programmatic_launch)


@dataclass(frozen=True)
class _Fragment:
    """Operands of the tensor cores as TF32 bits; `low` has what rounding took, at fp32."""

    high: list[Value]
    low: list[Value]


@dataclass
class _Rows:
    """What a warp knows of 16 queries: maximum (scaled, base 2) and this lane's share of the total
    for rows g and g + 8, and the sums, four values a group of 8 channels."""

    maxima: list[Value]
    totals: list[Value]
    sums: list[list[Value]]

    def flat(self) -> list[Value]:
        """All values, for a loop to carry."""
        return [*self.maxima, *self.totals, *(v for group in self.sums for v in group)]

    @staticmethod
    def of(values: Sequence[Value]) -> _Rows:
        """The inverse of `flat`."""
        rest = list(values[4:])
        groups = [rest[i : i + 4] for i in range(0, len(rest), 4)]
        return _Rows(list(values[:2]), list(values[2:4]), groups)


class _Body:
    """The kernel's body for one thread."""

    def __init__(
        self,
        kernel: KernelBuilder,
        shape: AttentionShape,
        tile: AttentionTile,
        *,
        precise: bool,
        round_result: bool,
    ) -> None:
        self.kernel, self.shape, self.tile = kernel, shape, tile
        self.precise, self.round_result = precise, round_result
        lane = kernel.thread % 32
        self.warp, self.g, self.t = kernel.thread // 32, lane // 4, lane % 4
        self.source, self.pitch = kernel.arguments[0].buffer, kernel.arguments[0].pitch_or_fail()
        self.first_query = kernel.block_x * tile.queries
        self.first_channel = kernel.block_y * shape.depth
        self.chunks = shape.head_dim // 4
        self.chunk = kernel.thread % self.chunks
        steps = -(-shape.tokens // tile.keys)
        self.rounds = -(-steps // tile.warps)
        partial = tile.warps * tile.queries * shape.head_dim
        self.partial = kernel.shared("float32", partial)
        rows = 2 * tile.warps * tile.queries
        self.statistics = kernel.shared("float32", rows, offset_bytes=4 * partial)

    def emit(self, programmatic: bool) -> None:
        """The whole body. The positional weights are read before the wait for earlier kernels."""
        early = self.tile.query_tiles == 1  # two tiles of queries leave no registers for it
        weights, bias = self.read_weights() if early else ([], [])
        if programmatic:
            instructions.wait_for_predecessors()
        queries = [self.read_queries(i) for i in range(self.tile.query_tiles)]
        ahead = self.read_keys(Int.of(0))
        positions = [self.position(item, weights, bias) for item in self.items() if early]
        state = self.attend(queries, ahead)
        if not early:
            weights, bias = self.read_weights()
            positions = [self.position(item, weights, bias) for item in self.items()]
        if programmatic:
            instructions.release_dependents()
        for i, rows in enumerate(state):
            self.write_partial(i, rows)
        instructions.barrier()
        for item, position in zip(self.items(), positions, strict=True):
            self.combine(item, position)

    # ---- reading

    def token_offset(self, token: Int) -> Int:
        """Of this head's first channel of a token."""
        row = self.kernel.block_z * self.shape.tokens + token
        return row * self.pitch + self.first_channel

    def clamp(self, token: Int) -> Int:
        """A token that exists, for one that may lie beyond the last."""
        return select(token < self.shape.tokens, token, self.shape.tokens - 1)

    def read_spread(self, token: Int, first: int, count: int, lane: Int, lanes: int) -> list[Value]:
        """This lane's share of `count` channels of a token: every `lanes`-th group of 4."""
        base = self.token_offset(token) + lane * 4 + first
        values: list[Value] = []
        for start in range(0, count, 4 * lanes):
            values += self.source.load_vector(base + start, 4)
        return values

    def read_queries(self, index: int) -> list[_Fragment]:
        """16 queries as fragments, one for every 8 channels of the key.

        Channels are taken so that a lane's come in fours: step s multiplies channels
        16 (s / 2) + 4 t + 2 (s % 2) and the next of every t; `read_keys` does the same.
        """
        first, shape = self.first_query + 16 * index, self.shape
        rows = [
            self.read_spread(self.clamp(first + half + self.g), 0, shape.key_dim, self.t, 4)
            for half in (0, 8)
        ]
        return [
            self.fragment([rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]])
            for s in range(shape.key_dim // 8)
        ]

    def first_key(self, round_: Int) -> Int:
        """The first key of this warp's step in a round; the warps' steps alternate."""
        return (round_ * self.tile.warps + self.warp) * self.tile.keys

    def read_keys(self, round_: Int) -> list[Value]:
        """The keys and values of one step, as loaded: for every 8 keys, key g's channels, then
        those of values 2 t and 2 t + 1 that `multiply_values` wants."""
        shape, loaded = self.shape, []
        for i in range(self.tile.key_tiles):
            first = self.first_key(round_) + 8 * i
            loaded += self.read_spread(self.clamp(first + self.g), shape.key_dim, shape.key_dim,
                                       self.t, 4)  # fmt: skip
            for place in (0, 1):
                token = self.clamp(first + self.t * 2 + place)
                loaded += self.read_spread(token, 2 * shape.key_dim, shape.head_dim, self.g, 8)
        return loaded

    def fragment(self, values: Sequence[Value]) -> _Fragment:
        """Round to nearest TF32; keep the rest where products are to be float32."""
        high = [round_to_tf32(v) for v in values]
        if not self.precise:
            return _Fragment(high, [])
        rests = [
            arith.subf(v, instructions.from_bits(h)) for v, h in zip(values, high, strict=True)
        ]
        return _Fragment(high, [round_to_tf32(v) for v in rests])

    def multiply(self, a: _Fragment, b: _Fragment, c: Sequence[Value]) -> list[Value]:
        """a b + c; at fp32 with the products of the rests, the smallest first."""
        total = list(c)
        if self.precise:
            total = multiply_tf32(a.low, b.high, total)
            total = multiply_tf32(a.high, b.low, total)
        return multiply_tf32(a.high, b.high, total)

    # ---- the main loop

    def attend(self, queries: list[list[_Fragment]], ahead: list[Value]) -> list[_Rows]:
        """All of this warp's keys, the next step's on their way while one is computed."""
        zero, lowest = f32(0.0), f32(_LOWEST)
        groups = self.shape.head_dim // 8
        size = 4 + 4 * groups
        start = [
            _Rows([lowest] * 2, [zero] * 2, [[zero] * 4 for _ in range(groups)]) for _ in queries
        ]
        if self.rounds == 1:
            return self.step(queries, start, ahead, Int.of(0))
        carried = [*(v for rows in start for v in rows.flat()), *ahead]
        with loop(0, self.rounds, carried=carried) as state:
            values = [v for v in state.carried if not isinstance(v, Int)]
            rows = [_Rows.of(values[i * size : (i + 1) * size]) for i in range(len(queries))]
            following = self.read_keys(state.index + 1)
            rows = self.step(queries, rows, values[len(queries) * size :], state.index)
            state.advance([*(v for r in rows for v in r.flat()), *following])
        results = [v for v in state.results if not isinstance(v, Int)]
        return [_Rows.of(results[i * size : (i + 1) * size]) for i in range(len(queries))]

    def step(
        self,
        queries: list[list[_Fragment]],
        state: list[_Rows],
        loaded: Sequence[Value],
        round_: Int,
    ) -> list[_Rows]:
        """The rows with the keys and values of one step taken in."""
        shape, count = self.shape, self.shape.key_dim // 4 + self.shape.head_dim // 4
        keys: list[list[_Fragment]] = []
        values: list[list[_Fragment]] = []
        for i in range(self.tile.key_tiles):
            part = list(loaded[i * count : (i + 1) * count])
            key, rest = part[: shape.key_dim // 4], part[shape.key_dim // 4 :]
            keys.append([self.fragment(key[s : s + 2]) for s in range(0, len(key), 2)])
            pairs = zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
            values.append([self.fragment(pair) for pair in pairs])
        return [
            self.update(rows, self.scores(fragments, keys, round_), values)
            for fragments, rows in zip(queries, state, strict=True)
        ]

    def scores(
        self, queries: list[_Fragment], keys: list[list[_Fragment]], round_: Int
    ) -> list[list[Value]]:
        """q k^T, unscaled; minus infinity for keys that do not exist."""
        ragged = self.rounds * self.tile.warps * self.tile.keys > self.shape.tokens
        lowest, result = f32(float("-inf")), []
        for i, fragments in enumerate(keys):
            products = [f32(0.0)] * 4
            for a, b in zip(queries, fragments, strict=True):
                products = self.multiply(a, b, products)
            if ragged:
                first = self.first_key(round_) + 8 * i + self.t * 2
                live = [first + place < self.shape.tokens for place in (0, 1)] * 2
                products = [
                    select_float(inside, product, lowest)
                    for inside, product in zip(live, products, strict=True)
                ]
            result.append(products)
        return result

    def update(
        self, rows: _Rows, scores: list[list[Value]], values: list[list[_Fragment]]
    ) -> _Rows:
        """One step of the online softmax: rescale what is known to the new maxima, and add."""
        factor = f32(self.shape.scale * instructions.LOG2_E)
        maxima, totals, rescale, weights = [], [], [], [list(s) for s in scores]
        for half in (0, 1):
            own = [s[2 * half + e] for s in scores for e in (0, 1)]
            largest = _across(_fold(arith.maximumf, own), arith.maximumf)
            maximum = arith.maximumf(rows.maxima[half], arith.mulf(largest, factor))
            negated = arith.negf(maximum)
            for part in weights:
                for e in (2 * half, 2 * half + 1):
                    part[e] = exp2(fma(part[e], factor, negated))
            shrink = exp2(arith.addf(rows.maxima[half], negated))
            added = _fold(arith.addf, [w[2 * half + e] for w in weights for e in (0, 1)])
            maxima.append(maximum)
            rescale.append(shrink)
            totals.append(fma(rows.totals[half], shrink, added))
        sums = [[arith.mulf(v, rescale[i // 2]) for i, v in enumerate(s)] for s in rows.sums]
        for weight, group in zip(weights, values, strict=True):
            # The accumulator's columns 2t, 2t + 1 are the multiplicand's t, t + 4: key 2t is the
            # product's t and key 2t + 1 its t + 4, which is how the values were read.
            a = self.fragment([weight[0], weight[2], weight[1], weight[3]])
            sums = [self.multiply(a, b, s) for b, s in zip(group, sums, strict=True)]
        return _Rows(maxima, totals, sums)

    # ---- the end

    def items(self) -> list[Int]:
        """The queries of the block whose `self.chunk` (4 channels) this thread finishes."""
        threads = 32 * self.tile.warps
        count = self.tile.queries * self.chunks
        first = self.kernel.thread // self.chunks
        return [first + i * (threads // self.chunks) for i in range(-(-count // threads))]

    def swizzle(self, row: Int, chunk: Int) -> Int:
        """Where a row keeps a chunk: neighbouring rows differ, so that no two lanes of a store
        meet in a bank."""
        return chunk ^ (row & 1)

    def write_partial(self, index: int, rows: _Rows) -> None:
        """A warp's sums, maxima and totals to shared memory.

        Sum j, column n = 2t + e is channel 32 (j / 4) + 4 n + j % 4: `read_spread`'s order.
        """
        for half in (0, 1):
            row = self.g + (16 * index + 8 * half)
            base = (self.warp * self.tile.queries + row) * self.shape.head_dim
            for group in range(0, len(rows.sums), 4):
                for e in (0, 1):
                    chunk = self.t * 2 + (2 * group + e)
                    values = [rows.sums[group + j][2 * half + e] for j in range(4)]
                    self.partial.store_vector(base + self.swizzle(row, chunk) * 4, values)
            total = _across(rows.totals[half], arith.addf)
            with guard(self.t.equals(0)):
                place = (self.warp * self.tile.queries + row) * 2
                self.statistics.store_vector(place, [rows.maxima[half], total])

    def combine(self, item: Int, position: list[Value]) -> None:
        """Add the warps' sums, weighted to a common maximum; normalise; add the position; store."""
        tile, shape = self.tile, self.shape
        whole = len(self.items()) * 32 * tile.warps == tile.queries * self.chunks
        inside = TRUE if whole else item < tile.queries
        row = select(inside, item, 0)
        known = [
            self.statistics.load_vector((row + warp * tile.queries) * 2, 2)
            for warp in range(tile.warps)
        ]
        negated = arith.negf(_fold(arith.maximumf, [maximum for maximum, _ in known]))
        total, sums = f32(0.0), [f32(0.0)] * 4
        for warp, (maximum, share) in enumerate(known):
            weight = exp2(arith.addf(maximum, negated))
            total = fma(share, weight, total)
            base = (row + warp * tile.queries) * shape.head_dim
            part = self.partial.load_vector(base + self.swizzle(row, self.chunk) * 4, 4)
            sums = [fma(p, weight, s) for p, s in zip(part, sums, strict=True)]
        inverse = instructions.reciprocal(total)
        values = [fma(s, inverse, p) for s, p in zip(sums, position, strict=True)]
        if self.round_result:
            values = [instructions.from_bits(round_to_tf32(v)) for v in values]
        query = self.first_query + row
        if shape.tokens % tile.queries:
            inside = inside & (query < shape.tokens)
        result = self.kernel.arguments[-1]
        pixel = self.kernel.block_z * shape.tokens + query
        channel = self.kernel.block_y * shape.head_dim + self.chunk * 4
        with guard(inside):
            result.buffer.store_vector(pixel * result.pitch_or_fail() + channel, values)

    # ---- the positional convolution

    def read_weights(self) -> tuple[list[list[Value]], list[Value]]:
        """The taps and the bias of this thread's 4 channels."""
        if self.shape.kernel is None:
            return [], []
        channels = self.shape.heads * self.shape.head_dim
        first = self.kernel.block_y * self.shape.head_dim + self.chunk * 4
        buffer = self.kernel.arguments[1].buffer
        count = self.shape.kernel[0] * self.shape.kernel[1]
        taps = [buffer.load_vector(first + i * channels, 4) for i in range(count)]
        return taps, self.kernel.arguments[2].buffer.load_vector(first, 4)

    def position(self, item: Int, taps: list[list[Value]], bias: list[Value]) -> list[Value]:
        """The depthwise convolution of the values at a query's place, for this thread's chunk."""
        shape = self.shape
        if shape.kernel is None:
            return [f32(0.0)] * 4
        query = self.clamp(self.first_query + item)
        row, column = query // shape.width, query % shape.width
        sums, zero = list(bias), f32(0.0)
        for i, tap in enumerate(taps):
            y = row + (i // shape.kernel[1] - shape.padding[0])
            x = column + (i % shape.kernel[1] - shape.padding[1])
            inside = (y < shape.height) & (x < shape.width)
            token = select(inside, y * shape.width + x, query)
            offset = self.token_offset(token) + self.chunk * 4 + 2 * shape.key_dim
            loaded = self.source.load_vector(offset, 4)
            values = [select_float(inside, v, zero) for v in loaded]
            sums = [fma(v, w, s) for v, w, s in zip(values, tap, sums, strict=True)]
        return sums


def _fold(operation: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    result = values[0]
    for value in values[1:]:
        result = operation(result, value)
    return result


def _across(value: Value, operation: Callable[[Value, Value], Value]) -> Value:
    """Combine over the four lanes t of a row."""
    for mask in (1, 2):
        value = operation(value, shuffle_xor(value, mask))
    return value


__all__ = ["AttentionShape", "AttentionTile", "build", "default_tile", "parse", "shared_bytes"]
