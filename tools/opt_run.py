"""What `yolomlir-opt` does with one chunk: parse, verify, run, print, and collect diagnostics."""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import physical_shape
from yolomlir.passes.base import PassContext
from yolomlir.passes.registry import REGISTRY
from yolomlir.tools import opt_arguments, opt_verify
from yolomlir.tools.opt_source import Diagnostic, Source, render

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError, YolomlirError
from yolomlir.frontend.weights import AbstractWeights, Array, WeightStore
from yolomlir.instrumentation import (
    IRPrinting,
    Timing,
    TreeDump,
    statistics_report,
)
from yolomlir.pipeline import PIPELINES, Pipeline, first_error
from yolomlir.remarks import LOGGER as REMARKS
from yolomlir.reproducer import EagerReproducer, save_weights
from yolomlir.target import target_named


@dataclass(frozen=True)
class Result:
    """What became of a chunk; output is None where it failed."""

    passed: bool
    output: bytes | None


class Session:
    """One run of the tool: options, and what adds up over chunks (time, statistics).

    setup_seconds: time that reading the command line took, for the report.
    """

    def __init__(self, options: argparse.Namespace, setup_seconds: float) -> None:
        self._options = options
        self._timing = Timing()
        self._timing.record("Command line", setup_seconds)
        self._context = PassContext(target=target_named(options.target))
        self._chunks = 0

    def process(self, source: Source) -> Result:
        """Run everything asked for on one chunk, in a context of its own."""
        diagnostics: list[Diagnostic] = []
        context = yolo.new_context()
        context.allow_unregistered_dialects = self._options.allow_unregistered_dialect
        context.enable_multithreading(False)  # Python passes, and output in one order
        with context, _Collector(source, context, diagnostics):
            output = self._transform(source, diagnostics)
        if self._options.verify_diagnostics:
            problems = opt_verify.check(source, diagnostics)
            sys.stderr.write("".join(f"{problem}\n" for problem in problems))
            return Result(not problems, output)
        sys.stderr.write("".join(render(diagnostic, source) for diagnostic in diagnostics))
        return Result(output is not None, output)

    def finish(self) -> None:
        """Print the reports asked for, to stderr."""
        if self._options.statistics:
            sys.stderr.write(statistics_report(self._context))
        if self._options.mlir_timing:
            sys.stderr.write(self._timing.report())

    def _transform(self, source: Source, diagnostics: list[Diagnostic]) -> bytes | None:
        """The chunk's output, or None where it failed; what went wrong is in `diagnostics`."""
        started = time.perf_counter()
        try:
            module = source.parse()
        except ir.MLIRError as error:
            if not diagnostics:
                where, message = first_error(error)
                diagnostics.append(Diagnostic("error", message, source.place_named(where)))
            return None
        self._timing.record("Parser", time.perf_counter() - started)
        self._chunks += 1
        if not _verify(module, source, diagnostics):
            return None
        if self._options.verify_roundtrip:
            _verify_roundtrip(module, source)
        self._context.weights = load_weights(self._options.weights, module)
        pipeline = self._pipeline()
        try:
            pipeline.run(module, self._context)
        except YolomlirError as error:
            self._diagnose(error, source, diagnostics)
            return None
        if self._options.weights_output:
            save_weights(Path(self._options.weights_output), self._context.weights, module)
        started = time.perf_counter()
        output = self._output(module)
        self._timing.record("Output", time.perf_counter() - started)
        return output

    def _diagnose(
        self, error: YolomlirError, source: Source, diagnostics: list[Diagnostic]
    ) -> None:
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        place = source.place_named(error.where)
        # What MLIR raised, it has reported already; then the error only says which pass it was.
        reported = isinstance(error.__cause__, ir.MLIRError) and any(
            diagnostic.severity == "error" for diagnostic in diagnostics
        )
        diagnostics.append(Diagnostic("note" if reported else "error", message, place))
        failed = getattr(error, "failed_pass", None)
        if failed and failed not in message:
            diagnostics.append(Diagnostic("note", f"in pass '{failed}'", place))
        reproducer = self._options.mlir_pass_pipeline_crash_reproducer
        if reproducer:
            diagnostics.append(Diagnostic("note", f"reproducer written to '{reproducer}'"))

    def _pipeline(self) -> Pipeline:
        options = self._options
        pipeline = opt_arguments.pipeline(options)
        pipeline.verify_each = options.verify_each in ("true", "1")
        pipeline.upstream_statistics = options.statistics
        before, after = (
            opt_arguments.passes_named(values, f"--mlir-print-ir-{when}")
            for when, values in (
                ("before", options.mlir_print_ir_before),
                ("after", options.mlir_print_ir_after),
            )
        )
        after_all = options.mlir_print_ir_after_all or options.mlir_print_ir_after_change
        pipeline.instrumentations.append(
            IRPrinting(
                sys.stderr,
                self._text,
                before=None if options.mlir_print_ir_before_all else before,
                after=None if after_all else after,
                only_changes=options.mlir_print_ir_after_change,
                on_failure=options.mlir_print_ir_after_failure,
            )
        )
        if options.mlir_print_ir_tree_dir:
            folder = Path(options.mlir_print_ir_tree_dir)
            folder = folder / f"chunk_{self._chunks - 1}" if self._chunks > 1 else folder
            pipeline.instrumentations.append(TreeDump(folder, self._text))
        if options.mlir_pass_pipeline_crash_reproducer:
            path = Path(options.mlir_pass_pipeline_crash_reproducer)
            pipeline.instrumentations.append(EagerReproducer(path))
        pipeline.instrumentations.append(self._timing)
        return pipeline

    def _text(self, module: ir.Module) -> str:
        options = self._options
        return str(
            module.operation.get_asm(
                enable_debug_info=options.mlir_print_debuginfo or options.mlir_pretty_debuginfo,
                pretty_debug_info=options.mlir_pretty_debuginfo,
                print_generic_op_form=options.mlir_print_op_generic,
                use_local_scope=options.mlir_print_local_scope,
            )
        )

    def _output(self, module: ir.Module) -> bytes:
        if not self._options.emit_bytecode:
            return self._text(module).rstrip("\n").encode() + b"\n"
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return buffer.getvalue()


