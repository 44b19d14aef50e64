"""Where a compile takes its tiles from, the commands around them, and predictions."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from autotune_fakes import workload
from yolomlir.dialects import yolo
from yolomlir.passes.assign_tiles import AssignTiles
from yolomlir.passes.base import PassContext

from yolomlir.autotune import signature, space, tables
from yolomlir.autotune.database import CaseRecord, Database, WinnerRecord
from yolomlir.autotune.prediction import gpu_named, predict, predicted_table
from yolomlir.autotune.tables import Table, TableEntry, table_of
from yolomlir.bindings import ir
from yolomlir.cli.main import main
from yolomlir.cli.tune import seconds
from yolomlir.diagnostics import UserError
from yolomlir.frontend.weights import AbstractWeights
from yolomlir.target import TARGETS, target_named

MODULE = """
!t = tensor<1x64x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<64x64x1x1xf32, #yolo.layout<"ohwi">>
module attributes {yolo.precision = "tf32"} {
  func.func @main(%x: !t) -> !t {
    %w = "yolo.weight"() {name = "w"} : () -> !w
    %0 = func.call @conv(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
    return %0 : !t
  }
  func.func private @conv(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"TILE} {
    %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
        groups = 1 : i64} : (!t, !w) -> !t loc("a.layer")
    %1 = "yolo.silu"(%0) : (!t) -> !t
    return %1 : !t
  }
}
"""
OWN = ", yolo.tile = {block_m = 32 : i64, block_n = 8 : i64, block_k = 8 : i64}"
TUNED = "block_m=16,block_n=64,block_k=64,warps_m=1,warps_n=4,warps_k=2,stages=2"
SHIPPED = "block_m=64,block_n=16,block_k=32,warps_m=4,warps_n=1,warps_k=1,stages=2"
TOO_LARGE = "block_m=256,block_n=128,block_k=128,warps_m=1,warps_n=1,warps_k=1,stages=8"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no shipped table."""
    monkeypatch.setenv("YOLOMLIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tables, "shipped", lambda target: None)
    return tmp_path


def parsed(own: str = "", images: int = 1, side: str = "8x8") -> ir.Module:
    return ir.Module.parse(of_images(images, side).replace("TILE", own))


def of_images(count: int, side: str = "8x8") -> str:
    return MODULE.replace("<1x64x8x8", f"<{count}x64x{side}")


def function_of(module: ir.Module) -> ir.Operation:
    """Its private function; the caller keeps the module, which owns it."""
    return module.body.operations[1].operation


def described(text: str = MODULE) -> tuple[str, str]:
    """Text and signature of a module's private function."""
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(text.replace("TILE", ""))
        function = function_of(module)
        return signature.function_text(function), signature.signature(function)


def assigned(
    own: str = "", target: str = "sm_90", images: int = 1, side: str = "8x8", **options: bool
) -> tuple[str, dict[str, int]]:
    """The key of the tile that the pass gives, and its statistics."""
    with yolo.new_context(), ir.Location.unknown():
        module = parsed(own, images, side)
        context = PassContext(weights=AbstractWeights(), target=target_named(target))
        AssignTiles(**options).run(module, context)
        attribute = ir.DictAttr(function_of(module).attributes["yolo.tile"])
        values = {n.name: n.attr.value for n in attribute}
        key = ",".join(f"{name}={int(value)}" for name, value in values.items())
        return space.key_of(space.tile_of("conv2d", key)), dict(
            context.statistics["yolo-assign-tiles"]
        )


def full(key: str) -> str:
    return space.key_of(space.tile_of("conv2d", key))


def tune(
    key: str, *, target: str = "sm_90", device: str = "NVIDIA H200", stale: bool = False
) -> None:
    """What a tuning run would leave."""
    text, _ = described()
    entry = signature.entry_key(text, target, device, "tf32", signature.assembler_version())
    entry = "of another compiler" if stale else entry
    database = Database.open(target, device)
    database.add(CaseRecord(entry, signature.text_digest(text), "conv2d …", "conv2d", "tf32", {}))
    database.add(WinnerRecord(entry, key, 2.0, 3.0, key))


def ship(
    monkeypatch: pytest.MonkeyPatch, *keys: str, images: int = 1, kind: str = "measured"
) -> None:
    """A table with a tile for so many images, then for twice as many, and so on."""
    rows = [
        ("tf32", described(of_images(images << i))[1], TableEntry(key, 1.0, 2.0))
        for i, key in enumerate(keys)
    ]
    table = table_of("sm_90", "NVIDIA H200", kind, rows)
    monkeypatch.setattr(tables, "shipped", lambda target: table if target == "sm_90" else None)


def test_attribute_before_database_before_table_before_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule, statistics = assigned()
    assert statistics == {"from_rule": 1}
    assert rule not in (full(TUNED), full(SHIPPED))
    ship(monkeypatch, SHIPPED)
    assert assigned() == (full(SHIPPED), {"from_shipped": 1})
    tune(TUNED)
    assert assigned() == (full(TUNED), {"from_database": 1})
    own = full("block_m=32,block_n=8,block_k=8")
    assert assigned(OWN) == (own, {"kept": 1})
    assert assigned(OWN, override=True) == (full(TUNED), {"from_database": 1})
    assert assigned(untuned=True) == (rule, {"from_rule": 1})


def test_a_table_s_tile_says_how_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, f"{SHIPPED},carveout=50")
    with yolo.new_context(), ir.Location.unknown():
        module = parsed()
        context = PassContext(weights=AbstractWeights(), target=target_named("sm_90"))
        AssignTiles().run(module, context)
        assert "carveout = 50 : i64" in str(function_of(module).attributes["yolo.tile"])
    ship(monkeypatch, f"{SHIPPED},carveout=60")
    assert assigned()[1] == {"from_rule": 1}


