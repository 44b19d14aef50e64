"""Pipelines: own passes and upstream ones mixed on one module, as text and as steps that run.

A pipeline's text is MLIR's: `builtin.module(yolo-dce,func.func(canonicalize{max-iterations=3}))`.
Own passes work on modules; upstream passes are run one leaf at a time, each in its anchors, so that
every pass can be verified, printed, timed and reproduced alone.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from yolomlir.bindings import ir, passmanager
from yolomlir.diagnostics import InternalError, UserError, YolomlirError
from yolomlir.dialects import yolo
from yolomlir.instrumentation import Instrumentation, run_counting
from yolomlir.passes.base import PassContext, Step, parse_pass
from yolomlir.passes.registry import REGISTRY
from yolomlir.reproducer import LateReproducer
from yolomlir.target import Target

LOGGER = logging.getLogger(__name__)
LEVELS = (0, 1, 2, 3)
"""Optimisation levels: what is needed to run, what is cheap and always good, what pays on every
target, fusion of chains of convolutions, which pays on GPUs. On the CPU 3 equals 2."""
DEFAULT_LEVEL = 2
HALF = "fp16"
"""The precision of products that is one of storage as well."""
_OPEN, _CLOSE = "({[<", ")}]>"


@dataclass
class Pipeline:
    """Passes that run in order on one module, verified after each.

    verify_each: check MLIR's and the dialect's rules after every pass. instrumentations: called
    before and after every pass (printing, timing, reproducers). upstream_statistics: gather those
    of upstream passes too; the process's standard error is redirected while such a pass runs.
    """

    steps: Sequence[Step]
    verify_each: bool = True
    instrumentations: list[Instrumentation] = field(default_factory=list)
    upstream_statistics: bool = False

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """A pipeline from text. Raises UserError for a pass or option that does not exist.

        Named pipelines (`yolo-pipeline-cpu{level=2}`) are expanded. Needs a current context only
        where the text has upstream passes.
        """
        return cls(list(_steps(text, ())))

    def __str__(self) -> str:
        return pipeline_text(self.steps)

    def run(self, module: ir.Module, context: PassContext) -> None:
        """Rewrite `module` in place.

        Raises UserError where a pass refuses its input, and InternalError that names the pass and
        the layer where a pass fails or leaves invalid IR.
        """
        for index, step in enumerate(self.steps):
            for each in self.instrumentations:
                each.before(self.steps, index, module, context)
            try:
                self._run_step(step, module, context)
            except BaseException:
                for each in self.instrumentations:
                    each.failed(self.steps, index, module, context)
                raise
            for each in self.instrumentations:
                each.after(self.steps, index, module, context)

    def _run_step(self, step: Step, module: ir.Module, context: PassContext) -> None:
        try:
            self._run_pass(step, module, context)
            if self.verify_each:
                _verify_after(step, module)
        except YolomlirError as error:
            error.failed_pass = step.name  # type: ignore[attr-defined]
            raise
        except Exception as error:
            raise _failure(step, error) from error

    def _run_pass(self, step: Step, module: ir.Module, context: PassContext) -> None:
        with module.context, ir.Location.unknown():
            if step.own is not None:
                step.own.run(module, context)
                return
            manager = passmanager.PassManager.parse(f"builtin.module({step.element})")
            manager.enable_verifier(False)
            if not self.upstream_statistics:
                manager.run(module.operation)
                return
            counts = run_counting(manager, module.operation)
            context.statistics.setdefault(step.name, Counter()).update(counts)


def pipeline_text(steps: Sequence[Step]) -> str:
    """The steps as `builtin.module(…)`, which `Pipeline.parse` reads again."""
    return f"builtin.module({','.join(step.element for step in steps)})"


def _verify_after(step: Step, module: ir.Module) -> None:
    try:
        module.operation.verify()
        yolo.verify(module)
    except UserError as error:
        message = f"pass '{step.name}' left invalid IR: {error.message}"
        raise InternalError(message, where=error.where) from error
    except ir.MLIRError as error:
        where, message = first_error(error)
        raise InternalError(
            f"pass '{step.name}' left invalid IR: {message}", where=where
        ) from error


def _failure(step: Step, error: Exception) -> InternalError:
    """The error to raise for one that no pass raises on purpose."""
    where, message = first_error(error)
    if not isinstance(error, ir.MLIRError):
        message = f"{type(error).__name__}: {message}"
    named = InternalError(f"pass '{step.name}' failed: {message}", where=where)
    named.failed_pass = step.name  # type: ignore[attr-defined]
    return named


def first_error(error: Exception) -> tuple[str | None, str]:
    """Layer (or None) and message of an exception, the first diagnostic's where MLIR raised it."""
    diagnostics = getattr(error, "error_diagnostics", None)
    if not diagnostics:
        return None, str(error)
    first = diagnostics[0]
    return yolo.layer_of(first.location), str(first.message)


