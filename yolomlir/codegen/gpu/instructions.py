"""Instructions of the GPU that kernels use: asynchronous copies, tensor cores, fast functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolomlir.bindings import arith, gpu, ir, llvm, memref, nvgpu, nvvm, vector
from yolomlir.codegen.gpu.builder import (
    ELEMENT_BYTES,
    Bool,
    Buffer,
    Int,
    element_type,
    f32,
    i32_type,
    select,
)

LOG2_E = 1.4426950408889634

# ---- asynchronous copies ------------------------------------------------------------------------

COPY_BYTES = 4
"""The least that `cp.async` copies."""


def copy_async(
    target: Buffer,
    target_offset: Int | int,
    source: Buffer,
    source_offset: Int | int,
    elements: int,
    *,
    live: Bool | None = None,
    through_l1: bool = False,
) -> None:
    """`cp.async` of 4, 8 or 16 bytes from global to shared memory, zeros where not `live`.

    Both addresses must be multiples of the size. Visible to the thread after `copy_wait`, to the
    block after a barrier behind that. Only copies of 16 bytes can bypass L1, and do unless asked.
    """
    count = None
    if live is not None and live.known is not True:
        count = select(live, elements, 0).index()
    nvgpu.device_async_copy(
        target.memref,
        [Int.of(target_offset).index()],
        source.memref,
        [Int.of(source_offset).index()],
        elements,
        src_elements=count,
        bypass_l1=elements * target.element_bytes == 16 and not through_l1,
    )


def copy_commit() -> None:
    """End a group of asynchronous copies."""
    nvvm.cp_async_commit_group()


def copy_wait(groups_left: int) -> None:
    """Wait until at most the newest `groups_left` groups are on their way."""
    nvvm.cp_async_wait_group(groups_left)


# ---- synchronisation ----------------------------------------------------------------------------


def barrier() -> None:
    """All threads of the block meet; their shared-memory writes are visible."""
    gpu.barrier()


def wait_for_predecessors() -> None:
    """`griddepcontrol.wait`: earlier kernels are complete and their writes visible."""
    nvvm.griddepcontrol(nvvm.GridDepActionKind.wait)


def cluster_barrier() -> None:
    """All threads of the cluster meet; their shared-memory writes are visible to each other."""
    cluster_arrive()
    cluster_wait()


def cluster_arrive(*, relaxed: bool = False) -> None:
    """The first half of `cluster_barrier`: this thread does not wait.

    relaxed: it makes no write visible, so it need not wait for earlier ones, either.
    """
    if relaxed:
        nvvm.cluster_arrive_relaxed(aligned=True)
    else:
        nvvm.cluster_arrive()


def cluster_wait() -> None:
    """The second half: every thread of the cluster has arrived."""
    nvvm.cluster_wait()


@dataclass(frozen=True)
class RemoteBuffer:
    """The shared memory of another block of the cluster; offsets are in elements."""

    pointer: ir.Value
    dtype: str = "float32"

    def load_vector(self, offset: Int | int, width: int) -> list[ir.Value]:
        """`width` neighbours; the address must be a multiple of their size."""
        scalar, address = element_type(self.dtype), self.address(offset)
        bytes_ = ELEMENT_BYTES[self.dtype]
        if width == 1:
            return [llvm.load(scalar, address, alignment=bytes_)]
        type_ = ir.VectorType.get([width], scalar)
        loaded = llvm.load(type_, address, alignment=bytes_ * width)
        return [vector.extract(loaded, [], [i]) for i in range(width)]

    def store_vector(self, offset: Int | int, values: Sequence[ir.Value]) -> None:
        """Neighbours in one access; the address must be a multiple of their size."""
        address, width = self.address(offset), len(values)
        bytes_ = ELEMENT_BYTES[self.dtype]
        if width == 1:
            llvm.store(values[0], address, alignment=bytes_)
            return
        type_ = ir.VectorType.get([width], element_type(self.dtype))
        llvm.store(vector.from_elements(type_, list(values)), address, alignment=bytes_ * width)

    def address(self, offset: Int | int) -> ir.Value:
        """Where an element is (`!llvm.ptr<7>`)."""
        return _element_pointer(self.pointer, offset, self.dtype)


DISTRIBUTED = 7
"""Address space of shared memory anywhere in the cluster."""
_SHARED = 3
_GLOBAL = 1


def shared_of_block(buffer: Buffer, rank: Int | int) -> RemoteBuffer:
    """The place of this block's shared `buffer` in the block of that rank of the cluster."""
    own, block = shared_pointer(buffer), Int.of(rank).value
    return RemoteBuffer(nvvm.mapa(llvm.PointerType.get(DISTRIBUTED), own, block), buffer.dtype)


def shared_pointer(buffer: Buffer) -> ir.Value:
    """Where a buffer in this block's shared memory begins (`!llvm.ptr<3>`)."""
    return _pointer(buffer, _SHARED)


