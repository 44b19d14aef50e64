"""What a measurement was taken on: command, date, machine, GPU, driver, versions."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from yolomlir import __version__
from yolomlir.runtime.device import cuda_device

_PACKAGES = (
    "numpy",
    "llvmlite",
    "torch",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "tensorrt",
    "tensorrt-rtx",
    "MNN",
    "ncnn",
    "cuda-bindings",
    "nvidia-cuda-cupti",
    "cupti-python",
)


def environment() -> dict[str, Any]:
    """Everything that a figure needs beside it; plain values for JSON.

    gpu and driver (CUDA version) are None without a GPU; cpus: those that the process may use.
    """
    device = cuda_device()
    gpu = None if isinstance(device, str) else device
    return {
        "command": shlex.join(["yolomlir", *map(_argument, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _processor(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu.name if gpu else None,
        "driver": _driver_version() if gpu else None,
        "cuda": ".".join(map(str, gpu.driver)) if gpu else None,
        "python": platform.python_version(),
        "versions": {"yolomlir": __version__, **_versions()},
    }


def _argument(text: str) -> str:
    """An argument as anybody may read it: of a path from the root, the file's name."""
    return Path(text).name if Path(text).is_absolute() else text


def describe(record: dict[str, Any]) -> str:
    """The environment on one line."""
    place = f"{record['cpu']}, {record['cpus']} CPUs"
    if record["gpu"]:
        place = f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}; {place}"
    return f"{place}; {record['date'][:10]}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver_version() -> str:
    """The driver's own version, as nvidia-smi prints it, where the system tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    words = text.split()
    numbers = [word for word in words if word[:1].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else "unknown"
