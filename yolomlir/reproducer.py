"""Crash reproducers: a file that `yolomlir-opt --run-reproducer` runs to the same failure."""

from __future__ import annotations

import logging
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo
from yolomlir.frontend.weights import AbstractWeights, WeightStore
from yolomlir.instrumentation import Instrumentation
from yolomlir.passes.base import PassContext, Step

LOGGER = logging.getLogger(__name__)


def write_reproducer(path: Path, step: Step, module: ir.Operation, context: PassContext) -> None:
    """Write the IR before a pass, how to run that pass on it, and its weights beside it.

    Raises UserError where the file cannot be written.
    """
    flags = [f"--pass-pipeline=builtin.module({step.element})", f"--target={context.target.name}"]
    if not isinstance(context.weights, AbstractWeights):
        weights = weights_beside(path)
        save_weights(weights, context.weights, module)
        flags.append(f"--weights={weights}")
    header = "// configuration: " + " ".join(shlex.quote(flag) for flag in flags)
    run = "// run again with: yolomlir-opt --run-reproducer THIS_FILE"
    text = str(module.get_asm(enable_debug_info=True))
    try:
        path.write_text(f"{header}\n{run}\n{text.rstrip()}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path)) from error


def weights_beside(path: Path) -> Path:
    """Where the weights of a reproducer lie."""
    return path.with_name(f"{path.name}.safetensors")


def save_weights(path: Path, store: WeightStore, module: ir.Module | ir.Operation) -> None:
    """Write the tensors that the module uses.

    Raises UserError where the store has no data, or the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    names = [yolo.string(op, "name") for op in yolo.ops_in(module, "yolo.weight")]
    missing = [name for name in names if name not in store]
    if missing:
        raise UserError(f"there is no data for weight '{missing[0]}'", hint="give --weights")
    try:
        save_file({name: store[name] for name in names}, str(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write: {error}", where=str(path)) from error


def configuration_of(text: str) -> list[str] | None:
    """The flags in a reproducer's `// configuration:` line; None where it has none."""
    match = re.search(r"^// configuration: (.*)$", text, re.MULTILINE)
    return None if match is None else shlex.split(match[1])


class EagerReproducer(Instrumentation):
    """Written before each pass, so that it survives an abort; removed once the pass succeeded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Write the file."""
        write_reproducer(self._path, steps[index], module.operation, context)

    def after(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
        weights_beside(self._path).unlink(missing_ok=True)


class LateReproducer(Instrumentation):
    """Keeps a copy of the module in memory, and writes it where a pass fails: cheap until then.

    path: the file in a new temporary folder; None as long as nothing failed.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._copy: ir.Operation | None = None

    def before(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Copy the module."""
        self._copy = module.operation.clone().operation

    def failed(
        self, steps: Sequence[Step], index: int, module: ir.Module, context: PassContext
    ) -> None:
        """Write the copy. Where that fails, too, it is only logged: the pass's failure counts."""
        if self._copy is None:
            return
        try:
            path = Path(tempfile.mkdtemp(prefix="yolomlir-")) / "reproducer.mlir"
            write_reproducer(path, steps[index], self._copy, context)
        except (OSError, UserError) as error:
            LOGGER.warning("no reproducer could be written: %s", error)
            return
        self.path = path
