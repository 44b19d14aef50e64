"""One name everywhere: a pass's file, class, flag and lit test; its example is tested."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from yolomlir.passes.base import Pass, parse_pass
from yolomlir.tools.pass_reference import describe, own_passes

PASSES = own_passes()
TESTS = Path(__file__).resolve().parents[1] / "passes"


def _flag(class_name: str) -> str:
    return "yolo-" + re.sub(r"(?<!^)(?=[A-Z])", "-", class_name).lower()


@pytest.fixture(params=list(PASSES))
def cls(request: pytest.FixtureRequest) -> type[Pass]:
    return PASSES[request.param]


def test_file_class_and_flag_are_one_name(cls: type[Pass]) -> None:
    stem = cls.__module__.rpartition(".")[2]
    assert cls.name == _flag(cls.__name__)
    assert cls.name == f"yolo-{stem.replace('_', '-')}"


def test_one_pass_a_file() -> None:
    assert len({cls.__module__ for cls in PASSES.values()}) == len(PASSES)


def test_options_make_a_pipeline_that_parses_to_the_same_pass(cls: type[Pass]) -> None:
    changed = {"int": 7, "float": 0.5, "str": "x", "bool": None}
    values = {}
    for field in dataclasses.fields(cls):
        values[field.name] = not field.default if field.type == "bool" else changed[str(field.type)]
    for pass_ in (cls(), cls(**values)):
        assert parse_pass(pass_.spec()) == pass_


def test_docstring_has_every_part(cls: type[Pass]) -> None:
    doc = describe(cls)
    assert doc.summary.endswith(".")
    assert {"Before", "After", "Example"} <= set(doc.sections), cls
    options = {field.name.replace("_", "-") for field in dataclasses.fields(cls)}
    assert set(doc.items["Options"]) == options


def test_example_is_in_the_lit_test(cls: type[Pass]) -> None:
    path = TESTS / f"{cls.__module__.rpartition('.')[2]}.mlir"
    example = describe(cls).sections["Example"].strip()
    assert f"--{cls.name}" in example
    assert example in path.read_text()