def shared_address(buffer: Buffer, offset: Int | int) -> ir.Value:
    """Where an element in this block's shared memory is (`!llvm.ptr<3>`)."""
    if Int.of(offset).known == 0:
        return shared_pointer(buffer)
    return _element_pointer(shared_pointer(buffer), offset, buffer.dtype)


def global_address(buffer: Buffer, offset: Int | int) -> ir.Value:
    """Where an element in global memory is (`!llvm.ptr<1>`)."""
    return _element_pointer(_pointer(buffer, _GLOBAL), offset, buffer.dtype)


def _pointer(buffer: Buffer, space: int) -> ir.Value:
    index = memref.extract_aligned_pointer_as_index(buffer.memref)
    integer = arith.index_cast(ir.IntegerType.get_signless(64), index)
    return llvm.inttoptr(llvm.PointerType.get(space), integer)


def _element_pointer(pointer: ir.Value, offset: Int | int, dtype: str) -> ir.Value:
    dynamic = ir.DenseI32ArrayAttr.get([-(2**31)])  # the index is an operand
    wraps = ir.IntegerAttr.get(i32_type(), 0)  # no flags
    index = [Int.of(offset).value]
    return llvm.getelementptr(pointer.type, pointer, index, dynamic, element_type(dtype), wraps)


def release_dependents() -> None:
    """`griddepcontrol.launch_dependents`: later kernels may start (and wait for this one)."""
    nvvm.griddepcontrol(nvvm.GridDepActionKind.launch_dependents)


def shuffle_xor(value: ir.Value, mask: int) -> ir.Value:
    """The value of the lane whose number differs by `mask`; all 32 lanes take part."""
    i32 = i32_type()
    return gpu.shuffle(
        value, arith.constant(i32, mask), arith.constant(i32, 32), gpu.ShuffleMode.XOR
    )[0]


def ballot(condition: Int) -> Int:
    """A bit for every lane, set where its integer is 1 and not 0; all 32 lanes take part."""
    everyone, i1 = arith.constant(i32_type(), -1), ir.IntegerType.get_signless(1)
    vote = arith.trunci(i1, condition.value)
    kind = nvvm.VoteSyncKind.ballot
    return Int(nvvm.vote_sync(i32_type(), everyone, vote, kind))


# ---- tensor cores -------------------------------------------------------------------------------


def load_matrices(buffer: Buffer, offset: Int | int, count: int) -> list[ir.Value]:
    """`ldmatrix`: `count` (1, 2, 4) matrices of 8 rows of 16 bytes; one register a lane each.

    Lane l gives the address of row l % 8 of matrix l / 8 (a multiple of 16 bytes). For float32 a
    register is one element, (row l / 4, column l % 4); for float16 it is a vector of two.
    """
    lanes = 4 // buffer.element_bytes
    type_ = ir.VectorType.get([count, lanes], element_type(buffer.dtype))
    loaded = nvgpu.ldmatrix(type_, buffer.memref, [Int.of(offset).index()], False, count)
    if lanes == 1:
        return [vector.extract(loaded, [], [i, 0]) for i in range(count)]
    return [vector.extract(loaded, [], [i]) for i in range(count)]


def round_to_tf32(value: ir.Value) -> ir.Value:
    """The bits (i32) of a float32 rounded to nearest TF32, ties away from zero."""
    mode = ir.Attribute.parse("#nvvm.fp_rnd_mode<rna>")
    return nvvm.ConvertFloatToTF32Op(i32_type(), value, rnd=mode).result


def bits(value: ir.Value) -> ir.Value:
    """The bits of a float32."""
    return arith.bitcast(i32_type(), value)


def from_bits(value: ir.Value) -> ir.Value:
    """The float32 of these bits."""
    return arith.bitcast(ir.F32Type.get(), value)


def multiply_tf32(
    a: Sequence[ir.Value], b: Sequence[ir.Value], c: Sequence[ir.Value]
) -> list[ir.Value]:
    """`mma.sync.m16n8k8` of TF32 bits: d = a b + c, accumulated in float32.

    a: 4 values, rows l/4 and l/4 + 8 of column l%4, then of column l%4 + 4. b: 2, rows l%4 and
    l%4 + 4 of column l/4. c and d: 4, columns 2(l%4) and the next of row l/4, then of row l/4 + 8.
    """
    return _mma(a, b, c, "<m = 16, n = 8, k = 8>", "tf32")


def multiply_f16(
    a: Sequence[ir.Value], b: Sequence[ir.Value], c: Sequence[ir.Value]
) -> list[ir.Value]:
    """`mma.sync.m16n8k16` of float16 pairs (`vector<2xf16>`), accumulated in float32."""
    return _mma(a, b, c, "<m = 16, n = 8, k = 16>", "f16")


