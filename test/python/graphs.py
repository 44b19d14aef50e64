"""Random small graphs of the `yolo` dialect for hypothesis: every op, and shapes that are hard.

A `Recipe` is plain data, so that hypothesis can shrink it; `build` makes the module of it. Numbers
in a move are taken modulo what there is to choose from, so every recipe makes a legal graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout, physical_shape

from yolomlir.bindings import func, ir
from yolomlir.frontend.weights import WeightStore

MAX_CHANNELS, MAX_SIDE = 24, 12


@dataclass(frozen=True)
class Move:
    """One step of a recipe: a method of `_Builder`, and numbers that choose for it."""

    kind: str
    a: int
    b: int
    c: int


@dataclass(frozen=True)
class Recipe:
    """A graph: image size, moves, how many results."""

    batch: int
    height: int
    width: int
    moves: tuple[Move, ...]
    results: int
    seed: int


@dataclass(frozen=True)
class Graph:
    """A module with its weights (float64) and an image in logical order."""

    module: ir.Module
    weights: WeightStore
    inputs: list[NDArray[np.uint8]]


def recipes(max_moves: int = 10) -> st.SearchStrategy[Recipe]:
    """Recipes of up to `max_moves` moves."""
    number = st.integers(0, 63)
    moves = st.builds(Move, st.sampled_from(sorted(MOVES)), number, number, number)
    return st.builds(
        Recipe,
        st.sampled_from((1, 1, 2)),
        st.integers(3, 9),
        st.integers(3, 9),
        st.lists(moves, min_size=1, max_size=max_moves).map(tuple),
        st.integers(1, 2),
        st.integers(0, 2**16),
    )


def build(recipe: Recipe, *, layout: Layout = Layout.LOGICAL) -> Graph:
    """The graph in the current context: activations in `layout`, image and results in NHWC."""
    image = (recipe.batch, 3, recipe.height, recipe.width)
    module = ir.Module.create(ir.Location.unknown())
    ui8 = ir.IntegerType.get_unsigned(8)
    type_ = ir.RankedTensorType.get(list(image), ui8, Layout.NHWC.attribute)
    with ir.InsertionPoint(module.body), ir.Location.unknown():
        main = func.FuncOp("main", ([type_], []))
        block = ir.Block.create_at_start(main.operation.regions[0], [type_])
        with ir.InsertionPoint(block):
            builder = _Builder(recipe, layout)
            returned = builder.run(block.arguments[0])
            func.ReturnOp(returned)
    signature = ir.FunctionType.get([type_], [v.type for v in returned])
    main.operation.attributes["function_type"] = ir.TypeAttr.get(signature)
    pixels = builder.rng.integers(0, 256, image, dtype=np.uint8)
    return Graph(module, builder.weights, [pixels])


class _Builder:
    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        self.recipe = recipe
        self.layout = layout
        self.rng = np.random.default_rng(recipe.seed)
        self.weights = WeightStore()
        self.values: list[ir.Value] = []
        self.count = 0

    def run(self, image: ir.Value) -> list[ir.Value]:
        """Play the moves; the values to return, in NHWC."""
        x = yolo.normalize(image, scale=1 / 256, loc=self.loc("normalize"))
        if self.layout is not Layout.NHWC:
            x = yolo.convert_layout(x, self.layout, loc=self.loc("entry"))
        self.values = [x, self.conv(x, 8, 3, silu=True)]
        for move in self.recipe.moves:
            self.values += [v for v in MOVES[move.kind](self, move) if v not in self.values]
        loose = [v for v in self.values[1:] if not list(v.uses)] or self.values[-1:]
        returned = loose[-self.recipe.results :]
        if self.layout is Layout.NHWC:
            return returned
        return [yolo.convert_layout(v, Layout.NHWC, loc=self.loc("exit")) for v in returned]

    # ---- pieces ---------------------------------------------------------------------------------

    def loc(self, what: str) -> ir.Location:
        self.count += 1
        return ir.Location.name(f"{what}.{self.count}")

    def weight(self, shape: list[int], array: NDArray[np.float64]) -> ir.Value:
        layout = Layout.LOGICAL
        if len(shape) == 4 and self.layout is Layout.NHWC:
            layout = (Layout.LOGICAL, Layout.OHWI, Layout.HWIO)[self.recipe.seed % 3]
        name = f"w{len(self.weights)}"
        value = yolo.weight(name, shape, layout=layout, loc=self.loc(name))
        if len(shape) == 4:
            array = np.transpose(array, layout.permutation)
            assert list(array.shape) == physical_shape(value.type)
        self.weights.derive(name, [], lambda: array)
        return value

    def vector(self, size: int, low: float = -1.0, high: float = 1.0) -> ir.Value:
        return self.weight([size], self.rng.uniform(low, high, size))

    def conv(
        self,
        x: ir.Value,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = True,
        norm: bool = False,
        silu: bool = False,
    ) -> ir.Value:
        shape = [out, yolo.shape_of(x)[1] // groups, kernel, kernel]
        w = self.weight(shape, self.rng.normal(0, np.prod(shape[1:]) ** -0.5, shape))
        y = yolo.conv2d(
            x,
            w,
            self.vector(out) if bias else None,
            strides=[stride] * 2,
            padding=[kernel // 2] * 4,
            groups=groups,
            loc=self.loc("conv"),
        )
        if norm:
            mean, variance = self.vector(out), self.vector(out, 0.5, 2.0)
            gamma, beta = self.vector(out), self.vector(out)
            y = yolo.batch_norm(y, gamma, beta, mean, variance, epsilon=1e-3, loc=self.loc("bn"))
        return yolo.silu(y, loc=self.loc("silu")) if silu else y

    def pick(self, number: int, fits: Callable[[ir.Value], bool] = lambda _: True) -> ir.Value:
        """One of the values that fit; of all of them where none does."""
        fitting = [v for v in self.values if fits(v)] or self.values
        return fitting[number % len(fitting)]

    def narrow(self, number: int) -> ir.Value:
        """A value with room for more channels."""
        x = self.pick(number)
        if yolo.shape_of(x)[1] > MAX_CHANNELS // 2:
            return self.conv(x, 4 + number % 8, 1, silu=True)
        return x

    def even(self, number: int) -> ir.Value:
        """A value with a whole number of pairs of 2 channels."""
        x = self.narrow(number)
        return x if yolo.shape_of(x)[1] % 4 == 0 else self.conv(x, 8, 1, silu=True)

    def halves(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        half = yolo.shape_of(x)[1] // 2
        first = yolo.slice_(x, offset=0, size=half, loc=self.loc("chunk"))
        return first, yolo.slice_(x, offset=half, size=half, loc=self.loc("chunk"))

    def bottleneck(self, x: ir.Value) -> ir.Value:
        channels = yolo.shape_of(x)[1]
        y = self.conv(self.conv(x, channels, 3, silu=True), channels, 3, silu=True)
        return yolo.add(x, y, loc=self.loc("add"))

    def attended(self, x: ir.Value, *, encoded: bool, key_dim: int) -> ir.Value:
        """Attention of two heads over a projection of x, as wide as x."""
        heads, head_dim = 2, yolo.shape_of(x)[1] // 2
        per_head = 2 * key_dim + head_dim
        qkv = self.conv(x, heads * per_head, 1)
        scale = key_dim**-0.5
        dims = {"heads": heads, "key_dim": key_dim, "head_dim": head_dim}
        y = yolo.attention(qkv, **dims, scale=scale, loc=self.loc("attention"))
        if not encoded:
            return y
        parts = [
            yolo.slice_(qkv, offset=h * per_head + 2 * key_dim, size=head_dim, loc=self.loc("v"))
            for h in range(heads)
        ]
        v = yolo.concat(parts, loc=self.loc("v"))
        channels = yolo.shape_of(v)[1]
        pe = self.conv(v, channels, 3, groups=channels)
        return yolo.add(y, pe, loc=self.loc("add"))


# ---- moves --------------------------------------------------------------------------------------


def _conv(b: _Builder, m: Move) -> list[ir.Value]:
    kernel = (1, 3, 1, 5)[m.b % 4]
    flags = {"bias": m.c & 1 == 0, "norm": m.c & 2 != 0, "silu": m.c & 4 != 0}
    return [b.conv(b.pick(m.a), 1 + m.b % 13, kernel, stride=1 + (m.c >> 3) % 2, **flags)]


def _depthwise(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a)
    channels = yolo.shape_of(x)[1]
    flags = {"norm": m.b & 1 != 0, "silu": m.b & 2 != 0}
    return [b.conv(x, channels, 3, groups=channels, stride=1 + m.c % 2, **flags)]


def _grouped(b: _Builder, m: Move) -> list[ir.Value]:
    return [b.conv(b.even(m.a), 6, 3, groups=2, silu=m.b % 2 == 0)]


def _residual(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a)
    y = b.conv(x, yolo.shape_of(x)[1], 3, silu=m.b % 2 == 0)
    operands = (x, y) if m.c % 2 else (y, x)
    return (
        [y, yolo.add(*operands, loc=b.loc("add"))]
        if m.c & 2
        else [yolo.add(*operands, loc=b.loc("add"))]
    )


def _two_convs(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a)
    y, z = b.conv(x, 8, 3, silu=True), b.conv(x, 8, 1, silu=m.b % 2 == 0)
    return [yolo.add(y, z, loc=b.loc("add"))]


def _add(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a)
    y = b.pick(m.b, lambda v: v.type == x.type)
    return [yolo.add(x, y if y.type == x.type else x, loc=b.loc("add"))]


def _silu(b: _Builder, m: Move) -> list[ir.Value]:
    return [yolo.silu(b.pick(m.a), loc=b.loc("silu"))]


def _norm(b: _Builder, m: Move) -> list[ir.Value]:
    return [b.conv(b.pick(m.a), 4 + m.b % 5, 1, bias=m.c % 2 == 0, norm=True, silu=True)]


def _concat(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.narrow(m.a)
    size = yolo.shape_of(x)[2:]
    parts = [x]
    for number in (m.b, m.c)[: 1 + m.b % 2]:
        y = b.pick(number, lambda v: yolo.shape_of(v)[2:] == size)
        room = sum(yolo.shape_of(v)[1] for v in [*parts, y]) <= MAX_CHANNELS
        parts.append(y if room and yolo.shape_of(y)[2:] == size else b.conv(x, 4, 1))
    return [yolo.concat(parts, loc=b.loc("concat"))]


def _slice(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a)
    channels = yolo.shape_of(x)[1]
    offset = m.b % channels
    size = 1 + m.c % (channels - offset)
    return [yolo.slice_(x, offset=offset, size=size, loc=b.loc("slice"))]


def _pool(b: _Builder, m: Move) -> list[ir.Value]:
    kernel = (2, 3, 5)[m.b % 3]
    pad, stride = kernel // 2, 1 + m.c % 2
    x = b.pick(m.a)
    return [
        yolo.max_pool2d(
            x, kernel=[kernel] * 2, strides=[stride] * 2, padding=[pad] * 4, loc=b.loc("pool")
        )
    ]


def _sppf(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.conv(b.pick(m.a), 4 + m.b % 3, 1)
    maps = [x]
    for _ in range(1 + m.b % 3):
        maps.append(yolo.max_pool2d(maps[-1], kernel=[5, 5], padding=[2] * 4, loc=b.loc("pool")))
    whole = yolo.concat(maps[::-1] if m.c % 4 == 3 else maps, loc=b.loc("concat"))
    return [b.conv(whole, 8, 1, silu=True), *(maps[1:2] if m.c % 3 == 0 else [])]


def _upsample(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.pick(m.a, lambda v: max(yolo.shape_of(v)[2:]) <= MAX_SIDE // 2)
    if max(yolo.shape_of(x)[2:]) > MAX_SIDE // 2:
        x = b.conv(x, 4, 3, stride=2)
    return [yolo.upsample(x, factor=2, loc=b.loc("upsample"))]


def _pyramid(b: _Builder, m: Move) -> list[ir.Value]:
    """An enlarged tensor joined with one as large, and wanted by a second concat itself."""
    deep = b.conv(b.pick(m.a), 8, 3, stride=2, silu=True)
    up = yolo.upsample(deep, factor=2, loc=b.loc("upsample"))
    lateral = b.conv(up, 4, 1)
    joined = yolo.concat([up, lateral], loc=b.loc("concat"))
    below = b.conv(joined, 8, 3, stride=2, silu=True)
    again = yolo.concat([below, deep] if m.b % 2 else [deep, below], loc=b.loc("concat"))
    return [b.conv(joined, 4, 1, silu=True), again]


def _attention(b: _Builder, m: Move) -> list[ir.Value]:
    x = b.even(m.a)
    y = b.attended(x, encoded=m.b % 2 == 0, key_dim=1 + m.c % 3)
    return [b.conv(y, yolo.shape_of(x)[1], 1)]


def _c2psa(b: _Builder, m: Move) -> list[ir.Value]:
    first, second = b.halves(b.conv(b.pick(m.a), 8, 1, silu=True))
    attended = b.conv(b.attended(second, encoded=True, key_dim=2), 4, 1)
    second = yolo.add(second, attended, loc=b.loc("add"))
    forward = b.conv(b.conv(second, 8, 1, silu=True), 4, 1)
    second = yolo.add(second, forward, loc=b.loc("add"))
    whole = yolo.concat([first, second], loc=b.loc("concat"))
    return [b.conv(whole, 8, 1, silu=True), *([whole] if m.b % 3 == 0 else [])]


def _c3k2(b: _Builder, m: Move) -> list[ir.Value]:
    parts = list(b.halves(b.conv(b.pick(m.a), 8, 1, silu=True)))
    for _ in range(1 + m.b % 2):
        parts.append(b.bottleneck(parts[-1]))
    whole = yolo.concat(parts, loc=b.loc("concat"))
    return [b.conv(whole, 8, 1, silu=True), *([parts[1]] if m.c % 3 == 0 else [])]


def _c3k(b: _Builder, m: Move) -> list[ir.Value]:
    """Siblings, one of them through bottlenecks; a single one reads what it would replace."""
    x = b.pick(m.a)
    y, z = b.conv(x, 4, 1, silu=True), b.conv(x, 4, 1, silu=True)
    for _ in range(1 + m.b % 2):
        y = b.bottleneck(y)
    whole = yolo.concat([y, z] if m.c % 4 else [z, y], loc=b.loc("concat"))
    return [b.conv(whole, 8, 1, silu=True)]


def _twice(b: _Builder, m: Move) -> list[ir.Value]:
    """One tensor wanted by two concats, at different places or at the same."""
    x = b.conv(b.pick(m.a), 4, 1, silu=True)
    y, z = b.conv(x, 4, 3, silu=True), b.conv(x, 8 if m.c % 2 else 4, 3, silu=True)
    first = yolo.concat([x, y], loc=b.loc("concat"))
    second = yolo.concat([z, x] if m.b % 2 else [x, z], loc=b.loc("concat"))
    return [first, b.conv(second, 8, 1)] if m.c & 2 else [b.conv(first, 4, 1), b.conv(second, 8, 3)]


MOVES: dict[str, Callable[[_Builder, Move], list[ir.Value]]] = {
    function.__name__.lstrip("_"): function
    for function in (
        _conv, _depthwise, _grouped, _residual, _two_convs, _add, _silu, _norm, _concat, _slice,
        _pool, _sppf, _upsample, _pyramid, _attention, _c2psa, _c3k2, _c3k, _twice,
    )
}  # fmt: skip
