"""The pass reference is current; `new_pass` makes a pass that passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from yolomlir.tools import new_pass, pass_reference

from yolomlir.diagnostics import UserError

CHECKOUT = Path(__file__).resolve().parents[2]


def test_reference_is_current() -> None:
    page = CHECKOUT / "docs" / "passes.md"
    assert page.read_text() == pass_reference.reference(), (
        "docs/passes.md is stale: python -m yolomlir.tools.pass_reference"
    )


def test_reference_check_tells_a_stale_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "passes.md"
    assert pass_reference.main([str(page), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert pass_reference.main([str(page)]) == 0
    assert pass_reference.main([str(page), "--check"]) == 0


@pytest.mark.parametrize("name", ["yolo-fold-bias", "fold_bias", "FoldBias"])
def test_new_pass_takes_any_form_of_a_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "test" / "passes").mkdir(parents=True)
    files = new_pass.create(name, tmp_path)
    assert [f.relative_to(tmp_path).as_posix() for f in files] == [
        "passes/fold_bias.py",
        "test/passes/fold_bias.mlir",
    ]
    with pytest.raises(UserError, match="there already"):
        new_pass.create(name, tmp_path)


@pytest.mark.parametrize("name", ["", "yolo-", "9lives", "a/b", "fold bias"])
def test_new_pass_refuses_what_is_no_name(name: str, tmp_path: Path) -> None:
    assert new_pass.main([name, "--root", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


def test_new_pass_in_a_copy_is_registered_and_passes_its_tests(tmp_path: Path) -> None:
    for folder in ("yolomlir", "dialects", "passes", "tools"):
        ignore = shutil.ignore_patterns("__pycache__", "*.npy", "*.png", "*.jpg")
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=ignore)
    tests = tmp_path / "test"
    (tests / "passes").mkdir(parents=True)
    (tests / "python").mkdir()
    shutil.copy(CHECKOUT / "test" / "lit.cfg.py", tests)
    names = tests / "python" / "test_pass_names.py"
    shutil.copy(CHECKOUT / "test" / "python" / "test_pass_names.py", names)
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (
        ["-m", "yolomlir.tools.new_pass", "yolo-fold-bias", "--root", str(tmp_path)],
        ["-c", "from lit.main import main; main()", "-v", str(tests / "passes")],
        ["-m", "pytest", "-q", str(names), "-k", "yolo-fold-bias", "-p", "no:cacheprovider"],
        ["-m", "ruff", "check", "--isolated", str(tmp_path / "passes" / "fold_bias.py")],
    ):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
