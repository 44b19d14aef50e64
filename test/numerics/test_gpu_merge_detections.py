"""Detection in two stages in the simulator: bit for bit what one stage gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import test_gpu_detect as whole
from gpu_dispatches import TARGETS, Run, activation, check_assembles, function, kernel_of

from yolomlir.codegen.gpu import merge_detections
from yolomlir.codegen.gpu.detect import DetectTile
from yolomlir.codegen.gpu.merge_detections import MergeTile
from yolomlir.diagnostics import UnsupportedError

SMALL = MergeTile(threads=64, lanes=2, blocks=2)
SIZES = ((6, 5), (4, 4), (4, 3))

pytestmark = pytest.mark.usefixtures("context")


@dataclass(frozen=True)
class Case(whole.Case):
    @property
    def rows(self) -> str:
        return f"tensor<{self.batch}x{self.max_det}x8xf32>"

    def first(self) -> str:
        """The function of the first stage."""
        boxes = [activation(self.batch, 4, *size) for size in self.sizes[:2]]
        logits = [activation(self.batch, self.classes, *size) for size in self.sizes[:2]]
        attributes = f"strides = array<i64: 8, 16>, max_det = {self.max_det} : i64"
        types = ", ".join([*boxes, *logits])
        line = f'%y = "yolo.candidates"(%a0, %a1, %a2, %a3) {{{attributes}}} : ({types}) -> '
        return function("detect", [*boxes, *logits], [line + self.rows], self.rows)

    def second(self) -> str:
        """The function of the second stage."""
        types = [self.rows, *(activation(self.batch, c, *self.sizes[2]) for c in (4, self.classes))]
        result = f"tensor<{self.batch}x{self.max_det}x6xf32>"
        line = '%y = "yolo.merge_detections"(%a0, %a1, %a2) {stride = 32 : i64} : '
        line += f"({', '.join(types)}) -> {result}"
        return function("merge_detections", types, [line], result)


def one_stage(case: Case, boxes, logits, tile=whole.SMALL, target="sm_90") -> np.ndarray:
    kernel = kernel_of(case.text(), tile=tile, target=target)
    return Run(kernel, [*boxes, *logits], (case.batch, case.max_det, 6))().value


def first_stage(case: Case, boxes, logits, tile=whole.SMALL, target="sm_90") -> np.ndarray:
    kernel = kernel_of(case.first(), tile=tile, target=target)
    return Run(kernel, [*boxes[:2], *logits[:2]], (case.batch, case.max_det, 8))().value


def second_stage(case: Case, rows, boxes, logits, tile=SMALL, target="sm_90") -> Run:
    kernel = kernel_of(case.second(), tile=tile, target=target)
    return Run(kernel, [rows, boxes[2], logits[2]], (case.batch, case.max_det, 6))


def check(
    case: Case, boxes, logits, tile=SMALL, target="sm_90", first=whole.SMALL, **options
) -> Run:
    """first: the tile of one stage, and of the first."""
    rows = first_stage(case, boxes, logits, first, target)
    run = second_stage(case, rows, boxes, logits, tile, target)
    got = run(**options).value
    np.testing.assert_array_equal(got, one_stage(case, boxes, logits, first, target))
    return run


@pytest.mark.parametrize(
    "case",
    [
        Case(8, SIZES, 10),
        Case(3, SIZES, 7, batch=2),
        Case(1, SIZES, 12),
        pytest.param(Case(12, ((4, 4), (2, 2), (1, 1)), 1), marks=pytest.mark.slow),
        Case(7, ((9, 7), (5, 4), (5, 3)), 15),
        Case(80, SIZES, 12),
    ],
    ids=str,
)
def test_geometries(case):
    for seed in range(2):
        check(case, *whole.operands(case, seed), seed=seed)


@pytest.mark.parametrize(
    "tile",
    [MergeTile(64, 1, 1), MergeTile(64, 4, 2), MergeTile(128, 16, 4), MergeTile(512, 8, 8)],
    ids=str,
)
@pytest.mark.parametrize("classes", [5, 37, pytest.param(40, marks=pytest.mark.slow)])
def test_tiles(tile, classes):
    case = Case(classes, SIZES, 12)
    check(case, *whole.operands(case), tile=tile)


def test_more_logits_than_registers_hold():
    case = Case(150, SIZES, 12)
    check(case, *whole.operands(case), tile=MergeTile(64, 2, 2))
    case = Case(47, SIZES, 12)
    check(case, *whole.operands(case), tile=MergeTile(64, 1, 1))


def level_alone(monkeypatch):
    """Without the exact selection of the last level."""
    monkeypatch.setattr(merge_detections._LevelSelection, "emit", lambda self: None)


@pytest.mark.parametrize("above", [-3.0, 0.0, 2.0])
def test_levels_of_other_sizes_of_logits(above, monkeypatch):
    """None of the last level's, some, or most are among the best; all have room."""
    level_alone(monkeypatch)
    case = Case(4, SIZES, 12)
    boxes, logits = whole.operands(case)
    logits[2] = logits[2] + np.float32(above)
    check(case, boxes, logits)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_more_rows_than_there_is_room_for(blocks, monkeypatch):
    """The last level's best are then chosen exactly: all 240 logits are beyond the bound, of which
    64 have room."""
    case = Case(20, SIZES, 12)
    boxes, logits = whole.operands(case)
    logits[2] = logits[2] + np.float32(40)
    tile = replace(SMALL, blocks=blocks)
    check(case, boxes, logits, tile=tile)
    check(case, boxes, [np.round(x) for x in logits], tile=tile)
    level_alone(monkeypatch)
    with pytest.raises(AssertionError):
        check(case, boxes, logits, tile=tile)


