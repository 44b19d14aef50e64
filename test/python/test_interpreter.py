"""The interpreter against formulas written out element by element, and its complaints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout

from yolomlir.bindings import func, ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import WeightStore
from yolomlir.interpreter import interpret

Array = NDArray[np.float64]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with yolo.new_context(), ir.Location.name("layer"):
        yield


def _module(shapes: Sequence[Sequence[int]], body: Callable[..., ir.Value]) -> ir.Module:
    types = [ir.RankedTensorType.get(list(shape), ir.F32Type.get()) for shape in shapes]
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        main = func.FuncOp("main", (types, []))
        block = ir.Block.create_at_start(main.operation.regions[0], types)
        with ir.InsertionPoint(block):
            result = body(*block.arguments)
            func.ReturnOp([result])
    signature = ir.FunctionType.get(types, [result.type])
    main.operation.attributes["function_type"] = ir.TypeAttr.get(signature)
    return module


def _run(body: Callable[..., ir.Value], *inputs: Array, **weights: Array) -> Array:
    module = _module([x.shape for x in inputs], body)
    return interpret(module, inputs, WeightStore(weights))[0]


@pytest.mark.parametrize(
    ("channels", "out", "groups", "kernel", "strides", "padding"),
    [
        (3, 4, 1, (3, 3), (2, 1), (1, 1, 1, 1)),
        (4, 6, 2, (1, 3), (1, 2), (0, 1, 2, 0)),
        (3, 3, 3, (3, 2), (1, 1), (1, 0, 1, 1)),
    ],
)
@pytest.mark.parametrize("layout", [Layout.LOGICAL, Layout.OHWI, Layout.HWIO])
def test_conv2d(
    rng: np.random.Generator,
    layout: Layout,
    channels: int,
    out: int,
    groups: int,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
) -> None:
    x = rng.normal(size=(2, channels, 5, 6))
    w = rng.normal(size=(out, channels // groups, *kernel))
    bias = rng.normal(size=out)

    def body(v: ir.Value) -> ir.Value:
        weight = yolo.weight("w", w.shape, layout=layout)
        return yolo.conv2d(
            v, weight, yolo.weight("b", [out]), strides=strides, padding=padding, groups=groups
        )

    got = _run(body, x, w=w.transpose(layout.permutation), b=bias)
    expected = np.zeros_like(got)
    for n, o, i, j in np.ndindex(*got.shape):
        total = bias[o]
        first = o // (out // groups) * (channels // groups)
        for c, r, s in np.ndindex(*w.shape[1:]):
            row, column = i * strides[0] + r - padding[0], j * strides[1] + s - padding[1]
            if 0 <= row < 5 and 0 <= column < 6:
                total += w[o, c, r, s] * x[n, first + c, row, column]
        expected[n, o, i, j] = total
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


def test_max_pool_ignores_its_padding(rng: np.random.Generator) -> None:
    x = rng.normal(size=(1, 2, 5, 4)) - 10
    got = _run(lambda v: yolo.max_pool2d(v, kernel=[3, 2], strides=[2, 1], padding=[1, 0, 1, 1]), x)
    for n, c, i, j in np.ndindex(*got.shape):
        window = x[n, c, max(0, 2 * i - 1) : 2 * i + 2, j : j + 2]
        assert got[n, c, i, j] == window.max()


def test_attention(rng: np.random.Generator) -> None:
    heads, key_dim, head_dim, scale = 2, 3, 4, 0.6
    qkv = rng.normal(size=(2, heads * (2 * key_dim + head_dim), 2, 3))
    got = _run(
        lambda v: yolo.attention(v, heads=heads, key_dim=key_dim, head_dim=head_dim, scale=scale),
        qkv,
    )
    flat = qkv.reshape(2, -1, 6)
    expected = np.zeros((2, heads * head_dim, 6))
    for n, h, i in product(range(2), range(heads), range(6)):
        q, k, v = np.split(flat[n, 10 * h : 10 * (h + 1)], [key_dim, 2 * key_dim])
        weights = np.array([np.exp(scale * q[:, i] @ k[:, j]) for j in range(6)])
        expected[n, head_dim * h : head_dim * (h + 1), i] = v @ weights / weights.sum()
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-12)


def test_detect(rng: np.random.Generator) -> None:
    sizes, classes, count = [(2, 2), (1, 2), (1, 1)], 3, 6
    boxes = [rng.normal(size=(1, 4, *size)) for size in sizes]
    logits = [rng.normal(size=(1, classes, *size)) for size in sizes]
    got = _run(
        lambda *v: yolo.detect(v[:3], v[3:], strides=[8, 16, 32], max_det=count), *boxes, *logits
    )[0]
    rows = []
    for box, logit, stride in zip(boxes, logits, (8, 16, 32), strict=True):
        for i, j in np.ndindex(*box.shape[2:]):
            left, top, right, bottom = box[0, :, i, j]
            corners = [j + 0.5 - left, i + 0.5 - top, j + 0.5 + right, i + 0.5 + bottom]
            rows.append((logit[0, :, i, j], [stride * c for c in corners]))
    best = sorted(rows, key=lambda row: -row[0].max())[:count]
    pairs = [(s, c, corners) for scores, corners in best for c, s in enumerate(scores)]
    expected = [
        [*corners, 1 / (1 + np.exp(-s)), c]
        for s, c, corners in sorted(pairs, key=lambda pair: -pair[0])[:count]
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_elementwise_and_data_movement(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 1, 4, 2, 2)) * 3
    gamma, beta, mean, variance = rng.uniform(0.5, 2, size=(4, 4))

    def norm(v: ir.Value) -> ir.Value:
        parameters = [yolo.weight(name, [4]) for name in ("g", "b", "m", "v")]
        return yolo.batch_norm(v, *parameters, epsilon=0.25)

    got = _run(norm, x, g=gamma, b=beta, m=mean, v=variance)
    for c in range(4):
        scale = gamma[c] / np.sqrt(variance[c] + 0.25)
        np.testing.assert_allclose(got[:, c], scale * (x[:, c] - mean[c]) + beta[c], rtol=1e-13)
    np.testing.assert_allclose(_run(yolo.silu, x), x / (1 + np.exp(-x)), rtol=1e-13)
    assert np.array_equal(_run(yolo.add, x, y), x + y)
    joined = np.concatenate([x, y, x], axis=1)
    assert np.array_equal(_run(lambda a, b: yolo.concat([a, b, a]), x, y), joined)
    part = _run(lambda v: yolo.slice_(v, offset=1, size=2), x)
    assert np.array_equal(part, x[:, 1:3])
    large = _run(lambda v: yolo.upsample(v, factor=3), x)
    assert all(large[0, 2, i, j] == x[0, 2, i // 3, j // 3] for i, j in np.ndindex(6, 6))
    assert np.array_equal(_run(lambda v: yolo.convert_layout(v, Layout.NHWC), x), x)
    assert np.array_equal(_run(lambda v: yolo.normalize(v, scale=0.5), x), x / 2)


def test_silu_of_large_numbers() -> None:
    x = np.array([-1e4, -745.0, 0.0, 745.0, 1e4]).reshape(1, 5, 1, 1)
    with np.errstate(all="raise", under="ignore"):
        got = _run(yolo.silu, x).ravel()
    assert got[0] == 0
    np.testing.assert_allclose(got[2:], [0, 745, 1e4])


def test_layers_are_recorded_by_name() -> None:
    def body(v: ir.Value) -> ir.Value:
        x = yolo.silu(v, loc=ir.Location.name("a.act"))
        return yolo.add(x, x, loc=ir.Location.name("b.add"))

    x = np.ones((1, 1, 1, 1))
    layers: dict[str, Array] = {}
    interpret(_module([x.shape], body), [x], WeightStore(), layers=layers)
    assert set(layers) == {"a.act", "b.add"}
    assert layers["b.add"] == 2 * layers["a.act"]


def test_calls_go_into_private_functions() -> None:
    text = """
        func.func @main(%x: tensor<1x1x2x2xf32>) -> tensor<1x1x2x2xf32> {
          %0 = func.call @twice(%x) {yolo.dispatch} : (tensor<1x1x2x2xf32>) -> tensor<1x1x2x2xf32>
          return %0 : tensor<1x1x2x2xf32>
        }
        func.func private @twice(%x: tensor<1x1x2x2xf32>) -> tensor<1x1x2x2xf32> {
          %0 = "yolo.add"(%x, %x) : (tensor<1x1x2x2xf32>, tensor<1x1x2x2xf32>)
              -> tensor<1x1x2x2xf32>
          return %0 : tensor<1x1x2x2xf32>
        }"""
    x = np.arange(4.0).reshape(1, 1, 2, 2)
    assert np.array_equal(interpret(ir.Module.parse(text), [x], WeightStore())[0], 2 * x)


@pytest.mark.parametrize(
    ("weights", "inputs", "function", "message"),
    [
        ({}, [np.ones((1, 2, 3, 3))], "main", "w: the weight store has no tensor"),
        ({"w": np.ones((1, 2, 1, 2))}, [np.ones((1, 2, 3, 3))], "main", r"\[1, 1, 1, 2\]"),
        ({"w": np.ones((1, 1, 1, 2))}, [np.ones((1, 3, 3, 2))], "main", "in logical order"),
        ({"w": np.ones((1, 1, 1, 2))}, [], "main", "1 arguments; got 0"),
        ({"w": np.ones((1, 1, 1, 2))}, [np.ones((1, 2, 3, 3))], "other", "no function @other"),
    ],
)
def test_complaints(
    weights: dict[str, Array], inputs: list[Array], function: str, message: str
) -> None:
    def body(v: ir.Value) -> ir.Value:
        return yolo.conv2d(v, yolo.weight("w", [1, 2, 1, 1], layout=Layout.OHWI))

    module = _module([(1, 2, 3, 3)], body)
    with pytest.raises(UserError, match=message):
        interpret(module, inputs, WeightStore(weights), function=function)


def test_other_dialects_are_refused_by_layer() -> None:
    text = """func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = arith.negf %x : tensor<2xf32> loc("model.1.neg")
      return %0 : tensor<2xf32>
    }"""
    with pytest.raises(UserError, match=r"model\.1\.neg: 'arith\.negf' is not of the yolo level"):
        interpret(ir.Module.parse(text), [np.ones(2)], WeightStore())
