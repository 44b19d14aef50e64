"""`yolomlir profile`: on the CPU by the program's clock; what a GPU's records are made into."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import small_model

from yolomlir.api import load
from yolomlir.cli.main import main
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.evaluate.profile import (
    CLOCK,
    CUPTI,
    Profile,
    _assemble,
    _by_step,
    _Measured,
    load_profile,
    profile,
)
from yolomlir.evaluate.profile_report import chrome_trace, compare_profiles, group_rows, summary
from yolomlir.runtime.artifact import Program
from yolomlir.runtime.cupti import KernelRecord
from yolomlir.runtime.plan import Plan, Step, View

HEIGHT, WIDTH = small_model.SIZE


@pytest.fixture(scope="module")
def artifact_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("profile") / "model.ylm")
    arguments = ["compile", small_model.checkpoint_file(), "-o", path, "--target", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOMLIR_CACHE_DIR", str(small_model.folder() / "cache"))
        assert main([*arguments, "--imgsz", small_model.IMGSZ]) == 0
    return path


@pytest.fixture(scope="module")
def found(artifact_file: str) -> Profile:
    image = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    return profile(lambda: load(artifact_file, threads=1), image, count=20)


def test_every_step_is_timed(found: Profile, artifact_file: str) -> None:
    model = load(artifact_file)
    steps = model.artifact.programs["cpu"].plan.steps
    assert [k.layer for k in found.kernels] == [step.layer for step in steps]
    assert found.method == CLOCK
    assert all(k.times.count == 20 for k in found.kernels)
    assert all(0 < k.times.minimum <= k.times.median for k in found.kernels)
    begins = [k.begin_us for k in found.kernels]
    assert begins[0] == 0
    assert begins == sorted(begins)
    model.close()


def test_steps_add_up_to_the_inference(found: Profile) -> None:
    """They run one after the other, so their sum is what some step runs for, within the whole."""
    assert found.overlaps == ()
    assert found.sum_us == pytest.approx(found.busy_us, rel=1e-9)
    assert found.sum_us <= found.total_us.median * 1.001
    assert found.sum_us > 0.5 * found.total_us.median  # a busy machine pauses between steps
    assert "no two kernels overlap" in "\n".join(summary(found))


def test_ticks_are_real_time(artifact_file: str) -> None:
    """Steps' times in microseconds, of a clock set against another one, fit that clock."""
    import time

    image = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    with load(artifact_file, threads=1) as model:
        start = time.perf_counter()
        measured = profile(lambda: load(artifact_file, threads=1), image, count=50)
        most = 1e6 * (time.perf_counter() - start)
    assert 0 < measured.total_us.mean * measured.total_us.count < most
    assert model.info.height == HEIGHT


