"""`yolo-fuse-pointwise` on the whole network: what it fuses, and that the meaning stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from yolomlir.dialects import yolo
from yolomlir.passes.assign_tiles import AssignTiles, chain_shape
from yolomlir.passes.base import PassContext
from yolomlir.passes.fuse_pointwise import smallest_gpu
from yolomlir.passes.lower_to_linalg import LowerToLinalg
from yolomlir.passes.outlining import dispatches, functions

from yolomlir.arena_interpreter import ORDERS, Arena, run_plan
from yolomlir.autotune import space, tables
from yolomlir.autotune.signature import Form
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.codegen.gpu import chain
from yolomlir.codegen.gpu.chain_tile import ChainTile, objection
from yolomlir.codegen.gpu.generate import generate_kernel
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.codegen.gpu.program import compile_kernels
from yolomlir.codegen.gpu.tile import to_attribute
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import ImportedModel, import_model
from yolomlir.interpreter import interpret
from yolomlir.pipeline import Pipeline, pipeline_for
from yolomlir.target import TARGETS, target_named

GPUS = [name for name, target in TARGETS.items() if target.kind == "gpu"]
SLOW_ELSEWHERE = "yolo-assign-tiles"

pytestmark = pytest.mark.usefixtures("context")


def _optimised(
    scale: str, shape: tuple[int, int], target: str, level: int
) -> tuple[ImportedModel, PassContext]:
    model = import_model(seeded_checkpoint(scale, 80, 0), height=shape[0], width=shape[1])
    passes = PassContext(weights=model.weights, target=target_named(target))
    steps = Pipeline.parse(pipeline_for(passes.target.kind, level)).steps
    Pipeline([s for s in steps if s.name != SLOW_ELSEWHERE]).run(model.module, passes)
    return model, passes


def test_launches_of_the_smallest_network() -> None:
    """100 without chains. Every stage of a chain is a convolution; no result is stored twice."""
    model, passes = _optimised("n", (640, 640), "sm_90", 3)
    counts = passes.statistics["yolo-fuse-pointwise"]
    calls = dispatches(model.module)
    assert len(calls) <= 65
    assert len(calls) + counts["fused"] == 100
    table = functions(model.module)
    chains = [table[yolo.callee(c)] for c in calls if yolo.callee(c).startswith("chain_")]
    assert len(chains) == counts["chains"] >= 20
    for function in chains:
        block = function.regions[0].blocks[0]
        returned = block.operations[-1].operation.operands
        assert 1 <= len(returned) == len(set(returned))
    attention = [c for c in calls if "128x20x20_128_add_then_256_silu_then_128_add" in str(c)]
    assert len(attention) == 2
    assert all(len(c.results) == 1 for c in attention)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_chains_mean_what_the_network_means(target: str) -> None:
    """On a small image, through the arena in orders that a graph may run; order of sums apart."""
    shape = (64, 96)
    plain, _ = _optimised("n", shape, target, 2)
    model, passes = _optimised("n", shape, target, 3)
    assert passes.statistics["yolo-fuse-pointwise"]["chains"] >= 15
    image = np.random.default_rng(1).integers(0, 256, (1, 3, *shape), dtype=np.uint8)
    expected = interpret(plain.module, [image], plain.weights)[0]
    plan = build_plan(model.module)
    arena = Arena(plan.arena_bytes)
    for order in ORDERS:
        got = run_plan(
            model.module, plan, {"image": image}, model.weights, order=order, arena=arena
        )
        np.testing.assert_array_equal(got["detections"], expected)


def test_a_tile_is_judged_by_the_shape_that_its_kernel_has() -> None:
    """What is read of a chain where tiles are assigned is what its code generator reads."""
    model, passes = _optimised("n", (640, 640), "sm_90", 3)
    found = {
        name: chain_shape(function)
        for name, function in functions(model.module).items()
        if name.startswith("chain_")
    }
    assert any(shape.kept for shape in found.values())
    assert any(shape.depthwise for shape in found.values())
    LowerToLinalg().run(model.module, passes)
    table = functions(model.module)
    assert found == {name: chain.parse(table[name]) for name in found}


class OneTile:
    """A table that knows the same tile for every chain and nothing else."""

    def __init__(self, tile: ChainTile) -> None:
        self.key = space.key_of(tile)

    def near(self, precision: str, form: Form) -> list[tables.TableEntry]:
        known = form.at(form.size).startswith("chain ")
        return [tables.TableEntry(self.key, 1.0, 1.0)] if known else []


def test_a_table_is_not_believed_where_a_tile_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after a change of the kernels: a compile goes on with its own choice."""
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    model, passes = _optimised("n", (64, 96), "sm_90", 3)
    table = functions(model.module)
    chains = [function for name, function in table.items() if name.startswith("chain_")]
    small, too_large = ChainTile(16, 1, 4, 8, 2), ChainTile(256, 1, 16, 32, 12)
    shapes = [chain_shape(function) for function in chains]
    fitting = [s for s in shapes if objection(small, s, passes.target, "tf32") is None]
    assert len(fitting) > 10
    for tile, count in ((too_large, 0), (small, len(fitting))):
        monkeypatch.setattr(tables, "shipped", lambda target, tile=tile: OneTile(tile))
        passes.statistics.clear()
        AssignTiles(override=True).run(model.module, passes)
        assert passes.statistics["yolo-assign-tiles"]["from_shipped"] == count
        assert sum("yolo.tile" in function.attributes for function in chains) == count


