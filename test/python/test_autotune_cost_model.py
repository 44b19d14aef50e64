"""The cost model: it can be fitted, its quality is measured right, and it orders what is plain."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from autotune_fakes import TRUE, unit, workload

from yolomlir.autotune import calibration, fitting, space
from yolomlir.autotune import constants as constants_file
from yolomlir.autotune.correction import Correction, fit_correction
from yolomlir.autotune.cost_model import (
    DEFAULT,
    Constants,
    Device,
    Features,
    correction_columns,
    predict_us,
)
from yolomlir.autotune.database import CaseRecord, Database, TimeRecord
from yolomlir.autotune.fitting import Measured, fit, held_out_quality, quality, spearman
from yolomlir.autotune.search import shape_options
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.diagnostics import UserError
from yolomlir.target import TARGETS

DEVICE = Device.of(TARGETS["sm_90"])


def measured(noise: float, points: int = 24) -> list[Measured]:
    """Times of the fake GPU for the convolutions of a network."""
    data = []
    shapes = {c.problem for c in workload(side=320).cases.values() if c.problem.family == "conv2d"}
    for problem in sorted(shapes, key=repr):
        both = space.sample(problem, 3 * points, repr(problem))
        tiles = [t for t in both if isinstance(t, ConvTile)][:points]  # windows have another model
        features = Features.of(ConvTiles.of(problem.shape, tiles), "tf32")
        factors = [1 + noise * (unit(repr(problem), space.key_of(t)) - 0.5) for t in tiles]
        us = predict_us(features, DEVICE, TRUE) * np.array(factors)
        data.append(Measured(repr(problem.shape), features, us))
    return data


def test_fitting_finds_the_constants_that_matter() -> None:
    data = measured(0.02)
    before = quality([(d, predict_us(d.features, DEVICE, DEFAULT)) for d in data])
    found = fit(data, DEVICE)
    after = quality([(d, predict_us(d.features, DEVICE, found)) for d in data])
    assert before.error > 0.1
    assert after.error < 0.02
    for name in ("start", "instruction"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.15)


def test_quality_is_of_shapes_that_the_fit_has_not_seen() -> None:
    data = measured(0.05)
    good = held_out_quality(data, DEVICE)
    assert good.shapes == len(data)
    assert good.rows == sum(len(d.us) for d in data)
    assert good.spearman > 0.95
    assert good.hits > 0.9
    random = np.random.default_rng(0)
    shuffled = [dataclasses.replace(d, us=random.permutation(d.us)) for d in data]
    assert held_out_quality(shuffled, DEVICE).within < 0.3
    assert "held-out shapes" in str(good)


def test_what_nothing_tells_of_stays() -> None:
    shape = ConvShape(1, 20, 20, 64, 20, 20, 64, 1, 1)
    tiles = [ConvTile(32, 32, 32, 2, 2, 1, stages) for stages in (2, 3)]
    features = Features.of(ConvTiles.of(shape, tiles), "tf32")
    found = fit([Measured("one", features, np.array([3.0, 3.1]))], DEVICE)
    assert found.cluster == pytest.approx(DEFAULT.cluster)
    assert found.correction is None
    assert all(value > 0 for value in found.vector())


def test_constants_survive_as_vectors() -> None:
    assert DEFAULT.with_vector(TRUE.vector()) == TRUE
    assert len(TRUE.vector()) + len(TRUE.factors()) + 1 == len(dataclasses.fields(Constants))
    factors = DEFAULT.factors() + np.arange(len(DEFAULT.factors()))
    assert (DEFAULT.with_factors(factors).factors() == factors).all()


def test_factors_are_found_within_shapes() -> None:
    planted = dataclasses.replace(TRUE, log_release_early=-0.15, log_through_l1=0.08)
    random = np.random.default_rng(0)
    data = []
    for item in measured(0.0):
        rows = len(item.us)
        flags = {
            n: random.integers(0, 2, rows).astype(float)
            for n in ("log_release_early", "log_through_l1")
        }
        features = Features({**item.features.columns, **flags})
        data.append(Measured(item.name, features, predict_us(features, DEVICE, planted)))
    found = fit(data, DEVICE)
    assert found.log_release_early == pytest.approx(-0.15, abs=0.02)
    assert found.log_through_l1 == pytest.approx(0.08, abs=0.02)


# ---- the correction -----------------------------------------------------------------------------


def planted(rows: int = 4000) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Columns, a logarithm that depends on two of them together, and groups with own levels."""
    random = np.random.default_rng(0)
    names = ("a", "b", "flag", "noise")
    columns = {name: random.uniform(-1, 1, rows) for name in names}
    columns["flag"] = np.round(columns["flag"] > 0).astype(np.float64)
    value = 0.3 * ((columns["a"] > 0.2) & (columns["flag"] > 0)) - 0.1 * (columns["b"] > -0.5)
    groups = random.integers(0, 40, rows)
    return columns, value, groups


def centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]


