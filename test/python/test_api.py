"""The Python API: what goes in, what comes out, what is refused."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from yolomlir.dialects import yolo
from yolomlir.passes.base import PassContext

import yolomlir
from yolomlir import api, compiler
from yolomlir.api import Model, choose_program
from yolomlir.bindings import ir
from yolomlir.codegen.build_plan import build_plan
from yolomlir.compiler import CompileOptions, merge, recompile
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.weights import WeightStore
from yolomlir.pipeline import optimize
from yolomlir.runtime.artifact import Artifact, ModelInfo, Program
from yolomlir.runtime.plan import Plan
from yolomlir.target import target_named
from yolomlir.vision.sources import SourceError

pytestmark = pytest.mark.usefixtures("cache")
SIDE, ROWS = 64, 84


@pytest.fixture(scope="module")
def model(cache_folder: Path, checkpoint_file: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOMLIR_CACHE_DIR", str(cache_folder))
        made = yolomlir.compile(checkpoint_file, target="cpu", imgsz=SIDE, threads=2)
    with made:
        yield made


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


# ---- batches ------------------------------------------------------------------------------------


def test_any_number_of_images_in_either_order(model) -> None:
    batch = images(3)
    rows = model(batch)
    assert rows.shape == (3, ROWS, 6)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(model(batch.transpose(0, 3, 1, 2)), rows)
    np.testing.assert_array_equal(model(batch[1]), rows[1:2])
    assert model(batch[:0]).shape == (0, ROWS, 6)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, SIDE, SIDE + 32, 3), np.uint8),
        ((SIDE, SIDE), np.uint8),
        ((1, SIDE, SIDE, 4), np.uint8),
        ((1, SIDE, SIDE, 3), np.float32),
        ((1, SIDE, SIDE, 3), np.int64),
    ],
)
def test_other_arrays_are_refused(model, shape, dtype) -> None:
    with pytest.raises(UserError, match=r"images (have shape|are)"):
        model(np.zeros(shape, dtype))


def test_an_input_buffer_is_an_array_like_any_other(model) -> None:
    buffer = model.input_buffer()
    assert buffer.shape == (1, SIDE, SIDE, 3)
    assert buffer.dtype == np.uint8
    buffer[...] = np.random.default_rng(0).integers(0, 256, buffer.shape)
    assert np.array_equal(model(buffer), model(buffer.copy()))
    assert model.input_buffer() is not buffer


def test_threads_get_their_own_rows(model) -> None:
    batch = images(8, seed=3)
    expected = model(batch)
    found: dict[int, np.ndarray] = {}

    def run(index: int) -> None:
        for _ in range(5):
            found[index] = model(batch[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        np.testing.assert_array_equal(found[index][0], expected[index])


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_of_one_detection_gives_the_best(model, checkpoint_file, batch: int) -> None:
    """A single row leaves loops of one iteration, which are unrolled into what is around them."""
    data = images(batch, seed=5)
    options = {"target": "cpu", "imgsz": SIDE, "batch": batch, "max_det": 1, "threads": 2}
    with yolomlir.compile(checkpoint_file, **options) as best:
        np.testing.assert_array_equal(best(data), model(data)[:, :1])


def test_ragged_lists_are_refused(model) -> None:
    with pytest.raises(UserError, match="no array"):
        model([[1], [1, 2]])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_a_model_of_its_own(model, again) -> None:
    with again(model) as other:
        rows = other(images(1))
    np.testing.assert_array_equal(rows, model(images(1)))


# ---- pictures -----------------------------------------------------------------------------------


def test_a_file_a_pil_image_and_an_array_give_the_same(model, photo) -> None:
    with Image.open(photo) as opened:
        picture = opened.convert("RGB")
    pixels = np.asarray(picture)
    found = [model.predict(s, conf=0).detections for s in (photo, str(photo), picture, pixels)]
    found.append(model.predict(pixels[..., ::-1], conf=0, color="bgr").detections)
    assert len(found[0]) == ROWS
    assert all(other == found[0] for other in found)


def test_predict_takes_one_picture(model, photo, tmp_path) -> None:
    with pytest.raises(UserError, match="takes one"):
        model.predict([photo, photo])
    with pytest.raises(UserError, match="holds no image"):
        model.predict([])
    with pytest.raises(SourceError, match="no such file"):
        model.predict(tmp_path / "absent.jpg")


def test_a_bad_picture_keeps_its_place(model, photo, tmp_path) -> None:
    found = list(model.predict_many([photo, tmp_path / "absent.jpg", photo]))
    assert [isinstance(item, SourceError) for item in found] == [False, True, False]
    assert found[0].detections == found[2].detections


def test_selection(model, photo) -> None:
    everything = model.predict(photo, conf=0)
    first = everything[0]
    assert model.predict(photo, conf=0, max_det=5).detections == everything.detections[:5]
    assert model.predict(photo, conf=0) == everything
    assert everything != model.predict(photo, conf=1)
    ids = (first.class_id, np.int64(first.class_id))
    for wanted in (*ids, first.class_name, [*ids], np.array(ids), (str(first.class_id),)):
        chosen = model.predict(photo, conf=0, classes=wanted)
        assert list(chosen) == [d for d in everything if d.class_id == first.class_id]
    high = model.predict(photo, conf=first.score)
    assert 1 <= len(high) < ROWS
    refused = [{"conf": 1.5}, {"conf": "1"}, {"max_det": 0}, {"max_det": 1000}, {"max_det": 2.5}]
    for options in (*refused, {"classes": [80]}, {"classes": "unicorn"}):
        with pytest.raises(UserError):
            model.predict(photo, **options)
    with pytest.raises(UserError, match="unknown class '-1'"):
        model.predict(photo, classes=[-1])


# ---- artifacts ----------------------------------------------------------------------------------


def test_save_and_load(model, tmp_path) -> None:
    path = tmp_path / "model.ylm"
    model.save(path)
    batch = images(1)
    for load in (yolomlir.load, yolomlir.compile):
        with load(path, target="cpu") as loaded:
            np.testing.assert_array_equal(loaded(batch), model(batch))
    with pytest.raises(UserError, match="compiled with imgsz 64x64, not 32x64"):
        yolomlir.compile(path, target="cpu", imgsz=(32, 64))
    with pytest.raises(UserError, match="compiled with batch 1, not 4"):
        yolomlir.compile(path, target="cpu", batch=4)
    with pytest.raises(UserError, match="compiled with input_dtype uint8, not float32"):
        yolomlir.compile(path, target="cpu", input_dtype="float32")


def _artifact(*targets: str) -> Artifact:
    info = ModelInfo("n", 80, ("x",) * 80, 64, 64, 1, 84, "tf32")
    plan = Plan(0, {}, {}, (), {})
    return Artifact(info, {t: Program(t, plan, {}, {}, {}) for t in targets})


@pytest.mark.parametrize(
    "options",
    [
        *({"imgsz": size} for size in ("64", 64.0, (64,), (64, 64, 3), (64, "64"), True, {64})),
        *({"batch": batch} for batch in (1.5, "2", True)),
        {"max_det": "3"},
        {"max_det": 2.0},
        {"level": "2"},
        {"threads": 1.5},
    ],
)
def test_options_of_another_type_are_refused(checkpoint_file, options) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"{name} is .*; expected a"):
        yolomlir.compile(checkpoint_file, **{"target": "cpu", "imgsz": SIDE, **options})


def test_numbers_of_numpy_are_numbers(checkpoint_file, tmp_path) -> None:
    two, side = np.int64(2), np.int32(SIDE)
    options = {"target": "cpu", "max_det": two, "threads": two}
    with yolomlir.compile(checkpoint_file, imgsz=np.array([side, side]), **options) as made:
        made.save(tmp_path / "m.ylm")
        assert made(images(1)).shape == (1, 2, 6)
    options = CompileOptions(height=side, width=side, max_det=two, batch=np.uint8(1))
    assert repr(options.resolved()) == repr(
        CompileOptions("cpu", None, SIDE, SIDE, 1, 2).resolved()
    )


@pytest.mark.parametrize(
    ("here", "targets", "chosen"),
    [
        ("cpu", ("sm_90", "cpu"), "cpu"),
        ("sm_90", ("cpu", "sm_90"), "sm_90"),
        ("sm_120", ("sm_80", "sm_90", "cpu"), "sm_90"),
        ("sm_89", ("sm_120", "cpu"), "cpu"),
    ],
)
def test_the_best_program_for_this_machine(monkeypatch, here, targets, chosen) -> None:
    monkeypatch.setattr(api, "native_target", lambda: here)
    assert choose_program(_artifact(*targets)) == chosen


def test_a_file_for_another_gpu_says_how_to_get_one_for_this(monkeypatch) -> None:
    monkeypatch.setattr(api, "native_target", lambda: "sm_89")
    expected = r"x\.ylm: has no program for sm_89, only for sm_90 .*"
    expected += r"yolomlir compile x\.ylm --target sm_89 -o other\.ylm"
    with pytest.raises(UserError, match=expected):
        choose_program(_artifact("sm_90"), None, "x.ylm")
    with pytest.raises(UserError, match="yolomlir compile CHECKPOINT --target cpu"):
        choose_program(_artifact("sm_90"), "cpu", "x.ylm")


def test_merge_keeps_every_program() -> None:
    merged = merge([_artifact("cpu"), _artifact("sm_90", "sm_120")])
    assert list(merged.programs) == ["cpu", "sm_90", "sm_120"]


GRAPH = """
!x = tensor<1x16x20x20xf32, #yolo.layout<"nhwc">>
module attributes {yolo.precision = "tf32"} {
  func.func @main(%x: !x) -> !x {
    %w = "yolo.weight"() {name = "w"} : () -> tensor<16x16x3x3xf32>
    %b = "yolo.weight"() {name = "b"} : () -> tensor<16xf32>
    %y = "yolo.conv2d"(%x, %w, %b) {
      strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64
    } : (!x, tensor<16x16x3x3xf32>, tensor<16xf32>) -> !x
    %z = "yolo.silu"(%y) : (!x) -> !x
    return %z : !x
  }
}
"""


def _one_convolution(target_name: str) -> Artifact:
    target = target_named(target_name)
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 16, 3, 3), "b": (16,)}
    store = WeightStore({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()})
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(GRAPH)
        optimize(module, PassContext(weights=store, target=target), target)
        text, plan = str(module), build_plan(module)
        program = compiler._generate(module, plan, store, "tf32", target, None)
    program.ir = text
    return replace(_artifact(), programs={target_name: program})


def test_a_file_for_one_gpu_becomes_the_one_for_another() -> None:
    pytest.importorskip("cuda.bindings")
    first, direct = _one_convolution("sm_90"), _one_convolution("sm_120")
    again = recompile(first, "sm_120")
    assert list(again.programs) == ["sm_120"]
    made, expected = again.programs["sm_120"], direct.programs["sm_120"]
    assert made.ir == expected.ir
    assert made.binaries == expected.binaries
    assert made.kernels == expected.kernels
    assert made.plan == expected.plan
    for name, values in expected.weights.items():
        np.testing.assert_array_equal(made.weights[name], values)
    assert made.binaries != first.programs["sm_90"].binaries
    assert recompile(first, "sm_90").programs["sm_90"] is first.programs["sm_90"]


def test_a_gpu_s_file_does_not_become_a_cpu_s() -> None:
    with pytest.raises(UnsupportedError, match="compile the checkpoint with --target cpu"):
        recompile(_artifact("sm_90"), "cpu")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be used: the module has no function @main"),
        ("func.func @main(", "cannot be read"),
        (
            'func.func @main() { "yolo.weight"() {name = "w", x} : () -> tensor<1xf32> return }',
            "cannot be used: 'yolo.weight' has no attribute 'x'",
        ),
    ],
)
def test_a_file_whose_ir_is_none_is_refused(text: str, reason: str) -> None:
    artifact = _artifact("sm_90")
    artifact.programs["sm_90"].ir = text
    with pytest.raises(UserError, match=f"{reason}.*compile the checkpoint again"):
        recompile(artifact, "sm_120")


# ---- the cache ----------------------------------------------------------------------------------


def _paths(checkpoint_file: Path, *options: CompileOptions) -> list[Path | None]:
    return [api._cache_path(checkpoint_file, o.resolved()) for o in options]


def test_the_key_has_everything_that_changes_the_artifact(checkpoint_file, tmp_path) -> None:
    base = CompileOptions()
    variants = [
        base,
        replace(base, height=64),
        replace(base, batch=2),
        replace(base, max_det=7),
        replace(base, input_dtype="float32"),
        replace(base, level=0),
        replace(base, target="sm_90"),
        replace(base, target="sm_90", precision="fp32"),
    ]
    paths = _paths(checkpoint_file, *variants)
    assert len(set(paths)) == len(variants)
    copy = tmp_path / "other name.safetensors"
    copy.write_bytes(checkpoint_file.read_bytes())
    assert _paths(copy, base) != _paths(checkpoint_file, base)
    copy.write_bytes(copy.read_bytes()[:-4] + b"\0\0\0\0")
    assert len({*_paths(copy, base), *paths}) == len(variants) + 1
    assert api._cache_path(tmp_path / "absent", base) is None


def test_tuning_changes_the_key_of_a_gpu_s_artifact(checkpoint_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    options = [CompileOptions(target="sm_90"), CompileOptions()]
    before = _paths(checkpoint_file, *options)
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "sm_90-x.jsonl").write_text("{}")
    after = _paths(checkpoint_file, *options)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_damaged_cache_is_compiled_again(checkpoint_file, tmp_path, monkeypatch, caplog) -> None:
    made = _artifact("cpu")
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(api, "compile_checkpoint", lambda *a, **k: made)
    options = CompileOptions().resolved()
    path = api._cache_path(checkpoint_file, options)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not an artifact")
    with caplog.at_level(logging.WARNING):
        assert api.compile_artifact(checkpoint_file, options) is made
    assert "compiling again" in caplog.text
    assert Artifact.load(path).info == made.info


def test_a_cache_that_cannot_be_written_is_no_error(
    checkpoint_file, tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    made = _artifact("cpu")
    monkeypatch.setattr(api, "compile_checkpoint", lambda *a, **k: made)
    with caplog.at_level(logging.WARNING):
        assert api.compile_artifact(checkpoint_file, CompileOptions().resolved()) is made
    assert "not kept" in caplog.text


def test_a_checkpoint_in_memory_has_a_key_too(checkpoint_file) -> None:
    options = CompileOptions().resolved()
    checkpoint = load_checkpoint(checkpoint_file)
    assert api._cache_path(checkpoint, options) == api._cache_path(checkpoint, options)
    changed = dict(checkpoint.tensors)
    name = next(iter(changed))
    changed[name] = changed[name] + 1
    other = replace(checkpoint, tensors=changed)
    assert api._cache_path(other, options) != api._cache_path(checkpoint, options)


def test_a_closed_model_says_so(checkpoint_file) -> None:
    with yolomlir.compile(checkpoint_file, target="cpu", imgsz=SIDE) as made:
        assert isinstance(made, Model)
    with pytest.raises(UserError, match="closed"):
        made(images(1))


@pytest.mark.parametrize("weights", [None, 3, b"m.safetensors", "", [], np.zeros(3)], ids=repr)
def test_what_is_no_path_is_refused(weights: object) -> None:
    with pytest.raises(UserError, match=r"^weights is .*; expected a \.safetensors"):
        yolomlir.compile(weights, target="cpu")  # type: ignore[arg-type]  # what is refused
    with pytest.raises(UserError, match=r"^path is .*; expected a \.ylm file"):
        yolomlir.load(weights)  # type: ignore[arg-type]  # what is refused
