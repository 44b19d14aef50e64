"""Warp-wide operations of the simulator against the layouts that the PTX ISA draws."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_kernels import SHARED, run

from yolomlir.simulator import SimulationError

RANDOM = np.random.default_rng(11)


# ---- mma ----------------------------------------------------------------------------------------


def tf32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def position_a(lane: int, register: int, element: int, packed: int) -> tuple[int, int]:
    """(row, column) of an element of A: PTX ISA, fragments of mma.m16n8k*."""
    group, t = lane // 4, lane % 4
    row = group + (8 if register % 2 else 0)
    column = t * packed + element + (4 * packed if register >= 2 else 0)
    return row, column


def position_b(lane: int, register: int, element: int, packed: int) -> tuple[int, int]:
    group, t = lane // 4, lane % 4
    return t * packed + element + 4 * packed * register, group


def position_c(lane: int, value: int) -> tuple[int, int]:
    group, t = lane // 4, lane % 4
    return group + (8 if value >= 2 else 0), t * 2 + value % 2


def gather(matrix: np.ndarray, registers: int, packed: int, position) -> np.ndarray:
    """(32, registers, packed) elements of a matrix."""
    out = np.empty((32, registers, packed), matrix.dtype)
    for index in np.ndindex(out.shape):
        out[index] = matrix[position(*index, packed)]
    return out


KINDS = {
    "tf32 k8": ("tf32", 8, 1, "f32"),
    "tf32 k4": ("tf32", 4, 1, "f32"),
    "f16 k16": ("f16", 16, 2, "f32"),
    "f16 k8": ("f16", 8, 2, "f32"),
    "f16 k16 f16": ("f16", 16, 2, "f16"),
    "bf16 k16": ("bf16", 16, 2, "f32"),
    "s8 k32": ("s8", 32, 4, "s32"),
    "u8 k16": ("u8", 16, 4, "s32"),
}
ELEMENT = {"tf32": np.float32, "f16": np.float16, "bf16": np.float32, "s8": np.int8, "u8": np.uint8}


def operands(kind: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        a, b = (RANDOM.integers(low, high, s) for s in ((16, k), (k, 8)))
        return a.astype(ELEMENT[kind]), b.astype(ELEMENT[kind])
    a, b = (RANDOM.standard_normal(s).astype(np.float32) for s in ((16, k), (k, 8)))
    if kind == "bf16":
        return tuple((m.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for m in (a, b))
    return a.astype(ELEMENT[kind]), b.astype(ELEMENT[kind])


def words(fragment: np.ndarray, kind: str) -> np.ndarray:
    """The fragment's 32-bit registers, flat: lane by lane."""
    if kind == "bf16":
        fragment = (fragment.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(fragment).reshape(-1).view(np.int32)


def mma_body(kind: str, k: int, a_count: int, b_count: int, accumulator: str) -> str:
    lines = []

    def fetch(name: str, source: str, count: int, vector: bool) -> list[str]:
        lines.append(f"%n{name} = arith.constant {count} : index")
        lines.append(f"%base{name} = arith.muli %tid, %n{name} : index")
        for i in range(count):
            lines.append(f"%o{name}{i} = arith.constant {i} : index")
            lines.append(f"%at{name}{i} = arith.addi %base{name}, %o{name}{i} : index")
            lines.append(f"%{name}{i} = memref.load {source}[%at{name}{i}] : memref<?xi32>")
            if vector:
                lines.append(f"%w{name}{i} = vector.broadcast %{name}{i} : i32 to vector<1xi32>")
                lines.append(
                    f"%{name}v{i} = vector.bitcast %w{name}{i} : vector<1xi32> to vector<2xf16>"
                )
        return [f"%{name}{'v' if vector else ''}{i}" for i in range(count)]

    a = fetch("a", "%x", a_count, kind == "f16")
    b = fetch("b", "%z", b_count, kind == "f16")
    half = accumulator == "f16"
    c = fetch("k", "%w", 2 if half else 4, half)
    scalar = {"f32": "f32", "s32": "i32", "f16": "vector<2xf16>"}[accumulator]
    if accumulator == "f32":
        lines += [f"%f{i} = arith.bitcast %k{i} : i32 to f32" for i in range(4)]
        c = [f"%f{i}" for i in range(4)]
    operand = "vector<2xf16>" if kind == "f16" else "i32"
    struct = f"!llvm.struct<({', '.join([scalar] * len(c))})>"
    kinds = "" if kind == "f16" else (
        f", multiplicandAPtxType = #nvvm.mma_type<{kind}>, "
        f"multiplicandBPtxType = #nvvm.mma_type<{kind}>"
    )  # fmt: skip
    if accumulator == "s32":
        kinds += ", intOverflowBehavior = #nvvm.mma_int_overflow<wrapped>"
    lines.append(
        f"%d = nvvm.mma.sync A[{', '.join(a)}] B[{', '.join(b)}] C[{', '.join(c)}] "
        f"{{layoutA = #nvvm.mma_layout<row>, layoutB = #nvvm.mma_layout<col>, "
        f"shape = #nvvm.shape<m = 16, n = 8, k = {k}>{kinds}}} "
        f": ({operand}, {operand}, {scalar}) -> {struct}"
    )
    for i in range(len(c)):
        lines.append(f"%d{i} = llvm.extractvalue %d[{i}] : {struct}")
        if half:
            lines.append(f"%v{i} = vector.bitcast %d{i} : vector<2xf16> to vector<1xi32>")
            lines.append(f"%r{i} = vector.extract %v{i}[0] : i32 from vector<1xi32>")
        elif accumulator == "f32":
            lines.append(f"%r{i} = arith.bitcast %d{i} : f32 to i32")
        value = f"%d{i}" if accumulator == "s32" else f"%r{i}"
        lines.append(f"memref.store {value}, %y[%atk{i}] : memref<?xi32>")
    return "\n".join(lines)


@pytest.mark.parametrize("name", KINDS)
def test_mma_sync(name):
    kind, k, packed, accumulator = KINDS[name]
    a, b = operands(kind, k)
    a_count, b_count = 2 * k // (4 * packed), k // (4 * packed)
    c = RANDOM.integers(-50, 50, (16, 8))
    c = c.astype({"f32": "f4", "s32": "i4", "f16": "f2"}[accumulator])
    inputs = [
        words(gather(a, a_count, packed, position_a), kind),
        words(gather(b, b_count, packed, position_b), kind),
    ]
    values = np.empty((32, 4), c.dtype)
    for lane, value in np.ndindex(32, 4):
        values[lane, value] = c[position_c(lane, value)]
    inputs.append(values.reshape(-1).view(np.int32).copy())
    out = np.zeros_like(inputs[-1])
    run(
        mma_body(kind, k, a_count, b_count, accumulator),
        [*inputs, out],
        "%x: memref<?xi32>, %z: memref<?xi32>, %w: memref<?xi32>, %y: memref<?xi32>",
    )
    if kind == "tf32":
        a, b = tf32(a), tf32(b)
    wide = np.int64 if kind in ("s8", "u8") else np.float64
    want = (a.astype(wide) @ b.astype(wide) + c).astype(c.dtype)
    result = out.view(c.dtype).reshape(32, 4)
    for lane, value in np.ndindex(32, 4):
        assert result[lane, value] == want[position_c(lane, value)]


def test_nvgpu_mma_sync_is_the_same_instruction():
    a, b = RANDOM.standard_normal((16, 8)), RANDOM.standard_normal((8, 8))
    a, b = a.astype(np.float32), b.astype(np.float32)
    x = gather(a, 4, 1, position_a).reshape(-1)
    z = gather(b, 2, 1, position_b).reshape(-1)
    out = np.zeros(128, np.float32)
    run(
        """
        %ia = arith.muli %tid, %c4 : index
        %two = arith.constant 2 : index
        %ib = arith.muli %tid, %two : index
        %av = vector.load %x[%ia] : memref<?xf32>, vector<4xf32>
        %bv = vector.load %z[%ib] : memref<?xf32>, vector<2xf32>
        %a = vector.shape_cast %av : vector<4xf32> to vector<4x1xf32>
        %b = vector.shape_cast %bv : vector<2xf32> to vector<2x1xf32>
        %c = arith.constant dense<1.0> : vector<2x2xf32>
        %d = nvgpu.mma.sync (%a, %b, %c) {mmaShape = [16, 8, 8], tf32Enabled}
            : (vector<4x1xf32>, vector<2x1xf32>, vector<2x2xf32>) -> vector<2x2xf32>
        %r = vector.shape_cast %d : vector<2x2xf32> to vector<4xf32>
        vector.store %r, %y[%ia] : memref<?xf32>, vector<4xf32>
        """,
        [x, z, out],
        "%x: memref<?xf32>, %z: memref<?xf32>, %y: memref<?xf32>",
    )
    want = (tf32(a).astype(np.float64) @ tf32(b).astype(np.float64) + 1).astype(np.float32)
    for lane, value in np.ndindex(32, 4):
        assert out.reshape(32, 4)[lane, value] == want[position_c(lane, value)]


def test_rounding_to_tf32_is_to_nearest_with_ties_away():
    step = np.float32(2.0**-10)
    x = np.ones(32, np.float32)
    x[:4] = [1 + step / 2, 1 + step / 2 - step / 1024, -(1 + step / 2), 1 + 3 * step / 4]
    x[4:] = RANDOM.standard_normal(28)
    out = np.zeros(32, np.float32)
    run(
        """
        %a = memref.load %x[%tid] : memref<?xf32>
        %r = nvvm.convert.float.to.tf32 %a {rnd = #nvvm.fp_rnd_mode<rna>}
        %f = arith.bitcast %r : i32 to f32
        memref.store %f, %y[%tid] : memref<?xf32>
        """,
        [x, out],
    )
    np.testing.assert_array_equal(out[:4], np.float32([1 + step, 1, -(1 + step), 1 + step]))
    assert (out == tf32(out)).all()
    below = tf32(x).astype(np.float64)
    ulp = np.spacing(np.abs(below).astype(np.float32)).astype(np.float64) * 2**13
    assert (np.abs(out.astype(np.float64) - x) <= ulp / 2).all()


# ---- ldmatrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("element", ["f32", "f16", "f16 transposed"])
def test_ldmatrix(count, element):
    transpose = element.endswith("transposed")
    element = element.split()[0]
    packed = 1 if element == "f32" else 2
    width = 4 * packed
    matrices = np.arange(count * 8 * width).reshape(count, 8, width).astype(f"f{4 // packed}")
    out = np.zeros(32 * count * packed, matrices.dtype)
    total, flag = count * 8 * width, str(transpose).lower()
    run(
        f"""
        %total = arith.constant {total} : index
        scf.for %i = %tid to %total step %c32 {{
          %v = memref.load %x[%i] : memref<?x{element}>
          memref.store %v, %s[%i] : memref<{total}x{element}, {SHARED}>
        }}
        gpu.barrier
        %rows = arith.constant {count * 8} : index
        %width = arith.constant {width} : index
        %row = arith.remui %tid, %rows : index
        %o = arith.muli %row, %width : index
        %r = nvgpu.ldmatrix %s[%o] {{numTiles = {count} : i32, transpose = {flag}}}
            : memref<{total}x{element}, {SHARED}> -> vector<{count}x{packed}x{element}>
        %flat = vector.shape_cast %r
            : vector<{count}x{packed}x{element}> to vector<{count * packed}x{element}>
        %each = arith.constant {count * packed} : index
        %at = arith.muli %tid, %each : index
        vector.store %flat, %y[%at] : memref<?x{element}>, vector<{count * packed}x{element}>
        """,
        [matrices.reshape(-1).copy(), out],
        f"%x: memref<?x{element}>, %y: memref<?x{element}>",
        shared=f"%s: memref<{total}x{element}, {SHARED}>",
    )
    if transpose:
        matrices = matrices.swapaxes(1, 2)
    result = out.reshape(32, count, packed)
    for lane, matrix, i in np.ndindex(result.shape):
        assert result[lane, matrix, i] == matrices[matrix, lane // 4, lane % 4 * packed + i]


# ---- between lanes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "offset", "width", "source"),
    [
        ("xor", 4, 32, lambda i: i ^ 4),
        ("xor", 1, 8, lambda i: i ^ 1),
        ("up", 3, 32, lambda i: i - 3 if i >= 3 else i),
        ("down", 5, 32, lambda i: i + 5 if i + 5 < 32 else i),
        ("down", 2, 8, lambda i: i + 2 if i % 8 + 2 < 8 else i),
        ("idx", 7, 32, lambda i: 7),
    ],
)
def test_gpu_shuffle(mode, offset, width, source):
    x = RANDOM.standard_normal(64).astype(np.float32)
    out, valid = np.zeros(64, np.float32), np.zeros(64, np.int32)
    run(
        f"""
        %o = arith.constant {offset} : i32
        %w = arith.constant {width} : i32
        %v = memref.load %x[%tid] : memref<?xf32>
        %r, %p = gpu.shuffle {mode} %v, %o, %w : f32
        %e = arith.extui %p : i1 to i32
        memref.store %r, %y[%tid] : memref<?xf32>
        memref.store %e, %z[%tid] : memref<?xi32>
        """,
        [x, out, valid],
        "%x: memref<?xf32>, %y: memref<?xf32>, %z: memref<?xi32>",
        block=(64, 1, 1),
    )
    lanes = [t // 32 * 32 + source(t % 32) for t in range(64)]
    np.testing.assert_array_equal(out, x[lanes])
    if mode in ("up", "down"):
        assert valid.tolist() == [int(s != t) for t, s in enumerate(lanes)]


@pytest.mark.parametrize(
    ("kind", "offset", "clamp", "source"),
    [
        ("bfly", 16, 0x1F, lambda i: i ^ 16),
        ("up", 1, 0, lambda i: max(i - 1, 0)),
        ("down", 8, 0x1F, lambda i: i + 8 if i < 24 else i),
        ("idx", 5, 0x1F, lambda i: 5),
        # Segments of 8 lanes: 24 mask bits above a clamp of 31.
        ("idx", 2, 0x181F, lambda i: i // 8 * 8 + 2),
    ],
)
def test_shfl_sync(kind, offset, clamp, source):
    x = np.arange(100, 132, dtype=np.int32)
    out = np.zeros(32, np.int32)
    run(
        f"""
        %all = arith.constant -1 : i32
        %o = arith.constant {offset} : i32
        %c = arith.constant {clamp} : i32
        %v = memref.load %x[%tid] : memref<?xi32>
        %r = nvvm.shfl.sync {kind} %all, %v, %o, %c : i32 -> i32
        memref.store %r, %y[%tid] : memref<?xi32>
        """,
        [x, out],
        "%x: memref<?xi32>, %y: memref<?xi32>",
    )
    assert out.tolist() == [100 + source(i) for i in range(32)]


def test_reductions_and_votes():
    x = RANDOM.integers(-1000, 1000, 64).astype(np.int32)
    out = np.zeros(256, np.int32)
    run(
        """
        %all = arith.constant -1 : i32
        %none = arith.constant 0 : i32
        %c128 = arith.constant 128 : index
        %c192 = arith.constant 192 : index
        %v = memref.load %x[%tid] : memref<?xi32>
        %sum = nvvm.redux.sync add %v, %all : i32 -> i32
        %neg = arith.cmpi slt, %v, %none : i32
        %votes = nvvm.vote.sync ballot %all, %neg -> i32
        %most = gpu.subgroup_reduce maxsi %v : (i32) -> i32
        %block = gpu.all_reduce add %v {} : (i32) -> i32
        %i1 = arith.addi %tid, %c64 : index
        %i2 = arith.addi %tid, %c128 : index
        %i3 = arith.addi %tid, %c192 : index
        memref.store %sum, %y[%tid] : memref<?xi32>
        memref.store %votes, %y[%i1] : memref<?xi32>
        memref.store %most, %y[%i2] : memref<?xi32>
        memref.store %block, %y[%i3] : memref<?xi32>
        """,
        [x, out],
        "%x: memref<?xi32>, %y: memref<?xi32>",
        block=(64, 1, 1),
    )
    warps = x.reshape(2, 32)
    sums, votes, most, block = out.reshape(4, 2, 32)
    assert (sums == warps.sum(1, keepdims=True)).all()
    ballots = [sum(1 << i for i, v in enumerate(w) if v < 0) for w in warps.tolist()]
    assert (votes.view(np.uint32) == np.array(ballots, np.uint32)[:, None]).all()
    assert (most == warps.max(1, keepdims=True)).all()
    assert (block == x.sum()).all()


def test_elect_and_match():
    x = np.arange(32, dtype=np.int32) % 3
    out = np.zeros(64, np.int32)
    run(
        """
        %all = arith.constant -1 : i32
        %v = memref.load %x[%tid] : memref<?xi32>
        %same = nvvm.match.sync any %all, %v : i32 -> i32
        %one32 = arith.constant 1 : i32
        %chosen = nvvm.elect.sync -> i1
        memref.store %same, %y[%tid] : memref<?xi32>
        scf.if %chosen { memref.store %one32, %y[%c32] : memref<?xi32> }
        """,
        [x, out],
        "%x: memref<?xi32>, %y: memref<?xi32>",
    )
    want = [sum(1 << j for j in range(32) if j % 3 == i % 3) for i in range(32)]
    assert out[:32].view(np.uint32).tolist() == want
    assert out[32] == 1


# ---- barriers and clusters ----------------------------------------------------------------------


def test_named_barrier_of_a_part_of_the_block():
    """Warps 0 and 1 exchange values while warp 2 goes on alone."""
    body = f"""
        %pair = arith.cmpi ult, %tid, %c64 : index
        %id = arith.constant 3 : i32
        %n = arith.constant 64 : i32
        scf.if %pair {{
          %f = arith.sitofp %lane : i32 to f32
          memref.store %f, %s[%tid] : memref<64xf32, {SHARED}>
          nvvm.barrier id = %id number_of_threads = %n
          %w = arith.addi %tid, %c32 : index
          %o = arith.remui %w, %c64 : index
          %v = memref.load %s[%o] : memref<64xf32, {SHARED}>
          memref.store %v, %y[%tid] : memref<?xf32>
        }}
    """
    for seed in range(4):
        out = np.zeros(96, np.float32)
        run(body, [np.zeros(1, np.float32), out], block=(96, 1, 1), seed=seed,
            shared=f"%s: memref<64xf32, {SHARED}>")  # fmt: skip
        want = np.concatenate([(np.arange(64) + 32) % 64, np.zeros(32)])
        np.testing.assert_array_equal(out, want)


CLUSTER = f"""
        %rank = nvvm.read.ptx.sreg.cluster.ctarank : i32
        %u = arith.constant 1 : i32
        %peer = arith.xori %rank, %u : i32
        %h = arith.constant 100 : i32
        %hundred = arith.muli %rank, %h : i32
        %value = arith.addi %hundred, %lane : i32
        memref.store %value, %s[%tid] : memref<64xi32, {SHARED}>
        ARRIVE
        %p = memref.extract_aligned_pointer_as_index %s : memref<64xi32, {SHARED}> -> index
        %p64 = arith.index_cast %p : index to i64
        %mine = llvm.inttoptr %p64 : i64 to !llvm.ptr<3>
        %theirs = nvvm.mapa %mine, %peer : !llvm.ptr<3> -> !llvm.ptr<7>
        %at = llvm.getelementptr %theirs[%lane] : (!llvm.ptr<7>, i32) -> !llvm.ptr<7>, i32
        %v = llvm.load %at : !llvm.ptr<7> -> i32
        %b = gpu.block_id x
        %base = arith.muli %b, %c64 : index
        %i = arith.addi %base, %tid : index
        memref.store %v, %y[%i] : memref<?xi32>
        nvvm.cluster.arrive
        nvvm.cluster.wait
"""


def test_shared_memory_of_a_cluster():
    out = np.zeros(256, np.int32)
    options = {
        "grid": (4, 1, 1), "cluster": (2, 1, 1), "block": (64, 1, 1),
        "shared": f"%s: memref<64xi32, {SHARED}>",
    }  # fmt: skip
    arguments = "%x: memref<?xf32>, %y: memref<?xi32>"
    synchronised = CLUSTER.replace("ARRIVE", "nvvm.cluster.arrive\nnvvm.cluster.wait")
    for schedule in ("lockstep", "warps"):
        run(synchronised, [np.zeros(1, np.float32), out], arguments, schedule=schedule, **options)
        ranks = np.arange(4) % 2 ^ 1
        want = 100 * ranks[:, None] + np.arange(64)
        np.testing.assert_array_equal(out.reshape(4, 64), want)


def test_a_cluster_must_meet_before_it_reads():
    body = CLUSTER.replace("ARRIVE", "")
    kinds = set()
    for seed in range(6):
        with pytest.raises(SimulationError) as error:
            run(body, [np.zeros(1, np.float32), np.zeros(256, np.int32)],
                "%x: memref<?xf32>, %y: memref<?xi32>", seed=seed, schedule="warps",
                grid=(2, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1),
                shared=f"%s: memref<64xi32, {SHARED}>")  # fmt: skip
        kinds.add(error.value.kind)
    assert kinds <= {"race", "uninitialised"}


def test_a_block_must_outlive_the_readers_of_its_memory():
    synchronised = CLUSTER.replace("ARRIVE", "nvvm.cluster.arrive\nnvvm.cluster.wait")
    early = synchronised[: synchronised.rindex("nvvm.cluster.arrive")]
    early = early.replace("-> i32\n        %b", '-> i32 loc("remote")\n        %b')
    for schedule in ("lockstep", "warps"):
        with pytest.raises(SimulationError) as error:
            run(early, [np.zeros(1, np.float32), np.zeros(256, np.int32)],
                "%x: memref<?xf32>, %y: memref<?xi32>", schedule=schedule,
                grid=(4, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1),
                shared=f"%s: memref<64xi32, {SHARED}>")  # fmt: skip
        assert error.value.kind == "race"
        assert error.value.location == '"remote"'
