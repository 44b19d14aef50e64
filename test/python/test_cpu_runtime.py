"""The CPU backend around its kernels: cache, worker processes, thread team, warm start."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen import workers
from yolomlir.codegen.cpu import object_cache
from yolomlir.codegen.cpu.isa import Host, Isa, host
from yolomlir.codegen.cpu.kernel import Buffer, KernelSource
from yolomlir.codegen.cpu.lower import compile_kernel
from yolomlir.codegen.cpu.program import compile_cpu_program
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.frontend.weights import WeightStore
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.cpu import CpuExecutor, _physical
from yolomlir.runtime.plan import Argument, Plan, Step, View

SHAPE = (1, 8, 16, 8)
"""N, H, W, C of every tensor here."""
_TEXT = """
func.func private @scale(%x: tensor<1x8x16x8xf32>, %w: tensor<8xf32>) -> tensor<1x8x16x8xf32>
    attributes {yolo.family = "conv2d"} {
  %e = tensor.empty() : tensor<1x8x16x8xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, c) -> (n, h, w, c)>, affine_map<(n, h, w, c) -> (c)>,
                       affine_map<(n, h, w, c) -> (n, h, w, c)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%x, %w : tensor<1x8x16x8xf32>, tensor<8xf32>) outs(%e : tensor<1x8x16x8xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %m = arith.mulf %a, %b : f32
    linalg.yield %m : f32
  } -> tensor<1x8x16x8xf32>
  return %y : tensor<1x8x16x8xf32>
}
func.func private @square(%x: tensor<1x8x16x8xf32>) -> tensor<1x8x16x8xf32>
    attributes {yolo.family = "conv2d"} {
  %e = tensor.empty() : tensor<1x8x16x8xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(n, h, w, c) -> (n, h, w, c)>,
                       affine_map<(n, h, w, c) -> (n, h, w, c)>],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%x : tensor<1x8x16x8xf32>) outs(%e : tensor<1x8x16x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %m = arith.mulf %a, %a : f32
    linalg.yield %m : f32
  } -> tensor<1x8x16x8xf32>
  return %y : tensor<1x8x16x8xf32>
}
"""
WEIGHT = np.arange(8, dtype=np.float32) - 3


def expected(x: np.ndarray) -> np.ndarray:
    """scale, square, scale."""
    return (x * WEIGHT) ** 2 * WEIGHT


def make(processes: int = 1, progress=None) -> Program:
    size = 4 * int(np.prod(SHAPE))
    views = [View(i * size, 8, (1, 8, 8, 16)) for i in range(4)]
    scale, x = (Argument(weight="w"), lambda v: Argument(view=v))
    steps = (
        Step("scale", "first", (x(views[0]), scale), (views[1],)),
        Step("square", "second", (x(views[1]),), (views[2],), (0,)),
        Step("scale", "third", (x(views[2]), scale), (views[3],), (1,)),
    )
    plan = Plan(4 * size, {"image": views[0]}, {"y": views[3]}, steps)
    weights = WeightStore({"w": WEIGHT})
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(_TEXT)
        return compile_cpu_program(module, plan, weights, processes=processes, progress=progress)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def program(cache: Path) -> Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOMLIR_CACHE_DIR", str(cache))
        return make()


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


# ---- execution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_computes_the_same(program: Program, threads: int) -> None:
    with CpuExecutor(program, threads=threads) as executor:
        for seed in range(20):
            got = executor.run({"image": image(seed)})["y"]
            np.testing.assert_array_equal(got, expected(image(seed)))


def test_callers_from_several_threads_get_their_own_results(program: Program) -> None:
    failures = []
    with CpuExecutor(program, threads=2) as executor:

        def call(seed: int) -> None:
            x = image(seed)
            got = [executor.run({"image": x})["y"] for _ in range(30)]
            failures.extend(seed for y in got if not np.array_equal(y, expected(x)))

        callers = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failures


def test_results_are_new_arrays(program: Program) -> None:
    with CpuExecutor(program, threads=1) as executor:
        first = executor.run({"image": image(1)})["y"]
        executor.run({"image": image(2)})
        np.testing.assert_array_equal(first, expected(image(1)))


def test_inputs_that_are_not_contiguous(program: Program) -> None:
    with CpuExecutor(program, threads=1) as executor:
        x = image()[:, ::-1, :, ::-1]
        np.testing.assert_array_equal(executor.run({"image": x})["y"], expected(x))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "'image' is missing"),
        ({"image": np.zeros((1, 8, 16, 4), np.float32)}, r"shape \(1, 8, 16, 4\); expected \(1, 8"),
        ({"image": np.zeros(SHAPE, np.float64)}, "float64; expected float32"),
        ({"image": np.zeros(SHAPE, np.float32), "mask": np.zeros(1)}, "unknown input 'mask'"),
    ],
)
def test_wrong_inputs_are_refused(program: Program, inputs, message: str) -> None:
    with CpuExecutor(program, threads=1) as executor, pytest.raises(UserError, match=message):
        executor.run(inputs)


def test_closing_ends_the_threads_and_later_calls(program: Program) -> None:
    before = threading.active_count()
    executor = CpuExecutor(program, threads=4)
    executor.run({"image": image()})
    assert threading.active_count() == before + 3
    executor.close()
    executor.close()
    assert threading.active_count() == before
    with pytest.raises(UserError, match="closed"):
        executor.run({"image": image()})


def test_an_executor_nobody_holds_ends_its_threads(program: Program) -> None:
    before = set(threading.enumerate())
    executor = CpuExecutor(program, threads=3)
    executor.run({"image": image()})
    team = set(threading.enumerate()) - before
    assert len(team) == 2
    del executor
    gc.collect()
    for thread in team:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_sleeping_threads_take_no_time(program: Program) -> None:
    with CpuExecutor(program, threads=3) as executor:
        executor.run({"image": image()})
        start = os.times()
        threading.Event().wait(0.5)
        end = os.times()
    assert (end.user - start.user) + (end.system - start.system) < 0.25


def test_code_for_another_machine_is_refused(program: Program) -> None:
    lacking = {**program.metadata, "features": ["+sse2", "+from-the-future"]}
    with pytest.raises(UserError, match="lacks from-the-future"):
        CpuExecutor(dataclasses.replace(program, metadata=lacking))
    other = {**program.metadata, "triple": "riscv64-unknown-linux-gnu"}
    with pytest.raises(UserError, match="compiled for riscv64"):
        CpuExecutor(dataclasses.replace(program, metadata=other))


@pytest.mark.parametrize("threads", [0, 10**6, 1.5, "2"])
def test_numbers_of_threads_that_cannot_be_are_refused(program: Program, threads) -> None:
    with pytest.raises(UserError, match=f"threads is {threads!r}"):
        CpuExecutor(program, threads=threads)


def test_threads_that_the_system_does_not_give_are_an_error(program: Program, monkeypatch) -> None:
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    inputs = {n: np.zeros(_physical(v), v.dtype) for n, v in program.plan.inputs.items()}
    with CpuExecutor(program, threads=3) as executor:
        with pytest.raises(UserError, match="3 threads cannot be started"):
            executor.run(inputs)
        started[0].join(10)
    assert not started[0].is_alive()


# ---- warm start ---------------------------------------------------------------------------------

_WARM = """
import pathlib, sys
import numpy as np
from yolomlir.runtime.artifact import Artifact
from yolomlir.runtime.cpu import CpuExecutor

