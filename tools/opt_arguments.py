"""The command line of `yolomlir-opt`: options as mlir-opt names them, and passes by short form."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from yolomlir.passes.registry import REGISTRY

from yolomlir import __version__
from yolomlir.bindings import SUPPORTED_LLVM
from yolomlir.diagnostics import UserError
from yolomlir.pipeline import PIPELINES, Pipeline
from yolomlir.reproducer import configuration_of
from yolomlir.target import TARGETS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Exit code 1, as mlir-opt's, through the error that `main` reports."""
        raise UserError(message, hint="try: yolomlir-opt --help")


def parser() -> argparse.ArgumentParser:
    """The options; passes by short form are taken out before."""
    p = _Parser(
        "yolomlir-opt",
        allow_abbrev=False,
        description="Parse, verify, transform and print MLIR with the yolo dialect.",
        epilog="Any pass can also be given by its name: --yolo-dce --cse "
        "--canonicalize='max-iterations=3'. They run in the order given.",
    )
    p.add_argument("input", nargs="?", default="-", help="file; '-' is stdin; text or bytecode")
    p.add_argument("-o", dest="output", default="-", metavar="FILE", help="'-' is stdout")
    p.add_argument("--pass-pipeline", metavar="TEXT", help="builtin.module(a,func.func(b,c{x=1}))")
    p.add_argument("--target", default="cpu", choices=list(TARGETS), help="what passes compile for")
    p.add_argument("--weights", metavar="FILE.safetensors|random:SEED", help="the weight store")
    p.add_argument("--weights-output", metavar="FILE.safetensors", help="write the store after")
    p.add_argument("--split-input-file", action="store_true", help="chunks between '// -----'")
    p.add_argument("--verify-diagnostics", action="store_true", help="check expected-… comments")
    p.add_argument("--verify-each", default="true", choices=("true", "false", "0", "1"))
    p.add_argument("--allow-unregistered-dialect", action="store_true")
    p.add_argument("--no-output", action="store_true", help="print no IR at the end")
    p.add_argument("--emit-bytecode", action="store_true")
    p.add_argument("--mlir-print-op-generic", action="store_true")
    p.add_argument("--mlir-print-debuginfo", action="store_true", help="print locations")
    p.add_argument("--mlir-print-local-scope", action="store_true")
    p.add_argument("--mlir-pretty-debuginfo", action="store_true")
    for when in ("before", "after"):
        p.add_argument(f"--mlir-print-ir-{when}", action="append", default=[], metavar="PASS,…")
        p.add_argument(f"--mlir-print-ir-{when}-all", action="store_true")
    p.add_argument("--mlir-print-ir-after-change", action="store_true")
    p.add_argument("--mlir-print-ir-after-failure", action="store_true")
    p.add_argument("--mlir-print-ir-tree-dir", metavar="DIR", help="NN_pass.mlir after every pass")
    p.add_argument("--mlir-timing", action="store_true")
    p.add_argument("--statistics", "--mlir-pass-statistics", action="store_true")
    p.add_argument("--mlir-pass-pipeline-crash-reproducer", metavar="FILE")
    p.add_argument(
        "--verify-roundtrip", action="store_true", help="text and bytecode, before passes"
    )
    for flag in ("--mlir-disable-threading", "--mlir-print-ir-module-scope"):
        p.add_argument(flag, action="store_true", help="always so; taken for habit's sake")
    p.add_argument("--run-reproducer", action="store_true", help="take flags from the input file")
    p.add_argument("--dump-pass-pipeline", action="store_true")
    version = f"yolomlir-opt {__version__}, MLIR {SUPPORTED_LLVM}"
    p.add_argument("--version", action="version", version=version)
    p.add_argument("--list-passes", "--show-passes", action="store_true")
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of a command line, with `passes`: the short forms, as pipeline elements in order.

    Raises UserError for what it does not know.
    """
    known = parser()
    flags = {flag for action in known._actions for flag in action.option_strings}
    rest: list[str] = []
    passes: list[str] = []
    takes_value = {f for a in known._actions if a.nargs is None for f in a.option_strings}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("-") and not name.startswith("--") and f"-{name}" in flags:
            name = f"-{name}"  # LLVM's command lines take one dash as two
        if name in flags:
            rest.append(f"{name}{equals}{value}")
            if name in takes_value and not equals:
                rest.extend(_value(name, words))
        elif re.fullmatch(r"--?[A-Za-z][\w.-]*", name):
            passes.append(f"{name.lstrip('-')}{{{value}}}" if equals else name.lstrip("-"))
        else:
            rest.append(word)
    options = known.parse_args(rest)
    options.passes = passes
    if passes and options.pass_pipeline is not None:
        raise UserError("--pass-pipeline and passes by their own flags exclude each other")
    return options


def _value(name: str, words: object) -> list[str]:
    value = next(words, None)  # type: ignore[call-overload]
    if value is None:
        raise UserError(f"option {name} needs a value", hint="try: yolomlir-opt --help")
    return [value]


def with_reproducer(argv: Sequence[str], data: bytes) -> argparse.Namespace:
    """The options of a command line with those that its input, a reproducer, states."""
    stated = configuration_of(data.decode(errors="replace"))
    if stated is None:
        raise UserError("the input has no '// configuration:' line", hint="is it a reproducer?")
    options = parse([*stated, *argv])
    options.run_reproducer = False
    return options


def pipeline(options: argparse.Namespace) -> Pipeline:
    """The pipeline asked for. Needs a current context. Raises UserError for unknown passes."""
    if options.pass_pipeline is not None:
        return Pipeline.parse(options.pass_pipeline)
    steps = [step for text in options.passes for step in _short(text).steps]
    return Pipeline(steps)


def passes_named(values: Sequence[str], flag: str) -> list[str]:
    """The passes that `--mlir-print-ir-before` or `-after` names; UserError for unknown ones.

    Needs a current context.
    """
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in names:
        try:
            _short(name)
        except UserError as error:
            raise UserError(f"{flag}: there is no pass '{name}'") from error
    return names


def _short(text: str) -> Pipeline:
    """A pass given by its own flag, nested where it must be, as mlir-opt does."""
    name = text.partition("{")[0]
    if name in REGISTRY or name in PIPELINES or name.startswith("yolo-"):
        return Pipeline.parse(text)
    for form in (text, f"func.func({text})", f"gpu.module({text})"):
        try:
            return Pipeline.parse(form)
        except UserError as error:
            if "no such option" in error.message:
                raise
    raise UserError(
        f"unknown command line argument '--{name}'", hint="try: yolomlir-opt --help, --list-passes"
    )


def print_help() -> None:
    """Write the help text to stdout."""
    parser().print_help(sys.stdout)
