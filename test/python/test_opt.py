"""`yolomlir-opt` as mlir-opt's users expect it: output, diagnostics, exit codes, reproducers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from yolomlir.dialects import yolo
from yolomlir.passes import rewriting
from yolomlir.passes.base import REGISTRY, Pass, PassContext
from yolomlir.tools.opt import main

from yolomlir import __version__
from yolomlir.bindings import SUPPORTED_LLVM, ir

SILU = """\
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t loc("model.0.act")
  %1 = "yolo.silu"(%x) : (!t) -> !t loc("model.1.act")
  return %0 : !t
}
"""
INVALID = """\
func.func @main(%x: tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32> {
  %0 = "yolo.silu"(%x) : (tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32>
  return %0 : tensor<1x4x2x3xf32>
}
"""
CONV_BN = """\
!t = tensor<1x8x6x6xf32>
!v = tensor<8xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w.weight"} : () -> tensor<8x8x1x1xf32>
  %g = "yolo.weight"() {name = "g"} : () -> !v
  %b = "yolo.weight"() {name = "b"} : () -> !v
  %m = "yolo.weight"() {name = "m"} : () -> !v
  %v = "yolo.weight"() {name = "v"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
  %1 = "yolo.batch_norm"(%0, %g, %b, %m, %v) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  return %1 : !t
}
"""


@pytest.fixture
def opt(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[object]:
    """Run the tool on a text: `opt(text, *flags)` gives exit code, stdout, stderr."""

    def run(text: str | bytes, *flags: str) -> tuple[int, str, str]:
        path = tmp_path / "in.mlir"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        code = main([str(path), *flags])
        out, err = capfdbinary.readouterr()
        return code, out.decode(errors="replace"), err.decode()

    return run


@pytest.fixture
def broken_passes() -> Iterator[None]:
    """Passes that misbehave, registered for one test."""

    @dataclass(frozen=True)
    class LeaveInvalid(Pass):
        name: ClassVar[str] = "yolo-leave-invalid"

        def run(self, module: ir.Module, context: PassContext) -> None:
            op = rewriting.operations(module, "yolo.silu")[1]
            op.results[0].set_type(ir.RankedTensorType.get([1, 9, 6, 6], ir.F32Type.get()))

    @dataclass(frozen=True)
    class Raise(Pass):
        name: ClassVar[str] = "yolo-raise"

        def run(self, module: ir.Module, context: PassContext) -> None:
            rewriting.operations(module, "yolo.silu")[1].erase()
            raise ZeroDivisionError("by zero")

    @dataclass(frozen=True)
    class LeaveUnverifiable(Pass):
        name: ClassVar[str] = "yolo-leave-unverifiable"

        def run(self, module: ir.Module, context: PassContext) -> None:
            del next(yolo.ops_in(module, "func.func")).attributes["function_type"]

    yield
    for name in ("yolo-leave-invalid", "yolo-raise", "yolo-leave-unverifiable"):
        del REGISTRY[name]


# ---- input and output ---------------------------------------------------------------------------


def test_output_is_the_same_when_read_again(opt) -> None:
    code, once, err = opt(SILU)
    assert (code, err) == (0, "")
    assert opt(once) == (0, once, "")


def test_locations_generic_form_and_local_scope(opt) -> None:
    assert 'loc("model.0.act")' in opt(SILU, "--mlir-print-debuginfo")[1]
    assert "loc(" not in opt(SILU)[1]
    assert '"func.func"()' in opt(SILU, "--mlir-print-op-generic")[1]
    local = opt(SILU, "--mlir-print-debuginfo", "--mlir-print-local-scope")[1]
    assert "#loc" not in local


def test_bytecode_out_and_in(opt, tmp_path: Path) -> None:
    path = tmp_path / "out.mlirbc"
    assert opt(SILU, "--emit-bytecode", "-o", str(path))[0] == 0
    assert path.read_bytes()[:4] == b"ML\xefR"
    code, text, _ = opt(path.read_bytes(), "--mlir-print-debuginfo")
    assert code == 0
    assert text == opt(SILU, "--mlir-print-debuginfo")[1].replace("in.mlir", "-")


def test_roundtrip_of_text_and_bytecode(opt) -> None:
    code, out, err = opt(CONV_BN, "--verify-roundtrip")
    assert (code, err) == (0, "")
    assert out == opt(CONV_BN)[1]


def test_input_that_is_neither_text_nor_bytecode(opt) -> None:
    code, _, err = opt(b"func.func @f() \xff\xfe", "--split-input-file")
    assert code == 1
    assert "in.mlir: byte 15 is not UTF-8; expected MLIR as text or bytecode" in err


def test_stdin_as_a_command() -> None:
    command = [sys.executable, "-m", "yolomlir.tools.opt", "-", "-yolo-dce"]
    run = subprocess.run(command, input=SILU, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("yolo.silu") == 1


def test_split_chunks_fail_alone(opt) -> None:
    text = f"{SILU}// -----\n{INVALID}// -----\n{SILU}"
    code, out, err = opt(text, "--split-input-file", "--yolo-dce")
    assert code == 1
    assert out.count("func.func") == 2
    assert out.count("// -----") == 1
    assert re.search(r"in\.mlir:9:8: error: 'yolo\.silu' result type is", err)


# ---- command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-pass"], "unknown command line argument '--no-such-pass'"),
        (["--yolo-dec"], "unknown pass 'yolo-dec' (did you mean 'yolo-dce'?)"),
        (["--pass-pipeline=nothing"], "'nothing' does not refer to a registered pass"),
        (["--pass-pipeline=func.func(cse"], "a bracket is not closed"),
        (["--pass-pipeline=cse)"], "unmatched ')'"),
        (["--pass-pipeline=yolo-dce(cse)"], "'yolo-dce' in 'yolo-dce(cse)' is no op"),
        (["--pass-pipeline=func.func(yolo-dce)"], "cannot be nested in func.func"),
        (["--pass-pipeline=yolo-dce{x=1}"], "pass 'yolo-dce' has no option 'x' (options: none)"),
        (["--yolo-layout-propagation=up"], "has no option 'up' (options: direction, weights)"),
        (
            ["--yolo-pipeline-cpu=level=7"],
            "no option 'level=7' (options: level=0|1|2|3, precision=",
        ),
        (["--canonicalize=top-up=1"], "no such option top-up"),
        (["--pass-pipeline=cse", "--yolo-dce"], "exclude each other"),
        (["--target=sm_1"], "invalid choice: 'sm_1'"),
        (["-o"], "option -o needs a value"),
        (["--weights=missing.safetensors", "--yolo-dce"], "missing.safetensors"),
        (["-o", "/no/such/folder/x"], "/no/such/folder/x: cannot write"),
        (["--run-reproducer"], "no '// configuration:' line"),
        (["--yolo-dce", "--mlir-print-ir-after=yolo-dec"], "there is no pass 'yolo-dec'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(opt, flags: list[str], message: str) -> None:
    code, out, err = opt(SILU, *flags)
    assert code == 1
    assert out == ""
    assert message in err
    assert err.startswith("yolomlir-opt: error: ")
    assert err.count("\n") == 1


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["missing.mlir"]) == 1
    assert "missing.mlir: cannot open input file: No such file" in capsys.readouterr().err


def test_own_and_upstream_passes_mix_and_the_pipeline_prints(opt) -> None:
    text = "builtin.module(func.func(cse,canonicalize{max-iterations=3}),yolo-dce,symbol-dce)"
    code, out, err = opt(SILU, f"--pass-pipeline={text}", "--dump-pass-pipeline")
    assert code == 0
    assert out.count("yolo.silu") == 1
    expected = (
        "builtin.module(func.func(cse),func.func(canonicalize{max-iterations=3}),"
        "yolo-dce,symbol-dce)"
    )
    assert err.strip() == expected
    assert opt(SILU, f"--pass-pipeline={expected}", "--dump-pass-pipeline")[2].strip() == expected


def test_short_forms_run_in_order_and_take_options(opt) -> None:
    flags = ("--yolo-layout-propagation=direction=forward weights=ohwi", "-cse", "--yolo-dce")
    code, _, err = opt(SILU, *flags, "--dump-pass-pipeline")
    assert code == 0
    assert err.strip() == (
        "builtin.module(yolo-layout-propagation{direction=forward weights=ohwi},cse,yolo-dce)"
    )


def test_function_passes_are_nested_as_mlir_opt_does(opt) -> None:
    code, _, err = opt(SILU, "--affine-loop-tile", "--dump-pass-pipeline")
    assert code == 0
    assert "func.func(affine-loop-tile" in err


def test_the_version_names_mlirs_too(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"yolomlir-opt {__version__}, MLIR {SUPPORTED_LLVM}\n"


def test_list_names_every_pass_and_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-passes"]) == 0
    out = capsys.readouterr().out
    for name in [*REGISTRY, "yolo-pipeline-cpu", "yolo-pipeline-gpu"]:
        assert f"--{name} " in out


# ---- watching a pipeline ------------------------------------------------------------------------


def test_ir_dumps(opt, tmp_path: Path) -> None:
    passes = ("--yolo-cse", "--cse", "--yolo-dce")
    err = opt(SILU, *passes, "--mlir-print-ir-after-all")[2]
    assert re.findall(r"IR Dump (\w+ [\w-]+) //", err) == [
        "After yolo-cse",
        "After cse",
        "After yolo-dce",
    ]
    err = opt(SILU, *passes, "--mlir-print-ir-after-change")[2]
    assert re.findall(r"IR Dump (\w+ [\w-]+) //", err) == ["After yolo-cse"]
    flags = ("--mlir-print-ir-before=yolo-cse,cse", "--mlir-print-ir-after=yolo-dce")
    err = opt(SILU, *passes, *flags)[2]
    assert re.findall(r"IR Dump (\w+ [\w-]+) //", err) == [
        "Before yolo-cse",
        "Before cse",
        "After yolo-dce",
    ]
    opt(SILU, *passes, f"--mlir-print-ir-tree-dir={tmp_path / 'dump'}")
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["00_input.mlir", "01_yolo-cse.mlir", "02_cse.mlir", "03_yolo-dce.mlir"]
    before, after = ((tmp_path / "dump" / n).read_text().count("yolo.silu") for n in names[:2])
    assert (before, after) == (2, 1)


def test_tree_dump_of_split_chunks_keeps_them_apart(opt, tmp_path: Path) -> None:
    text = f"{SILU}// -----\n{SILU}"
    flags = ("--split-input-file", "--yolo-cse", f"--mlir-print-ir-tree-dir={tmp_path / 'dump'}")
    assert opt(text, *flags)[0] == 0
    found = sorted(p.relative_to(tmp_path / "dump").as_posix() for p in tmp_path.rglob("0*.mlir"))
    assert found == [
        "00_input.mlir",
        "01_yolo-cse.mlir",
        "chunk_1/00_input.mlir",
        "chunk_1/01_yolo-cse.mlir",
    ]


def test_timing_and_statistics(opt) -> None:
    err = opt(SILU, "--yolo-cse", "--cse", "--mlir-timing")[2]
    rows = dict(reversed(r) for r in re.findall(r"^ +([\d.]+) \( *[\d.]+%\)  (.+)$", err, re.M))
    assert {"Command line", "Parser", "yolo-cse", "cse", "Output", "Total"} == set(rows)
    parts = sum(float(seconds) for name, seconds in rows.items() if name != "Total")
    assert float(rows["Total"]) == pytest.approx(parts, abs=0.0005)
    text = SILU.replace("  return", "  %c = arith.constant 0 : i32\n  return")
    err = opt(text, "--yolo-cse", "--cse", "--statistics")[2]
    assert re.search(r"yolo-cse\n  \(S\) +1 merged\n", err)
    assert re.search(r"\ncse\n  \(S\) +0 num-cse'd\n  \(S\) +1 num-dce'd\n", err)


# ---- failures -----------------------------------------------------------------------------------


def test_parse_and_verify_errors_show_the_line(opt) -> None:
    code, out, err = opt("func.func @f() {\n  nonsense\n}\n")
    assert (code, out) == (1, "")
    assert "in.mlir:2:3: error: custom op 'nonsense' is unknown" in err
    assert err.splitlines()[1:] == ["  nonsense", "  ^"]
    err = opt(SILU.replace('"(%x) : (!t) -> !t loc("model.1', '"(%x) : (!t) -> f32 loc("model.1'))[
        2
    ]
    assert "in.mlir:4:" in err
    assert "expected base type 'builtin.tensor'" in err


@pytest.mark.usefixtures("broken_passes")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("yolo-leave-invalid", "pass 'yolo-leave-invalid' left invalid IR: 'yolo.silu' result"),
        ("yolo-leave-unverifiable", "pass 'yolo-leave-unverifiable' left invalid IR"),
        ("yolo-raise", "pass 'yolo-raise' failed: ZeroDivisionError: by zero"),
    ],
)
def test_a_failing_pass_is_named_and_can_be_reproduced(
    opt, tmp_path: Path, name: str, message: str
) -> None:
    file = tmp_path / "crash.mlir"
    passes = ("--canonicalize", f"--{name}", "--yolo-dce")
    code, out, err = opt(SILU, *passes, f"--mlir-pass-pipeline-crash-reproducer={file}")
    assert (code, out) == (1, "")
    assert message in err
    assert f"reproducer written to '{file}'" in err
    if name == "yolo-leave-invalid":
        assert "model.1.act" in err
    text = file.read_text()
    assert text.startswith(f"// configuration: '--pass-pipeline=builtin.module({name})' --target=")
    assert text.count("yolo.silu") == 2, "the IR is the one before the failing pass"
    code, _, again = opt(text, "--run-reproducer")
    assert code == 1
    assert message in again


def test_no_reproducer_is_left_where_all_is_well(opt, tmp_path: Path) -> None:
    file = tmp_path / "crash.mlir"
    assert opt(SILU, "--yolo-dce", f"--mlir-pass-pipeline-crash-reproducer={file}")[0] == 0
    assert not file.exists()


def test_an_abort_leaves_a_reproducer(tmp_path: Path) -> None:
    """The bindings have assertions on: what a pass does wrong in C++ ends the process."""
    (tmp_path / "in.mlir").write_text(SILU)
    script = """
import os, sys
from dataclasses import dataclass
from typing import ClassVar
from yolomlir.passes.base import Pass
from yolomlir.tools.opt import main

@dataclass(frozen=True)
class Abort(Pass):
    name: ClassVar[str] = "yolo-abort"

    def run(self, module, context):
        os.abort()

sys.exit(main(["in.mlir", "--yolo-cse", "--yolo-abort",
               "--mlir-pass-pipeline-crash-reproducer=crash.mlir"]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=False
    )
    assert run.returncode < 0
    text = (tmp_path / "crash.mlir").read_text()
    assert "builtin.module(yolo-abort)" in text
    assert text.count("yolo.silu") == 1


# ---- --verify-diagnostics -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("", "unexpected error: 'yolo.silu' result type is"),
        (
            "// expected-error @+1 {{result shape}}",
            'expected error "result shape" was not produced',
        ),
        ("// expected-error {{result type}}", 'expected error "result type" was not produced'),
        ("// expected-warning @+1 {{result type}}", 'expected warning "result type" was not'),
        ("// expected-error @below {{result type}} expected-note @below {{no}}", 'note "no" was'),
        ("// expected-error @unknown {{result type}}", 'expected error "result type" was not'),
        ("// expected-error-re @+1 {{result {{[0-9]+}}}}", 'expected error "result {{[0-9]+}}"'),
    ],
)
def test_diagnostics_that_do_not_match_fail(opt, comment: str, message: str) -> None:
    lines = INVALID.splitlines()
    code, out, err = opt("\n".join([lines[0], comment, *lines[1:]]), "--verify-diagnostics")
    assert (code, out) == (1, "")
    assert message in err


@pytest.mark.parametrize(
    "comment",
    [
        "// expected-error @+1 {{result type is tensor<1x4x2x3xf32>}}",
        "// expected-error @below {{result type}}",
        "// expected-error@below{{result type}}",
        "// expected-error-re @+1 {{result type is {{.*}}; expected tensor<{{[0-9x]+}}f32>}}",
    ],
)
def test_diagnostics_that_match_pass(opt, comment: str) -> None:
    lines = INVALID.splitlines()
    text = "\n".join([lines[0], comment, *lines[1:]])
    assert opt(text, "--verify-diagnostics") == (0, "", "")


def test_each_expectation_takes_one_diagnostic(opt) -> None:
    lines = INVALID.splitlines()
    twice = "// expected-error @+1 {{result type}} expected-error @+1 {{result}}"
    code, _, err = opt("\n".join([lines[0], twice, *lines[1:]]), "--verify-diagnostics")
    assert code == 1
    assert 'expected error "result" was not produced' in err


def test_sound_input_with_an_expectation_fails(opt) -> None:
    code, _, err = opt(SILU + "// expected-error @above {{x}}\n", "--verify-diagnostics")
    assert code == 1
    assert 'expected error "x" was not produced' in err


# ---- weights ------------------------------------------------------------------------------------


def test_weights_are_rewritten_with_the_module(opt, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(8).astype(np.float32) for name in "gbm"}
    tensors["v"] = rng.uniform(0.5, 2, 8).astype(np.float32)
    tensors["w.weight"] = rng.standard_normal((8, 8, 1, 1)).astype(np.float32)
    source, result = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(tensors, source)
    flags = ("--yolo-fold-batch-norm", f"--weights={source}", f"--weights-output={result}")
    assert opt(CONV_BN, *flags)[0] == 0
    folded = load_file(result)
    assert set(folded) == {"w.weight:bn", "w.bias:bn"}
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    scale = wide["g"] / np.sqrt(wide["v"] + 1e-3)
    weight = (wide["w.weight"] * scale[:, None, None, None]).astype(np.float32)
    bias = (wide["b"] - wide["m"] * scale).astype(np.float32)
    np.testing.assert_array_equal(folded["w.weight:bn"], weight)
    np.testing.assert_array_max_ulp(folded["w.bias:bn"], bias, 1)


def test_random_weights_depend_on_seed_and_name_alone(opt, tmp_path: Path) -> None:
    def store(seed: int, *flags: str) -> dict[str, np.ndarray]:
        path = tmp_path / "out.safetensors"
        assert opt(CONV_BN, f"--weights=random:{seed}", f"--weights-output={path}", *flags)[0] == 0
        return load_file(path)

    one, again, other = store(1), store(1), store(2)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, again[name])
        assert not np.array_equal(tensor, other[name])
    assert (one["v"] > 0).all()
    assert not np.array_equal(one["g"], one["b"])


