"""`yolomlir`: the command line. One file a subcommand; this one finds them and reports errors."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import yolomlir.cli as _package
from yolomlir import __version__
from yolomlir.diagnostics import InternalError, YolomlirError

_HELPERS = ("main", "options", "progress")
_ORDER = (
    "predict",
    "compile",
    "info",
    "demo",
    "bench",
    "profile",
    "compare",
    "val",
    "tune",
    "cache",
)


class _Command(Protocol):
    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the subcommand's parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run it; the exit code."""


def _commands() -> dict[str, _Command]:
    names = [m.name for m in pkgutil.iter_modules(_package.__path__) if m.name not in _HELPERS]
    ordered = [n for n in _ORDER if n in names] + sorted(set(names) - set(_ORDER))
    return {n: cast(_Command, importlib.import_module(f"yolomlir.cli.{n}")) for n in ordered}


def build_parser(commands: dict[str, _Command]) -> argparse.ArgumentParser:
    """The parser of every subcommand."""
    parser = argparse.ArgumentParser(
        prog="yolomlir", description="An MLIR compiler that makes YOLO26 fast."
    )
    parser.add_argument("--version", action="version", version=f"yolomlir {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Exit code 0: done; 1: a bug; 2: a user's error; 130: interrupted."""
    commands = _commands()
    args = build_parser(commands).parse_args(argv)
    level = os.environ.get("YOLOMLIR_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="yolomlir: %(levelname)s: %(message)s")
    try:
        return commands[args.command].run(args)
    except YolomlirError as error:
        if args.traceback:
            raise
        kind = "internal error" if isinstance(error, InternalError) else "error"
        print(f"yolomlir: {kind}: {error}", file=sys.stderr)
        return 1 if isinstance(error, InternalError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`yolomlir … | head`): nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