def _with_locations(module: ir.Module) -> str:
    return str(module.operation.get_asm(enable_debug_info=True))


def _verify_roundtrip(module: ir.Module, source: Source) -> None:
    """Print and read again, as text and bytecode. Raises InternalError where something is lost."""
    text = _with_locations(module)
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    for form, data in (("text", text), ("bytecode", buffer.getvalue())):
        if _with_locations(ir.Module.parse(data)) != text:
            raise InternalError(f"{form} does not read back as what it was", where=source.name)


def _verify(module: ir.Module, source: Source, diagnostics: list[Diagnostic]) -> bool:
    """Hold every yolo op against the dialect's rules; each that breaks one is a diagnostic."""
    sound = True
    for op, error in yolo.faults(module):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        diagnostics.append(Diagnostic("error", message, source.place_of(op.location)))
        sound = False
    return sound


class _Collector(logging.Handler):
    """Gathers a chunk's diagnostics, MLIR's and the passes' remarks, while it is entered."""

    def __init__(self, source: Source, context: ir.Context, diagnostics: list[Diagnostic]) -> None:
        super().__init__(logging.INFO)
        self._source, self._context, self._found = source, context, diagnostics
        self._level, self._propagate = REMARKS.level, REMARKS.propagate

    def __enter__(self) -> None:
        self._context.emit_error_diagnostics = True
        self._handler = self._context.attach_diagnostic_handler(self._take)
        REMARKS.addHandler(self)
        REMARKS.setLevel(logging.INFO)
        REMARKS.propagate = False

    def __exit__(self, *_: object) -> None:
        self._handler.detach()
        REMARKS.removeHandler(self)
        REMARKS.setLevel(self._level)
        REMARKS.propagate = self._propagate

    def emit(self, record: logging.LogRecord) -> None:
        """A warning or remark of a pass."""
        location, message = record.mlir  # type: ignore[attr-defined]
        severity = "warning" if record.levelno >= logging.WARNING else "remark"
        self._found.append(Diagnostic(severity, message, self._source.place_of(location)))

    def _take(self, diagnostic: ir.Diagnostic) -> bool:
        severity = diagnostic.severity.name.lower()
        place = self._source.place_of(diagnostic.location)
        self._found.append(Diagnostic(severity, str(diagnostic.message), place))
        for note in diagnostic.notes:
            place = self._source.place_of(note.location)
            self._found.append(Diagnostic("note", str(note.message), place))
        return True


# ---- weights ------------------------------------------------------------------------------------


def load_weights(text: str | None, module: ir.Module) -> WeightStore:
    """The store that `--weights` asks for: none, a safetensors file, or `random:SEED`."""
    if text is None:
        return AbstractWeights()
    kind, _, seed = text.partition(":")
    if kind == "random" and seed.isdecimal():
        return random_weights(module, int(seed))
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        store = WeightStore(load_file(text))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read weights: {error}", where=text) from error
    for op in yolo.ops_in(module, "yolo.weight"):
        name, expected = yolo.string(op, "name"), physical_shape(op.results[0].type)
        if name not in store:
            raise UserError(f"there is no weight '{name}'", where=text)
        if list(store[name].shape) != expected:
            shape = list(store[name].shape)
            raise UserError(f"weight '{name}' is {shape}; the module has {expected}", where=text)
    return store


def random_weights(module: ir.Module, seed: int) -> WeightStore:
    """Standard normal values for every `yolo.weight`, scaled by 1/sqrt(fan-in), as it states them.

    A value depends on the seed and the weight's name alone, but for its rounding. What some batch
    norm uses as variance is made positive.
    """
    tensors: dict[str, Array] = {}
    for op in yolo.ops_in(module, "yolo.weight"):
        name = yolo.string(op, "name")
        shape = physical_shape(op.results[0].type)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape)
        if len(shape) == 4:
            logical = yolo.shape_of(op.results[0])
            values /= np.sqrt(np.prod(logical[1:]))
        if _is_variance(op):
            values = 0.5 + np.abs(values)
        half = yolo.element_of(op.results[0]) == "f16"
        tensors[name] = values.astype(np.float16 if half else np.float32)
    return WeightStore(tensors)


def _is_variance(op: ir.Operation) -> bool:
    uses = op.results[0].uses
    return any(use.owner.name == "yolo.batch_norm" and use.operand_number == 4 for use in uses)


# ---- lists --------------------------------------------------------------------------------------


def list_passes() -> str:
    """Own passes and pipelines with their first lines; upstream ones work too."""
    lines = ["Passes of yolomlir:"]
    for name, cls in sorted(REGISTRY.items()):
        first = (inspect.getdoc(cls) or "").splitlines()[0]
        lines.append(f"  --{name:<28} {first}")
    lines.append("Pipelines:")
    options = "level=0|1|2|3 precision=fp32|tf32|fp16 pairs=all|CxHxW[:N]+..."
    for name, kind in PIPELINES.items():
        lines.append(f"  --{name:<28} the graph pipeline of a {kind} target; {options}")
    lines.append("Every pass of upstream MLIR works as well, by its name there.")
    return "\n".join(lines) + "\n"
