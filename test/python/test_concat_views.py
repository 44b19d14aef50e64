"""What `yolo-concat-views` decides for the patterns of the network and for hard ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from graphs import MOVES, Graph, Move, Recipe, build
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout
from yolomlir.passes.base import PassContext, parse_pass
from yolomlir.passes.outlining import Outliner, entry_block, operations
from yolomlir.passes.placement import Dependencies, Placement, sources_of
from yolomlir.passes.registry import REGISTRY

from yolomlir.bindings import ir

PASSES = ("merge-siblings", "conv-epilogue-fusion", "form-dispatches", "concat-views")

pytestmark = pytest.mark.usefixtures("context")


def _graph(move: Move, **passes: str) -> tuple[Graph, Counter[str]]:
    graph = build(Recipe(1, 6, 8, (move,), 2, 0), layout=Layout.NHWC)
    context = PassContext(weights=graph.weights)
    for name in PASSES:
        assert f"yolo-{name}" in REGISTRY
        parse_pass(f"yolo-{name}{passes.get(name, '')}").run(graph.module, context)
    return graph, context.statistics["yolo-concat-views"]


@pytest.mark.parametrize(
    ("move", "concats", "sources", "copies"),
    [
        # Concats of three or four are nested pairs, so two or three views.
        pytest.param(Move("c3k2", 1, 0, 1), 2, 0, 0, id="c3k2 is one buffer of three parts"),
        pytest.param(Move("c3k2", 1, 1, 1), 3, 0, 0, id="with two modules of four"),
        pytest.param(Move("c3k2", 1, 1, 0), 3, 0, 0, id="a part wanted by others as well"),
        pytest.param(Move("c2psa", 1, 1, 0), 1, 0, 0, id="c2psa replaces a dead half"),
        pytest.param(Move("c3k", 1, 1, 1), 1, 0, 0, id="c3k with merged siblings"),
        pytest.param(Move("c3k", 1, 0, 1), 0, 1, 0, id="one bottleneck reads what it replaced"),
        pytest.param(Move("sppf", 1, 2, 1), 0, 1, 0, id="pools would start at channel 6"),
        pytest.param(Move("pyramid", 1, 1, 1), 1, 3, 0, id="enlarged, and wanted by a concat"),
        pytest.param(Move("twice", 1, 1, 0), 2, 0, 0, id="between two others: z, x, y"),
        pytest.param(Move("twice", 1, 0, 0), 1, 1, 0, id="twice at one place, others beside it"),
        pytest.param(Move("upsample", 1, 0, 0), 0, 0, 1, id="enlarged for no convolution"),
    ],
)
def test_decisions(move: Move, concats: int, sources: int, copies: int) -> None:
    graph, counted = _graph(move)
    kept = [op for op in operations(entry_block(graph.module)) if op.name == "yolo.concat"]
    assert (len(kept), counted["multi_source_reads"], counted["copies"]) == (
        concats,
        sources,
        copies,
    )


@pytest.mark.parametrize("kind", sorted(MOVES))
def test_a_second_run_changes_nothing(kind: str) -> None:
    for seed in range(4):
        graph, _ = _graph(Move(kind, 1, seed, seed))
        before = str(graph.module)
        parse_pass("yolo-concat-views").run(graph.module, PassContext(weights=graph.weights))
        assert str(graph.module) == before


# ---- placement ----------------------------------------------------------------------------------

TENSOR = 'tensor<1x{}x2x2xf32, #yolo.layout<"nhwc">>'


class _Main:
    """A `@main` written with a few words: named dispatches of named tensors, then views."""

    def __init__(self, channels: int) -> None:
        type_ = ir.Type.parse(TENSOR.format(channels))
        text = f"func.func @main(%x: {type_}) {{ return }}"
        self.module = ir.Module.parse(text)
        self.block = entry_block(self.module)
        self.x = self.block.arguments[0]
        self.end = operations(self.block)[-1]
        self.outliner = Outliner(self.module)

    def call(self, *operands: ir.Value, channels: int) -> ir.Value:
        """A dispatch whose body does not matter: a slice of its first operand, or a concat."""

        def body(arguments: list[ir.Value]) -> ir.Value:
            have = yolo.shape_of(arguments[0])[1]
            if channels <= have:
                return yolo.slice_(arguments[0], offset=0, size=channels)
            return yolo.concat([arguments[0]] * (channels // have))

        call = self.outliner.call(
            body, list(operands), "elementwise", "f", loc=ir.Location.unknown(), before=self.end
        )
        return call.results[0]

    def view(self, builder: Callable[[], ir.Value]) -> ir.Value:
        with ir.InsertionPoint(self.end):
            return builder()

    def slice(self, x: ir.Value, offset: int, size: int) -> ir.Value:
        return self.view(lambda: yolo.slice_(x, offset=offset, size=size))

    def concat(self, *xs: ir.Value) -> ir.Value:
        return self.view(lambda: yolo.concat(list(xs)))


def _place(main: _Main, *values: ir.Value, alignment: int = 1) -> str | None:
    placement = Placement(main.block)
    return placement.try_views([v.owner.operation for v in values], alignment)


def test_argument_keeps_its_buffer() -> None:
    main = _Main(4)
    y = main.call(main.x, channels=4)
    assert "argument of @main" in str(_place(main, main.concat(main.x, y)))


def test_one_tensor_twice_in_a_concat() -> None:
    main = _Main(4)
    y = main.call(main.x, channels=4)
    assert "two places" in str(_place(main, main.concat(y, y)))


def test_dead_half_is_replaced_only_after_its_last_reader() -> None:
    main = _Main(8)
    whole = main.call(main.x, channels=8)
    a, b = main.slice(whole, 0, 4), main.slice(whole, 4, 4)
    c = main.call(b, channels=4)
    d = main.call(c, channels=4)
    joined = main.concat(a, d)
    main.call(joined, channels=8)
    assert _place(main, a, b, joined) is None
    main.call(b, channels=4)  # nothing orders this reader before d
    assert "still wanted" in str(_place(main, a, b, joined))


def test_reader_through_a_concat_that_is_no_view_counts() -> None:
    main = _Main(8)
    whole = main.call(main.x, channels=8)
    a, b = main.slice(whole, 0, 4), main.slice(whole, 4, 4)
    d = main.call(main.call(b, channels=4), channels=4)
    joined = main.concat(a, d)
    other = main.concat(main.x, b)
    main.call(other, channels=4)
    assert "still wanted" in str(_place(main, a, b, joined))


def test_refused_views_leave_the_placement_as_it_was() -> None:
    main = _Main(4)
    y, z = main.call(main.x, channels=4), main.call(main.x, channels=4)
    good, bad = main.concat(y, z), main.concat(z, y)
    placement = Placement(main.block)
    assert placement.try_views([good.owner.operation]) is None
    offsets = dict(placement.buffer_of(y).offsets)
    assert placement.try_views([bad.owner.operation]) is not None
    assert placement.buffer_of(y).offsets == offsets
    assert placement.views == {good}
    assert placement.buffer_of(bad).offsets == {bad: 0}


def test_buffer_may_begin_before_the_concat() -> None:
    """A slice from the middle of a tensor at a concat's start: the buffer reaches further left."""
    main = _Main(8)
    whole = main.call(main.x, channels=8)
    part = main.slice(whole, 4, 4)
    z = main.call(main.x, channels=4)
    joined = main.concat(part, z)
    placement = Placement(main.block)
    assert placement.try_views([part.owner.operation, joined.owner.operation]) is None
    buffer = placement.buffer_of(joined)
    start = buffer.extent[0]
    places = [buffer.offsets[v] - start for v in (whole, part, z, joined)]
    assert places == [0, 4, 8, 4]
    assert buffer.extent[1] - start == 12


