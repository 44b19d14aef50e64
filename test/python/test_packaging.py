"""What is in the checkout is in the package."""

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("yolomlir/**/__init__.py")
    }
    found |= {f"yolomlir.{name}" for name in ("dialects", "passes", "tools")}
    assert set(settings["packages"]) == found
