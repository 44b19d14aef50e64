"""Environment variables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from yolomlir.diagnostics import UserError
from yolomlir.settings import (
    Settings,
    cache_key,
    describe,
    settings,
    unknown_variables,
    variable_name,
)


def test_defaults_need_no_environment() -> None:
    current = settings({})
    assert current.num_threads >= 1
    assert current.cache_dir.name == "yolomlir"
    assert current.release_url.startswith("https://github.com/ultralytics/assets/")


def test_values_are_read_and_typed() -> None:
    current = settings(
        {
            "YOLOMLIR_CACHE_DIR": "~/c",
            "YOLOMLIR_NUM_THREADS": "3",
            "YOLOMLIR_LOG_LEVEL": "debug",
            "YOLOMLIR_RELEASE_URL": "http://127.0.0.1:1/x/",
        }
    )
    assert current.cache_dir == Path("~/c").expanduser()
    assert current.num_threads == 3
    assert current.log_level == "DEBUG"
    assert current.release_url == "http://127.0.0.1:1/x"


def test_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOMLIR_NUM_THREADS", "5")
    assert settings().num_threads == 5
    monkeypatch.setenv("YOLOMLIR_NUM_THREADS", "")
    assert settings().num_threads == settings({}).num_threads


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("YOLOMLIR_NUM_THREADS", "0"),
        ("YOLOMLIR_NUM_THREADS", "many"),
        ("YOLOMLIR_LOG_LEVEL", "loud"),
        ("YOLOMLIR_RELEASE_URL", "ftp://x"),
    ],
)
def test_bad_values_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}: is '{value}'; expected"):
        settings({name: value})


def test_every_setting_is_described() -> None:
    rows = describe()
    assert [row[0] for row in rows] == [variable_name(f.name) for f in dataclasses.fields(Settings)]
    assert all(row[2] for row in rows)
    assert [name for name, _ in cache_key()] == [
        field.name for field in dataclasses.fields(Settings) if field.metadata["cache_key"]
    ]


def test_variables_that_are_no_settings_are_found() -> None:
    given = {"YOLOMLIR_NUM_THREAD": "1", "YOLOMLIR_X": "", "YOLOMLIR_TEST_DATA": "", "HOME": ""}
    (typo, hint), (other, every) = unknown_variables({**given, "YOLOMLIR_CUDA_SYNC": "1"})
    assert (typo, hint) == ("YOLOMLIR_NUM_THREAD", "did you mean YOLOMLIR_NUM_THREADS?")
    assert other == "YOLOMLIR_X"
    assert "YOLOMLIR_CACHE_DIR" in every
