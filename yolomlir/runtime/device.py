"""Which CUDA GPU is here, if any, without starting anything on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from yolomlir.target import TARGETS


@dataclass(frozen=True)
class CudaDevice:
    """A GPU the driver reports. driver: the CUDA version it supports, such as (13, 0)."""

    name: str
    capability: tuple[int, int]
    driver: tuple[int, int]

    @property
    def target(self) -> str | None:
        """The target row for it: the same chip, else the newest older one of its family."""
        exact = f"sm_{self.capability[0]}{self.capability[1]}"
        if exact in TARGETS:
            return exact
        major, minor = self.capability
        family = [
            (int(name[3:]) % 10, name)
            for name in TARGETS
            if name.startswith("sm_") and int(name[3:]) // 10 == major
        ]
        older = [name for m, name in sorted(family) if m <= minor]
        return older[-1] if older else None


@cache
def cuda_device() -> CudaDevice | str:
    """The first CUDA GPU, or the reason why none can be used."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "the CUDA bindings are not installed (pip install 'yolomlir[cuda]')"
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # cuda-bindings raises RuntimeError where libcuda is missing
        return f"the NVIDIA driver is not installed: {error}"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"the NVIDIA driver reports {status.name}: no GPU can be used"
    return _first_device(driver)


def _first_device(driver: Any) -> CudaDevice | str:
    def call(function: Any, *args: Any) -> Any:
        status, *values = function(*args)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    attribute = driver.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    try:
        if call(driver.cuDeviceGetCount) == 0:
            return "no CUDA GPU is visible (is CUDA_VISIBLE_DEVICES empty?)"
        device = call(driver.cuDeviceGet, 0)
        name = call(driver.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
        capability = (
            int(call(driver.cuDeviceGetAttribute, major, device)),
            int(call(driver.cuDeviceGetAttribute, minor, device)),
        )
        version = int(call(driver.cuDriverGetVersion))
    except RuntimeError as error:
        return f"the NVIDIA driver failed: {error}"
    return CudaDevice(name, capability, (version // 1000, version % 1000 // 10))


def cuda_target() -> str | None:
    """The target of the first CUDA GPU, or None where there is none that yolomlir knows."""
    device = cuda_device()
    return None if isinstance(device, str) else device.target
