"""The CUDA runtime on a real GPU: right, repeatable, leak-free, zero-copy, honest in failure."""

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

from reference import run_reference

import yolomlir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.runtime.device import cuda_device

pytestmark = pytest.mark.device

BOX_PX = {"fp32": 0.01, "tf32": 2.3, "fp16": 2.8}
"""fp32: the bound asked of every engine against float64. tf32: inputs of every product are rounded
to 2^-11; through some 60 layers the errors of a row add up like sqrt(60) * 2^-11 * 3 standard
deviations, 1.13 % of a box's distances, which are at most some 200 px for the rows compared.
fp16: what is stored is rounded to 2^-11, so the sums of some 25 residuals on the way are as well:
sqrt(85) for sqrt(60)."""
SCORE = {"fp32": 1e-4, "tf32": 0.011, "fp16": 0.0135}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return seeded_checkpoint("n", 80, 0)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[yolomlir.Model]:
    with yolomlir.compile(checkpoint, imgsz=(384, 672), cache=False) as model:
        yield model


def pictures(n: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth random pictures: blurred noise has the spectrum of photos more than white noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (n, height // 16, width // 16, 3), dtype=np.uint8)
    return coarse.repeat(16, axis=1).repeat(16, axis=2)


def free_bytes() -> int:
    from yolomlir.runtime.cuda_driver import call, driver

    return int(call(driver.cuMemGetInfo)[0])


def assert_rows_match(rows: np.ndarray, expected: np.ndarray, precision: str) -> None:
    """Every expected row that is clear of its neighbours by more than the tolerance is there."""
    box, score = BOX_PX[precision], SCORE[precision]
    for image, reference in zip(rows, expected, strict=True):
        cut = reference[-1, 4] + 2 * score
        for row in reference[reference[:, 4] > cut]:
            same = image[image[:, 5] == row[5]]
            near = (np.abs(same[:, 4] - row[4]) <= score) & (
                np.abs(same[:, :4] - row[:4]).max(axis=1) <= box
            )
            assert near.any(), f"no row near {row}"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize(("batch", "size"), [(1, (640, 640)), (4, (384, 672))])
def test_equals_float64(
    checkpoint: Checkpoint, precision: str, batch: int, size: tuple[int, int]
) -> None:
    images = pictures(batch, *size)
    with yolomlir.compile(
        checkpoint, precision=precision, imgsz=size, batch=batch, cache=False
    ) as model:
        rows = model(images)
    expected = run_reference(checkpoint.tensors, images.transpose(0, 3, 1, 2)).rows
    assert_rows_match(rows, expected, precision)


def test_equal_images_give_equal_rows(checkpoint: Checkpoint) -> None:
    image = pictures(1, 96, 128)
    with yolomlir.compile(checkpoint, imgsz=(96, 128), batch=5, cache=False) as model:
        rows = model(np.repeat(image, 5, axis=0))
    assert all(np.array_equal(rows[0], row) for row in rows[1:])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_replays_are_bitwise_equal(checkpoint: Checkpoint, precision: str) -> None:
    image = pictures(1, 384, 672)
    with yolomlir.compile(checkpoint, precision=precision, imgsz=(384, 672)) as model:
        first = model(image)
        assert all(np.array_equal(first, model(image)) for _ in range(1000))


def test_input_buffers(checkpoint: Checkpoint) -> None:
    """They give the rows of any other array, may outlive the model, and are freed at the end."""
    image = pictures(1, 640, 640, 3)
    with yolomlir.compile(checkpoint) as model:
        expected = model(image)
        buffer = model.input_buffer()
        assert buffer.shape == (1, 640, 640, 3)
        assert buffer.dtype == np.uint8
        assert not buffer.any()
        buffer[...] = image
        assert np.array_equal(model(buffer), expected)
        assert np.array_equal(model(buffer[:, :, ::-1]), model(image[:, :, ::-1].copy()))
        page = buffer[0, :8]
        del buffer
        assert np.array_equal(page, image[0, :8])
    assert np.array_equal(page, image[0, :8])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_images(checkpoint: Checkpoint, count: int) -> None:
    images = pictures(count, 96, 128)
    with yolomlir.compile(checkpoint, imgsz=(96, 128), batch=2, cache=False) as two:
        rows = two(images)
    with yolomlir.compile(checkpoint, imgsz=(96, 128), batch=1, cache=False) as one:
        expected = one(images)
    assert rows.shape == (count, one.info.max_det, 6)
    assert_rows_match(rows, expected, "tf32")


def test_batch_of_64(checkpoint: Checkpoint) -> None:
    image = pictures(1, 64, 64)
    with yolomlir.compile(checkpoint, imgsz=(64, 64), batch=64, cache=False) as model:
        rows = model(np.repeat(image, 64, axis=0))
    assert all(np.array_equal(rows[0], row) for row in rows[1:])


def test_memory_is_flat_over_inferences(model: yolomlir.Model) -> None:
    image = pictures(1, 384, 672)
    model(image)
    before = free_bytes()
    for _ in range(10_000):
        model(image)
    assert free_bytes() == before


def test_closing_gives_everything_back(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "m.ylm"
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        model.save(path)
    with yolomlir.load(path):
        pass  # the driver's own pools grow with the first model
    gc.collect()
    before = free_bytes()
    for _ in range(50):
        with yolomlir.load(path) as model:
            model(pictures(1, 64, 64))
    gc.collect()
    assert free_bytes() >= before - (2 << 20)  # the driver keeps pages of 2 MiB


def test_threads_get_their_own_boxes(model: yolomlir.Model) -> None:
    images = [pictures(1, 384, 672, seed) for seed in range(8)]
    expected = [model(image) for image in images]
    wrong: list[int] = []

    def work(index: int) -> None:
        same = [np.array_equal(model(images[index]), expected[index]) for _ in range(50)]
        wrong.extend([index] * same.count(False))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_models_at_once(checkpoint: Checkpoint) -> None:
    image = pictures(1, 64, 96)
    with (
        yolomlir.compile(checkpoint, imgsz=(64, 96), cache=False) as a,
        yolomlir.compile(seeded_checkpoint("n", 3, 1), imgsz=(64, 96), cache=False) as b,
    ):
        rows_a, rows_b = a(image), b(image)
        assert np.array_equal(a(image), rows_a)
        assert np.array_equal(b(image), rows_b)
        assert rows_b[..., 5].max() <= 2


def test_zero_copy_from_torch(model: yolomlir.Model) -> None:
    torch: Any = pytest.importorskip("torch")
    image = pictures(1, 384, 672)
    expected = model(image)
    on_gpu = torch.from_numpy(image).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = model.run_device(on_gpu, stream=stream.cuda_stream)
        rows = torch.as_tensor(result, device="cuda")
        again = torch.from_dlpack(result)
        assert rows.data_ptr() == again.data_ptr()
        copied = rows.clone()
    stream.synchronize()
    assert np.array_equal(copied.cpu().numpy(), expected)
    assert np.array_equal(model(image), expected)  # host path still works afterwards


@pytest.mark.parametrize("fault", ["dtype", "shape", "strides", "host"])
def test_device_arrays_that_do_not_fit(model: yolomlir.Model, fault: str) -> None:
    torch: Any = pytest.importorskip("torch")
    image = torch.zeros((1, 384, 672, 3), dtype=torch.uint8, device="cuda")
    wrong = {
        "dtype": lambda: image.float(),
        "shape": lambda: image[:, :-1],
        "strides": lambda: torch.zeros((1, 384, 672, 6), dtype=torch.uint8, device="cuda")[
            ..., ::2
        ],
        "host": lambda: image.cpu(),
    }[fault]()
    with pytest.raises(UserError):
        model.run_device(wrong)


def test_runs_without_a_graph(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from yolomlir.runtime import cuda
    from yolomlir.runtime.cuda_driver import CudaError, driver

    image = pictures(1, 64, 64)
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        expected = model(image)

    def refuse(*_: Any, **__: Any) -> None:
        raise CudaError("cuGraphInstantiate", driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(cuda, "KernelGraph", refuse)
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        assert np.array_equal(model(image), expected)
    assert "without a CUDA graph" in caplog.text


def test_plain_edges_give_the_same_rows(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yolomlir.runtime import cuda

    image = pictures(1, 64, 64)
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        expected = model(image)
    original = cuda.KernelGraph
    monkeypatch.setattr(
        cuda, "KernelGraph", lambda n, programmatic: original(n, programmatic=False)
    )
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        assert np.array_equal(model(image), expected)


def test_an_older_program_runs_from_its_ptx(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    device = cuda_device()
    assert not isinstance(device, str)
    if device.capability <= (8, 0):
        pytest.skip("needs a GPU newer than sm_80")
    image = pictures(1, 64, 64)
    with yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False) as model:
        expected = model(image)
    with yolomlir.compile(checkpoint, target="sm_80", imgsz=(64, 64), cache=False) as model:
        rows = model(image)
    assert "compiled for sm_80" in caplog.text
    assert_rows_match(rows, expected, "tf32")


def test_a_program_for_a_newer_gpu_is_explained(checkpoint: Checkpoint) -> None:
    device = cuda_device()
    assert not isinstance(device, str)
    if device.capability >= (12, 0):
        pytest.skip("needs a GPU older than sm_120")
    with pytest.raises(UserError, match=r"compiled for sm_120; this GPU is .*older"):
        yolomlir.compile(checkpoint, target="sm_120", imgsz=(64, 64), cache=False)


def test_closed_model_says_so(checkpoint: Checkpoint) -> None:
    model = yolomlir.compile(checkpoint, imgsz=(64, 64), cache=False)
    model.close()
    model.close()
    with pytest.raises(UserError, match="closed"):
        model(pictures(1, 64, 64))
