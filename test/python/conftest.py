"""What several files share: a small seeded model, compiled once; generated datasets of COCO."""

from __future__ import annotations

from pathlib import Path

import pytest
from coco_protocol import make_dataset
from safetensors.numpy import save_file

from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.vision.demo import demo_image


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the whole session, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("yolomlir-cache")


@pytest.fixture
def cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The session's cache, for this process and those that the test starts."""
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(cache_folder))
    monkeypatch.setenv("YOLOMLIR_NUM_THREADS", "2")
    return cache_folder


@pytest.fixture(scope="session")
def checkpoint_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """YOLO26n with untrained weights and 80 classes."""
    path = tmp_path_factory.mktemp("weights") / "seeded.safetensors"
    save_file(dict(seeded_checkpoint("n", 80, 0).tensors), path)
    return path


@pytest.fixture(scope="session")
def photo() -> Path:
    """A photo of 512x512 pixels."""
    return demo_image()


@pytest.fixture(scope="session")
def all_categories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with COCO's 80 categories."""
    return make_dataset(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="session")
def few_categories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of COCO's categories, for what does not depend on their number: scoring is slow."""
    return make_dataset(tmp_path_factory.mktemp("few"), (*range(1, 12), 90))