@pytest.mark.parametrize(
    ("images", "known"), [(2, False), (3, True), (8, True), (16, True), (17, True), (64, True)]
)
def test_a_tile_measured_with_other_images_serves(
    images: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third as many, twice as many, or the most that were measured. 64 of them are told apart
    from the weights' 64 channels."""
    ship(monkeypatch, SHIPPED, images=8)
    key, statistics = assigned(images=images)
    assert statistics == {"from_shipped" if known else "from_rule": 1}
    assert (key == full(SHIPPED)) == known


def test_one_image_does_not_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, SHIPPED)
    assert assigned(images=2)[1] == {"from_shipped": 1}
    assert assigned(images=3)[1] == assigned(images=64)[1] == {"from_rule": 1}


def test_the_nearest_number_of_images_serves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, SHIPPED, TUNED, images=4)
    found = {n: assigned(images=n)[0] for n in (2, 4, 5, 6, 8, 64)}
    few, many = full(SHIPPED), full(TUNED)
    assert found == {2: few, 4: few, 5: many, 6: many, 8: many, 64: many}
    ship(monkeypatch, SHIPPED, TOO_LARGE, images=4)
    assert assigned(images=5) == assigned(images=8) == (few, {"from_shipped": 1})


@pytest.mark.parametrize(
    ("images", "side", "known"),
    [
        (1, "6x8", True), (1, "8x16", True), (1, "8x17", False), (1, "1x1", True),
        (2, "4x8", True), (64, "1x1", True), (64, "1x3", False),
    ],
)  # fmt: skip
def test_a_tile_measured_with_another_image_size_serves(
    images: int, side: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the pixels of all images: 64 were measured, of one image."""
    ship(monkeypatch, SHIPPED)
    _, statistics = assigned(images=images, side=side)
    assert statistics == {"from_shipped" if known else "from_rule": 1}


ATTENTION = """
!t = tensor<1x256xSIDExf32, #yolo.layout<"nhwc">>
!r = tensor<1x128xSIDExf32, #yolo.layout<"nhwc">>
module attributes {yolo.precision = "tf32"} {
  func.func @main(%x: !t) -> !r {
    %0 = func.call @attend(%x) {yolo.dispatch} : (!t) -> !r
    return %0 : !r
  }
  func.func private @attend(%x: !t) -> !r attributes {yolo.family = "attention"} {
    %0 = "yolo.attention"(%x) {heads = 2 : i64, key_dim = 32 : i64, head_dim = 64 : i64,
        scale = 0.18 : f64} : (!t) -> !r
    return %0 : !r
  }
}
"""


def test_attention_s_tile_is_judged_by_the_keys_of_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What holds all keys in one step has no registers for the next ones of a larger image."""
    tile = "query_tiles=2,key_tiles=4,warps=8,cluster=2"
    name = described(ATTENTION.replace("SIDE", "20x20"))[1]
    table = table_of("sm_90", "GPU", "measured", [("tf32", name, TableEntry(tile, 1.0, 2.0))])
    monkeypatch.setattr(tables, "shipped", lambda target: table)
    found = {}
    for side in ("16x20", "20x20", "25x25", "27x27"):
        with yolo.new_context(), ir.Location.unknown():
            module = ir.Module.parse(ATTENTION.replace("SIDE", side))
            context = PassContext(weights=AbstractWeights(), target=target_named("sm_90"))
            AssignTiles().run(module, context)
            found[side] = "yolo.tile" in function_of(module).attributes
    assert found == {"16x20": True, "20x20": True, "25x25": False, "27x27": False}


def test_a_predicted_tile_serves_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, SHIPPED, images=8, kind="predicted")
    assert assigned(images=8)[1] == {"from_shipped": 1}
    assert assigned(images=16)[1] == assigned(images=8, side="8x9")[1] == {"from_rule": 1}


