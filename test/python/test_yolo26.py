"""The network: structure at every scale, and checkpoints that do not fit it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pt_writer import PtWriter
from yolomlir.dialects import yolo
from yolomlir.dialects.layout import Layout

from yolomlir.bindings import ir
from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.frontend.network import SCALES, convolutions, parameters
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.frontend.yolo26 import ImportedModel, import_model, infer_architecture

HEAD = "model.23"


def ones(scale: str, classes: int = 80, *, fused: bool = False) -> Checkpoint:
    """A checkpoint of the right keys and shapes; its values do not matter."""
    shapes = parameters(SCALES[scale], classes, fused=fused)
    return Checkpoint({key: np.ones(shape, np.float32) for key, shape in shapes.items()})


def kinds(module: ir.Module) -> Counter[str]:
    return Counter(op.name.removeprefix("yolo.") for op in yolo.ops_in(module))


def outputs(model: ImportedModel) -> dict[str, list[int]]:
    """The shape of the last op of every layer `model.<i>`."""
    shapes = {}
    for op in yolo.ops_in(model.module):
        if op.name == "yolo.weight":
            continue
        layer = ".".join(yolo.layer_of(op.location).split(".")[:2])
        shapes[layer] = yolo.shape_of(op.results[0])
    return shapes


# ---- structure ----------------------------------------------------------------------------------

# Published sizes of the fused end-to-end models, in millions of parameters.
PUBLISHED = {"n": 2.4, "s": 9.5, "m": 20.4, "l": 24.8, "x": 55.7}


@pytest.mark.parametrize("scale", SCALES)
def test_published_parameter_counts(scale: str) -> None:
    shapes = parameters(SCALES[scale], 80, fused=True)
    millions = sum(math.prod(shape) for shape in shapes.values()) / 1e6
    assert round(millions, 1) == PUBLISHED[scale]


def test_convolutions_of_n() -> None:
    convs = convolutions(SCALES["n"], 80)
    assert len(convs) == 102
    assert sum(conv.groups > 1 for conv in convs) == 8
    assert sum(conv.act is not None for conv in convs) == 87
    assert sum(conv.norm is None for conv in convs) == 6
    assert Counter((c.kernel, c.stride) for c in convs) == {(3, 2): 7, (3, 1): 40, (1, 1): 55}
    assert sum(math.prod(s) for s in parameters(SCALES["n"], 80, fused=True).values()) == 2_408_932


def test_layers_of_n() -> None:
    with yolo.new_context():
        shapes = outputs(import_model(ones("n")))
    channels_and_side = {
        0: (16, 320), 1: (32, 160), 2: (64, 160), 3: (64, 80), 4: (128, 80), 5: (128, 40),
        6: (128, 40), 7: (256, 20), 8: (256, 20), 9: (256, 20), 10: (256, 20), 11: (256, 40),
        12: (384, 40), 13: (128, 40), 14: (128, 80), 15: (256, 80), 16: (64, 80), 17: (64, 40),
        18: (192, 40), 19: (128, 40), 20: (128, 20), 21: (384, 20), 22: (256, 20),
    }  # fmt: skip
    for layer, (channels, side) in channels_and_side.items():
        assert shapes[f"model.{layer}"] == [1, channels, side, side], layer
    assert shapes[HEAD] == [1, 300, 6]


# Repeats and C3k by scale, from the published configuration: depth .5 halves two to one, depth 1
# keeps them; m, l and x have C3k in layers 2 and 4 as well.
@pytest.mark.parametrize(
    ("scale", "attention", "pools", "heads"),
    [("n", 2, 3, 2), ("s", 2, 3, 4), ("m", 2, 3, 4), ("l", 3, 3, 4), ("x", 3, 3, 6)],
)
def test_every_scale_imports(scale: str, attention: int, pools: int, heads: int) -> None:
    with yolo.new_context():
        model = import_model(ones(scale), height=96, width=64)
        assert model.module.operation.verify()
        yolo.verify(model.module)
        assert (model.scale, model.classes) == (scale, 80)
        counts = kinds(model.module)
        assert counts["attention"] == attention
        assert counts["max_pool2d"] == pools
        assert counts["conv2d"] == len(convolutions(SCALES[scale], 80))
        assert counts["batch_norm"] == counts["conv2d"] - 6
        op = next(op for op in yolo.ops_in(model.module, "yolo.attention"))
        assert yolo.integer(op, "heads") == heads
        assert yolo.integer(op, "head_dim") == 64
        assert yolo.integer(op, "key_dim") == 32
        assert yolo.real(op, "scale") == 32**-0.5


@pytest.mark.parametrize("scale", SCALES)
def test_c3k_where_the_scale_has_it(scale: str) -> None:
    names = {conv.name for conv in convolutions(SCALES[scale], 80)}
    assert ("model.2.m.0.cv3.conv" in names) == (scale in "mlx")
    assert ("model.6.m.1.cv1.conv" in names) == (scale in "lx")
    assert "model.22.m.1.0.cv1.conv" not in names


def test_fused_has_biases_and_no_batch_norm() -> None:
    with yolo.new_context():
        counts = kinds(import_model(ones("n", fused=True)).module)
    assert counts["conv2d"] == 102
    assert counts["batch_norm"] == 0
    assert counts["silu"] == 87
    assert counts["weight"] == 204


@pytest.mark.parametrize("classes", [1, 3, 80, 81, 200])
def test_class_counts(classes: int) -> None:
    with yolo.new_context():
        model = import_model(ones("n", classes), height=64, width=64)
        assert model.classes == len(model.names) == classes
        detect = next(yolo.ops_in(model.module, "yolo.detect"))
        assert [yolo.shape_of(v)[1] for v in detect.operands] == [4] * 3 + [classes] * 3
    width = max(64, min(classes, 100))
    convs = {conv.name: conv for conv in convolutions(SCALES["n"], classes)}
    assert convs[f"{HEAD}.one2one_cv3.1.0.1.conv"].outputs == width


@pytest.mark.parametrize(
    ("height", "width", "batch", "rows"),
    [(320, 640, 1, 300), (640, 640, 2, 300), (64, 96, 3, 126), (32, 32, 1, 21)],
)
def test_input_sizes(height: int, width: int, batch: int, rows: int) -> None:
    """The result has 300 rows, or one an anchor where the image is too small for so many."""
    with yolo.new_context():
        model = import_model(ones("n", 3), height=height, width=width, batch=batch)
        main = next(op for op in model.module.body.operations)
        argument, result = main.type.inputs[0], main.type.results[0]
        assert list(argument.shape) == [batch, 3, height, width]
        assert list(result.shape) == [batch, rows, 6]
        yolo.verify(model.module)


def test_max_det() -> None:
    with yolo.new_context():
        model = import_model(ones("n", 3), max_det=1000)
        detect = next(yolo.ops_in(model.module, "yolo.detect"))
        assert yolo.shape_of(detect.results[0]) == [1, 1000, 6]
        assert yolo.integers(detect, "strides") == [8, 16, 32]


@pytest.mark.parametrize(
    ("dtype", "element", "scale"), [("uint8", "ui8", 1 / 255), ("float32", "f32", 1.0)]
)
def test_entry(dtype: str, element: str, scale: float) -> None:
    """NHWC in, normalised at once, logical order from there on."""
    with yolo.new_context():
        model = import_model(ones("n"), input_dtype=dtype)
        normalize, convert, *rest = list(yolo.ops_in(model.module))
        image = ir.RankedTensorType(normalize.operands[0].type)
        assert str(image.element_type) == element
        assert Layout.of(image) is Layout.NHWC
        assert yolo.real(normalize, "scale") == scale
        assert convert.name == "yolo.convert_layout"
        assert {Layout.of(v.type) for op in rest for v in op.results} == {Layout.LOGICAL}


def test_attributes_and_locations() -> None:
    with yolo.new_context():
        module = import_model(ones("s", 7)).module
        model = ir.DictAttr(module.operation.attributes["yolo.model"])
        assert ir.StringAttr(model["scale"]).value == "s"
        assert ir.IntegerAttr(model["classes"]).value == 7
        assert ir.StringAttr(model["task"]).value == "detect"
        assert ir.StringAttr(module.operation.attributes["yolo.precision"]).value == "fp32"
        layers = {(op.name, yolo.layer_of(op.location)) for op in yolo.ops_in(module)}
        assert ("yolo.conv2d", "model.2.m.0.cv1.conv") in layers
        assert ("yolo.batch_norm", "model.2.m.0.cv1.bn") in layers
        assert ("yolo.silu", "model.2.m.0.cv1.act") in layers
        assert ("yolo.conv2d", f"{HEAD}.one2one_cv2.0.2") in layers
        assert ("yolo.detect", HEAD) in layers
        assert not [layer for _, layer in layers if "loc(" in layer or "unknown" in layer]


def test_weights_are_the_checkpoints() -> None:
    """Every weight op's name is a key, of that shape; the store has float32 of the same values."""
    checkpoint = seeded_checkpoint("n", 3, 5)
    half = {key: tensor.astype(np.float16) for key, tensor in checkpoint.tensors.items()}
    with yolo.new_context():
        model = import_model(Checkpoint(half), height=32, width=32)
        ops = list(yolo.ops_in(model.module, "yolo.weight"))
        assert {yolo.string(op, "name") for op in ops} == set(half) == set(model.weights)
        for op in ops:
            key = yolo.string(op, "name")
            assert tuple(yolo.shape_of(op.results[0])) == model.weights[key].shape
            assert model.weights[key].dtype == np.float32
            np.testing.assert_array_equal(model.weights[key], half[key])