def _mma(
    a: Sequence[ir.Value],
    b: Sequence[ir.Value],
    c: Sequence[ir.Value],
    shape: str,
    kind: str,
) -> list[ir.Value]:
    float_type = ir.F32Type.get()
    multiplicand = ir.Attribute.parse(f"#nvvm.mma_type<{kind}>")
    result = nvvm.mma_sync(
        llvm.StructType.get_literal([float_type] * 4),
        ir.Attribute.parse(f"#nvvm.shape{shape}"),
        ir.Attribute.parse("#nvvm.mma_layout<row>"),
        ir.Attribute.parse("#nvvm.mma_layout<col>"),
        list(a),
        list(b),
        list(c),
        multiplicand_a_ptx_type=multiplicand,
        multiplicand_b_ptx_type=multiplicand,
    )
    return [llvm.extractvalue(float_type, result, [i]) for i in range(4)]


# ---- functions of float32 -----------------------------------------------------------------------


def _intrinsic(name: str, operands: Sequence[ir.Value]) -> ir.Value:
    return llvm.call_intrinsic(
        ir.F32Type.get(), ir.StringAttr.get(name), list(operands), [], ir.DenseI32ArrayAttr.get([])
    )


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a b + c, rounded once."""
    return _intrinsic("llvm.fma.f32", [a, b, c])


def exp2(x: ir.Value) -> ir.Value:
    """2^x to 2 ulp (`ex2.approx.ftz`), 0 for results below the normal range."""
    return _intrinsic("llvm.nvvm.ex2.approx.ftz.f", [x])


def exp(x: ir.Value) -> ir.Value:
    """e^x with a relative error below 2^-21.5 over the whole range.

    x log2(e) is taken in two floats, so that its rounding does not grow with |x|.
    """
    high = arith.mulf(x, f32(LOG2_E))
    # x log2(e) - high, from the product's own rounding and the constant's.
    low = fma(x, f32(LOG2_E), arith.negf(high))
    low = fma(x, f32(1.925963033500e-08), low)
    power = exp2(high)
    corrected = fma(arith.mulf(low, f32(0.6931471805599453)), power, power)
    # Outside the range `low` may be a NaN (x infinite) or meet an infinite power.
    above = arith.cmpf(arith.CmpFPredicate.OGT, power, f32(0.0))
    below = arith.cmpf(arith.CmpFPredicate.OLT, power, f32(1.0e38))
    return arith.select(arith.andi(above, below), corrected, power)


def reciprocal(x: ir.Value) -> ir.Value:
    """1 / x to 1 ulp (`rcp.approx.ftz`)."""
    return nvvm.rcp_approx_ftz_f(ir.F32Type.get(), x)


def rsqrt(x: ir.Value) -> ir.Value:
    """1 / sqrt(x) to 2 ulp (`rsqrt.approx.ftz`)."""
    return _intrinsic("llvm.nvvm.rsqrt.approx.ftz.f", [x])


def log2(x: ir.Value) -> ir.Value:
    """log2(x) (`lg2.approx.ftz`): absolute error 2^-22 between 0.5 and 2, else relative 2^-22."""
    return _intrinsic("llvm.nvvm.lg2.approx.ftz.f", [x])


def sigmoid(x: ir.Value) -> ir.Value:
    """1 / (1 + e^-x): absolute error below 2^-22.

    e^-x may be off by |x| 2^-24 relatively, which the sigmoid scales by at most
    max |x| e^-x / (1 + e^-x)^2 = 0.23.
    """
    power = exp2(arith.mulf(x, f32(-LOG2_E)))
    return reciprocal(arith.addf(power, f32(1.0)))


def silu(x: ir.Value) -> ir.Value:
    """x sigmoid(x)."""
    return arith.mulf(x, sigmoid(x))


def tanh(x: ir.Value) -> ir.Value:
    """tanh(x) as 1 - 2 / (e^2x + 1): absolute error below 2^-21."""
    power = exp2(arith.mulf(x, f32(2 * LOG2_E)))
    return fma(reciprocal(arith.addf(power, f32(1.0))), f32(-2.0), f32(1.0))


def sqrt(x: ir.Value) -> ir.Value:
    """The square root, correctly rounded."""
    return _intrinsic("llvm.sqrt.f32", [x])


def population_count(x: Int) -> Int:
    """How many bits are set."""
    name = ir.StringAttr.get("llvm.ctpop.i32")
    flags = ir.DenseI32ArrayAttr.get([])
    return Int(llvm.call_intrinsic(i32_type(), name, [x.value], [], flags))


def permute(low: ir.Value, high: ir.Value, order: ir.Value) -> ir.Value:
    """`prmt`: byte i of the result is the one of the eight of `low` and `high` that nibble i of
    `order` (0 to 7) names."""
    name = ir.StringAttr.get("llvm.nvvm.prmt")
    flags = ir.DenseI32ArrayAttr.get([])
    return llvm.call_intrinsic(i32_type(), name, [low, high, order], [], flags)


def absolute(x: ir.Value) -> ir.Value:
    """|x|."""
    return _intrinsic("llvm.fabs.f32", [x])
