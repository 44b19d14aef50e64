"""From a checkpoint to an artifact: the whole compile, a target at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from yolomlir.arguments import whole
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.progress import ProgressCallback
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.target import Target, target_named

if TYPE_CHECKING:
    from yolomlir.bindings import ir
    from yolomlir.frontend.weights import WeightStore
    from yolomlir.frontend.yolo26 import ImportedModel
    from yolomlir.runtime.plan import Plan

LEVELS = ("yolo", "optimized", "linalg", "gpu", "ptx")
"""What `emit` can print, from the model as imported down to assembly."""

PRECISIONS = {"cpu": ("fp32",), "gpu": ("tf32", "fp32", "fp16")}
"""Precisions by kind of target, its default first."""

HIGHEST_LEVEL = 3
"""The optimisation level that fuses chains of convolutions."""

STRIDE = 32
"""Image sides must be multiples of the coarsest level's stride."""


@dataclass(frozen=True)
class CompileOptions:
    """Everything that changes what is compiled.

    precision: of products, `fp32`, `tf32` or, of stored tensors and weights as well, `fp16` (GPU
    only); None takes the target's default. height, width: pixels, multiples of 32. max_det:
    most rows an image. input_dtype: `uint8` or `float32` images, N, H, W, 3. level: optimisation,
    0 to 3; None takes what was measured to be fastest, else 2; on the CPU 3 equals 2.
    """

    target: str = "cpu"
    precision: str | None = None
    height: int = 640
    width: int = 640
    batch: int = 1
    max_det: int = 300
    input_dtype: str = "uint8"
    level: int | None = None

    def resolved(self) -> CompileOptions:
        """The options with defaults filled in. Raises UserError for what cannot be compiled."""
        numbers = ("height", "width", "batch", "max_det", "level")
        given = {name: getattr(self, name) for name in numbers if getattr(self, name) is not None}
        plain: dict[str, Any] = {name: whole(name, value) for name, value in given.items()}
        return replace(self, **plain)._completed()

    def _completed(self) -> CompileOptions:
        target = target_named(self.target)
        for name, side in (("height", self.height), ("width", self.width)):
            _check_side(name, side)
        if self.batch < 1:
            raise UserError(f"batch is {self.batch}; it must be at least 1")
        if self.max_det < 1:
            raise UserError(f"max_det is {self.max_det}; it must be at least 1")
        anchors = sum((self.height // s) * (self.width // s) for s in (8, 16, 32))
        if self.max_det > anchors and self.max_det != CompileOptions.max_det:
            raise UserError(
                f"max_det is {self.max_det}; a {self.height}x{self.width} image has only "
                f"{anchors} candidate boxes",
                hint=f"at most {anchors}, or larger images",
            )
        if self.input_dtype not in ("uint8", "float32"):
            raise UserError(f"input_dtype is '{self.input_dtype}'; expected uint8 or float32")
        known = PRECISIONS[target.kind]
        precision = self.precision or known[0]
        if precision == "fp16" and target.kind == "cpu":
            raise UnsupportedError(
                f"precision 'fp16' needs a GPU; the target is {target.name}",
                hint="use fp32 on the CPU, or the target of a GPU, such as sm_90",
            )
        if precision not in known:
            raise UserError(
                f"precision '{precision}' is not available on {target.name}",
                hint=f"one of: {', '.join(known)}",
            )
        return replace(self, precision=precision, max_det=min(self.max_det, anchors))


def _check_side(name: str, side: int) -> None:
    if side >= STRIDE and side % STRIDE == 0:
        return
    below = max(side // STRIDE, 1) * STRIDE
    raise UserError(
        f"image {name} is {side}; it must be a positive multiple of {STRIDE}",
        hint=f"try {below} or {below + STRIDE}",
    )


def compile_checkpoint(
    checkpoint: Checkpoint,
    options: CompileOptions,
    *,
    progress: ProgressCallback | None = None,
) -> Artifact:
    """Compile a checkpoint for `options.target`.

    Raises UserError for a checkpoint that is not YOLO26 detection, or options it cannot honour.
    """
    from yolomlir.bindings import ir
    from yolomlir.codegen.build_plan import build_plan
    from yolomlir.dialects import yolo

    options = options.resolved()
    target = target_named(options.target)
    with yolo.new_context(), ir.Location.unknown():
        imported = _import(checkpoint, options)
        module = _optimize(imported, options, target)
        text = str(module)
        plan = build_plan(module)
        program = _generate(
            module, plan, imported.weights, str(options.precision), target, progress
        )
    program.ir = text
    return Artifact(_model_info(imported, options, checkpoint), {target.name: program})


def recompile(
    artifact: Artifact, target_name: str, *, progress: ProgressCallback | None = None
) -> Artifact:
    """The model of an artifact for another GPU, from the optimised IR and the weights inside it.

    The graph and the plan stay; tiles are chosen anew, kernels generated for the new target.
    Raises UnsupportedError from or to the CPU, whose weights lie in another order, and UserError
    where the IR is not what this version reads.
    """
    from yolomlir.bindings import ir
    from yolomlir.dialects import yolo
    from yolomlir.frontend.weights import WeightStore
    from yolomlir.passes.assign_tiles import AssignTiles
    from yolomlir.passes.base import PassContext

    target = target_named(target_name)
    if target.name in artifact.programs:
        return replace(artifact, programs={target.name: artifact.programs[target.name]})
    sources = [p for name, p in artifact.programs.items() if target_named(name).kind == target.kind]
    if not sources:
        raise UnsupportedError(
            f"holds programs for {', '.join(artifact.programs)}; {target.name} cannot be compiled "
            "from them, because a GPU's weights and a CPU's lie in different orders",
            hint=f"compile the checkpoint with --target {target.name}",
        )
    source = sources[0]
    precision = str(source.metadata.get("precision", artifact.info.precision))
    weights = WeightStore(source.weights)
    with yolo.new_context(), ir.Location.unknown():
        module = _parsed(source.ir)
        AssignTiles(override=True).run(module, PassContext(weights=weights, target=target))
        text = str(module)
        program = _generate(module, source.plan, weights, precision, target, progress)
    program.ir = text
    return replace(artifact, programs={target.name: program})


def _parsed(text: str) -> ir.Module:
    """An artifact's optimised IR, in the current context. Raises UserError where it is none."""
    from yolomlir.bindings import ir
    from yolomlir.dialects import yolo
    from yolomlir.passes.outlining import entry_block
    from yolomlir.pipeline import first_error

    hint = "compile the checkpoint again"
    try:
        module = ir.Module.parse(text)
        yolo.verify(module)
        entry_block(module)
    except ir.MLIRError as error:
        message = f"the IR inside cannot be read: {first_error(error)[1]}"
        raise UserError(message, hint=hint) from error
    except UserError as error:
        raise UserError(f"the IR inside cannot be used: {error.message}", hint=hint) from error
    return module


def merge(artifacts: Sequence[Artifact]) -> Artifact:
    """One artifact with the programs of several, which are of one model for different targets."""
    first = artifacts[0]
    programs = {name: p for artifact in artifacts for name, p in artifact.programs.items()}
    return replace(first, programs=programs)


def emit(checkpoint: Checkpoint, options: CompileOptions, level: str) -> str:
    """The IR of a compile at one of `LEVELS`, as text. Raises UserError for an unknown level."""
    from yolomlir.bindings import ir
    from yolomlir.dialects import yolo

    options = options.resolved()
    target = target_named(options.target)
    if level not in LEVELS:
        raise UserError(f"unknown level '{level}'", hint=f"one of: {', '.join(LEVELS)}")
    if level in ("gpu", "ptx") and target.kind != "gpu":
        raise UserError(f"--emit {level} needs a GPU target", hint="add --target sm_120")
    with yolo.new_context(), ir.Location.unknown():
        imported = _import(checkpoint, options)
        if level == "yolo":
            return str(imported.module)
        module = _optimize(imported, options, target)
        if level == "optimized":
            return str(module)
        _lower(module, imported.weights, target)
        if level == "linalg":
            return str(module)
        from yolomlir.autotune.untuned import assign_default_tiles
        from yolomlir.codegen.gpu.program import emit_kernels

        assign_default_tiles(module, target, str(options.precision))
        return emit_kernels(module, target, str(options.precision), level)


def _import(checkpoint: Checkpoint, options: CompileOptions) -> ImportedModel:
    from yolomlir.bindings import ir
    from yolomlir.frontend.yolo26 import import_model

    imported = import_model(
        checkpoint,
        height=options.height,
        width=options.width,
        batch=options.batch,
        max_det=options.max_det,
        input_dtype=options.input_dtype,
    )
    imported.module.operation.attributes["yolo.precision"] = ir.StringAttr.get(
        options.precision, imported.module.context
    )
    return imported


def _optimize(imported: ImportedModel, options: CompileOptions, target: Target) -> ir.Module:
    from yolomlir.passes.base import PassContext
    from yolomlir.pipeline import optimize

    context = PassContext(weights=imported.weights, target=target)
    level, pairs = _level_and_pairs(imported, options, target)
    optimize(imported.module, context, target, level=level, pairs=pairs)
    return imported.module


def _level_and_pairs(
    imported: ImportedModel, options: CompileOptions, target: Target
) -> tuple[int, str]:
    """The level asked for, or else measured; and what level 3 was measured with."""
    from yolomlir.autotune.levels import measured_level, measured_pairs

    size = (options.height, options.width, options.batch)
    model = (target.name, imported.scale, str(options.precision), *size)
    level = measured_level(*model) if options.level is None else options.level
    return level, measured_pairs(*model) if level == HIGHEST_LEVEL else ""


def _lower(module: ir.Module, weights: WeightStore, target: Target) -> None:
    from yolomlir.passes.base import PassContext
    from yolomlir.passes.lower_to_linalg import LowerToLinalg

    LowerToLinalg().run(module, PassContext(weights=weights, target=target))


def _generate(
    module: ir.Module,
    plan: Plan,
    weights: WeightStore,
    precision: str,
    target: Target,
    progress: ProgressCallback | None,
) -> Program:
    """Lower the optimised `module` in place and compile its kernels."""
    _lower(module, weights, target)
    if target.kind == "cpu":
        from yolomlir.codegen.cpu.program import compile_cpu_program

        program = compile_cpu_program(module, plan, weights, progress=progress)
    else:
        from yolomlir.autotune.untuned import assign_default_tiles
        from yolomlir.codegen.gpu.program import compile_gpu_program

        assign_default_tiles(module, target, precision)
        program = compile_gpu_program(module, plan, weights, target, precision, progress=progress)
    program.metadata["precision"] = precision
    return program


def _model_info(
    imported: ImportedModel, options: CompileOptions, checkpoint: Checkpoint
) -> ModelInfo:
    return ModelInfo(
        scale=imported.scale,
        classes=imported.classes,
        names=tuple(imported.names),
        height=options.height,
        width=options.width,
        batch=options.batch,
        max_det=options.max_det,
        precision=str(options.precision),
        input_dtype=options.input_dtype,
        source=checkpoint.path.name if checkpoint.path else "",
    )