def test_values_of_attention() -> None:
    """v is cut out of qkv a head at a time: 64 channels after every 32 of q and 32 of k."""
    with yolo.new_context():
        module = import_model(ones("s"), height=64, width=64).module
        slices = [
            (yolo.integer(op, "offset"), yolo.integer(op, "size"))
            for op in yolo.ops_in(module, "yolo.slice")
            if ".m.0.attn.v" in yolo.layer_of(op.location)
        ]
    assert slices == [(64, 64), (192, 64), (320, 64), (448, 64)]


# ---- checkpoints that do not fit ----------------------------------------------------------------


def refused(checkpoint: Checkpoint, **options: object) -> str:
    with yolo.new_context(), pytest.raises(UserError) as caught:
        import_model(checkpoint, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def without(checkpoint: Checkpoint, drop: Callable[[str], bool]) -> Checkpoint:
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not drop(key)}
    return Checkpoint(tensors, path=Path("w.safetensors"))


def one_to_many(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """What a checkpoint has of the one-to-many head: the same tensors under other names."""
    return {
        key.replace("one2one_", ""): tensor
        for key, tensor in checkpoint.tensors.items()
        if "one2one_" in key
    }


def test_both_heads_and_counters_are_fine() -> None:
    checkpoint = ones("n")
    counters = {f"model.{i}.bn.num_batches_tracked": np.array(3) for i in (0, 1)}
    both = Checkpoint(checkpoint.tensors | one_to_many(checkpoint) | counters)
    with yolo.new_context():
        model = import_model(both)
    assert set(model.weights) == set(checkpoint.tensors)


def test_only_one_to_many() -> None:
    checkpoint = ones("n")
    backbone = without(checkpoint, lambda key: "one2one" in key)
    text = refused(Checkpoint(backbone.tensors | one_to_many(checkpoint), path=Path("w.pt")))
    assert text.startswith("w.pt: has only the one-to-many head")
    assert "non-maximum suppression" in text
    assert "end2end=True" in text


def test_no_head() -> None:
    text = refused(without(ones("n"), lambda key: key.startswith(HEAD)))
    assert f"has no '{HEAD}.one2one_cv3.0.2.weight'" in text


def test_missing_keys_are_listed() -> None:
    text = refused(without(ones("n"), lambda key: key.startswith("model.8.")))
    count = sum(key.startswith("model.8.") for key in ones("n").tensors)
    assert f"{count} missing (model.8.cv1.conv.weight, model.8.cv1.bn.weight, " in text
    assert f"… and {count - 10} more)" in text
    assert "cut short" in text


def test_batch_norms_left_out() -> None:
    text = refused(without(ones("n"), lambda key: ".bn." in key))
    assert "96 missing (model.0.conv.bias" in text
    assert "nothing was fused" in text


def test_half_fused() -> None:
    checkpoint = ones("n")
    tensors = {k: t for k, t in checkpoint.tensors.items() if not k.startswith("model.0.bn")}
    text = refused(Checkpoint(tensors | {"model.0.conv.bias": np.ones(16, np.float32)}))
    assert "4 missing" in text
    assert "1 unexpected (model.0.conv.bias)" in text
    assert "some batch norms are folded and some are not" in text


def test_unexpected_keys() -> None:
    checkpoint = ones("n")
    extra = {"model.24.weight": np.ones(3, np.float32)}
    text = refused(Checkpoint(checkpoint.tensors | extra))
    assert "1 unexpected (model.24.weight)" in text
    assert "layers added" in text


def test_wrong_shapes() -> None:
    checkpoint = ones("n")
    checkpoint.tensors["model.5.conv.weight"] = np.ones((128, 64, 3, 3), np.float32)
    text = refused(checkpoint)
    assert "1 misshapen (model.5.conv.weight is 128x64x3x3, expected 128x128x3x3)" in text


def test_scalar_where_a_tensor_should_be() -> None:
    for key in ("model.0.conv.weight", f"{HEAD}.one2one_cv3.0.2.weight"):
        checkpoint = ones("n")
        checkpoint.tensors[key] = np.float32(1).reshape(())
        assert refused(checkpoint)


def test_contradictory_scales() -> None:
    wide = ones("s")
    wide.tensors["model.6.m.1.cv1.conv.weight"] = np.ones((64, 128, 1, 1), np.float32)
    text = refused(wide)
    assert "no scale of YOLO26 has 32 channels in 'model.0.conv' and 2 inner modules" in text
    stem = ones("n")
    stem.tensors["model.0.conv.weight"] = np.ones((24, 3, 3, 3), np.float32)
    assert "no scale of YOLO26 has 24 channels" in refused(stem)


def test_the_stem_of_another_scale() -> None:
    checkpoint = ones("n")
    checkpoint.tensors["model.0.conv.weight"] = np.ones((32, 3, 3, 3), np.float32)
    text = refused(checkpoint)
    assert "does not match YOLO26s with 80 classes" in text
    assert "the first layer says scale 's'" in text


def test_asked_for_another_scale() -> None:
    text = refused(ones("n"), scale="m")
    assert "the weights are of scale 'n', not 'm'" in text
    with yolo.new_context():
        assert import_model(ones("n"), scale="n").scale == "n"


def test_levels_disagree_on_classes() -> None:
    checkpoint = ones("n", 5)
    checkpoint.tensors[f"{HEAD}.one2one_cv3.1.2.weight"] = np.ones((6, 64, 1, 1), np.float32)
    assert "disagree on the class count" in refused(checkpoint)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("model.23.proto.cv1.conv.weight", "a segmentation model"),
        ("model.23.one2one_cv4.0.0.conv.weight", "a pose or OBB model"),
        ("model.10.linear.weight", "a classification model"),
        ("model.23.dfl.conv.weight", "of an earlier YOLO (it has DFL boxes)"),
    ],
)
def test_other_tasks(key: str, what: str) -> None:
    checkpoint = ones("n")
    checkpoint.tensors[key] = np.ones(1, np.float32)
    assert f"the checkpoint is {what}, not YOLO26 detection" in refused(checkpoint)


