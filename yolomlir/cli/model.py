"""The model that a command line names, compiled as its options say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from yolomlir.api import Model, compile
from yolomlir.cli.options import device_target
from yolomlir.cli.progress import progress_bar


def open_model(path: str | Path, args: argparse.Namespace, **changes: Any) -> Model:
    """Compile (or load) a model file for `args`' compile and device options, with progress.

    changes: options of `yolomlir.compile` that replace those of `args`. Options that were not given
    are left to the API, which takes a compiled model's own.
    """
    options: dict[str, Any] = {
        "precision": args.precision,
        "imgsz": args.imgsz,
        "max_det": args.max_det,
        "threads": args.threads,
    }
    if "target" not in changes:
        options["target"] = device_target(args.device)
    given = {name: value for name, value in (options | changes).items() if value is not None}
    with progress_bar() as progress:
        return compile(path, cache=not args.no_cache, progress=progress, **given)
