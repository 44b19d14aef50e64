"""Runs lit's tests under pytest, an item a file, so that one command runs everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ("dialects", "passes", "codegen", "opt")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (TESTS / folder).rglob("*")
    if path.suffix in (".mlir", ".test") and "Inputs" not in path.parts
)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What lit says of every selected file, from one run of lit: test name to its record."""
    chosen = [
        str(item.callspec.params["path"])
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    folder = tmp_path_factory.mktemp("lit")
    report = folder / "report.json"
    command = [
        sys.executable,
        "-c",
        "from lit.main import main; main()",
        "-q",
        "-o",
        str(report),
        *chosen,
    ]
    environment = {**os.environ, "YOLOMLIR_LIT_OUTPUT": str(folder / "out")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert report.exists(), run.stdout + run.stderr
    tests = json.loads(report.read_text())["tests"]
    return {test["name"].partition(" :: ")[2]: test for test in tests}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_lit(path: Path, results: dict) -> None:
    record = results[path.relative_to(TESTS).as_posix()]
    if record["code"] == "UNSUPPORTED":
        pytest.skip(record["output"] or "unsupported here")
    assert record["code"] in ("PASS", "XFAIL"), record["output"]


def test_there_are_files() -> None:
    assert FILES