def test_something_else_entirely() -> None:
    text = refused(Checkpoint({"encoder.weight": np.ones(3)}, path=Path("x.safetensors")))
    assert text.startswith("x.safetensors: has no 'model.0.conv.weight'")
    assert "encoder.weight" in text


def test_values_that_make_no_sense() -> None:
    checkpoint = ones("n")
    checkpoint.tensors["model.3.conv.weight"][5, 0, 0, 0] = np.nan
    assert "'model.3.conv.weight' holds values that are not finite" in refused(checkpoint)
    checkpoint = ones("n")
    checkpoint.tensors["model.3.bn.running_var"][5] = -1
    assert "'model.3.bn.running_var' holds a negative variance" in refused(checkpoint)
    checkpoint = ones("n")
    checkpoint.tensors["model.3.conv.weight"] = np.ones((64, 64, 3, 3), np.int8)
    assert "holds int8; expected floating-point" in refused(checkpoint)
    checkpoint = ones("n")
    checkpoint.tensors["model.3.bn.bias"] = np.full(64, 1e300)  # no float32
    assert "not finite" in refused(checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 100}, "input height is 100; it must be a positive multiple of 32 (96 is"),
        ({"width": 720}, "input width is 720"),
        ({"width": 0}, "input width is 0; it must be a positive multiple of 32 (32 is"),
        ({"batch": 0}, "batch is 0"),
        ({"max_det": 0}, "max_det is 0"),
        ({"input_dtype": "float16"}, "unknown input type 'float16' (one of: uint8, float32)"),
        ({"scale": "z"}, "unknown scale 'z' (one of: n, s, m, l, x)"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    assert message in refused(ones("n"), **options)


# ---- whole files --------------------------------------------------------------------------------


def test_from_a_pt_file(tmp_path: Path) -> None:
    """As Ultralytics saves it: a half-precision module with both heads and batch counters."""
    checkpoint = seeded_checkpoint("n", 2, 0)
    everything = checkpoint.tensors | one_to_many(checkpoint)
    half = {key: tensor.astype(np.float16) for key, tensor in everything.items()}
    half["model.0.bn.num_batches_tracked"] = np.array(9, np.int64)
    writer = PtWriter()
    module = writer.module(half, names={0: "cat", 1: "dog"})
    path = writer.save(tmp_path / "best.pt", {"model": None, "ema": module})
    with yolo.new_context():
        model = import_model(load_checkpoint(path))
    assert model.names == ("cat", "dog")
    for key, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(model.weights[key], tensor.astype(np.float16))


def test_infer_architecture() -> None:
    found = infer_architecture(ones("l", 4, fused=True))
    assert (found.scale, found.classes, found.fused) == ("l", 4, True)
