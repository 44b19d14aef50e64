"""Self-attention over the positions of a map, with the positional convolution, in one kernel.

A block, or the blocks of a cluster, have a few queries of one head; their warps share the keys
and meet once, at the end (`attention_end`). Queries, keys and values go from global memory (L2)
straight to the registers of the tensor cores' fragments: the sums over channels and over keys do
not care for their order, so a lane takes what lies together in memory, and shared memory is only
used to combine the warps. Softmax is online, in float32 and base 2; the combination is in a fixed
order, so the result does not depend on timing.

Lane l of a warp is g = l / 4, t = l % 4 below (rows and columns of the fragments of `mma.sync`). A
fragment's register is the TF32 of a float32, or two float16: channels are counted in registers
then, and a product with the values takes 16 keys instead of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from yolomlir.bindings import arith, func, ir, vector
from yolomlir.codegen.gpu import instructions
from yolomlir.codegen.gpu.attention_end import AttentionEnd, Rows, across, fold
from yolomlir.codegen.gpu.attention_problem import (
    AttentionShape,
    AttentionTile,
    default_tile,
    misfit,
    parse,
    shared_bytes,
    tiles,
)
from yolomlir.codegen.gpu.builder import (
    Int,
    KernelBuilder,
    f32,
    loop,
    narrow,
    select,
    select_float,
)
from yolomlir.codegen.gpu.element import FLOAT16, FLOAT32
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    exp2,
    fma,
    multiply_f16,
    multiply_tf32,
    round_to_tf32,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Kernel, Parameter
from yolomlir.codegen.gpu.tile import tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.target import Target

_VECTOR_BYTES = 16
_LOWEST = -3.0e38
"""The maximum before the first key: finite, so that a warp without keys weighs 0, not NaN."""
_HALF_UNIT, _TF32_BITS = 1 << 12, -1 << 13
"""Half of a TF32's last bit, and the bits of a float32 that it keeps."""

Value: TypeAlias = ir.Value


