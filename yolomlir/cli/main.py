"""`yolomlir`: the command line. One file a subcommand; this one finds it and reports errors.

Only the subcommand that was asked for is imported, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from yolomlir import __version__
from yolomlir.cli.progress import discard_output, printable
from yolomlir.diagnostics import InternalError, YolomlirError
from yolomlir.interrupts import TerminatedError, forget_interruption, termination_raises

COMMANDS = {
    "predict": "detect objects in images, folders, globs, URLs, videos, cameras and streams",
    "compile": "compile a checkpoint to one .ylm file",
    "info": "describe a model file, or this machine",
    "demo": "run the whole chain on a packaged photo, without a download",
    "bench": "time a model beside other engines",
    "profile": "time every kernel of a model",
    "compare": "compare two runs, layer by layer, and name the first that differs",
    "val": "score a model on annotated images by the COCO protocol",
    "tune": "find the fastest kernels for a model on this GPU",
    "cache": "list, clear or export what is cached",
}
"""Every subcommand, `yolomlir/cli/NAME.py`, and what it is for."""

EXIT_BUG, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


class _Command(Protocol):
    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the subcommand's parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run it; the exit code."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"yolomlir: error: {message} ({self.prog} --help)\n")


def available() -> dict[str, str]:
    """The subcommands of this installation, with what each is for."""
    return {
        name: summary
        for name, summary in COMMANDS.items()
        if importlib.util.find_spec(f"yolomlir.cli.{name}")
    }


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the subcommand `chosen`; of the others only the name and what they are for."""
    parser = _Parser(prog="yolomlir", description="An MLIR compiler that makes YOLO26 fast.")
    parser.add_argument("--version", action="version", version=f"yolomlir {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = _subparsers(parser)
    for name, summary in available().items():
        if name == chosen:
            command(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _subparsers(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Where subcommands' parsers go; they are of the parser's own class."""
    return parser.add_subparsers(dest="command", required=True, metavar="COMMAND")


def command(name: str) -> _Command:
    """The module of a subcommand."""
    return cast(_Command, importlib.import_module(f"yolomlir.cli.{name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Exit code 0: done; 1: a bug, or done in part; 2: a user's error; 130: interrupted; 143:
    terminated.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Of pictures that Pillow still reads: what it refuses is said as an error of ours.
    warnings.filterwarnings("ignore", "Image size .* decompression bomb")
    _print_anything()
    try:
        with termination_raises():
            code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return 0
    except KeyboardInterrupt as error:
        forget_interruption()
        code = interruption_code(error)
        said = "terminated" if code == EXIT_TERMINATED else "interrupted"
        print(f"yolomlir: {said}", file=sys.stderr)
        return code
    except Exception as error:
        if "--traceback" in arguments:
            raise
        return _report(error)
    return code


def interruption_code(error: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C or SIGTERM."""
    return EXIT_TERMINATED if isinstance(error, TerminatedError) else EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    known = available()
    if chosen is not None and chosen not in known:
        close = difflib.get_close_matches(chosen, known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"one of: {', '.join(known)}"
        _Parser(prog="yolomlir").error(f"unknown command '{chosen}': {hint}")
    parser = build_parser(chosen)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown, _parser_of(parser, args.command))
    from yolomlir.settings import settings, unknown_variables

    level = settings().log_level
    logging.basicConfig(level=level, format="yolomlir: %(levelname)s: %(message)s")
    for name, hint in unknown_variables():
        logging.getLogger(__name__).warning("%s is no setting of yolomlir: %s", name, hint)
    return command(args.command).run(args)


def _parser_of(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of the subcommand that was given."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return cast(argparse.ArgumentParser, action.choices[name])
    return parser


def _refuse(unknown: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Say which arguments nothing takes, and what the first one is likely to stand for."""
    options = [text for action in parser._actions for text in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
    hint = f": did you mean '{close[0]}'?" if close and unknown[0].startswith("-") else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _report(error: Exception) -> int:
    """Say on one line what went wrong; the exit code."""
    if isinstance(error, InternalError):
        line, code = f"internal error: {error}", EXIT_BUG
    elif isinstance(error, YolomlirError):
        line, code = f"error: {error}", EXIT_USER_ERROR
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        line, code = f"error: {where}{error.strerror or error}", EXIT_USER_ERROR
    elif isinstance(error, MemoryError):
        line, code = f"error: not enough memory: {error}", EXIT_USER_ERROR
    else:
        what = f"{type(error).__name__}: {error}"
        line, code = f"internal error: {what} (a bug; --traceback shows where)", EXIT_BUG
    print(f"yolomlir: {printable(' '.join(line.splitlines()))}", file=sys.stderr)
    return code


def _print_anything() -> None:
    """Let names that the terminal's encoding lacks be printed, escaped, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