program = Artifact.load(sys.argv[1]).programs["cpu"]
with CpuExecutor(program, threads=2) as executor:
    x = np.load(sys.argv[2])
    np.save(sys.argv[3], executor.run({"image": x})["y"])
    if hasattr(__import__("os"), "fork"):
        import os
        child = os.fork()
        if child == 0:
            same = np.array_equal(executor.run({"image": x})["y"], np.load(sys.argv[3]))
            os._exit(0 if same else 3)
        assert os.waitpid(child, 0)[1] == 0, "a forked child computes something else"
loaded = [name for name in sys.modules if name.split(".")[0] in ("mlir", "llvm")]
assert not loaded, loaded
status = pathlib.Path("/proc/self/status")  # its peak is this program's, not of who started it
lines = status.read_text().splitlines() if status.is_file() else ["VmHWM: 0 kB"]
print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")))
"""


def test_a_saved_program_runs_without_mlir(program: Program, tmp_path: Path) -> None:
    """Also in a forked child, and in little memory."""
    info = ModelInfo("n", 1, ("thing",), 8, 16, 1, 1, "fp32", "float32")
    Artifact(info, {"cpu": program}).save(tmp_path / "m.ylm")
    np.save(tmp_path / "x.npy", image())
    paths = [tmp_path / "m.ylm", tmp_path / "x.npy", tmp_path / "y.npy"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WARM, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected(image()))
    assert int(done.stdout) < 300


# ---- cache --------------------------------------------------------------------------------------


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kernel"))


def test_equal_kernels_are_compiled_once(program: Program) -> None:
    assert len(program.plan.steps) == 3
    assert len(program.kernels) == 2


def test_a_second_compile_takes_everything_from_the_cache(program: Program, monkeypatch) -> None:
    def refuse(_, jobs, *__):
        assert not jobs, "compiled again"

    monkeypatch.setattr(workers, "compile_all", refuse)
    reports = []
    again = make(progress=lambda *report: reports.append(report))
    assert again.binaries == program.binaries
    assert reports == [("compiling kernels", 2, 2)]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "empty"])
def test_damaged_entries_are_compiled_again(
    damage: str, tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    good = make()
    victim = entries(tmp_path)[0]
    data = victim.read_bytes()
    bad = {
        "truncated": data[: len(data) // 2],
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "foreign": b"something else",
        "empty": b"",
    }[damage]
    victim.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        again = make()
    assert "damaged cache entry" in caplog.text
    assert again.kernels == good.kernels
    assert victim.read_bytes() != bad
    with CpuExecutor(again, threads=1) as executor:
        np.testing.assert_array_equal(executor.run({"image": image()})["y"], expected(image()))


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING):
        made = make()
    assert caplog.text.count("not cached") == 1  # not once a kernel
    assert len(made.kernels) == 2


def test_the_key_has_everything_that_changes_a_kernel() -> None:
    source = KernelSource("f", "text", (Buffer((1, 2, 2, 8), "f32", 8),), (Buffer((8,)),))
    machine = Host("x86_64-linux", "znver4", ("+avx2",))
    variants = [
        (source, machine),
        (dataclasses.replace(source, text="other"), machine),
        (dataclasses.replace(source, operands=(Buffer((1, 2, 2, 8), "f32", 12),)), machine),
        (source, dataclasses.replace(machine, cpu="znver3")),
        (source, dataclasses.replace(machine, features=("+avx512f",))),
    ]
    assert len({object_cache.kernel_key(*v) for v in variants}) == len(variants)


# ---- worker processes ---------------------------------------------------------------------------


def test_workers_compile_what_this_process_compiles(
    program: Program, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    assert make(processes=2).binaries == program.binaries


def test_a_kernel_that_cannot_be_compiled_is_named() -> None:
    bad = KernelSource("broken", "not mlir", (), (Buffer((8,)),))
    isa = host().isa
    jobs = [(bad, isa, "a"), (bad, isa, "b")]
    with pytest.raises(InternalError, match="broken"):
        workers.compile_all(compile_kernel, jobs, ["broken", "broken"], 2, lambda *_: None)


def test_an_aborting_compiler_is_an_error_not_the_end(monkeypatch) -> None:
    monkeypatch.setattr(workers, "_COMMAND", "import os; os.abort()")
    job = (KernelSource("doomed", "", (), ()), Isa("sse", 4, 16), "s")
    with pytest.raises(InternalError, match=r"doomed.*aborted"):
        workers.compile_all(compile_kernel, [job, job], ["doomed"] * 2, 2, lambda *_: None)
