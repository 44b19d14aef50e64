"""Which part of the compiler may import which, lazily or not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import yolomlir

PACKAGE = Path(yolomlir.__file__).parent


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importing(part: str, other: str) -> list[str]:
    """The files of a part of the package that import something of another part."""
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files
    return [str(f) for f in files if any(f"{n}.".startswith(f"{other}.") for n in imported(f))]


def test_the_tuner_imports_the_code_generators_and_never_the_other_way_round() -> None:
    assert importing("codegen", "yolomlir.autotune") == []
    assert importing("autotune", "yolomlir.codegen")