# ---- text ---------------------------------------------------------------------------------------


def split_pipeline(text: str) -> list[str]:
    """The elements between top-level commas: `a{x=1,2},func.func(b,c)` has two.

    Raises UserError for brackets that do not match.
    """
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth < 0:
            raise UserError(f"unmatched '{character}' at column {index + 1} of pipeline '{text}'")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise UserError(f"a bracket is not closed in pipeline '{text}'")
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _steps(text: str, anchors: tuple[str, ...]) -> Iterator[Step]:
    for element in split_pipeline(text):
        anchor, bracket, rest = element.partition("(")
        anchor = anchor.strip()
        if bracket and "{" not in anchor:
            if not rest.endswith(")"):
                raise UserError(f"expected ',' after ')' in '{element}'")
            if anchor in REGISTRY or ("." not in anchor and anchor != "any"):
                raise UserError(f"'{anchor}' in '{element}' is no op that passes can be nested in")
            inner = anchors if anchor == "builtin.module" else (*anchors, anchor)
            yield from _steps(rest[:-1], inner)
            continue
        yield from _leaf(element, anchors)


def _leaf(text: str, anchors: tuple[str, ...]) -> Iterator[Step]:
    name = text.partition("{")[0].strip()
    if name in PIPELINES:
        yield from _steps(_expand(name, text), anchors)
        return
    if name not in REGISTRY and name.startswith("yolo-"):
        close = difflib.get_close_matches(name, [*REGISTRY, *PIPELINES], n=1)
        hint = f"did you mean '{close[0]}'?" if close else "yolomlir-opt --list-passes names them"
        raise UserError(f"unknown pass '{name}'", hint=hint)
    if name in REGISTRY:
        if anchors:
            message = f"pass '{name}' works on builtin.module; it cannot be nested in {anchors[-1]}"
            raise UserError(message)
        own = parse_pass(text)
        yield Step(own.spec(), (), own)
        return
    step = Step(text, anchors)
    try:
        passmanager.PassManager.parse(f"builtin.module({step.element})")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot parse pipeline element '{step.element}': {reason}") from error
    yield step


# ---- the pipelines of the product ---------------------------------------------------------------

PIPELINES = {"yolo-pipeline-cpu": "cpu", "yolo-pipeline-gpu": "gpu"}
"""Pipelines that can be named where a pass can, and the kind of target that they are for."""


_OPTIONS = {"level": tuple(map(str, LEVELS)), "precision": ("fp32", "tf32", HALF)}


def _expand(name: str, text: str) -> str:
    given = {}
    for option in text.partition("{")[2].rstrip("} ").split():
        key, _, value = option.partition("=")
        if key != "pairs" and value not in _OPTIONS.get(key, ()):
            known = ", ".join(f"{k}={'|'.join(values)}" for k, values in _OPTIONS.items())
            known += ", pairs=all|CxHxW[:N]+..."
            raise UserError(f"pipeline '{name}' has no option '{option}'", hint=f"options: {known}")
        given[key] = value
    level = int(given.get("level", DEFAULT_LEVEL))
    return pipeline_for(PIPELINES[name], level, given.get("precision", ""), given.get("pairs", ""))


