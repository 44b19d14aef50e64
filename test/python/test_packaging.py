"""What an ordinary install contains: every package, and every file that is not Python."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"yolomlir": "yolomlir", "yolomlir.dialects": "dialects", "yolomlir.passes": "passes"}
FOLDERS["yolomlir.tools"] = "tools"


def _setuptools() -> dict:
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _packages() -> dict[str, Path]:
    """Every folder with Python files, by the package's name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *parts))] = file.parent
    return found


def test_every_package_is_installed() -> None:
    assert set(_setuptools()["packages"]) == set(_packages())


def test_every_data_file_is_installed() -> None:
    patterns = _setuptools()["package-data"]
    listed = {
        file
        for package, folder in _packages().items()
        for pattern in patterns.get(package, [])
        for file in folder.glob(pattern)
    }
    ignored = {".py", ".pyc"}
    for folder in FOLDERS.values():
        files = [f for f in (ROOT / folder).rglob("*") if f.is_file()]
        for file in files:
            assert file.suffix in ignored or file in listed, file