def test_alignment_is_of_the_buffer() -> None:
    main = _Main(8)
    y, z = main.call(main.x, channels=2), main.call(main.x, channels=4)
    joined = main.concat(y, z)
    assert "multiple of 4" in str(_place(main, joined, alignment=4))
    assert _place(main, joined, alignment=2) is None


def test_dependencies_look_through_views_channel_by_channel() -> None:
    main = _Main(4)
    y, z = main.call(main.x, channels=4), main.call(main.x, channels=4)
    joined = main.concat(y, z)
    right = main.slice(joined, 4, 4)
    reader = main.call(right, channels=4)
    dependencies = Dependencies(main.block)
    assert dependencies.before(z.owner.operation, reader.owner.operation)
    assert not dependencies.before(y.owner.operation, reader.owner.operation)
    assert sources_of(joined, (3, 5)) == [y.owner.operation, z.owner.operation]
    large = main.view(lambda: yolo.upsample(joined, factor=2))
    assert sources_of(large, (0, 4)) == [y.owner.operation]


def test_numbers_of_a_plan_follow_the_placement() -> None:
    graph, _ = _graph(Move("c3k2", 1, 1, 1))
    sizes = {}
    for reuse in ("none", "concurrent", "sequential"):
        context = PassContext(weights=graph.weights)
        parse_pass(f"yolo-plan-memory{{reuse={reuse}}}").run(graph.module, context)
        counts = context.statistics["yolo-plan-memory"]
        sizes[reuse] = counts["arena_bytes"]
        assert counts["live_bytes"] <= sizes[reuse] <= counts["no_reuse_bytes"]
    assert sizes["none"] == counts["no_reuse_bytes"]
    assert sizes["sequential"] <= sizes["concurrent"] < sizes["none"]
