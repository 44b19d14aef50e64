"""Depthwise, max pool, attention and detect kernels on a GPU, alone, at the network's sizes.

The cases and the float64 references are those of test/numerics, where the simulator runs them.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

import gpu_dispatches
import test_gpu_attention as attention
import test_gpu_depthwise as depthwise
import test_gpu_detect as detect
import test_gpu_max_pool as max_pool
import test_gpu_merge_detections as merging
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.codegen.gpu.ptx import assemble, to_ptx
from yolomlir.runtime.device import cuda_device, cuda_target
from yolomlir.simulator.report import SimulationReport
from yolomlir.target import target_named

_FOUND = cuda_device()
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(isinstance(_FOUND, str), reason=f"no GPU: {_FOUND}"),
]


class DeviceRun(gpu_dispatches.Run):
    """`Run` on the GPU; the workspace stays there between launches, as in a model."""

    launches = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        from yolomlir.runtime import cuda_driver

        super().__init__(*args, **options)
        self.cuda = cuda_driver
        self.context = cuda_driver.Context()
        self.context.make_current()
        target = target_named(cuda_target() or "sm_90")
        code = assemble(to_ptx(self.kernel.module, target), target.chip).code
        launch = self.kernel.launch
        self.module = cuda_driver.load_module(code, None, self.context.device, launch.function)
        self.function = cuda_driver.load_function(
            self.module, launch.function, launch.shared_bytes, launch.function
        )
        self.memory: dict[int, Any] = {}

    def __call__(self, **_: Any) -> gpu_dispatches.Result:
        y = np.full((*self.shape[:-1], self.pitch), np.nan, np.float32)
        self.arguments[self.position] = y.reshape(-1)
        values = [self._value(i, a) for i, a in enumerate(self.arguments)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        driver, launch = self.cuda.driver, self.kernel.launch
        for _i in range(self.launches):
            self.cuda.call(
                driver.cuLaunchKernel, self.function, *launch.grid, *launch.block,
                launch.shared_bytes, 0, ctypes.addressof(pointers), 0, where=launch.function,
            )  # fmt: skip
        self.cuda.call(driver.cuCtxSynchronize, where=launch.function)
        address = driver.CUdeviceptr(self.memory[self.position].address)
        self.cuda.call(driver.cuMemcpyDtoH, y.ctypes.data, address, y.nbytes)
        assert np.isnan(y[..., self.shape[-1] :]).all()
        return gpu_dispatches.Result(
            y[..., : self.shape[-1]].copy(), SimulationReport(launch.function)
        )

    def _value(self, position: int, argument: Any) -> Any:
        if not isinstance(argument, np.ndarray):
            return ctypes.c_int32(argument)
        fresh = position not in self.memory
        if fresh:
            self.memory[position] = self.cuda.DeviceMemory(argument.nbytes, "test")
        if fresh or position == self.position:
            self.memory[position].upload(argument)
        return ctypes.c_uint64(self.memory[position].address)


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch):
    for module in (attention, depthwise, detect, max_pool, merging):
        monkeypatch.setattr(module, "Run", DeviceRun)
    with yolo.new_context(), ir.Location.unknown():
        yield


def _target() -> str:
    return cuda_target() or "sm_90"


@pytest.mark.parametrize(
    "case",
    [
        depthwise.Case(64, 80, 80),
        depthwise.Case(80, 40, 40),
        depthwise.Case(256, 20, 20, residual=True),
        depthwise.Case(85, 21, 13, batch=4),
        depthwise.Case(16, 33, 35, stride=2, kernel=5),
        depthwise.Case(8, 17, 9, kernel=7),
    ],
    ids=str,
)
def test_depthwise(case):
    depthwise.run(case, target=_target())


@pytest.mark.parametrize("shape", [(1, 20, 20, 128), (4, 12, 21, 256), (2, 40, 40, 10)], ids=str)
def test_max_pool(shape):
    max_pool.check_chained(shape, target=_target())


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize(
    "case",
    [
        attention.Case(2, 20, 20),
        attention.Case(6, 20, 20, batch=8),
        attention.Case(2, 12, 21, batch=4),
        attention.Case(1, 1, 3),
    ],
    ids=str,
)
def test_attention(case, precision):
    run = attention.run(case, precision, target=_target())
    np.testing.assert_array_equal(run().value, run().value)


@pytest.mark.parametrize(
    "case",
    [
        detect.Case(80, detect.NETWORK, 300),
        detect.Case(80, detect.NETWORK, 300, batch=4),
        detect.Case(3, ((48, 80), (24, 40), (12, 20)), 300, batch=2),
        detect.Case(1, ((160, 160), (80, 80), (40, 40)), 1000),
    ],
    ids=str,
)
def test_detect(case):
    boxes, logits = detect.operands(case)
    run = detect.check(case, boxes, logits, target=_target())
    first = run().value
    run.launches = 100
    np.testing.assert_array_equal(first, run().value)


def test_detect_with_ties():
    """Every class of every anchor is a candidate; the order is by index alone."""
    case = detect.Case(80, detect.NETWORK, 300)
    boxes, logits = detect.operands(case)
    detect.check(case, boxes, [np.full_like(x, -3.0) for x in logits], target=_target())
    rng = np.random.default_rng(0)
    values = np.array([-2.0, -0.0, 0.0, 1.0], np.float32)
    detect.check(case, boxes, [rng.choice(values, x.shape) for x in logits], target=_target())


@pytest.mark.parametrize("above", [0, 2, 5, 40])
@pytest.mark.parametrize(
    "case",
    [
        merging.Case(80, detect.NETWORK, 300),
        merging.Case(80, detect.NETWORK, 300, batch=4),
        merging.Case(3, ((48, 80), (24, 40), (12, 20)), 300, batch=2),
        merging.Case(37, ((32, 32), (16, 16), (8, 8)), 512),
    ],
    ids=str,
)
def test_detection_in_two_stages(case, above):
    """Of the last level come few of the best, many, most, or more than there is room for."""
    boxes, logits = detect.operands(case)
    logits[2] = logits[2] + np.float32(above)
    run = merging.check(case, boxes, logits, tile=None, first=None, target=_target())
    first = run().value
    for _ in range(50):
        np.testing.assert_array_equal(first, run().value)
    values = np.array([-2, 0, 1, 1.001], np.float32)
    rng = np.random.default_rng(0)
    ties = [rng.choice(values, x.shape) for x in logits]
    merging.check(case, boxes, ties, tile=None, first=None, target=_target())