def pipeline_for(
    target_kind: str, level: int = DEFAULT_LEVEL, precision: str = "", pairs: str = ""
) -> str:
    """The graph pipeline of a kind of target (`cpu`, `gpu`) at -O0 to -O3, as text.

    Level 0 is what code generation needs: batch norms folded, NHWC, one dispatch a kernel, the
    memory plan. Level 1 adds cleaning up and the fold of the image scale; level 2 merges siblings
    and, on GPUs, detects in two stages, of which the first does not wait for the last level;
    level 3 fuses chains of pointwise convolutions on GPUs and equals level 2 on the CPU. Of the
    precisions only `fp16` changes the graph: it narrows activations and weights. pairs: of 3x3
    convolutions that level 3 fuses on GPUs (`all`, or the option `inputs` of
    `yolo-fuse-bottlenecks`); none where empty. A compile takes those of `autotune.levels`.
    """
    if target_kind not in PIPELINES.values():
        raise UserError(f"no pipeline for a '{target_kind}' target", hint="cpu or gpu")
    if level not in LEVELS:
        raise UserError(f"optimisation level is {level}; expected 0, 1, 2 or 3")
    weights = "ohwi" if target_kind == "gpu" else "hwio"
    reuse = "{reuse=concurrent}" if target_kind == "gpu" else ""
    inputs = "" if pairs == "all" else f"{{inputs={pairs}}}"
    sixteen_bytes = "{alignment=8}" if precision == HALF else ""  # in channels; else the default, 4
    passes = (
        (1, "yolo-canonicalize"),
        (0, "yolo-fold-batch-norm"),
        (1, "yolo-fold-normalize"),
        (0, f"yolo-layout-propagation{{weights={weights}}}"),
        (0, "yolo-transpose-elision"),
        (1, "yolo-cse"),
        (2, f"yolo-merge-siblings{sixteen_bytes}"),
        (1, "yolo-canonicalize"),
        *([(0, "yolo-narrow-activations")] if precision == HALF else []),
        *([(2, "yolo-split-detection")] if target_kind == "gpu" else []),
        (0, "yolo-conv-epilogue-fusion"),
        (0, "yolo-form-dispatches"),
        (0, f"yolo-concat-views{sixteen_bytes}"),
        (0, "yolo-dce"),
        *([(3, "yolo-fuse-pointwise")] if target_kind == "gpu" else []),
        *([(3, f"yolo-fuse-bottlenecks{inputs}")] if target_kind == "gpu" and pairs else []),
        (0, "yolo-assign-tiles"),
        (0, f"yolo-plan-memory{reuse}"),
    )
    return f"builtin.module({','.join(text for least, text in passes if level >= least)})"


def optimize(
    module: ir.Module,
    context: PassContext,
    target: Target,
    level: int = DEFAULT_LEVEL,
    pairs: str = "",
) -> None:
    """Run the graph pipeline of `target` on `module` in place; the store is rewritten with it.

    The precision is the module's `yolo.precision`. level, pairs: as `pipeline_for` takes them.

    Raises InternalError with the path of a reproducer where a pass fails.
    """
    context.target = target
    named = "yolo.precision" in module.operation.attributes
    precision = yolo.string(module.operation, "yolo.precision") if named else ""
    with module.context:
        pipeline = Pipeline.parse(pipeline_for(target.kind, level, precision, pairs))
    reproducer = LateReproducer()
    pipeline.instrumentations.append(reproducer)
    try:
        pipeline.run(module, context)
    except InternalError as error:
        hint = "a bug of yolomlir"
        if reproducer.path is not None:
            hint += f"; reproducer: {reproducer.path}"
        raise InternalError(error.message, where=error.where, hint=hint) from error