def test_what_is_known_of_one_target_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ship(monkeypatch, SHIPPED)
    tune(TUNED)
    assert assigned(target="sm_120")[1] == {"from_rule": 1}


def test_illegal_tiles_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ship(monkeypatch, SHIPPED)
    tune(TOO_LARGE)
    assert assigned() == (full(SHIPPED), {"from_shipped": 1})
    assert "is not legal here" in caplog.text
    tune("pixels=2,threads=64")
    ship(monkeypatch, TOO_LARGE)
    assert assigned()[1] == {"from_rule": 1}
    assert "is not a tile of family 'conv2d'" in caplog.text


def test_stale_entries_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tune(TUNED, stale=True)
    assert assigned()[1] == {"from_rule": 1}
    assert "of another version of the compiler" in caplog.text


def test_a_damaged_database_is_no_error(cache: Path) -> None:
    tune(TUNED)
    (file,) = (cache / "tuning").iterdir()
    file.write_bytes(b"\x00" + file.read_bytes())
    assert assigned()[1] == {"from_rule": 1}


def test_signatures_tell_apart_what_matters_and_nothing_else() -> None:
    text, name = described()
    assert name == "conv2d 1x64x8x8,64x64x1x1 > conv2d silu > 1x64x8x8"
    assert described(MODULE.replace("TILE", OWN)) == (text, name)
    renamed = MODULE.replace("@conv(", "@other(").replace("a.layer", "b.layer")
    assert described(renamed) == (text, name)
    silu = '    %1 = "yolo.silu"(%0) : (!t) -> !t\n    return %1'
    for change in (("<1x64x8x8", "<2x64x8x8"), (silu, "    return %0")):
        other = described(MODULE.replace(*change))
        assert other[0] != text
        assert other[1] != name


def test_signatures_of_a_network_are_distinct() -> None:
    cases = workload().cases.values()
    assert len({c.signature for c in cases}) == len(cases)
    assert len({c.yolo_text for c in cases}) == len(cases)