def test_trees_find_what_two_properties_do_together() -> None:
    columns, value, groups = planted()
    level = np.random.default_rng(1).normal(0, 1, 40)[groups]  # not the correction's business
    weight = np.ones(len(value))
    found = fit_correction(columns, value + level, groups, weight)
    factor = found.log_factor(columns)
    assert np.abs(centred(factor - value, groups)).mean() < 0.01
    assert factor.mean() == pytest.approx(0.0, abs=1e-6)
    again = fit_correction(columns, value + level, groups, weight)
    assert (again.log_factor(columns) == factor).all()


def test_rows_that_weigh_nothing_teach_nothing() -> None:
    columns, value, groups = planted()
    wrong = np.where(columns["noise"] > 0.5, -value, value)
    weight = np.where(columns["noise"] > 0.5, 1e-9, 1.0)
    factor = fit_correction(columns, wrong, groups, weight).log_factor(columns)
    assert np.corrcoef(factor, value)[0, 1] > 0.98


def test_a_correction_is_bounded_where_nothing_was_measured() -> None:
    columns, value, groups = planted()
    weight = np.ones(len(value))
    far = {name: np.array([-1e6, 1e6]) for name in columns}
    seen = fit_correction(columns, value, groups, weight)
    inside = seen.log_factor(columns)
    outside = seen.log_factor(far)
    assert inside.min() - 0.05 <= outside.min()
    assert outside.max() <= inside.max() + 0.05
    large = fit_correction(columns, 20 * value, groups, weight).log_factor(columns)
    assert np.abs(large).max() <= 0.6


def test_a_correction_survives_as_json() -> None:
    columns, value, groups = planted(1000)
    found = fit_correction(columns, value, groups, np.ones(len(value)))
    read = Correction.from_json(json.loads(json.dumps(found.as_json())))
    assert read.names == tuple(columns)
    assert read.log_factor(columns) == pytest.approx(found.log_factor(columns), abs=2e-3)
    with pytest.raises(KeyError):
        Correction.from_json({"trees": found.as_json()["trees"]})


def test_fitting_learns_what_the_picture_lacks() -> None:
    data = []
    for item in measured(0.02):
        columns = correction_columns(item.features, DEVICE, TRUE)
        strange = (columns["tail"] > 0.3) & (columns["warp_shape"] > 0)
        data.append(dataclasses.replace(item, us=item.us * np.where(strange, 1.4, 1.0)))
    found = fit(data, DEVICE)
    plain = dataclasses.replace(found, correction=None)
    without = quality([(d, predict_us(d.features, DEVICE, plain)) for d in data])
    with_it = quality([(d, predict_us(d.features, DEVICE, found)) for d in data])
    assert with_it.within > without.within + 0.01
    assert with_it.error < 0.7 * without.error


