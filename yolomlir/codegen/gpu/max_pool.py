"""Max pooling of NHWC maps: a tile with its halo in shared memory, maxima of rows, then of columns.

Several windows of one input (SPPF's 5x5 pools, chained: windows of 5, 9 and 13 of the input) come
from one pass; each result is a group of channels of the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yolomlir.bindings import arith, func, ir
from yolomlir.codegen.gpu import linalg_match as match
from yolomlir.codegen.gpu.builder import (
    TRUE,
    Bool,
    Buffer,
    Int,
    KernelBuilder,
    element_type,
    guard,
    loop,
    select,
    select_float,
)
from yolomlir.codegen.gpu.element import Element, element_named
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.instructions import (
    barrier,
    from_bits,
    release_dependents,
    round_to_tf32,
    wait_for_predecessors,
)
from yolomlir.codegen.gpu.kernel import ACTIVATION, Kernel, Parameter
from yolomlir.codegen.gpu.tile import later_option, tile_or
from yolomlir.diagnostics import UnsupportedError
from yolomlir.target import Target

_UNROLL = 4
"""Items of a thread handled side by side, so that their loads overlap."""


@dataclass(frozen=True)
class Window:
    """The inputs of one output: rows [-top, rows - top) and columns [-left, columns - left) around
    (stride * output row, stride * output column)."""

    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True)
class MaxPool:
    """The shapes of a dispatch: an input [N, H, W, C], an output of len(windows) * C channels.

    vector: channels of one access, of 16 bytes or less. round_result: to TF32, for a consumer that
    takes its input as rounded. dtype: of the input and the output.
    """

    batch: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    strides: tuple[int, int]
    windows: tuple[Window, ...]
    vector: int
    round_result: bool = False
    dtype: str = "float32"

    @property
    def element(self) -> Element:
        """The type of the input and the output."""
        return element_named(self.dtype)


@dataclass(frozen=True)
class MaxPoolTile:
    """A block's output rows, columns and channels, and its threads; carveout: see
    `tile.CARVEOUTS`."""

    rows: int
    columns: int
    channels: int = 8
    threads: int = 256
    carveout: int = later_option(0)


def shared_bytes(pool: MaxPool, tile: MaxPoolTile) -> int:
    """Dynamic shared memory: the input tile with its halo, and a row maximum a window."""
    rows, columns = _halo(pool, tile)
    elements = tile.channels * rows * (columns + len(pool.windows) * tile.columns)
    return pool.element.bytes * elements


def default_tile(pool: MaxPool, target: Target) -> MaxPoolTile:
    """Split the map until a third of the multiprocessors have work and the tile fits.

    A finer split re-reads more halo: SPPF's is 12 rows and columns.
    """
    groups = -(-pool.channels // 8) * pool.batch
    longest = max(pool.out_height, pool.out_width)
    parts = 1
    while parts < longest:
        tile = _split(pool, parts)
        fits = shared_bytes(pool, tile) <= target.shared_memory_bytes // 2
        if fits and (groups * parts * parts * 3 >= target.multiprocessors or tile.rows <= 8):
            return tile
        parts += 1
    return _split(pool, longest)


def _split(pool: MaxPool, parts: int) -> MaxPoolTile:
    return MaxPoolTile(-(-pool.out_height // parts), -(-pool.out_width // parts))


def _halo(pool: MaxPool, tile: MaxPoolTile) -> tuple[int, int]:
    """Input rows and columns that a tile reads."""
    around = _union(pool.windows)
    return (
        (tile.rows - 1) * pool.strides[0] + around.rows,
        (tile.columns - 1) * pool.strides[1] + around.columns,
    )


def _union(windows: Sequence[Window]) -> Window:
    top, left = max(w.top for w in windows), max(w.left for w in windows)
    rows = top + max(w.rows - w.top for w in windows)
    return Window(top, left, rows, left + max(w.columns - w.left for w in windows))


# ---- the linalg form ----------------------------------------------------------------------------


def parse(function: ir.Operation) -> MaxPool:
    """The pool of a dispatch function. Raises UnsupportedError for another form."""
    results = list(match.only(function, "func.return").operands)
    if len(results) != 1:
        match.refuse(function, f"returns {len(results)} values; expected one")
    concat = match.made_by(results[0], "tensor.concat")
    pooled = list(concat.operands) if concat is not None else results
    chains = [_chain(value) for value in pooled]
    strides = {_strides(chain) for chain in chains}
    sizes = {match.shape(value)[:3] for value in pooled}
    if len(strides) != 1 or len(sizes) != 1:
        match.refuse(function, f"pools with strides {strides} to sizes {sizes}; expected one")
    source = function.regions[0].blocks[0].arguments[0]
    batch, height, width, channels = match.shape(source)
    dtype = match.dtype_of(source)
    _, out_height, out_width = sizes.pop()
    windows = tuple(_window(chain) for chain in chains)
    return MaxPool(
        batch, height, width, channels, out_height, out_width, strides.pop(), windows,
        match.vector_width(function, channels, (0, 1), element_named(dtype)),
        "yolo.round_result" in function.attributes, dtype,
    )  # fmt: skip


def _chain(value: ir.Value) -> list[ir.Operation]:
    """The pools between the function's argument and a value, last first."""
    pools: list[ir.Operation] = []
    while (op := match.made_by(value, "linalg.pooling_nhwc_max")) is not None:
        pools.append(op)
        value, _ = match.unpadded(op.operands[0])
    if match.argument_number(value) != 0 or not pools:
        match.refuse(value.owner.operation, "is not a chain of max pools of its argument")
    return pools


