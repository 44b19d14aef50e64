"""Commands as a user gives them, on a model small enough that its kernels run in microseconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from yolomlir.cli.main import main

SIDE = 64
"""Of the model's images: 84 anchors."""
SMALL = ["--imgsz", str(SIDE), "--device", "cpu"]
ALL = [*SMALL, "--conf", "0"]


def yolomlir_command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "yolomlir", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=120, check=False, **options
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command says before it exits with 2."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("yolomlir: error: "), err
    assert err.count("\n") == 1, err
    return err


def detections(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    """What `predict --json -` finds in its one image."""
    assert main(["predict", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)[0]["detections"]
