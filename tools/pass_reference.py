"""Writes `docs/passes.md` from docstrings: `python -m yolomlir.tools.pass_reference`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yolomlir.passes.base import Pass
from yolomlir.passes.registry import REGISTRY

from yolomlir.pipeline import LEVELS, PIPELINES, pipeline_for, split_pipeline

SECTIONS = ("Options", "Before", "After", "Statistics", "Example")
_HEADING = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)
_DEFAULT = Path(__file__).resolve().parents[1] / "docs" / "passes.md"

_INTRODUCTION = """\
# Passes

Generated from the passes' docstrings by `python -m yolomlir.tools.pass_reference`; do not edit.

Every pass runs alone in `yolomlir-opt` by its own flag (`--yolo-dce`), with options as in
`--yolo-layout-propagation='direction=forward weights=ohwi'`, and in a pipeline beside upstream's
passes: `--pass-pipeline='builtin.module(yolo-dce,func.func(cse))'`.
"""


@dataclass(frozen=True)
class PassDoc:
    """A pass's docstring in parts. sections: text by heading, dedented; absent ones left out."""

    summary: str
    description: str
    sections: dict[str, str]

    @property
    def items(self) -> dict[str, dict[str, str]]:
        """`name: text` lists of the sections that are lists, by heading."""
        found = {}
        for heading in ("Options", "Statistics"):
            lines = re.split(r"^(?=[\w-]+: )", self.sections.get(heading, ""), flags=re.MULTILINE)
            pairs = (line.partition(": ") for line in lines if line.strip())
            found[heading] = {name: " ".join(text.split()) for name, _, text in pairs}
        return found


def describe(cls: type[Pass]) -> PassDoc:
    """The docstring of a pass in parts."""
    summary, _, rest = (inspect.getdoc(cls) or "").partition("\n")
    description, *parts = _HEADING.split(rest)
    bodies = (textwrap.dedent(part).strip("\n") for part in parts[1::2])
    return PassDoc(summary, description.strip(), dict(zip(parts[::2], bodies, strict=True)))


def own_passes() -> dict[str, type[Pass]]:
    """The passes of the product by name, in order of name."""
    package = "yolomlir.passes."
    return {n: c for n, c in sorted(REGISTRY.items()) if c.__module__.startswith(package)}


def reference() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, _pipelines()]
    parts += [_page(name, cls) for name, cls in own_passes().items()]
    return "\n".join(parts)


def _pipelines() -> str:
    lines = ["## Pipelines", ""]
    lines.append("`yolomlir-opt --yolo-pipeline-cpu=level=2` runs what `yolomlir compile` runs.")
    for flag, kind in PIPELINES.items():
        for level in LEVELS:
            text = pipeline_for(kind, level).removeprefix("builtin.module(").removesuffix(")")
            lines += ["", f"`{flag}{{level={level}}}`:", "", "```"]
            lines += [*split_pipeline(text), "```"]
    lines += [
        "",
        "`precision=fp16` adds `yolo-narrow-activations` before dispatches are formed, and",
    ]
    lines.append("asks for channels in multiples of 8, which are 16 bytes then. `pairs=all`, or")
    lines.append("`pairs=` with `inputs` of `yolo-fuse-bottlenecks`, adds that pass at level 3;")
    lines.append("`yolomlir compile` takes the pairs that were measured to gain (docs/tuning.md).")
    return "\n".join(lines) + "\n"


def _page(name: str, cls: type[Pass]) -> str:
    doc = describe(cls)
    lines = [f"## `{name}`", "", doc.summary]
    if doc.description:
        lines += ["", doc.description]
    lines += _options(cls, doc.items["Options"])
    for heading in ("Before", "After"):
        if heading in doc.sections:
            lines += ["", f"{heading}:", "", "```mlir", doc.sections[heading], "```"]
    statistics = doc.items["Statistics"]
    if statistics:
        lines += ["", "| statistic | counts |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in statistics.items()]
    if "Example" in doc.sections:
        lines += ["", "Example, which is a test too:", "", "```mlir"]
        lines += [doc.sections["Example"], "```"]
    return "\n".join(lines) + "\n"


def _options(cls: type[Pass], texts: dict[str, str]) -> list[str]:
    fields = dataclasses.fields(cls)
    if not fields:
        return []
    lines = ["", "| option | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        option = field.name.replace("_", "-")
        meaning = texts.get(option, texts.get(field.name, ""))
        lines.append(f"| `{option}` | {field.type} | `{_shown(field.default)}` | {meaning} |")
    return lines


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "(empty)"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with `--check` say whether the one that is there is current (exit 1)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=_DEFAULT)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(argv)
    text = reference()
    if not options.check:
        options.output.write_text(text)
        return 0
    if options.output.is_file() and options.output.read_text() == text:
        return 0
    sys.stderr.write(f"{options.output} is stale: run python -m yolomlir.tools.pass_reference\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