def test_weights_that_do_not_fit_are_refused(opt, tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    tensors = {name: np.ones(8, np.float32) for name in "gbmv"}
    save_file(tensors, source)
    err = opt(CONV_BN, f"--weights={source}")[2]
    assert f"{source}: there is no weight 'w.weight'" in err
    save_file(tensors | {"w.weight": np.ones((8, 8, 3, 3), np.float32)}, source)
    err = opt(CONV_BN, f"--weights={source}")[2]
    assert "weight 'w.weight' is [8, 8, 3, 3]; the module has [8, 8, 1, 1]" in err


@pytest.mark.usefixtures("broken_passes")
def test_a_reproducer_brings_the_weights_as_they_were(opt, tmp_path: Path) -> None:
    file = tmp_path / "crash.mlir"
    text = CONV_BN.replace("return %1", '%2 = "yolo.silu"(%1) : (!t) -> !t\n  return %2')
    passes = ("--yolo-fold-batch-norm", "--yolo-leave-unverifiable", "--weights=random:3")
    assert opt(text, *passes, f"--mlir-pass-pipeline-crash-reproducer={file}")[0] == 1
    weights = tmp_path / "crash.mlir.safetensors"
    assert set(load_file(weights)) == {"w.weight:bn", "w.bias:bn"}
    code, _, err = opt(file.read_text(), "--run-reproducer")
    assert code == 1
    assert "pass 'yolo-leave-unverifiable' left invalid IR" in err


def test_a_damaged_variance_names_layer_and_channel(opt, tmp_path: Path) -> None:
    tensors = {name: np.ones(8, np.float32) for name in "gbmv"}
    tensors["v"][3] = -1
    tensors["w.weight"] = np.ones((8, 8, 1, 1), np.float32)
    source = tmp_path / "in.safetensors"
    save_file(tensors, source)
    text = CONV_BN.replace("!v, !v, !v, !v) -> !t", '!v, !v, !v, !v) -> !t loc("model.7.bn")')
    code, _, err = opt(text, "--yolo-fold-batch-norm", f"--weights={source}")
    assert code == 1
    assert "error: model.7.bn: batch norm's variance is -1.0 at channel 3" in err
    assert "note: model.7.bn: in pass 'yolo-fold-batch-norm'" in err


@pytest.mark.parametrize(
    "flags",
    [
        ("--mlir-print-ir-tree-dir={}/dump",),
        ("--mlir-pass-pipeline-crash-reproducer={}/crash.mlir",),
        ("--weights=random:1", "--weights-output={}/weights.safetensors"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    opt, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    code, _, stderr = opt(CONV_BN, "--yolo-cse", *(f.format(tmp_path / "file") for f in flags))
    assert code == 1
    assert "cannot write" in stderr
    assert f"{tmp_path / 'file'}" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("flag", ["--yolo-merge-siblings", "--yolo-concat-views"])
def test_an_alignment_of_no_channels_is_refused(opt, flag: str) -> None:
    code, _, stderr = opt(CONV_BN, f"{flag}=alignment=0")
    assert code == 1
    assert f"'{flag[2:]}': alignment is 0; it must be at least 1" in stderr
