"""`python -m yolomlir.autotune.device_session`, without a GPU: what becomes of several models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from yolomlir.autotune import device_session
from yolomlir.autotune.tables import MEASURED, Table, TableEntry, load_table, table_of

TILES = {
    "seeded:n": {"shared": "of n", "n alone": "of n"},
    "seeded:s": {"shared": "of s", "s alone": "of s"},
}


def table(tiles: dict[str, str]) -> Table:
    rows = [("tf32", name, TableEntry(tile, 1.0, 2.0)) for name, tile in tiles.items()]
    return table_of("sm_90", "NVIDIA H200", MEASURED, rows)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(target="sm_90", name="NVIDIA H200")
    monkeypatch.setattr("yolomlir.runtime.cuda_driver.require_device", lambda: device)
    builder = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(device_session, "ProcessBuilder", lambda workers: builder)
    monkeypatch.setattr(device_session, "_tune", lambda name, *rest: table(TILES[name]))


def tuned(folder: Path, *models: str) -> dict[str, str]:
    """The tiles of the table that a session leaves."""
    assert device_session.main(["--weights", *models, "--out", str(folder)]) == 0
    left = load_table(folder / "sm_90.json")
    assert left is not None
    return {name: entry.tile for name, entry in left.entries["tf32"].items()}


def test_of_two_models_the_first_keeps_its_tiles(tmp_path: Path) -> None:
    expected = {"shared": "of n", "n alone": "of n", "s alone": "of s"}
    assert tuned(tmp_path, "seeded:n", "seeded:s") == expected
    other = tuned(tmp_path / "other", "seeded:s", "seeded:n")
    assert other == {**expected, "shared": "of s"}


def test_a_later_session_replaces_what_it_tunes_again(tmp_path: Path) -> None:
    table({"shared": "old", "n alone": "old", "gone": "old"}).save(tmp_path / "sm_90.json")
    assert tuned(tmp_path, "seeded:n") == {"shared": "of n", "n alone": "of n", "gone": "old"}
