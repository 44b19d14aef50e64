"""Faults of accesses to float16, planted and caught: half words have their own rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated_kernels import SHARED, run

from yolomlir.simulator import SimulationError

FLAT = "memref<?xf16>"
TILE = f"memref<512xf16, {SHARED}>"
ARGUMENTS = f"%x: {FLAT}, %y: {FLAT}"
DOUBLED = "%two = arith.constant 2 : index\n%d = arith.muli %tid, %two : index"


def arrays(count: int = 512) -> list[Any]:
    return [np.ones(count, np.float16), np.zeros(512, np.float16)]


def simulated(body: str, given: list[Any] | None = None, **options: Any) -> None:
    for schedule in ("lockstep", "warps"):
        run(
            body, given or arrays(), ARGUMENTS, schedule=schedule, shared=f"%s: {TILE}",
            block=(64, 1, 1), **options,
        )  # fmt: skip


def caught(body: str, kind: str, given: list[Any] | None = None) -> str:
    with pytest.raises(SimulationError) as error:
        simulated(body, given)
    assert error.value.kind == kind, error.value
    assert error.value.location == '"fault"', error.value
    return str(error.value)


def test_out_of_bounds_is_counted_in_half_words():
    body = f'%v = memref.load %x[%tid] : {FLAT} loc("fault")'
    simulated(body, arrays(64))
    assert "of 126" in caught(body, "out-of-bounds", arrays(63))


@pytest.mark.parametrize(("width", "shift"), [(2, 1), (4, 2), (8, 4)])
def test_misaligned_vectors(width: int, shift: int):
    """Vectors of 4, 8 and 16 bytes, each at a multiple of half its size."""
    type_ = f"vector<{width}xf16>"
    body = f"""
        %w = arith.constant {width} : index
        %at = arith.muli %tid, %w : index
        %shift = arith.constant SHIFT : index
        %i = arith.addi %at, %shift : index
        %v = vector.load %x[%i] {{alignment = {2 * width} : i64}} : {FLAT}, {type_} loc("fault")
    """
    simulated(body.replace("SHIFT", str(width)), arrays(1024))
    caught(body.replace("SHIFT", str(shift)), "misaligned", arrays(1024))


def copy(elements: int, index: str, *, location: str = "fault") -> str:
    return (
        f"%t = nvgpu.device_async_copy %x[{index}], %s[{index}], {elements} "
        f': {FLAT} to {TILE} loc("{location}")'
    )


def test_copies_of_two_begin_at_even_elements():
    simulated(f"{DOUBLED}\n{copy(2, '%d')}\nnvvm.cp.async.wait.group 0")
    caught(f"{DOUBLED}\n%i = arith.addi %d, %c1 : index\n{copy(2, '%i')}", "misaligned")


def test_a_half_of_a_copied_word_is_invisible_until_waited_for():
    body = f"""
        {DOUBLED}
        {copy(2, "%d", location="copy")}
        nvvm.cp.async.commit.group
        WAIT
        %i = arith.addi %d, %c1 : index
        %v = memref.load %s[%i] : {TILE} loc("fault")
        memref.store %v, %y[%tid] : {FLAT}
    """
    caught(body.replace("WAIT", ""), "in-flight")
    simulated(body.replace("WAIT", "nvvm.cp.async.wait.group 0"))


def test_halves_of_one_word_do_not_race():
    """Two warps write each word, a half each; then both write the same halves."""
    body = f"""
        %h = arith.constant 1.0 : f16
        %i = arith.remui %tid, %c32 : index
        %two = arith.constant 2 : index
        %twice = arith.muli %i, %two : index
        %warp = arith.divui %tid, %c32 : index
        %half = arith.muli %warp, FACTOR : index
        %at = arith.addi %twice, %half : index
        memref.store %h, %s[%at] : {TILE} loc("fault")
    """
    simulated(body.replace("FACTOR", "%c1"))
    caught(body.replace("FACTOR", "%c0"), "race")


def test_misaligned_ldmatrix_rows():
    """Rows of 8 float16 begin at multiples of 8 elements."""
    body = f"""
        %h = arith.constant 1.0 : f16
        {DOUBLED}
        %far = arith.addi %tid, %c64 : index
        memref.store %h, %s[%tid] : {TILE}
        memref.store %h, %s[%far] : {TILE}
        gpu.barrier
        %row = arith.constant PITCH : index
        %last = arith.constant 7 : index
        %r = arith.andi %tid, %last : index
        %at = arith.muli %r, %row : index
        %m = nvgpu.ldmatrix %s[%at] {{numTiles = 1 : i32, transpose = false}}
            : {TILE} -> vector<1x2xf16> loc("fault")
    """
    simulated(body.replace("PITCH", "8"))
    assert "row 1 of matrix 0" in caught(body.replace("PITCH", "4"), "misaligned")
