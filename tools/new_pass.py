"""Makes a pass and its test from one name: `python -m yolomlir.tools.new_pass yolo-fold-bias`.

The registry imports every module of `passes/`, so the file alone registers the pass. What it makes
runs and passes its tests; the body is where the work begins.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from yolomlir.diagnostics import UserError, YolomlirError

_CHECKOUT = Path(__file__).resolve().parents[1]

_EXAMPLE = """\
// RUN: yolomlir-opt %s --split-input-file --FLAG | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NEXT: %[[Y:.*]] = "yolo.silu"(%arg0)
// CHECK-NEXT: return %[[Y]]
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
"""

_PASS = '''\
"""The pass `FLAG`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from yolomlir.passes import rewriting
from yolomlir.passes.base import Pass, PassContext

from yolomlir.bindings import ir


@dataclass(frozen=True)
class CLASS(Pass):
    """SUMMARY.

    Before:
        %0 = "yolo.silu"(%x)

    After:
        %0 = "yolo.silu"(%x)

    Statistics:
        seen: ops that the pass looked at.

    Example:
EXAMPLE
    """

    name: ClassVar[str] = "FLAG"

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Look at every activation."""
        for _ in rewriting.operations(module, "yolo.silu"):
            context.count(self, "seen")
'''


def create(name: str, root: Path) -> list[Path]:
    """Write the pass and its lit test below `root`; returns the files.

    `name` is the flag (`yolo-fold-bias`), the file (`fold_bias`) or the class (`FoldBias`). Raises
    UserError for a name that is none, and where a file is there already.
    """
    words = _words(name)
    stem, flag = "_".join(words), f"yolo-{'-'.join(words)}"
    class_name = "".join(word.capitalize() for word in words)
    files = {
        root / "passes" / f"{stem}.py": _pass_text(flag, class_name, words),
        root / "test" / "passes" / f"{stem}.mlir": _EXAMPLE.replace("FLAG", flag),
    }
    for path in files:
        if path.exists():
            raise UserError("the file is there already", where=path)
        if not path.parent.is_dir():
            raise UserError("no such folder", where=path.parent, hint="is this a checkout?")
    for path, text in files.items():
        path.write_text(text)
    return list(files)


def _words(name: str) -> list[str]:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower().replace("_", "-")
    words = plain.removeprefix("yolo-").split("-")
    if not all(re.fullmatch(r"[a-z][a-z0-9]*", word) for word in words):
        raise UserError(f"'{name}' is no name for a pass", hint="like yolo-fold-bias")
    return words


def _pass_text(flag: str, class_name: str, words: Sequence[str]) -> str:
    lines = _EXAMPLE.replace("FLAG", flag).rstrip("\n").splitlines()
    example = "\n".join(f"        {line}".rstrip() for line in lines)
    summary = " ".join(words).capitalize()
    text = _PASS.replace("FLAG", flag).replace("CLASS", class_name)
    return text.replace("SUMMARY", summary).replace("EXAMPLE", example)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a pass; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", help="yolo-fold-bias, fold_bias or FoldBias")
    parser.add_argument("--root", type=Path, default=_CHECKOUT, help="the checkout")
    options = parser.parse_args(argv)
    try:
        files = create(options.name, options.root)
    except YolomlirError as error:
        sys.stderr.write(f"new_pass: error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in files))
    sys.stdout.write("next: python -m yolomlir.tools.pass_reference, for docs/passes.md\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