def test_operations_are_the_networks(found: Profile) -> None:
    """2 a multiply-add of all convolutions, from their own list, and of both attentions."""
    from yolomlir.frontend.network import SCALES, convolutions

    convs = {c.name: c for c in convolutions(SCALES["n"], small_model.CLASSES)}
    kernel = next(k for k in found.kernels if k.layer == "model.3.conv")
    conv = convs["model.3.conv"]
    positions = (HEIGHT // 8) * (WIDTH // 8)
    assert kernel.flops == 2 * positions * int(np.prod(conv.weight_shape))
    item = 4
    read = 64 * 4 * positions * item + int(np.prod(conv.weight_shape)) * item + 64 * item
    assert kernel.bytes == read + 64 * positions * item
    merged = next(k for k in found.kernels if k.layer == "model.6.m.0.cv1.conv")
    assert merged.flops == 2 * (HEIGHT // 16) * (WIDTH // 16) * 64 * 64
    attention = next(k for k in found.kernels if k.family == "attention")
    tokens = (HEIGHT // 32) * (WIDTH // 32)
    pe = 2 * tokens * 128 * 9
    assert attention.flops == pe + 2 * tokens * tokens * (2 * 32 + 128)
    assert sum(k.flops for k in found.kernels) > 2e7


def test_groups(found: Profile) -> None:
    families = group_rows(found, lambda k: k.family)
    assert {row[0] for row in families} == {
        "conv2d", "depthwise", "max_pool", "attention", "detect",
    }  # fmt: skip
    assert sum(int(row[1]) for row in families) == len(found.kernels)


def test_the_command_and_its_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, artifact_file: str
) -> None:
    pytest.importorskip("matplotlib")
    paths = {n: str(tmp_path / n) for n in ("p.json", "t.json", "p.md", "r.png")}
    arguments = [
        "--count", "5", "--json", paths["p.json"], "--trace", paths["t.json"],
        "--markdown", paths["p.md"], "--roofline", paths["r.png"],
    ]  # fmt: skip
    assert main(["profile", artifact_file, *arguments]) == 0
    text = capsys.readouterr().out
    assert "time-stamp counter" in text
    assert "by family" in text
    assert main(["profile", paths["p.json"], "--against", paths["p.json"]]) == 0
    assert "1.00x" in capsys.readouterr().out
    again = load_profile(paths["p.json"])
    assert json.loads(json.dumps(again.to_dict())) == json.loads((tmp_path / "p.json").read_text())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(again.kernels)
    assert {"name", "ts", "dur", "pid", "tid"} <= set(complete[0])
    assert "| kernel |" in (tmp_path / "p.md").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


# ---- what is made of a GPU's records ------------------------------------------------------------

LAYERS = ("a.conv", "b.conv", "c.conv", "d.conv")


@pytest.fixture
def program() -> Program:
    """Four steps of three kernels."""
    view = View(0, 4, (1, 4, 2, 2))
    steps = tuple(
        Step(kernel, layer, (), (view,))
        for kernel, layer in zip(("k0", "k1", "k1", "k2"), LAYERS, strict=True)
    )
    kernels = {name: {"function": f"{name}_entry"} for name in ("k0", "k1", "k2")}
    return Program("sm_90", Plan(64, {}, {}, steps), {}, kernels, {})


def record(step: int, inference: int, start: float, end: float, node: int) -> KernelRecord:
    name = ("k0_entry", "k1_entry", "k1_entry", "k2_entry")[step]
    base = 1_000_000 + 100_000 * inference
    return KernelRecord(name, base + round(1e3 * start), base + round(1e3 * end), 7, node)


TIMES = [(0, 10), (10, 20), (12, 25), (25, 30)]


def records(nodes: list[int]) -> list[KernelRecord]:
    """Three inferences; b and c run side by side for 8 us."""
    found = [
        record(step, i, start, end, nodes[step])
        for i in range(3)
        for step, (start, end) in enumerate(TIMES)
    ]
    return found[::-1]


@pytest.mark.parametrize("nodes", [[41, 42, 43, 47], [0, 0, 0, 0]])
def test_records_belong_to_steps(program: Program, nodes: list[int]) -> None:
    """By the graph's nodes; by time where the kernels were launched without a graph."""
    begins, ends = _by_step(records(nodes), program, 3)
    np.testing.assert_allclose(begins, [[0, 10, 12, 25]] * 3)
    np.testing.assert_allclose(ends, [[10, 20, 25, 30]] * 3)


def test_records_that_do_not_fit_are_refused(program: Program) -> None:
    some = records([1, 2, 3, 4])
    for wrong in (some[1:], [r for r in some if r.graph_node != 2], []):
        with pytest.raises(InternalError, match="the plan has 4 steps"):
            _by_step(wrong, program, 3)


def test_overlap_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, program: Program, found: Profile
) -> None:
    """The sum is 38 us, some kernel runs for 30, and the 8 between are b's with c."""
    from yolomlir.evaluate import profile as module

    nothing = module.StepLayers("conv2d", (), ())
    monkeypatch.setattr(module, "step_layers", lambda program, graph: [nothing] * 4)
    begins, ends = _by_step(records([1, 2, 3, 4]), program, 3)

    class FakeModel:
        target = "sm_90"
        info = small_info()

        class artifact:  # noqa: N801
            programs = {"sm_90": program}  # noqa: RUF012

    measured = _Measured(CUPTI, begins, ends, [30.0, 31.0, 32.0])
    made = _assemble(FakeModel(), measured, 3)  # type: ignore[arg-type]
    assert made.sum_us == pytest.approx(38)
    assert made.busy_us == pytest.approx(30)
    assert made.overlap_us == pytest.approx(8)
    assert [(o.first, o.second, o.us) for o in made.overlaps] == [("b.conv", "c.conv", 8.0)]
    assert "b.conv with c.conv 8.0 us" in "\n".join(summary(made))
    lanes = {e["name"]: e["tid"] for e in chrome_trace(made)["traceEvents"] if e["ph"] == "X"}
    assert lanes == {"a.conv": 0, "b.conv": 0, "c.conv": 1, "d.conv": 0}
    rows, totals = compare_profiles(made, found)
    assert totals == (31.0, found.total_us.median)
    assert len(rows) == 4 + len(found.kernels)


def small_info() -> Any:
    from yolomlir.runtime.artifact import ModelInfo

    return ModelInfo("n", 3, ("a", "b", "c"), HEIGHT, WIDTH, 1, 20, "tf32")


def test_roofs(found: Profile) -> None:
    from yolomlir.target import target_named

    kernel = next(k for k in found.kernels if k.layer == "model.3.conv")
    h200 = target_named("sm_90")
    bound = kernel.bytes / 4800e9, kernel.flops / 494e12
    assert kernel.roof_us(h200, "tf32") == pytest.approx(1e6 * max(bound))
    assert kernel.roof_us(h200, "fp32") >= kernel.roof_us(h200, "tf32")
    assert kernel.roof_us(h200, "fp16") == pytest.approx(1e6 * max(bound[0], bound[1] / 2))
    assert kernel.roof_us(target_named("cpu"), "fp32") == 0.0


# ---- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ('{"kind": "bench"}', "is not a profile"), ("[]", "is not")],
)
def test_files_that_are_no_profile(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_profile(path)


def test_a_profile_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "/nonexistent/a.json"]) == 2
    assert "/nonexistent/a.json: cannot be read" in capsys.readouterr().err
