"""An evaluation that was interrupted goes on, from its own journal alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coco_protocol import (
    MODEL,
    ScriptedDetector,
    evaluated,
    noisy_rows,
    settings,
)

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.coco import evaluate
from yolomlir.evaluate.datasets import load_dataset


def test_interrupted_run_goes_on(tmp_path, few_categories) -> None:
    journal = tmp_path / "cache" / "journal.jsonl"
    whole = evaluated(few_categories, noisy_rows)
    first = ScriptedDetector(few_categories, noisy_rows, fail_after=3)
    options = settings(journal=journal)
    with pytest.raises(KeyboardInterrupt):
        evaluate(first, load_dataset(few_categories), options, MODEL)
    assert len(first.seen) == 9
    # As a kill leaves it: the last line cut off.
    journal.write_bytes(journal.read_bytes()[:-20])
    second = ScriptedDetector(few_categories, noisy_rows)
    progress: list[tuple[str, int, int]] = []
    result = evaluate(
        second, load_dataset(few_categories), options, MODEL, progress=lambda *a: progress.append(a)
    )
    assert len(second.seen) == 16 - 8
    assert result.resumed == 8
    assert result.detections == whole.detections
    assert result.figures == whole.figures
    assert progress[0] == ("evaluating", 8, 16)
    assert ("evaluating", 16, 16) in progress
    assert not journal.exists()


def test_journal_of_another_run_is_not_continued(tmp_path, few_categories) -> None:
    journal = tmp_path / "journal.jsonl"
    options = settings(journal=journal, keep_journal=True)
    evaluate(
        ScriptedDetector(few_categories, noisy_rows), load_dataset(few_categories), options, MODEL
    )
    assert journal.exists()
    again = ScriptedDetector(few_categories, noisy_rows)
    evaluate(again, load_dataset(few_categories), options, MODEL)
    assert again.seen == []
    for change, model in [
        ({"confidence": 0.5}, MODEL),
        ({"letterbox": "predict"}, MODEL),
        ({}, replace(MODEL, digest="other")),
    ]:
        before = journal.read_bytes()
        other = ScriptedDetector(few_categories, lambda *_: [])
        other._by_pixels = _AnyImage()  # another letterbox gives other pixels
        evaluate(other, load_dataset(few_categories), replace(options, **change), model)
        assert len(other.seen) == 16
        journal.write_bytes(before)


class _AnyImage(dict):
    def __missing__(self, key: bytes) -> int:
        return 1000


def test_foreign_file_is_not_overwritten_by_a_journal(tmp_path, few_categories) -> None:
    path = tmp_path / "thesis.txt"
    for text in ("years of work\n", '{"a": 1}\n'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a journal"):
            evaluated(few_categories, noisy_rows, journal=path)
        assert path.read_text() == text
    with pytest.raises(UserError, match="digest"):
        evaluated(few_categories, noisy_rows, replace(MODEL, digest=""), journal=path)