def _check(shape: AttentionShape, tile: AttentionTile, target: Target, name: str) -> None:
    least = 4 * shape.element.chunk  # a lane's 16 bytes of a key
    if shape.key_dim % least or shape.head_dim not in (32, 64, 128) or shape.scale <= 0:
        raise UnsupportedError(
            f"attention with key_dim {shape.key_dim}, head_dim {shape.head_dim}, scale "
            f"{shape.scale}; expected a multiple of {least}, one of 32, 64, 128, and more than 0",
            where=name,
        )
    if (reason := misfit(tile, shape, target)) is not None:
        raise UnsupportedError(f"{tile}: {reason}", where=name)


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("attention")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of an attention dispatch at `fp16`, `tf32` or `fp32` (three TF32 products for
    one)."""
    shape = parse(function.operation)
    tile = tile_or(
        function.operation, AttentionTile, lambda: default_tile(shape, target, precision)
    )
    return build(shape, tile, target, precision, name, function.location)


def build(
    shape: AttentionShape,
    tile: AttentionTile,
    target: Target,
    precision: str,
    name: str,
    location: ir.Location,
) -> Kernel:
    """The kernel for this shape and tile. Raises UnsupportedError where it does not fit."""
    _check(shape, tile, target, name)
    activation = Parameter(ACTIVATION, shape.dtype, _VECTOR_BYTES)
    taps = Parameter(WEIGHT, shape.dtype, _VECTOR_BYTES)
    bias = Parameter(WEIGHT, alignment_bytes=_VECTOR_BYTES)
    weights = [taps, bias] if shape.kernel is not None else []
    kernel = KernelBuilder(
        name,
        [activation, *weights, activation],
        threads=32 * tile.warps,
        shared_bytes=shared_bytes(shape, tile),
        location=location,
        attributes=_cluster_attribute(tile.cluster),
    )
    with kernel:
        body = _Body(kernel, shape, tile, precise=precision == "fp32")
        body.emit(target.programmatic_launch)
    grid = (-(-shape.tokens // tile.queries) * tile.cluster, shape.heads, shape.batch)
    cluster = (tile.cluster, 1, 1)
    return kernel.finish(grid, cluster=cluster, programmatic=target.programmatic_launch)


def _cluster_attribute(blocks: int) -> dict[str, ir.Attribute]:
    if blocks == 1:
        return {}
    return {"nvvm.cluster_dim": ir.Attribute.parse(f"array<i32: {blocks}, 1, 1>")}


@dataclass(frozen=True)
class _Fragment:
    """Operands of the tensor cores: pairs of float16, or TF32 bits; `low` has what rounding took,
    at fp32."""

    high: list[Value]
    low: list[Value]


class _Body:
    """The kernel's body for one thread."""

    def __init__(
        self,
        kernel: KernelBuilder,
        shape: AttentionShape,
        tile: AttentionTile,
        *,
        precise: bool,
    ) -> None:
        self.kernel, self.shape, self.tile, self.precise = kernel, shape, tile, precise
        self.element = shape.element
        self.key_registers = shape.key_dim // (4 * self.element.packed)
        self.value_registers = shape.head_dim // (4 * self.element.packed)
        lane = kernel.thread % 32
        self.g, self.t = lane // 4, lane % 4
        rank = kernel.block_x % tile.cluster
        self.worker = rank * tile.warps + kernel.thread // 32
        self.source, self.pitch = kernel.arguments[0].buffer, kernel.arguments[0].pitch_or_fail()
        self.end = AttentionEnd(kernel, shape, tile, rank)
        self.first_channel = kernel.block_y * shape.depth
        steps = -(-shape.tokens // tile.keys)
        self.rounds = -(-steps // tile.workers)

    def emit(self, programmatic: bool) -> None:
        """The whole body. The positional weights are read before the wait for earlier kernels."""
        # Two tiles of queries and a loop leave no registers for it.
        early = self.tile.query_tiles == 1 or self.rounds == 1
        self.end.open()
        weights = self.end.read_weights() if early else []
        if programmatic:
            instructions.wait_for_predecessors()
            if self.tile.release_early:
                instructions.release_dependents()
        queries = [self.read_queries(i) for i in range(self.tile.query_tiles)]
        ahead = self.read_keys(Int.of(0))
        positions = self.end.positions(weights) if early else []
        state = self.attend(queries, ahead)
        if not early:
            positions = self.end.positions(self.end.read_weights())
        if programmatic and not self.tile.release_early:
            instructions.release_dependents()
        for i, rows in enumerate(state):
            self.end.write_partial(i, rows)
        self.end.finish(positions)

    # ---- reading

    def token_offset(self, token: Int) -> Int:
        """Of this head's first channel of a token."""
        row = self.kernel.block_z * self.shape.tokens + token
        return row * self.pitch + self.first_channel

    def clamp(self, token: Int) -> Int:
        """A token that exists, for one that may lie beyond the last."""
        return select(token < self.shape.tokens, token, self.shape.tokens - 1)

    def read_spread(
        self, token: Int, first: int, count: int, lane: Int, lanes: int, width: int
    ) -> list[Value]:
        """This lane's share of `count` channels of a token: every `lanes`-th group of `width`."""
        base = self.token_offset(token) + lane * width + first
        values: list[Value] = []
        for start in range(0, count, width * lanes):
            values += self.source.load_packed(base + start, width)
        return values

    def read_key(self, token: Int, first: int) -> list[Value]:
        """This lane's share of a query or key, in groups of 4 registers."""
        return self.read_spread(token, first, self.shape.key_dim, self.t, 4, self.element.chunk)

    def read_queries(self, index: int) -> list[_Fragment]:
        """16 queries as fragments, one for every step over the channels of the key.

        Channels are taken so that a lane's registers come in fours: step s multiplies registers
        16 (s / 2) + 4 t + 2 (s % 2) and the next of every t; `read_keys` does the same.
        """
        first = self.end.first_query + 16 * index
        rows = [self.read_key(self.clamp(first + half + self.g), 0) for half in (0, 8)]
        return [
            self.fragment([rows[0][2 * s], rows[1][2 * s], rows[0][2 * s + 1], rows[1][2 * s + 1]])
            for s in range(self.key_registers // 2)
        ]

    def first_key(self, round_: Int) -> Int:
        """The first key of this warp's step in a round; the warps' steps alternate."""
        return (round_ * self.tile.workers + self.worker) * self.tile.keys

    def read_keys(self, round_: Int) -> list[Value]:
        """The keys and values of one step, as loaded: for every 8 keys, key g's channels, then
        those of values 2 t and 2 t + 1 that `update` wants."""
        shape, loaded = self.shape, []
        for i in range(self.tile.key_tiles):
            first = self.first_key(round_) + 8 * i
            loaded += self.read_key(self.clamp(first + self.g), shape.key_dim)
            for place in (0, 1):
                token = self.clamp(first + self.t * 2 + place)
                loaded += self.read_spread(token, 2 * shape.key_dim, shape.head_dim, self.g, 8, 4)
        return loaded

    def fragment(self, values: Sequence[Value]) -> _Fragment:
        """Round to nearest TF32; keep the rest where products are to be float32. Pairs of float16
        as they are."""
        if self.element is not FLOAT32:
            return _Fragment(list(values), [])
        if self.shape.rounded and not self.precise:
            return _Fragment([instructions.bits(v) for v in values], [])
        if not self.precise:
            return _Fragment([round_to_tf32(v) for v in values], [])
        high = [_add_half_unit(v) for v in values]  # NaN would be lost, but is in the rest
        rests = [
            arith.subf(v, instructions.from_bits(h)) for v, h in zip(values, high, strict=True)
        ]
        return _Fragment(high, [round_to_tf32(v) for v in rests])

    def weights(self, values: Sequence[Value]) -> _Fragment:
        """`fragment` of the softmax's powers, which are at least 0; a NaN is in their total."""
        if self.precise:
            return self.fragment(values)
        return _Fragment([_add_half_unit(v) for v in values], [])

    def multiply(self, a: _Fragment, b: _Fragment, c: Sequence[Value]) -> list[Value]:
        """a b + c; at fp32 with the products of the rests, the smallest first."""
        total = list(c)
        if self.element is FLOAT16:
            return multiply_f16(a.high, b.high, total)
        if self.precise:
            total = multiply_tf32(a.low, b.high, total)
            total = multiply_tf32(a.high, b.low, total)
        return multiply_tf32(a.high, b.high, total)

    # ---- the main loop

    def attend(self, queries: list[list[_Fragment]], ahead: list[Value]) -> list[Rows]:
        """All of this warp's keys, the next step's on their way while one is computed."""
        zero, lowest = f32(0.0), f32(_LOWEST)
        groups = self.shape.head_dim // 8
        size = 4 + 4 * groups
        if self.rounds == 1:
            return self.step(queries, [None] * len(queries), ahead, Int.of(0))
        start = [
            Rows([lowest] * 2, [zero] * 2, [[zero] * 4 for _ in range(groups)]) for _ in queries
        ]
        carried = [*(v for rows in start for v in rows.flat()), *ahead]
        with loop(0, self.rounds, carried=carried) as state:
            values = [v for v in state.carried if not isinstance(v, Int)]
            rows = [Rows.of(values[i * size : (i + 1) * size]) for i in range(len(queries))]
            following = self.read_keys(state.index + 1)
            rows = self.step(queries, rows, values[len(queries) * size :], state.index)
            state.advance([*(v for r in rows for v in r.flat()), *following])
        results = [v for v in state.results if not isinstance(v, Int)]
        return [Rows.of(results[i * size : (i + 1) * size]) for i in range(len(queries))]

    def step(
        self,
        queries: list[list[_Fragment]],
        state: Sequence[Rows | None],
        loaded: Sequence[Value],
        round_: Int,
    ) -> list[Rows]:
        """The rows (None before the first step) with the keys and values of one step taken in."""
        count = self.key_registers + self.value_registers
        keys: list[list[_Fragment]] = []
        values: list[list[_Fragment]] = []
        columns: list[list[Value]] = []
        for i in range(self.tile.key_tiles):
            part = list(loaded[i * count : (i + 1) * count])
            key, rest = part[: self.key_registers], part[self.key_registers :]
            keys.append([self.fragment(key[s : s + 2]) for s in range(0, len(key), 2)])
            own = self.columns(rest)
            columns = [a + b for a, b in zip(columns, own, strict=True)] if columns else own
            if len(columns[0]) == 2:
                values.append([self.fragment(registers) for registers in columns])
                columns = []
        return [
            self.update(rows, self.scores(fragments, keys, round_), values)
            for fragments, rows in zip(queries, state, strict=True)
        ]

    def scores(
        self, queries: list[_Fragment], keys: list[list[_Fragment]], round_: Int
    ) -> list[list[Value]]:
        """q k^T, unscaled; minus infinity for keys that do not exist."""
        ragged = self.rounds * self.tile.workers * self.tile.keys > self.shape.tokens
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

    def columns(self, loaded: Sequence[Value]) -> list[list[Value]]:
        """Of 8 keys, as `read_keys` loaded their values: for each column of the fragments, keys
        2 t and 2 t + 1, a register each, or both in one as float16."""
        pairs = list(zip(loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :], strict=True))
        if self.element is FLOAT32:
            return [list(pair) for pair in pairs]
        return [[vector.shuffle(a, b, [e, e + 2])] for a, b in pairs for e in (0, 1)]

    def weight_fragments(self, weights: Sequence[list[Value]]) -> Iterator[_Fragment]:
        """The softmax's powers as multiplicands, from the layout of accumulators."""
        if self.element is FLOAT16:
            for one, other in zip(weights[::2], weights[1::2], strict=True):
                yield _Fragment([_pair(w[i : i + 2]) for w in (one, other) for i in (0, 2)], [])
            return
        for weight in weights:
            # The accumulator's columns 2t, 2t + 1 are the multiplicand's t, t + 4: key 2t is the
            # product's t and key 2t + 1 its t + 4, which is how the values were read.
            yield self.weights([weight[0], weight[2], weight[1], weight[3]])

    def update(
        self, rows: Rows | None, scores: list[list[Value]], values: list[list[_Fragment]]
    ) -> Rows:
        """One step of the online softmax: rescale what is known to the new maxima, and add."""
        factor = f32(self.shape.scale * instructions.LOG2_E)
        maxima, totals, rescale, weights = [], [], [], [list(s) for s in scores]
        for half in (0, 1):
            own = [s[2 * half + e] for s in scores for e in (0, 1)]
            largest = across(fold(arith.maximumf, own), arith.maximumf)
            before = rows.maxima[half] if rows else f32(_LOWEST)
            maximum = arith.maximumf(before, arith.mulf(largest, factor))
            negated = arith.negf(maximum)
            for part in weights:
                for e in (2 * half, 2 * half + 1):
                    part[e] = exp2(fma(part[e], factor, negated))
            added = fold(arith.addf, [w[2 * half + e] for w in weights for e in (0, 1)])
            maxima.append(maximum)
            if rows:
                rescale.append(exp2(arith.addf(before, negated)))
                added = fma(rows.totals[half], rescale[half], added)
            totals.append(added)
        sums = [[f32(0.0)] * 4] * (self.shape.head_dim // 8)
        if rows:
            sums = [[arith.mulf(v, rescale[i // 2]) for i, v in enumerate(s)] for s in rows.sums]
        for a, group in zip(self.weight_fragments(weights), values, strict=True):
            sums = [self.multiply(a, b, s) for b, s in zip(group, sums, strict=True)]
        return Rows(maxima, totals, sums)


def _pair(values: Sequence[Value]) -> Value:
    """Two float32 as a register of float16."""
    type_ = ir.VectorType.get([2], ir.F16Type.get())
    return vector.from_elements(type_, [narrow(v, FLOAT16.name) for v in values])


def _add_half_unit(value: Value) -> Value:
    """The bits of a float32 rounded to nearest TF32, ties away from zero, by an addition and a
    mask: four times the rate of the conversion, but a NaN may become 0."""
    i32 = ir.IntegerType.get_signless(32)
    raised = arith.addi(instructions.bits(value), arith.constant(i32, _HALF_UNIT))
    return arith.andi(raised, arith.constant(i32, _TF32_BITS))


__all__ = [
    "AttentionShape",
    "AttentionTile",
    "build",
    "default_tile",
    "parse",
    "shared_bytes",
    "tiles",
]
