"""What is known of a CUDA error: the layer where kernels run one by one, else how to learn it."""

from types import SimpleNamespace
from typing import Any

import pytest

cuda = pytest.importorskip("yolomlir.runtime.cuda", reason="needs the CUDA bindings")


def executor(one_by_one: bool) -> Any:
    made = object.__new__(cuda.CudaExecutor)
    made._graph = None
    made._one_by_one = one_by_one
    launch = SimpleNamespace(layer="model.3.conv", enqueue=lambda stream: None)
    made._launches = [launch, SimpleNamespace(layer="model.4.conv", enqueue=lambda stream: None)]
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(cuda, "call", lambda function, *args, **where: made.append(where))
    return made


def test_one_by_one_every_wait_names_its_layer(calls: list[dict[str, Any]]) -> None:
    executor(one_by_one=True)._enqueue(None)
    assert [c["where"] for c in calls] == ["model.3.conv", "model.4.conv"]


def test_without_it_the_wait_says_how_to_learn_the_layer(calls: list[dict[str, Any]]) -> None:
    plain = executor(one_by_one=False)
    plain._enqueue(None)
    assert calls == []
    plain._wait(None)
    assert "YOLOMLIR_CUDA_SYNC=1" in calls[0]["hint"]
