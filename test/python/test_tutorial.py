"""Every command of docs/tutorial.md runs, one after the other, as a reader would run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
COPIED = ("yolomlir", "dialects", "passes", "tools", "test/passes", "pyproject.toml")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy to work in, since the tutorial adds a pass."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy(source, target)
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, module in (("yolomlir", "yolomlir"), ("yolomlir-opt", "yolomlir.tools.opt")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    (scripts / "python").symlink_to(sys.executable)
    return tmp_path


def steps() -> list[list[str]]:
    """What to execute, in order; installation is what runs these tests."""
    found = []
    # Images of 64 pixels show the same in less time, with kernels that other tests compile too.
    for language, text in _BLOCK.findall(TUTORIAL.read_text().replace("320", "64")):
        if language == "python":
            found.append([sys.executable, "-c", text])
        if language == "console":
            lines = text.splitlines()
            assert all(line.startswith("$ ") for line in lines), text
            found += [["sh", "-ec", line[2:]] for line in lines]
    return found


@pytest.mark.usefixtures("cache")
def test_every_command_of_the_tutorial(checkout: Path) -> None:
    pytest.importorskip("matplotlib")
    path = os.pathsep.join([str(checkout / "bin"), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout)}
    commands = steps()
    assert len(commands) > 12
    for command in commands:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    for name in ("boxes.json", "out/photo.jpg", "model.ylm", "linalg.mlir", "arena.svg"):
        assert (checkout / name).stat().st_size > 0, name
    assert (checkout / "passes" / "count_activations.py").exists()


def test_the_documents_link_to_files_that_exist() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
