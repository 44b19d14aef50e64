"""The tuning database: kept line by line, never fatal, and never taken for what it is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from yolomlir.autotune import database as database_module
from yolomlir.autotune import signature
from yolomlir.autotune.database import CaseRecord, Database, TimeRecord, WinnerRecord
from yolomlir.autotune.tables import Table, TableEntry, load_table, table_of

CASE = CaseRecord("k1", "digest", "conv2d …", "conv2d", "tf32", {"batch": 1})
TIME = TimeRecord("k1", "block_m=64", 3.5, 0.1)
WINNER = WinnerRecord("k1", "block_m=64", 3.4, 4.0, "block_m=32")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning" / "sm_90-fake.jsonl"


def filled(path: Path) -> Database:
    database = Database.open("sm_90", "Fake", path)
    for record in (CASE, TIME, WINNER):
        database.add(record)
    return database


def test_records_come_back(path: Path) -> None:
    written = filled(path)
    written.add(TimeRecord("k1", "block_m=64", 3.3, final=True))
    again = Database.open("sm_90", "Fake", path)
    assert again.cases == {"k1": CASE}
    assert again.times == {"k1": {"block_m=64": TimeRecord("k1", "block_m=64", 3.3, final=True)}}
    assert again.winners == {"k1": WINNER}
    assert again.damaged == 0


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_killed_run_loses_its_last_line_at_most(path: Path, cut: int) -> None:
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    again = Database.open("sm_90", "Fake", path)
    assert again.cases == {"k1": CASE}
    assert again.times["k1"]["block_m=64"] == TIME
    again.add(WinnerRecord("k2", "a=1", 1.0, 1.0, "a=1"))
    last = Database.open("sm_90", "Fake", path)
    assert "k2" in last.winners  # not glued to the torn line
    assert last.damaged == (0 if cut == 1 else 1)


def test_damaged_lines_are_left_out_and_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(path)
    with path.open("a") as file:
        file.write("not json\n[1, 2]\n" + '{"kind": "time", "key": "k1"}\n')
        file.write('{"kind": "time", "key": "k1", "tile": "t", "us": "fast"}\n')
        file.write('{"kind": "spell", "key": "k1"}\n\x00\xff\n')
    with caplog.at_level(logging.WARNING):
        again = Database.open("sm_90", "Fake", path)
    assert again.winners == {"k1": WINNER}
    assert list(again.times["k1"]) == ["block_m=64"]
    assert again.damaged == 6
    assert f"{path}: 6 damaged lines were left out" in caplog.text


@pytest.mark.parametrize(
    "content",
    ["", "garbage\n", '{"kind": "header", "format": 1, "target": "sm_120", "device": "Fake"}\n',
     '{"kind": "header", "format": 99, "target": "sm_90", "device": "Fake"}\n'],
)  # fmt: skip
def test_a_foreign_file_is_set_aside(
    path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text(content)
    database = Database.open("sm_90", "Fake", path)
    assert "set aside" in caplog.text
    assert path.with_suffix(".foreign").read_text() == content
    database.add(CASE)
    assert Database.open("sm_90", "Fake", path).cases == {"k1": CASE}


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    database = Database.open("sm_90", "Fake", tmp_path / "file" / "db.jsonl")
    database.add(CASE)
    database.add(WINNER)
    assert database.winners == {"k1": WINNER}
    assert caplog.text.count("cannot be written") == 1


def test_two_writers_do_not_mix(path: Path) -> None:
    first, second = filled(path), Database.open("sm_90", "Fake", path)
    for number in range(50):
        first.add(TimeRecord("k1", f"a={number}", 1.0))
        second.add(TimeRecord("k1", f"b={number}", 2.0))
    again = Database.open("sm_90", "Fake", path)
    assert len(again.times["k1"]) == 101
    assert again.damaged == 0


def test_stale_means_the_same_function_under_another_key(path: Path) -> None:
    database = filled(path)
    assert database.stale("digest", "another key")
    assert not database.stale("digest", "k1")
    assert not database.stale("another function", "another key")


def test_the_key_covers_everything_that_can_change_the_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = ("text", "sm_90", "H200", "tf32", "13.0")
    keys = {signature.entry_key(*base)}
    for place, other in enumerate(("text2", "sm_120", "H100", "fp32", "13.1")):
        changed = [*base]
        changed[place] = other
        keys.add(signature.entry_key(*changed))
    monkeypatch.setattr(signature, "SPACE_VERSION", 10**6)
    keys.add(signature.entry_key(*base))
    monkeypatch.undo()
    monkeypatch.setattr(signature, "code_fingerprint", lambda: "another compiler")
    keys.add(signature.entry_key(*base))
    assert len(keys) == 8


def test_every_database_of_the_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    assert list(database_module.databases()) == []
    for target, device in (("sm_90", "NVIDIA H200"), ("sm_90", "NVIDIA H100"), ("sm_120", "5070")):
        Database.open(target, device).add(WINNER)
    (tmp_path / "tuning" / "sm_90-noise.jsonl").write_text("noise\n")
    found = [(d.target, d.device) for d in database_module.databases("sm_90")]
    assert found == [("sm_90", "NVIDIA H100"), ("sm_90", "NVIDIA H200")]
    assert len(list(database_module.databases())) == 3
    assert database_module.path_for("sm_90", "NVIDIA H200").name == "sm_90-nvidia-h200.jsonl"


def test_a_database_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_module, "folder", lambda: tmp_path)
    (tmp_path / "sm_90-a.jsonl").mkdir()  # opening it is an OSError, for any user
    filled(tmp_path / "sm_90-fake.jsonl")
    assert [d.device for d in database_module.databases("sm_90")] == ["Fake"]
    assert "sm_90-a.jsonl: cannot be read" in caplog.text


# ---- tables -------------------------------------------------------------------------------------


def table() -> Table:
    rows = [("tf32", "conv2d a", TableEntry("block_m=64", 3.1234, 4.0)),
            ("fp32", "conv2d b", TableEntry("block_m=32", 1.0, 1.0))]  # fmt: skip
    return table_of("sm_90", "NVIDIA H200", "measured", rows, "a note")


def test_a_table_comes_back(tmp_path: Path) -> None:
    table().save(tmp_path / "t.json")
    again = load_table(tmp_path / "t.json")
    assert again is not None
    assert again.find("tf32", "conv2d a") == TableEntry("block_m=64", 3.123, 4.0)
    assert again.find("fp32", "conv2d a") is None
    assert (again.kind, again.device, again.note) == ("measured", "NVIDIA H200", "a note")


def test_merged_tables_have_the_later_entries() -> None:
    other = table_of("sm_90", "NVIDIA H200", "measured",
                     [("tf32", "conv2d a", TableEntry("block_m=16", 1.0, 2.0)),
                      ("tf32", "conv2d c", TableEntry("block_m=16", 1.0, 2.0))])  # fmt: skip
    both = table().merged(other)
    assert sorted(both.entries["tf32"]) == ["conv2d a", "conv2d c"]
    assert both.entries["tf32"]["conv2d a"].tile == "block_m=16"
    assert sorted(both.entries) == ["fp32", "tf32"]
    assert both.find("fp16", "conv2d a") == both.find("tf32", "conv2d a")


@pytest.mark.parametrize("damage", ["space", "format", "entries", "row"])
def test_a_table_that_is_not_one_is_not_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    table().save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    if damage == "row":
        data["entries"]["tf32"]["conv2d a"] = ["block_m=64"]
    elif damage == "entries":
        del data["entries"]
    else:
        data[damage] = 999
    (tmp_path / "t.json").write_text(json.dumps(data))
    assert load_table(tmp_path / "t.json") is None
    assert "not used" in caplog.text
    assert load_table(tmp_path / "missing.json") is None
