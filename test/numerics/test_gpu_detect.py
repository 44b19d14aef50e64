"""The detect kernel in the simulator: choice and order exact, boxes and scores within rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from gpu_dispatches import (
    TARGETS,
    UNIT,
    Run,
    activation,
    check_assembles,
    function,
    kernel_of,
)

from yolomlir.codegen.gpu.detect import DetectTile
from yolomlir.codegen.gpu.detect_exact import ExactSelection
from yolomlir.codegen.gpu.detect_layout import Layout
from yolomlir.codegen.gpu.ptx import to_ptx
from yolomlir.diagnostics import UnsupportedError
from yolomlir.target import target_named

SMALL = DetectTile(threads=128, lanes=1)

pytestmark = pytest.mark.usefixtures("context")


@dataclass(frozen=True)
class Case:
    classes: int
    sizes: tuple[tuple[int, int], ...]
    max_det: int
    batch: int = 1
    strides: tuple[int, ...] = (8, 16, 32)

    def text(self) -> str:
        boxes = [activation(self.batch, 4, *size) for size in self.sizes]
        logits = [activation(self.batch, self.classes, *size) for size in self.sizes]
        result = f"tensor<{self.batch}x{self.max_det}x6xf32>"
        names = ", ".join(f"%a{i}" for i in range(2 * len(self.sizes)))
        attributes = (
            f"{{strides = array<i64: {', '.join(map(str, self.strides))}>, "
            f"max_det = {self.max_det} : i64}}"
        )
        types = ", ".join([*boxes, *logits])
        line = f'%y = "yolo.detect"({names}) {attributes} : ({types}) -> {result}'
        return function("detect", [*boxes, *logits], [line], result)

    def maps(self, channels: int, rng: np.random.Generator) -> list[np.ndarray]:
        shapes = [(self.batch, h, w, channels) for h, w in self.sizes]
        return [rng.standard_normal(shape, np.float32) * np.float32(3) for shape in shapes]


def expected(case: Case, boxes: list[np.ndarray], logits: list[np.ndarray]) -> np.ndarray:
    """Two stages of stable sorting in float64: equal logits by lower index, -0 equal to 0."""
    rows = np.zeros((case.batch, case.max_det, 6))
    for n in range(case.batch):
        flat = np.concatenate([x[n].reshape(-1, case.classes) for x in logits]).astype(np.float64)
        corners = np.concatenate(
            [_decode(b[n], s) for b, s in zip(boxes, case.strides, strict=True)]
        )
        anchors = np.argsort(-flat.max(1), kind="stable")[: case.max_det]
        candidates = flat[anchors].reshape(-1)
        best = np.argsort(-candidates, kind="stable")[: case.max_det]
        rows[n, :, :4] = corners[anchors[best // case.classes]]
        with np.errstate(over="ignore"):
            rows[n, :, 4] = 1 / (1 + np.exp(-candidates[best]))
        rows[n, :, 5] = best % case.classes
    return rows


def _decode(box: np.ndarray, stride: int) -> np.ndarray:
    height, width, _ = box.shape
    y, x = np.mgrid[:height, :width] + 0.5
    left, top, right, bottom = box.astype(np.float64).transpose(2, 0, 1)
    corners = np.stack([x - left, y - top, x + right, y + bottom], -1) * stride
    return corners.reshape(-1, 4)


def check(case: Case, boxes, logits, run: Run | None = None, tile=None, **options) -> Run:
    target = options.pop("target", "sm_90")
    if run is None:
        shape = (case.batch, case.max_det, 6)
        kernel = kernel_of(case.text(), target=target, tile=tile)
        run = Run(kernel, [*boxes, *logits], shape)
    got = run(**options).value
    want = expected(case, boxes, logits)
    np.testing.assert_array_equal(got[..., 5], want[..., 5])
    # ax - l and its product with the stride: two roundings, of at most |ax| + |l|.
    largest = max(float(np.abs(b).max()) + max(b.shape) for b in boxes) * max(case.strides)
    np.testing.assert_allclose(got[..., :4], want[..., :4], rtol=0, atol=2 * UNIT * largest)
    # The sigmoid's bound, of instructions.sigmoid.
    np.testing.assert_allclose(got[..., 4], want[..., 4], rtol=0, atol=2.0**-22)
    return run


def operands(case: Case, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return case.maps(4, rng), case.maps(case.classes, rng)


SIZES = ((6, 5), (3, 3), (2, 1))


@pytest.mark.parametrize(
    "case",
    [
        Case(8, SIZES, 10),
        Case(3, SIZES, 7, batch=2),
        Case(1, SIZES, 41),
        Case(12, ((4, 4), (2, 2), (1, 1)), 21),
        Case(7, ((9, 7), (5, 4), (3, 2)), 30, strides=(4, 4, 64)),
        Case(80, SIZES, 1),
    ],
    ids=str,
)
def test_geometries(case):
    boxes, logits = operands(case)
    check(case, boxes, logits, tile=SMALL)


@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
@pytest.mark.parametrize("classes", [5, 40, 37])
def test_lanes_share_the_classes_of_an_anchor(lanes, classes):
    case = Case(classes, SIZES, 12)
    check(case, *operands(case), tile=DetectTile(64, lanes))


def test_equal_logits_go_by_index():
    """Few values, many ties, at both thresholds and within; zeros of both signs are equal."""
    case = Case(6, ((8, 8), (4, 4), (2, 2)), 25)
    for seed in range(3):
        boxes, logits = operands(case, seed)
        rng = np.random.default_rng(seed)
        values = np.array([-2.0, -0.0, 0.0, 1.0], np.float32)[: 2 + seed]
        logits = [rng.choice(values, x.shape) for x in logits]
        check(case, boxes, logits, tile=SMALL, seed=seed)


def by_bins_alone(monkeypatch):
    """Without the exact selection, no detection is written where bins do not suffice."""
    monkeypatch.setattr(ExactSelection, "emit", lambda self: None)


@pytest.mark.parametrize("case", [Case(8, SIZES, 10), Case(37, ((9, 9), (4, 4), (2, 2)), 20)])
@pytest.mark.parametrize("offset", [-17.0, -8.0, 0.0, 4.0])
def test_spread_logits_are_chosen_by_bins(case, offset, monkeypatch):
    """Also where the end bins hold some of them."""
    by_bins_alone(monkeypatch)
    boxes, logits = operands(case)
    check(case, boxes, [x + np.float32(offset) for x in logits], tile=DetectTile(128, 8))


def test_ties_within_a_bin_go_by_anchor_and_class(monkeypatch):
    """Equal logits of anchors whose largest differ: the higher anchor's come first, whatever its
    number."""
    by_bins_alone(monkeypatch)
    case = Case(4, ((4, 4), (2, 2), (1, 1)), 12)
    boxes, logits = operands(case)
    rng = np.random.default_rng(1)
    logits = [np.full_like(x, -9) for x in logits]
    for x in logits:
        x[..., 0] = rng.choice(np.array([1.0, 1.001, 1.002], np.float32), x.shape[:-1])
        x[..., 2] = 0.5
    check(case, boxes, logits, tile=SMALL)


@pytest.mark.parametrize(
    "case", [Case(8, SIZES, 10, batch=2), Case(3, ((8, 8), (4, 4), (2, 2)), 30)]
)
def test_exact_selection(case, monkeypatch):
    monkeypatch.setattr(Layout, "fast", False)
    boxes, logits = operands(case)
    check(case, boxes, logits, tile=SMALL)
    check(case, boxes, [np.round(x) for x in logits], tile=SMALL)


def crowded(what: str) -> tuple[Case, list[np.ndarray]]:
    """Logits that exceed one limit (with 10 wanted, 32 anchors, 128 groups, 32 kept candidates, 128
    in a bin)."""
    classes = {"groups": 64, "bin": 16}.get(what, 4)
    case = Case(classes, ((12, 12), (6, 6), (3, 3)), 10)
    rng = np.random.default_rng(2)
    logits = [np.float32(-9) - np.abs(x) for x in case.maps(case.classes, rng)]
    first = logits[0].reshape(-1, case.classes)
    if what == "anchors":
        first[:40] = 2.0
    elif what == "groups":  # a logit in each of 16 groups of 10 anchors
        first[:10, ::4] = 2 + rng.uniform(0, 1 / 128, (10, 16))
    else:  # the logits of 10 anchors within 1/64: 40 to keep, or 160 in a bin
        first[:10] = 3 + rng.uniform(0, 1 / 256, (10, case.classes))
    return case, [x.astype(np.float32) for x in logits]


@pytest.mark.parametrize("what", ["anchors", "groups", "kept", "bin"])
def test_crowded_logits_are_chosen_exactly(what, monkeypatch):
    case, logits = crowded(what)
    boxes, tile = operands(case)[0], DetectTile(128, 8)
    check(case, boxes, logits, tile=tile)
    by_bins_alone(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, boxes, logits, tile=tile)


def test_all_logits_equal():
    """The worst case of stage two: every class of every chosen anchor is a candidate."""
    case = Case(20, ((8, 9), (4, 4), (2, 2)), 30)
    boxes, logits = operands(case)
    check(case, boxes, [np.full_like(x, -7.25) for x in logits], tile=SMALL)


def test_extreme_logits():
    case = Case(4, SIZES, 15)
    boxes, logits = operands(case)
    extremes = [np.inf, -np.inf, 3.0e38, -3.0e38, 1.0e-40, -1.0e-40, 88.0, -104.0]
    logits[0].reshape(-1)[: len(extremes)] = extremes
    check(case, boxes, logits, tile=SMALL)
    check(case, boxes, [np.where(x > -20, x - np.float32(60), x) for x in logits], tile=SMALL)


def test_large_max_det():
    """More detections than threads, and more than the 300 of the network."""
    case = Case(3, ((16, 16), (8, 8), (4, 4)), 330)
    check(case, *operands(case), tile=SMALL)


def test_more_anchors_than_registers_hold():
    """Keys are then read from the workspace in every pass."""
    case = Case(2, ((40, 40), (20, 20), (10, 10)), 20)
    check(case, *operands(case), tile=DetectTile(128, 1))


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    case = Case(5, SIZES, 9, batch=2)
    check(case, *operands(case), tile=SMALL, target=target)


def test_launches_after_each_other_need_no_clearing():
    """The counters return to zero, and nothing of an earlier image is left."""
    case = Case(4, SIZES, 11, batch=2)
    boxes, logits = operands(case)
    run = check(case, boxes, logits, tile=DetectTile(64, 2))
    first = run(seed=5).value
    for seed in (1, 2):
        again = run(seed=seed, schedule="warps").value
        np.testing.assert_array_equal(first, again)
    assert not run.arguments[-1][: case.batch].any()


def test_default_tile():
    """The blocks that are used on a device."""
    case = Case(80, ((12, 12), (6, 6), (3, 3)), 60)
    check(case, *operands(case))


def test_rows_less_aligned_than_their_channels():
    case = Case(8, SIZES, 9, batch=2)
    boxes, logits = operands(case)
    kernel = kernel_of(case.text(), tile=SMALL, alignments=[4] * 6 + [4])
    run = Run(kernel, [*boxes, *logits], (2, 9, 6), extra=1)
    check(case, boxes, logits, run)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_keys_are_fenced_on_both_sides_of_the_counter(target):
    """The simulator's memory is sequentially consistent; a GPU's is not."""
    kernel = kernel_of(Case(8, SIZES, 10).text(), target=target)
    ptx = to_ptx(kernel.module, target_named(target))
    before, counter, after = ptx.split("fence.acq_rel.gpu")
    assert "st.global" in before
    assert "atom.global.add.u32" in before  # the histogram
    assert counter.count("atom.global.add.u32") == 1
    assert "ld.global" not in counter
    assert "st.global" not in counter
    assert "ld.global" in after


def test_too_large_max_det_is_refused():
    case = Case(1, ((160, 160), (80, 80), (40, 40)), 30000)
    with pytest.raises(UnsupportedError, match="max_det 30000"):
        kernel_of(case.text())


NETWORK = ((80, 80), (40, 40), (20, 20))


def test_network_size(monkeypatch):
    """Logits as a network's: most anchors far below, a few objects, several classes of each."""
    by_bins_alone(monkeypatch)
    case = Case(80, NETWORK, 300)
    boxes, logits = operands(case)
    rng = np.random.default_rng(4)
    logits = [x - 14 + 2 * rng.standard_normal((*x.shape[:-1], 1), np.float32) for x in logits]
    logits[1][0, 10:14, 20:23] += 15
    check(case, boxes, logits)


@pytest.mark.parametrize(
    "case",
    [Case(80, NETWORK, 300), Case(3, ((48, 80), (24, 40), (12, 20)), 300, batch=4),
     Case(365, NETWORK, 1000), Case(1, ((160, 160), (80, 80), (40, 40)), 300)],
    ids=str,
)  # fmt: skip
def test_assembles(case):
    check_assembles(case.text())
