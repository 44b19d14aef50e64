"""Every `YOLOMLIR_*` environment variable: type, default, meaning, part of cache keys or not.

A field of `Settings` named `cache_dir` is the variable `YOLOMLIR_CACHE_DIR`. To add one, add a
field; `settings()` reads the environment at every call, so that a change takes effect at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from yolomlir.diagnostics import UserError

PREFIX = "YOLOMLIR_"
_OF_TESTS = f"{PREFIX}TEST_"


def _usable_cpus() -> int:
    """CPUs that this process may run on; fewer than the machine has under taskset or in a pod."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _log_level(text: str) -> str:
    level = text.upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(text)
    return level


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _url(text: str) -> str:
    if not text.startswith(("https://", "http://")):
        raise ValueError(text)
    return text.rstrip("/")


def _variable(
    meaning: str, parse: Callable[[str], Any], expected: str, *, cache_key: bool = False
) -> dict[str, Any]:
    """What is known of a variable besides its type and default.

    expected: what a value has to be, for the error. cache_key: whether compiled code or its results
    depend on it, so that caches must keep its values apart.
    """
    return {"meaning": meaning, "parse": parse, "expected": expected, "cache_key": cache_key}


@dataclass(frozen=True)
class Settings:
    """The settings of this process, as its environment has them."""

    cache_dir: Path = field(
        default_factory=lambda: platformdirs.user_cache_path("yolomlir"),
        metadata=_variable(
            "Folder of compiled artifacts, kernels, tuning results and downloaded checkpoints.",
            lambda text: Path(text).expanduser(),
            "a folder",
        ),
    )
    release_url: str = field(
        default="https://github.com/ultralytics/assets/releases/download/v8.4.0",
        metadata=_variable(
            "Where `yolo26n.pt` and its sisters are downloaded from when no such file is there.",
            _url,
            "an http or https URL",
        ),
    )
    num_threads: int = field(
        default_factory=_usable_cpus,
        metadata=_variable(
            "Threads of the CPU backend; by default the CPUs that the process may use.",
            _positive,
            "a whole number of at least 1",
        ),
    )
    cuda_sync: bool = field(
        default=False,
        metadata=_variable(
            "Launch CUDA kernels one by one and wait for each, so that an error names its layer.",
            _flag,
            "1 or 0",
        ),
    )
    log_level: str = field(
        default="WARNING",
        metadata=_variable(
            "What the command line logs: DEBUG, INFO, WARNING, ERROR.",
            _log_level,
            "the name of a logging level",
        ),
    )


def variable_name(field: str) -> str:
    """The environment variable of a field of `Settings`."""
    return PREFIX + field.upper()


def settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. An empty variable counts as unset. Raises UserError for a bad one."""
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Settings):
        name = variable_name(item.name)
        text = source.get(name, "")
        if not text:
            continue
        try:
            values[item.name] = item.metadata["parse"](text)
        except ValueError:
            expected = item.metadata["expected"]
            raise UserError(f"is '{text}'; expected {expected}", where=name) from None
    return Settings(**values)


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """The variables that begin as ours do and are none, each with what to do about it."""
    source = os.environ if environment is None else environment
    known = [item.name.upper() for item in dataclasses.fields(Settings)]
    found = []
    for name in sorted(source):
        own = name.removeprefix(PREFIX)
        if own == name or own in known or name.startswith(_OF_TESTS):
            continue
        close = difflib.get_close_matches(own, known, n=1)
        listed = [PREFIX + other for other in close or known]
        hint = f"did you mean {listed[0]}?" if close else f"there are {', '.join(listed)}"
        found.append((name, hint))
    return found


def cache_key(current: Settings | None = None) -> tuple[tuple[str, str], ...]:
    """Name and value of the settings that results depend on, for the key of a cache."""
    current = settings() if current is None else current
    return tuple(
        (item.name, str(getattr(current, item.name)))
        for item in dataclasses.fields(Settings)
        if item.metadata["cache_key"]
    )


def describe() -> list[tuple[str, str, str, bool]]:
    """A row a variable: name, current value, meaning, whether it is part of cache keys."""
    current = settings()
    return [
        (
            variable_name(item.name),
            str(getattr(current, item.name)),
            str(item.metadata["meaning"]),
            bool(item.metadata["cache_key"]),
        )
        for item in dataclasses.fields(Settings)
    ]
