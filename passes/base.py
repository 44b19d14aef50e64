"""What a pass is: a frozen dataclass whose fields are its options, registered by its name."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import AbstractWeights, WeightStore
from yolomlir.target import TARGETS, Target

REGISTRY: dict[str, type[Pass]] = {}
"""Every pass by its name, filled when `yolomlir.passes.registry` is imported."""


@dataclass
class PassContext:
    """What a pass may use besides the IR; one for a whole pipeline.

    statistics: counts by pass name, added up over the pipeline (`statistics[name]["elided"] += 1`).
    """

    weights: WeightStore = field(default_factory=AbstractWeights)
    target: Target = TARGETS["cpu"]
    statistics: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, pass_: Pass, statistic: str, by: int = 1) -> None:
        """Add to a statistic of a pass."""
        self.statistics.setdefault(pass_.name, Counter())[statistic] += by


@dataclass(frozen=True)
class Pass:
    """Base of every pass. A subclass is one file; its docstring is its page in the reference.

    The docstring's first line says what it does; sections `Before:`, `After:`, `Statistics:` and
    `Example:` follow, the example being a lit test as well. Fields are options: `max_chain: int
    = 8` is `{max-chain=8}` in a pipeline. Supported types: int, float, bool, str.
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if not cls.name:
            return
        if cls.name in REGISTRY and REGISTRY[cls.name].__qualname__ != cls.__qualname__:
            raise TypeError(f"pass '{cls.name}' is already registered by {REGISTRY[cls.name]!r}")
        REGISTRY[cls.name] = cls

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Rewrite `module` in place. Raises UserError where the input breaks a precondition."""
        raise NotImplementedError

    def require_positive(self, *options: str) -> None:
        """Raise UserError, naming the flag, for the first of these options that is below 1."""
        for option in options:
            value = getattr(self, option)
            if value < 1:
                flag = option.replace("_", "-")
                raise UserError(f"'{self.name}': {flag} is {value}; it must be at least 1")

    def spec(self) -> str:
        """The pass as pipeline text, options that differ from their defaults included."""
        options = {
            f.name.replace("_", "-"): _option_text(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        text = " ".join(f"{key}={value}" for key, value in options.items())
        return f"{self.name}{{{text}}}" if text else self.name


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline, ready to run.

    text: the pass as written, options included. anchors: the ops it is nested in, outermost first,
    `builtin.module` left out. own: the pass, when it is not an upstream one.
    """

    text: str
    anchors: tuple[str, ...] = ()
    own: Pass | None = None

    @property
    def name(self) -> str:
        """The pass's flag, without options."""
        return self.text.partition("{")[0]

    @property
    def element(self) -> str:
        """The pass in its anchors, as an element of a `builtin.module` pipeline."""
        text = self.text
        for anchor in reversed(self.anchors):
            text = f"{anchor}({text})"
        return text


def _option_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_SPEC = re.compile(r"(?P<name>[\w-]+)(?:\{(?P<options>[^{}]*)\})?")


def parse_pass(text: str) -> Pass:
    """A pass from `name{option=value other=value}`. Raises UserError for what it does not know."""
    match = _SPEC.fullmatch(text.strip())
    if match is None or match["name"] not in REGISTRY:
        name = match["name"] if match else text
        raise UserError(f"unknown pass '{name}'", hint="yolomlir-opt --list-passes names them")
    cls = REGISTRY[match["name"]]
    fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in (match["options"] or "").split():
        key, equals, value = item.partition("=")
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UserError(f"pass '{cls.name}' has no option '{key}'", hint=f"options: {known}")
        option = fields[key]
        values[option.name] = _parse_option(cls.name, key, str(option.type), value, bool(equals))
    return cls(**values)


def _parse_option(pass_name: str, key: str, kind: str, value: str, given: bool) -> Any:
    if kind == "bool":
        if value in ("true", "1", "") and (given is False or value):
            return True
        if value in ("false", "0"):
            return False
    else:
        try:
            return {"int": int, "float": float, "str": str}[kind](value)
        except ValueError:
            pass
    raise UserError(f"pass '{pass_name}': option '{key}={value}' is not a {kind}")
