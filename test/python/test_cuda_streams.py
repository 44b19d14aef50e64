"""Inferences of one model share an arena: those on different streams wait for each other."""

from types import SimpleNamespace
from typing import Any

import pytest

cuda = pytest.importorskip("yolomlir.runtime.cuda", reason="needs the CUDA bindings")
Plan = pytest.importorskip("yolomlir.runtime.plan").Plan
View = pytest.importorskip("yolomlir.runtime.plan").View

OWN, CALLERS = 5, 7
IMAGE = View(0, 3, (1, 3, 4, 4), "uint8")
ROWS = View(256, 6, (1, 5, 6))


class _Image:
    """What `StridedMemoryView` says of an image on the GPU."""

    ptr, shape, dtype, strides, is_device_accessible = 1 << 20, (1, 4, 4, 3), "uint8", None, True

    @staticmethod
    def from_any_interface(image: Any, *, stream_ptr: int) -> Any:
        return _Image


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The driver's functions that are called, with their arguments."""
    made: list[tuple[Any, ...]] = []

    def call(function: Any, *args: Any, **_: Any) -> None:
        made.append((function.__name__, *args))

    monkeypatch.setattr(cuda, "call", call)
    monkeypatch.setattr("cuda.core.utils.StridedMemoryView", _Image)
    return made


def executor() -> Any:
    made = object.__new__(cuda.CudaExecutor)
    made._plan = Plan(512, {"image": IMAGE}, {"detections": ROWS}, ())
    made._arena = SimpleNamespace(address=0)
    made._context = SimpleNamespace(make_current=lambda: None, release=lambda: None)
    made._lock = cuda.threading.Lock()
    made._closed = made._one_by_one = made._elsewhere = False
    made._stream, made._done, made._graph = OWN, "done", None
    made._input_address, made._readers = {"image": 0}, {"image": []}
    made._launches, made._memory, made._pinned, made._modules, made._events = [], [], {}, {}, []
    return made


def waits(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [args for name, *args in calls if name == "cuStreamWaitEvent"]


def test_an_inference_from_host_memory_waits_for_one_on_a_callers_stream(
    calls: list[tuple[Any, ...]],
) -> None:
    model = executor()
    model.run_device(object(), stream=CALLERS)
    calls.clear()
    image = {"image": cuda.np.zeros((1, 4, 4, 3), "uint8")}
    model._copy_in(image)
    assert [name for name, *_ in calls] == ["cuStreamWaitEvent", "cuMemcpyHtoDAsync"]
    assert waits(calls) == [[OWN, "done", 0]]
    calls.clear()
    model._copy_in(image)
    assert waits(calls) == [], "once is enough: the stream keeps the order"


def test_an_inference_that_was_waited_for_costs_no_wait(calls: list[tuple[Any, ...]]) -> None:
    model = executor()
    model.run_device(object())
    calls.clear()
    model._copy_in({"image": cuda.np.zeros((1, 4, 4, 3), "uint8")})
    assert waits(calls) == []


def test_closing_waits_for_an_inference_on_a_callers_stream(calls: list[tuple[Any, ...]]) -> None:
    model = executor()
    freed = []
    model._memory = [SimpleNamespace(free=lambda: freed.append(len(calls)))]
    model.run_device(object(), stream=CALLERS)
    model.close()
    waited = [index for index, made in enumerate(calls) if made == ("cuEventSynchronize", "done")]
    assert len(waited) == 1
    assert waited[0] < freed[0]
