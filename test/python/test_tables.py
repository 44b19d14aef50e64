"""Tables on terminals of any width: figures are never cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from yolomlir.evaluate.outputs import print_table

HEADER = ("engine", "wall ms", "min", "p99")
ROWS = [
    ["yolomlir sm_90 tf32 (cuda)", "1234.567", "1200.125", "1300.875"],
    ["[b]torch[/b]", "2.5", "2", "3"],
]


def printed(width: int, *optional: str, title: str = "") -> str:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width), HEADER, ROWS, title=title, optional=optional)
    return stream.getvalue()


def test_everything_is_there_where_there_is_room() -> None:
    text = printed(80, "p99", title="Times [s]")
    for part in (*HEADER, *ROWS[0], *ROWS[1], "Times [s]"):
        assert part in text
    assert "left out" not in text


@pytest.mark.parametrize("width", [20, 40, 55, 60])
def test_figures_are_whole_on_a_narrow_terminal(width: int) -> None:
    """Columns are left out by name, the least important first, and the others keep every digit."""
    text = printed(width, "p99", "min")
    assert "1234.567" in text
    gone = [name for name in ("min", "p99") if f"{name}" not in text.split("left out")[0]]
    for name, figure in (("min", "1200.125"), ("p99", "1300.875")):
        assert (figure in text) == (name not in gone)
    if gone:
        assert f"the terminal is too narrow: {', '.join(gone)}" in text


def test_the_first_optional_column_goes_first() -> None:
    text = printed(50, "p99", "min")
    assert "1200.125" in text
    assert "1300.875" not in text


def test_the_name_is_folded_where_nothing_may_be_left_out() -> None:
    text = printed(54)
    assert all(figure in text for figure in ROWS[0][1:])
    assert "yolomlir sm_90 tf32 (cuda)" not in text
    assert "(cuda)" in text