def _strides(chain: Sequence[ir.Operation]) -> tuple[int, int]:
    if any(match.pair(op, "dilations") != (1, 1) for op in chain):
        match.refuse(chain[0], "dilates a max pool")
    return match.pair(chain[0], "strides")


def _window(chain: Sequence[ir.Operation]) -> Window:
    """The one window that a chain of pools amounts to.

    Two pools compose to one of a wider window where the first keeps the size: an odd window with
    stride 1, padded by half. (Its outputs beyond the edge, minus infinity to the second pool, would
    have seen no input that the outputs inside do not see.)
    """
    total = Window(0, 0, 1, 1)
    for op in chain:
        rows, columns = match.shape(op.operands[1])
        _, (top, left, bottom, right) = match.unpadded(op.operands[0])
        same = (
            match.pair(op, "strides") == (1, 1)
            and (top, bottom) == (rows // 2, (rows - 1) // 2)
            and (left, right) == (columns // 2, (columns - 1) // 2)
            and rows % 2 == columns % 2 == 1
        )
        if len(chain) > 1 and not same:
            match.refuse(op, "chains max pools that change the size")
        total = Window(
            total.top + top, total.left + left, total.rows + rows - 1, total.columns + columns - 1
        )
    return total


# ---- the kernel ---------------------------------------------------------------------------------


@register_family("max_pool")
def generate(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a max_pool dispatch; every precision gives the same, exact result."""
    del precision
    pool = parse(function.operation)
    tile = tile_or(function.operation, MaxPoolTile, lambda: default_tile(pool, target))
    return build(pool, tile, target, name, function.location)


def build(
    pool: MaxPool, tile: MaxPoolTile, target: Target, name: str, location: ir.Location
) -> Kernel:
    """The kernel for these shapes and tile. Raises UnsupportedError where the tile does not fit."""
    bytes_ = shared_bytes(pool, tile)
    if bytes_ > target.shared_memory_bytes:
        raise UnsupportedError(
            f"{tile} needs {bytes_} bytes of shared memory; {target.name} has "
            f"{target.shared_memory_bytes}",
            where=name,
        )
    if tile.channels % pool.vector:
        raise UnsupportedError(
            f"{tile} for accesses of {pool.vector} channels", where=name,
            hint=f"take a multiple of {pool.vector} channels",
        )  # fmt: skip
    alignment = pool.element.bytes * pool.vector
    parameters = [Parameter(ACTIVATION, pool.dtype, alignment)] * 2
    kernel = KernelBuilder(
        name, parameters, threads=tile.threads, shared_bytes=bytes_, location=location
    )
    rows, columns = -(-pool.out_height // tile.rows), -(-pool.out_width // tile.columns)
    with kernel:
        _Body(kernel, pool, tile, columns).emit(target.programmatic_launch)
    groups = -(-pool.channels // tile.channels)
    return kernel.finish(
        (rows * columns, groups, pool.batch), programmatic=target.programmatic_launch
    )


class _Body:
    """The kernel's phases; a block has one tile of one group of channels of one image."""

    def __init__(
        self, kernel: KernelBuilder, pool: MaxPool, tile: MaxPoolTile, tiles_across: int
    ) -> None:
        self.kernel, self.pool, self.tile = kernel, pool, tile
        self.around = _union(pool.windows)
        self.halo_rows, self.halo_columns = _halo(pool, tile)
        self.vectors = tile.channels // pool.vector
        self.row = (kernel.block_x // tiles_across) * tile.rows
        self.column = (kernel.block_x % tiles_across) * tile.columns
        self.channel = kernel.block_y * tile.channels
        elements = self.halo_rows * self.halo_columns * tile.channels
        self.inputs = kernel.shared(pool.dtype, elements)
        maxima = self.halo_rows * tile.columns * tile.channels
        bytes_ = pool.element.bytes
        self.maxima = [
            kernel.shared(pool.dtype, maxima, offset_bytes=bytes_ * (elements + i * maxima))
            for i in range(len(pool.windows))
        ]

    def emit(self, programmatic: bool) -> None:
        """The whole body."""
        if programmatic:
            wait_for_predecessors()
        self.read_tile()
        if programmatic:
            release_dependents()
        barrier()
        self.maxima_of_rows()
        barrier()
        self.maxima_of_columns()

    def read_tile(self) -> None:
        """The input tile with its halo to shared memory, minus infinity outside the map."""
        pool, source = self.pool, self.kernel.arguments[0]
        pitch = source.pitch_or_fail()
        lowest = self.lowest()
        image = self.kernel.block_z * pool.height

        def read(item: Int) -> Callable[[], None]:
            vector, pixel = item % self.vectors, item // self.vectors
            row = self.row * pool.strides[0] + pixel // self.halo_columns - self.around.top
            column = self.column * pool.strides[1] + pixel % self.halo_columns - self.around.left
            channel = self.channel + vector * pool.vector
            inside = (row < pool.height) & (column < pool.width)
            safe_row, safe_column = select(inside, row, 0), select(inside, column, 0)
            safe_channel = self.clamp_channel(channel)
            offset = ((image + safe_row) * pool.width + safe_column) * pitch + safe_channel
            values = source.buffer.load_packed(offset, pool.vector)
            kept = [select_float(inside, v, lowest) for v in values]
            return lambda: self.inputs.store_packed(item * pool.vector, kept)

        self.for_items(self.halo_rows * self.halo_columns * self.vectors, read)

    def lowest(self) -> ir.Value:
        """Minus infinity, as registers hold values."""
        type_, value = element_type(self.pool.dtype), float("-inf")
        if self.pool.dtype != "float16" or self.pool.vector == 1:
            return arith.constant(type_, value)
        pair = ir.VectorType.get([2], type_)
        return arith.constant(
            pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(type_, value))
        )

    def maxima_of_rows(self) -> None:
        """Of every input row of the tile and every output column, the maximum along the row."""
        pool, tile = self.pool, self.tile
        step = tile.channels

        def reduce(item: Int) -> Callable[[], None]:
            vector, place = item % self.vectors, item // self.vectors
            row, column = place // tile.columns, place % tile.columns
            first = (row * self.halo_columns + column * pool.strides[1]) * step
            base = first + vector * pool.vector
            spans = [(self.around.left - w.left, w.columns) for w in pool.windows]
            results = self.nested(self.inputs, [base] * len(spans), spans, step)
            return lambda: self.store_maxima(item, results)

        self.for_items(self.halo_rows * tile.columns * self.vectors, reduce)

    def store_maxima(self, item: Int, results: Sequence[Sequence[ir.Value]]) -> None:
        """One maximum a window to its plane of shared memory."""
        for plane, values in zip(self.maxima, results, strict=True):
            plane.store_packed(item * self.pool.vector, values)

    def maxima_of_columns(self) -> None:
        """The maxima of the row maxima, to the destination."""
        pool, tile, result = self.pool, self.tile, self.kernel.arguments[1]
        pitch = result.pitch_or_fail()
        step = tile.columns * tile.channels
        image = self.kernel.block_z * pool.out_height

        def reduce(item: Int) -> Callable[[], None]:
            vector, place = item % self.vectors, item // self.vectors
            row, column = place // tile.columns, place % tile.columns
            base = (row * pool.strides[0] * tile.columns + column) * tile.channels
            base = base + vector * pool.vector
            results = [
                self.nested(plane, [base], [(self.around.top - w.top, w.rows)], step)[0]
                for plane, w in zip(self.maxima, pool.windows, strict=True)
            ]
            out_row, out_column = self.row + row, self.column + column
            channel = self.channel + vector * pool.vector
            inside = (out_row < pool.out_height) & (out_column < pool.out_width)
            offset = ((image + out_row) * pool.out_width + out_column) * pitch + channel

            def store() -> None:
                with guard(inside & self.channel_inside(channel)):
                    for i, values in enumerate(results):
                        stored = _rounded(values) if pool.round_result else values
                        result.buffer.store_packed(offset + i * pool.channels, stored)

            return store

        self.for_items(tile.rows * tile.columns * self.vectors, reduce)

    def nested(
        self, plane: Buffer, bases: Sequence[Int], spans: Sequence[tuple[int, int]], step: int
    ) -> list[list[ir.Value]]:
        """Maxima over spans (first, count) of elements `step` apart; a span within a later one is
        reused there."""
        results: list[list[ir.Value]] = []
        done: set[int] = set()
        for i, (base, (first, count)) in enumerate(zip(bases, spans, strict=True)):
            wanted = set(range(first, first + count))
            reuse = i > 0 and done <= wanted
            best = results[-1] if reuse else None
            for place in sorted(wanted - done if reuse else wanted):
                values = plane.load_packed(base + place * step, self.pool.vector)
                best = values if best is None else _maximum(best, values)
            results.append(best or [])
            done = wanted
        return results

    def clamp_channel(self, channel: Int) -> Int:
        """A channel to read for one that may lie beyond the last."""
        if self.pool.channels % self.tile.channels == 0:
            return channel
        return select(self.channel_inside(channel), channel, 0)

    def channel_inside(self, channel: Int) -> Bool:
        """Whether the channel exists."""
        return (
            TRUE if self.pool.channels % self.tile.channels == 0 else channel < self.pool.channels
        )

    def for_items(self, count: int, body: Callable[[Int], Callable[[], None]]) -> None:
        """Share items among the threads. `body` loads and computes for one, also for an item past
        the end (of the last round), and returns what stores its result."""
        threads = self.tile.threads
        rounds = -(-count // threads)
        full, rest = divmod(rounds, _UNROLL)
        if full > 1:
            with loop(0, full) as state:
                self.round(state.index * (_UNROLL * threads), _UNROLL, count, body, rest > 0)
        else:
            full, rest = 0, rounds
        if rest:
            self.round(Int.of(full * _UNROLL * threads), rest, count, body, False)

    def round(
        self,
        first: Int,
        rounds: int,
        count: int,
        body: Callable[[Int], Callable[[], None]],
        inside: bool,
    ) -> None:
        """Some items a thread: all are computed before the first is stored."""
        threads = self.tile.threads
        stores = []
        for i in range(rounds):
            item = first + self.kernel.thread + i * threads
            bounded = not inside and (
                first.known is None or first.known + (i + 1) * threads > count
            )
            live = item < count if bounded else TRUE
            stores.append((live, body(select(live, item, 0))))
        for live, store in stores:
            with guard(live):
                store()


def _rounded(values: Sequence[ir.Value]) -> list[ir.Value]:
    return [from_bits(round_to_tf32(value)) for value in values]


def _maximum(a: Sequence[ir.Value], b: Sequence[ir.Value]) -> list[ir.Value]:
    return [arith.maximumf(x, y) for x, y in zip(a, b, strict=True)]


__all__ = ["MaxPool", "MaxPoolTile", "Window", "build", "default_tile", "parse"]
