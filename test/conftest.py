"""Skips tests that need a GPU, or minutes; gives contexts and folders to those that ask."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from yolomlir.dialects import yolo

from yolomlir.bindings import ir
from yolomlir.runtime.device import cuda_device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = cuda_device()
    wanted = config.getoption("markexpr") or ""
    for item in items:
        if "device" in item.keywords and isinstance(found, str):
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {found}"))
        if "slow" in item.keywords and "slow" not in wanted:
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m slow"))


def pytest_collection_finish() -> None:
    """What is there now stays until the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def context() -> Iterator[None]:
    """An MLIR context with the dialect, and a location, for what a test builds."""
    with yolo.new_context(), ir.Location.unknown():
        yield


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return Path(value)


@pytest.fixture(scope="session")
def real_weights() -> Path:
    """Trained weights of YOLO26n, fused, as safetensors."""
    return _folder("YOLOMLIR_TEST_WEIGHTS") / "yolo26n_coco_dequantised_fused.safetensors"


@pytest.fixture(scope="session")
def reference_folder() -> Path:
    """A seeded YOLO26n with its ONNX export, an input and the rows that it gives."""
    return _folder("YOLOMLIR_TEST_REFERENCE")
