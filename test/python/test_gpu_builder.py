"""The builder's integers, guards and loops, and the way from a kernel to a cubin."""

from __future__ import annotations

import pytest

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu import builder, instructions, ptx
from yolomlir.codegen.gpu.builder import Bool, Int, KernelBuilder, guard, loop, select
from yolomlir.codegen.gpu.kernel import ACTIVATION, WEIGHT, Kernel, Launch, Parameter
from yolomlir.diagnostics import InternalError
from yolomlir.target import target_named


@pytest.fixture
def body():
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield module


def opaque(value: int = 7) -> Int:
    """An Int whose value Python does not know."""
    return Int(arith.constant(builder.i32_type(), value))


def test_constants_fold_without_operations(body):
    x = Int.of(37)
    folded = [x + 5, x - 40, x * 3, x // 4, x % 8, x ^ 5, x & 12, x | 64, x << 2, x >> 1, 3 + x]
    assert [f.known for f in folded] == [42, -3, 111, 9, 5, 32, 4, 101, 148, 18, 40]
    assert len(body.body.operations) == 0


def test_comparisons_are_unsigned(body):
    assert (Int.of(-1) < 10).known is False
    assert (Int.of(3) < 10).known is True
    assert (Int.of(-1) >= 10).known is True
    assert Int.of(4).equals(4).known is True


def test_the_addend_stays_out_of_the_ssa_value(body):
    x = opaque()
    y = (x + 3) * 4 + 1
    assert y.addend == 13
    assert "muli" in str(y.base.owner)
    assert len(body.body.operations) == 3  # the opaque value, the factor, the product


def test_conditions_fold(body):
    unknown = opaque() < 9
    true, false = Bool(None, True), Bool(None, False)
    assert (true & unknown) is unknown
    assert (false | unknown) is unknown
    assert (unknown & false).known is False
    assert (~false).known is True
    assert select(true, 1, 2).known == 1


def test_a_loop_must_advance(body):
    with pytest.raises(InternalError, match="advance"), loop(0, 4, carried=[Int.of(0)]):
        pass


def reverse_kernel(name: str = "reverse") -> Kernel:
    """Adds the loop's sum to a block reversed through shared memory."""
    parameters = [Parameter(ACTIVATION), Parameter(WEIGHT, alignment_bytes=16)]
    with KernelBuilder(name, parameters, threads=64, shared_bytes=512) as k:
        source, target = (a.buffer for a in k.arguments)
        tile = k.shared("float32", 64, offset_bytes=256)
        instructions.wait_for_predecessors()
        tile.store(k.thread, source.load(k.block_x * 64 + k.thread))
        instructions.barrier()
        with loop(0, 5, carried=[Int.of(0)]) as it:
            it.advance([it.carried[0] + it.index])
        instructions.release_dependents()
        total = arith.uitofp(ir.F32Type.get(), it.results[0].value)
        with guard(k.thread < 63):
            value = arith.addf(tile.load(63 - k.thread), instructions.silu(total))
            target.store(k.block_x * 64 + k.thread, instructions.exp(value))
    return k.finish((4, 1, 1), programmatic=True)


@pytest.mark.parametrize("chip", ["sm_90", "sm_120"])
def test_a_kernel_assembles(chip):
    with ir.Context():
        text = ptx.to_ptx(reverse_kernel().module, target_named(chip))
    assert f".target {chip}" in text
    assert ".extern .shared" in text
    assert "griddepcontrol.wait" in text
    cubin = ptx.assemble(text, chip)
    assert cubin.code[:4] == b"\x7fELF"
    assert 0 < cubin.registers < 64
    assert cubin.spill_bytes == 0


def test_shared_memory_has_an_end():
    with ir.Context():
        k = KernelBuilder("tight", [], threads=32, shared_bytes=128)
        with pytest.raises(InternalError, match="shared memory"), k:
            k.shared("float32", 33)


def test_launch_round_trips_through_json():
    launch = Launch("f", (1, 2, 3), (64, 1, 1), 512, (Parameter(ACTIVATION, "uint8", 1),))
    assert Launch.from_json(launch.to_json()) == launch


def test_the_cache_is_read_and_a_damaged_entry_compiled_again(tmp_path, caplog):
    target = target_named("sm_90")
    with ir.Context():
        kernel = reverse_kernel()
        first = ptx.compile_kernel(kernel, target, cache=tmp_path)
        (entry,) = tmp_path.iterdir()
        before = entry.stat().st_mtime_ns
        assert ptx.compile_kernel(kernel, target, cache=tmp_path) == first
        assert entry.stat().st_mtime_ns == before
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
        assert ptx.compile_kernel(kernel, target, cache=tmp_path) == first
    assert "damaged" in caplog.text
    assert entry.stat().st_mtime_ns > before


def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    target = target_named("sm_90")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with ir.Context():
        for name in ("one", "two"):
            ptx.compile_kernel(reverse_kernel(name), target, cache=blocked / "kernels")
    assert caplog.text.count(f"{blocked / 'kernels'}: cannot be written") == 1


def test_several_processes_give_the_same_kernels():
    target = target_named("sm_90")
    with ir.Context():
        kernels = {name: reverse_kernel(name) for name in ("one", "two")}
        together = ptx.compile_kernels(kernels, target, processes=2)
        alone = {n: ptx.compile_kernel(k, target) for n, k in kernels.items()}
    assert together == alone


def test_bad_ptx_is_an_internal_error():
    with pytest.raises(InternalError, match="sm_90"):
        ptx.assemble(".version 8.0\n.target sm_90\n.address_size 64\nnonsense", "sm_90")