def test_equal_logits_go_by_anchor_and_index():
    case = Case(6, ((8, 8), (4, 4), (5, 5)), 25)
    for seed in range(4):
        boxes, logits = whole.operands(case, seed)
        rng = np.random.default_rng(seed)
        values = np.array([-2.0, -0.0, 0.0, 1.0, 1.001], np.float32)[: 2 + seed]
        check(case, boxes, [rng.choice(values, x.shape) for x in logits], seed=seed)


def test_all_logits_equal():
    """No logit of the last level comes before the bound; and one anchor's, all do."""
    case = Case(20, ((8, 9), (6, 6), (6, 5)), 30)
    boxes, logits = whole.operands(case)
    logits = [np.full_like(x, -7.25) for x in logits]
    check(case, boxes, logits)
    logits[2][0, 2, 3] = -7
    check(case, boxes, logits)


def test_extreme_logits():
    case = Case(4, SIZES, 12)
    boxes, logits = whole.operands(case)
    extremes = [np.inf, -np.inf, 3.0e38, -3.0e38, 1.0e-40, -1.0e-40, 88.0, -104.0]
    for level in (0, 2):
        logits[level].reshape(-1)[: len(extremes)] = extremes
    check(case, boxes, logits)
    check(case, boxes, [np.where(x > -20, x - np.float32(60), x) for x in logits])


def test_nan_is_the_largest():
    """As in one stage: its anchor and itself come first, whatever else the anchor has."""
    case = Case(5, SIZES, 12)
    boxes, logits = whole.operands(case)
    logits[0][0, 2, 3, 1] = logits[2][0, 1, 1, 4] = logits[2][0, 3, 0, 0] = np.nan
    check(case, boxes, logits)
    assert np.isnan(one_stage(case, boxes, logits)[0, :3, 4]).all()
    logits[2][:] = np.nan  # more than the blocks have room for
    check(case, boxes, logits, tile=replace(SMALL, blocks=8))


def test_first_stage_gives_what_detection_gives_of_its_levels():
    case = Case(8, SIZES, 12, batch=2)
    boxes, logits = whole.operands(case)
    for tile in (whole.SMALL, DetectTile(128, 8)):
        rows = first_stage(case, boxes, logits, tile)
        part = replace(case, sizes=SIZES[:2], strides=(8, 16))
        want = whole.expected(part, boxes[:2], logits[:2])
        np.testing.assert_array_equal(rows[..., 5], want[..., 5])
        np.testing.assert_allclose(rows[..., 4], 1 / (1 + np.exp(-rows[..., 6])), atol=2.0**-22)
        largest = np.concatenate([x.max(-1).reshape(2, -1) for x in logits[:2]], axis=1)
        assert (rows[..., 7] >= rows[..., 6]).all()
        assert all(np.isin(rows[n, :, 7], largest[n]).all() for n in range(2))


