"""`yolomlir-opt`: parse, verify, run passes, print; flags and exit codes as mlir-opt's.

Exit code 0: every chunk passed (with `--verify-diagnostics`: exactly what was expected came).
1: an error, a failing pass, or a command line that is not understood.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from yolomlir.tools import opt_arguments, opt_run
from yolomlir.tools.opt_source import SEPARATOR, read_sources

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError, YolomlirError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `yolomlir-opt` on a command line; returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except YolomlirError as error:
        sys.stderr.write(f"yolomlir-opt: error: {error}\n")
        return 1
    except BrokenPipeError:
        return 1


def _main(argv: list[str]) -> int:
    options = opt_arguments.parse(argv)
    if options.list_passes:
        sys.stdout.write(opt_run.list_passes())
        return 0
    data = _read(options.input)
    if options.run_reproducer:
        options = opt_arguments.with_reproducer(argv, data)
    started = time.perf_counter()
    with ir.Context():
        pipeline = opt_arguments.pipeline(options)
    if options.dump_pass_pipeline:
        sys.stderr.write(f"{pipeline}\n")
    session = opt_run.Session(options, time.perf_counter() - started)
    results = [
        session.process(source)
        for source in read_sources(_shown(options.input), data, split=options.split_input_file)
    ]
    if not options.verify_diagnostics:
        _write(options, [result.output for result in results if result.output is not None])
    session.finish()
    return 0 if all(result.passed for result in results) else 1


def _shown(name: str) -> str:
    return "<stdin>" if name == "-" else name


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"cannot open input file: {error.strerror}", where=name) from error


def _write(options: argparse.Namespace, outputs: list[bytes]) -> None:
    if options.no_output:
        return
    joined = outputs[0] if len(outputs) == 1 else f"\n{SEPARATOR}\n\n".encode().join(outputs)
    if options.output == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(joined)
        sys.stdout.buffer.flush()
        return
    try:
        Path(options.output).write_bytes(joined)
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=options.output) from error


if __name__ == "__main__":
    sys.exit(main())
