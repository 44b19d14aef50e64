"""Checking the cost model on a GPU: what is measured, and how it is judged."""

from __future__ import annotations

import json

import pytest
from autotune_fakes import TRUE, FakeBuilder, FakeMeasure, part

from yolomlir.autotune import model_check, space
from yolomlir.autotune.cost_model import DEFAULT
from yolomlir.autotune.database import CaseRecord, Database, TimeRecord
from yolomlir.autotune.model_check import TOP, Checked, check_model, held_out_constants, summary
from yolomlir.autotune.search import shape_options

LOAD = part(8)
CONVOLUTIONS = [c for c in LOAD.cases.values() if c.problem.family == "conv2d"]


def database(measure: FakeMeasure, tiles: int = 6) -> Database:
    """What an earlier session, of another compiler version, knows of all functions but the last."""
    known = Database("sm_90", "Fake GPU")
    for case in CONVOLUTIONS[:-1]:
        key = "old " + case.name
        options = shape_options(case.problem)
        known.add(CaseRecord(key, "", case.signature, "conv2d", "tf32", options))
        for tile in space.sample(case.problem, tiles, case.name):
            name = space.key_of(tile)
            known.add(TimeRecord(key, name, measure.us(case, name)))
    return known


def test_the_first_tiles_of_the_whole_space_are_measured() -> None:
    measure, builder = FakeMeasure(LOAD), FakeBuilder()
    found = check_model(LOAD, database(measure), builder, measure, ({}, TRUE))
    assert [c.function for c in found] == [c.name for c in CONVOLUTIONS[:-1]]
    for case in CONVOLUTIONS[:-1]:
        first = space.ranked_keys(case.problem, TRUE)[:TOP]
        assert {(case.name, key) for key in first} <= set(measure.timed)
        default = space.key_of(space.default(case.problem))
        assert next(key for name, key in measure.checked if name == case.name) == default
    assert all(c.close and c.us >= c.best_us for c in found)  # the fake GPU's own constants


def test_a_model_that_is_wrong_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = {c.problem: space.ranked_keys(c.problem, TRUE) for c in CONVOLUTIONS}
    measure, known = FakeMeasure(LOAD), Database("sm_90", "Fake GPU")
    expected = []
    for case in CONVOLUTIONS:
        options = shape_options(case.problem)
        known.add(CaseRecord(case.name, "", case.signature, "conv2d", "tf32", options))
        us = [measure.us(case, key) for key in orders[case.problem]]
        for key, time in zip(orders[case.problem], us, strict=True):
            known.add(TimeRecord(case.name, key, time))
        expected.append(min(us[-TOP:]) <= 1.05 * min(us))
    monkeypatch.setattr(space, "ranked_keys", lambda problem, _: orders[problem][::-1])
    found = check_model(LOAD, known, FakeBuilder(), measure, ({}, TRUE))
    assert [c.close for c in found] == expected
    assert expected.count(False) > len(expected) // 2
    assert not any(c.new for c in found)


def test_tiles_with_faults_do_not_count() -> None:
    measure, builder = FakeMeasure(LOAD), FakeBuilder()
    case = CONVOLUTIONS[0]
    first = list(space.ranked_keys(case.problem, TRUE)[:TOP])
    default = space.key_of(space.default(case.problem))
    rest = [key for key in first if key != default]
    builder.faults, measure.wrong, measure.broken = {rest[0]}, {rest[1]}, {rest[2]}
    check_model(part(1), database(measure), builder, measure, ({}, TRUE))
    timed = {key for name, key in measure.timed if name == case.name}
    assert not timed & set(rest[:3])
    assert set(rest[3:]) <= timed


def test_constants_are_fitted_without_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def fake(data: list[model_check.fitting.Measured], device: object) -> object:
        seen.append({d.name for d in data})
        return DEFAULT

    monkeypatch.setattr(model_check.fitting, "fit", fake)
    known = database(FakeMeasure(LOAD))
    by_shape, _ = held_out_constants(known, "tf32")
    names = seen[-1]  # the last fit is of all
    assert set(by_shape) == names
    assert sum(len(names - fold) for fold in seen[:-1]) == len(names)


def test_the_summary_counts_and_compares() -> None:
    rows = [
        Checked("a", "", 1.04, 1.0, 9, False),
        Checked("b", "", 1.2, 1.0, 9, True),
        Checked("c", "", 1.0, 1.0, 9, True),
        Checked("d", "", 1.0, 1.0, 9, False),
    ]
    text = summary(rows)
    assert "4 convolutions" in text
    assert "for 3 (75 %)" in text
    assert "median loss 2.0 %, worst 20 %; 2 fastest ones were new" in text
    assert summary([]) == "nothing was measured"
    assert json.dumps([r.close for r in rows]) == "[true, false, true, true]"