def test_functions_of_one_shape_are_held_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [dataclasses.replace(d, us=d.us * k) for d in measured(0.0, 6) for k in (1.0, 1.1)]
    seen: list[set[str]] = []

    def fake(items: list[Measured], device: Device, start: Constants) -> Constants:
        seen.append({d.name for d in items})
        counts = [sum(d.name == name for d in items) for name in seen[-1]]
        assert set(counts) == {2}
        return start

    monkeypatch.setattr(fitting, "fit", fake)
    found = held_out_quality(data, DEVICE)
    assert (found.shapes, found.functions) == (len(data) // 2, len(data))
    assert len(seen) == 5
    names = {d.name for d in data}
    held = [name for fold in seen for name in names - fold]
    assert sorted(held) == sorted(names)


# ---- how good it is -----------------------------------------------------------------------------


def test_spearman_is_the_correlation_of_ranks() -> None:
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(a, a**3) == pytest.approx(1.0)
    assert spearman(a, -a) == pytest.approx(-1.0)
    # Ranks 1 2 3 4 against 2 1 4 3: 1 - 6 * 4 / (4 * 15).
    assert spearman(a, np.array([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    # Ties share the mean of their ranks: 1.5 1.5 3.5 3.5 against 1 2 3 4.
    assert spearman(np.array([5.0, 5.0, 9.0, 9.0]), a) == pytest.approx(4 / np.sqrt(4 * 5))
    assert spearman(np.ones(3), a[:3]) == 0.0


def test_hits_look_at_the_first_predictions_only() -> None:
    columns = Features({})
    data = Measured("s", columns, np.array([10.0, 1.04, 1.0]))
    found = quality([(data, np.array([1.0, 2.0, 3.0]))], top=2)
    assert found.hits == 1.0  # the second is within 5 % of the third
    assert quality([(data, np.array([1.0, 3.0, 2.0]))], top=1).hits == 0.0


def us(shape: ConvShape, tile: ConvTile, target: str = "sm_90") -> float:
    gpu = TARGETS[target]
    features = Features.of(ConvTiles.of(shape, [tile]), "tf32")
    return float(predict_us(features, Device.of(gpu), DEFAULT)[0])


def test_more_work_takes_longer() -> None:
    tile = ConvTile(64, 64, 32, 2, 2, 1, 3)
    small = ConvShape(1, 40, 40, 64, 40, 40, 64, 3, 3, 1, 1, 1, 1)
    deep = dataclasses.replace(small, in_channels=512)
    many = dataclasses.replace(small, batch=32)
    assert us(small, tile) < us(deep, tile)
    assert us(small, tile) < us(many, tile)
    assert us(many, tile) < us(many, tile, "sm_120")  # 48 multiprocessors against 132


def test_a_deep_k_over_few_pixels_pays_for_a_cluster() -> None:
    shape = ConvShape(1, 20, 20, 256, 20, 20, 16, 3, 3, 1, 1, 1, 1)
    tile = ConvTile(64, 16, 64, 4, 1, 1, 4)
    assert us(shape, dataclasses.replace(tile, cluster_k=8)) < us(shape, tile)
    shallow = dataclasses.replace(shape, in_channels=16)
    assert us(shallow, dataclasses.replace(tile, cluster_k=2)) > us(shallow, tile)


def database_of(cases: int) -> Database:
    """A database of some functions, and of a second one of the first one's shape."""
    database = Database("sm_90", "Fake GPU")
    chosen = [c for c in workload(side=320).cases.values() if c.problem.family == "conv2d"]
    for case in chosen[:cases]:
        problem = case.problem
        database.add(CaseRecord(
            case.name, "", case.signature, "conv2d", "tf32", shape_options(problem)
        ))  # fmt: skip
        for tile in space.sample(problem, 12, case.name):
            key = space.key_of(tile)
            time = space.predicted_us(problem, [tile], TRUE)[0]
            database.add(TimeRecord(case.name, key, time))
        database.add(TimeRecord(case.name, "nonsense=1", 1.0))
        database.add(TimeRecord(case.name, space.key_of(space.default(problem)), fault="spills"))
    first = chosen[0].name
    database.add(dataclasses.replace(database.cases[first], key="twin"))
    for record in list(database.times[first].values()):
        database.add(dataclasses.replace(record, key="twin", us=1.2 * record.us))
    return database


def test_calibration_reads_the_database_alone() -> None:
    constants, found = calibration.calibrate(database_of(30))
    assert found.shapes > 20
    assert found.functions == 31
    assert found.spearman > 0.97
    assert constants != DEFAULT
    text = constants_file.constants_text(constants, "Fake GPU", found)
    assert '"device": "Fake GPU"' in text
    assert "held-out shapes" in text


def test_calibration_needs_enough_shapes() -> None:
    with pytest.raises(UserError, match="too few to fit"):
        calibration.calibrate(database_of(3))


def test_functions_of_one_shape_are_kept_apart() -> None:
    data = calibration.measured_convolutions(database_of(3))
    assert len(data) == 4
    assert len({d.name for d in data}) <= 3
    twins = [d for d in data if d.name == data[0].name]
    assert twins[-1].us == pytest.approx(1.2 * twins[0].us)


def test_constants_survive_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = measured(0.05)
    constants = fit(data, DEVICE)
    score = quality([(d, predict_us(d.features, DEVICE, constants)) for d in data])
    (tmp_path / "tables").mkdir()
    file = tmp_path / "tables" / "constants.json"
    file.write_text(constants_file.constants_text(constants, "Fake GPU", score))
    monkeypatch.setattr(constants_file.resources, "files", lambda _: tmp_path)
    read = constants_file.shipped_calibration.__wrapped__()
    assert (read.device, read.quality) == ("Fake GPU", str(score))
    for item in data[:5]:
        ours = predict_us(item.features, DEVICE, read.constants)
        assert ours == pytest.approx(predict_us(item.features, DEVICE, constants), rel=5e-3)
    plain = dataclasses.replace(constants, correction=None)
    file.write_text(constants_file.constants_text(plain, "Fake GPU", score))
    assert constants_file.shipped_calibration.__wrapped__().constants.correction is None


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_shipped_constants_predict_every_gpu(target: str) -> None:
    constants = constants_file.shipped_calibration().constants
    gpu, shape = TARGETS[target], ConvShape(1, 40, 40, 64, 40, 40, 64, 3, 3, 1, 1, 1, 1)
    tiles = space.ranked(space.Problem("conv2d", shape, gpu, "tf32"), constants)
    us = space.predicted_us(space.Problem("conv2d", shape, gpu, "tf32"), list(tiles), constants)
    assert np.isfinite(us).all()
    assert 0.5 < min(us) < 20  # 118 MFLOP: a launch takes no less, the slowest GPU no longer
    assert min(us) == us[0]


def test_shipped_constants_are_whole() -> None:
    shipped = constants_file.shipped_calibration()
    assert all(np.isfinite(v) and v > 0 for v in shipped.constants.vector())
    assert (shipped.device is None) == (shipped.constants == DEFAULT)
    assert shipped.constants.correction is not None
    assert "held-out shapes" in shipped.quality