# ---- shipped tables -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "cpu"])
def test_shipped_tables_are_whole(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    table = tables.shipped(target)
    if table is None:
        pytest.skip("the package ships none for it")
    assert table.target == target
    assert table.kind == ("measured" if target == "sm_90" else "predicted")
    assert table.kind == "measured" or "predicted" in table.note
    for rows in table.entries.values():
        for name, entry in rows.items():
            tile = space.tile_of(name.split()[0], entry.tile)
            assert space.tile_of(name.split()[0], space.key_of(tile)) == tile
            # The whole graph decides about launches: what makes room may be slower alone.
            most = 1.25 if "carveout" in entry.tile else 1.1
            assert 0 < entry.us <= most * entry.default_us


# ---- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [2, 3])
def test_a_prediction_has_every_launch(level: int) -> None:
    load = workload("sm_120", level=level)
    found = predict(load)
    assert [s.layer for s in found.steps] == [s.layer for s in load.plan.steps]
    assert all(s.us > 0 for s in found.steps)
    assert found.sum_us == pytest.approx(sum(s.us for s in found.steps))
    assert max(s.us for s in found.steps) < found.path_us < found.sum_us
    counted = {s.layer: s.flops for s in found.steps if s.family in ("conv2d", "chain")}
    assert all(flops > 0 for flops in counted.values())
    assert ("chain" in {s.family for s in found.steps}) == (level == 3)


def test_predicted_tables_say_so_and_are_legal() -> None:
    load = workload("sm_120")
    table = predicted_table(load)
    assert (table.kind, table.device) == ("predicted", "NVIDIA GeForce RTX 5070")
    for case in load.cases.values():
        entry = table.find("tf32", case.signature)
        assert (entry is not None) == (case.problem.family == "conv2d")
        if entry is not None:
            assert space.illegal(case.problem, space.tile_of("conv2d", entry.tile)) is None
            assert entry.us <= entry.default_us


def test_gpus_go_by_their_names() -> None:
    assert gpu_named("RTX 5070") == ("sm_120", "NVIDIA GeForce RTX 5070")
    with pytest.raises(UserError, match="no figures are known of 'voodoo2'"):
        gpu_named("voodoo2")


# ---- commands -----------------------------------------------------------------------------------


def test_cache_lists_exports_and_clears(
    cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tune(TUNED)
    (cache / "artifacts").mkdir()
    (cache / "mine").mkdir()
    assert main(["cache", "ls"]) == 0
    assert "sm_90 on NVIDIA H200: 1 functions tuned" in capsys.readouterr().out
    output = tmp_path / "table.json"
    assert main(["cache", "export", "--target", "sm_90", "-o", str(output)]) == 0
    data = json.loads(output.read_text())
    assert data["entries"]["tf32"] == {"conv2d …": [TUNED, 2.0, 3.0]}
    assert main(["cache", "export", "--target", "sm_120", "-o", str(output)]) == 2
    assert "nothing was tuned for sm_120" in capsys.readouterr().err
    assert main(["cache", "clear", "tunning"]) == 2
    assert (cache / "tuning").is_dir()
    assert main(["cache", "clear", "tuning"]) == 0
    assert not (cache / "tuning").exists()
    assert main(["cache", "clear"]) == 0
    assert not (cache / "artifacts").exists()
    assert (cache / "mine").is_dir()  # the folder may be shared


def test_tuning_without_a_gpu_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    from yolomlir.runtime.device import cuda_device

    if not isinstance(cuda_device(), str):
        pytest.skip("there is a GPU here")
    assert main(["tune", "seeded:n", "--imgsz", "64"]) == 2
    assert "nothing can be tuned here" in capsys.readouterr().err
    assert main(["tune", "seeded:n", "--imgsz", "64", "--target", "cpu"]) == 2
    assert "nothing can be tuned" in capsys.readouterr().err


def test_tune_predict_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    arguments = ["tune", "seeded:n", "--imgsz", "64", "--target", "sm_120", "--predict"]
    assert main([*arguments, "--layers", "model.2.", "--table", str(path)]) == 0
    assert "predicted, not measured" in capsys.readouterr().out
    table = tables.load_table(path)
    assert isinstance(table, Table)
    assert table.kind == "predicted"
    deeper = tmp_path / "level3.json"
    fused = [*arguments, "-O", "3", "--layers", "model.2.", "--table", str(deeper)]
    assert main(fused) == 0
    fewer = tables.load_table(deeper)
    assert len(table.entries["tf32"]) > len(fewer.entries["tf32"]) > 0  # without what chains have
    assert main(arguments) == 2
    assert main([*arguments, "--layers", "nowhere", "--table", str(path)]) == 2
    assert "no kernel belongs to nowhere" in capsys.readouterr().err


def test_info_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.numpy import save_file

    from yolomlir.frontend.seeded import seeded_checkpoint

    path = tmp_path / "n.safetensors"
    save_file(dict(seeded_checkpoint("n", 2, 0, fused=True).tensors), path)
    assert main(["info", str(path), "--predict", "rtx5070"]) == 0
    text = capsys.readouterr().out
    assert "This is a prediction, not a measurement, for NVIDIA GeForce RTX 5070" in text
    assert "model.23" in text
    assert main(["info", str(path), "--predict", "rtx5070", "--precision", "fp16", "--json"]) == 0
    assert "(sm_120, fp16)" in json.loads(capsys.readouterr().out)["note"]
    assert main(["info", str(path), "--precision", "fp16"]) == 2
    assert "--precision is of a prediction" in capsys.readouterr().err
    assert main(["info", "--predict", "rtx5070"]) == 2
    assert "--predict needs a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("60", 60), ("60s", 60), ("1.5m", 90), ("5min", 300), ("2 sec", 2)]
)
def test_times_have_units(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "0s", "-5", "fast", "5h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="not a time"):
        seconds(text)