def test_launches_after_each_other_need_no_clearing():
    case = Case(6, SIZES, 12, batch=2)
    boxes, logits = whole.operands(case)
    rows = first_stage(case, boxes, logits)
    run = second_stage(case, rows, boxes, logits)
    first = run(seed=5).value
    for seed in (1, 2):
        np.testing.assert_array_equal(first, run(seed=seed, schedule="warps").value)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    case = Case(5, SIZES, 9, batch=2)
    tile = SMALL if target != "sm_80" else replace(SMALL, blocks=1)
    check(case, *whole.operands(case), tile=tile, target=target)
    check(case, *whole.operands(case), tile=None, target=target)


def test_rows_less_aligned_than_their_channels():
    case = Case(8, SIZES, 9, batch=2)
    boxes, logits = whole.operands(case)
    rows = first_stage(case, boxes, logits)
    kernel = kernel_of(case.second(), tile=SMALL, alignments=[4] * 4)
    run = Run(kernel, [rows, boxes[2], logits[2]], (2, 9, 6), extra=1)
    np.testing.assert_array_equal(run().value, one_stage(case, boxes, logits))


@pytest.mark.parametrize("tile", [MergeTile(64, 3, 1), MergeTile(64, 32, 1), MergeTile(96, 1, 1),
                                  MergeTile(64, 1, 16)])  # fmt: skip
def test_other_tiles_are_refused(tile):
    with pytest.raises(UnsupportedError, match="powers of two"):
        kernel_of(Case(4, SIZES, 5).second(), tile=tile)


def test_too_many_rows_are_refused():
    case = Case(1, ((80, 80), (40, 40), (20, 20)), 3000)
    with pytest.raises(UnsupportedError, match="max_det 3000"):
        kernel_of(case.second())


@pytest.mark.parametrize("classes", [1, 24, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("above", [0, 40])
def test_fewer_anchors_than_rows(classes, above):
    """The last level has 6 anchors, of 20 rows; of 144 logits beyond the bound, 64 have room."""
    case = Case(classes, ((6, 5), (4, 4), (3, 2)), 20)
    boxes, logits = whole.operands(case)
    logits[2] = logits[2] + np.float32(above)
    check(case, boxes, logits)
    check(case, boxes, [np.round(x / 8) for x in logits])


def test_network_size(monkeypatch):
    """Logits as a network's, with a large object: more than the wanted rows are sent."""
    level_alone(monkeypatch)
    case = Case(80, whole.NETWORK, 300)
    boxes, logits = whole.operands(case)
    rng = np.random.default_rng(4)
    logits = [x - 14 + 2 * rng.standard_normal((*x.shape[:-1], 1), np.float32) for x in logits]
    logits[1][0, 10:14, 20:23, :6] += 15
    logits[2][0, 3:9, 4:10, :12] += 16
    rows = first_stage(case, boxes, logits, tile=None)
    got = second_stage(case, rows, boxes, logits, tile=None)().value
    want = Run(kernel_of(case.text()), [*boxes, *logits], (1, 300, 6))().value
    np.testing.assert_array_equal(got, want)
    finer = first_stage(case, boxes, logits, tile=None)[0, -1, 6]
    assert 300 < (logits[2] > finer).sum() < 1024


@pytest.mark.parametrize(
    "case",
    [
        Case(80, whole.NETWORK, 300),
        Case(1, ((80, 80), (40, 40), (20, 20)), 300),
        pytest.param(Case(3, ((48, 80), (24, 40), (20, 20)), 300, batch=4), marks=pytest.mark.slow),
        pytest.param(Case(365, ((80, 80), (40, 40), (32, 32)), 512), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_assembles(case):
    check_assembles(case.first())
    check_assembles(case.second())