def test_a_cpu_program_has_no_chains() -> None:
    assert pipeline_for("cpu", 3) == pipeline_for("cpu", 2)


# ---- files that can be compiled again for other GPUs --------------------------------------------


def _chains(
    model: ImportedModel, target: str, *, tile: ChainTile | None = None
) -> dict[str, Kernel]:
    """What a compile for `target` from an sm_90 program's IR generates for its chains."""
    chip = target_named(target)
    module = ir.Module.parse(str(model.module))
    passes = PassContext(weights=model.weights, target=chip)
    for name, function in functions(module).items():
        if tile is not None and name.startswith("chain_"):
            function.attributes["yolo.tile"] = to_attribute(tile)
    AssignTiles(override=True).run(module, passes)
    LowerToLinalg().run(module, passes)
    return {
        yolo.string(view.operation, "sym_name"): generate_kernel(view, chip, precision="tf32")
        for view in module.body.operations
        if "yolo.family" in view.operation.attributes
        and yolo.string(view.operation, "yolo.family") == "chain"
    }


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("scale", ["n", pytest.param("s", marks=pytest.mark.slow)])
def test_chains_made_for_an_h200_are_generated_for_every_gpu(scale: str, target: str) -> None:
    """Also where the file has a tile that only its own GPU can take: clusters and 200 KB."""
    model, _ = _optimised(scale, (640, 640), "sm_90", 3)
    kernels = _chains(model, target, tile=ChainTile(64, 8, 8, 32, 12))
    assert len(kernels) >= 15
    limit = target_named(target).shared_memory_bytes
    assert all(kernel.launch.shared_bytes <= limit for kernel in kernels.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("scale", ["n", "s"])
def test_chains_made_for_an_h200_assemble_for_every_gpu(scale: str, target: str) -> None:
    model, _ = _optimised(scale, (640, 640), "sm_90", 3)
    chip = target_named(target)
    for name, compiled in compile_kernels(_chains(model, target), chip).items():
        assert compiled.spill_bytes == 0, name
        assert compiled.registers * compiled.launch.block[0] <= chip.registers_per_sm, name


def test_the_smallest_gpu_has_what_all_have() -> None:
    smallest = smallest_gpu()
    for name in GPUS:
        target = target_named(name)
        assert smallest.shared_memory_bytes <= target.shared_memory_bytes
        assert target.clusters or not smallest.clusters


def test_chains_for_one_gpu_alone() -> None:
    """YOLO26s has chains that fit an H200 and no RTX 4090; `portable=false` makes them."""
    found = {}
    for portable in ("true", "false"):
        model = import_model(seeded_checkpoint("s", 80, 0))
        passes = PassContext(weights=model.weights, target=target_named("sm_90"))
        text = pipeline_for("gpu", 3).replace(
            "yolo-fuse-pointwise", f"yolo-fuse-pointwise{{portable={portable}}}"
        )
        skipped = (SLOW_ELSEWHERE, "yolo-plan-memory")
        steps = [s for s in Pipeline.parse(text).steps if s.name not in skipped]
        Pipeline(steps).run(model.module, passes)
        found[portable] = len(dispatches(model.module))
    assert found["false"] < found["true"] < 99
