"""Building `gpu.func` kernels: integers that fold, guards, loops, memory, the function itself.

Addresses are counted in elements, in i32, and widened to `index` at each access (LLVM's NVPTX
backend has no 32-bit `index`). An `Int` keeps its constant addend apart from its SSA value, so the
addend of an address becomes the displacement of the load or store and costs no instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from yolomlir.bindings import arith, gpu, ir, memref, scf, vector
from yolomlir.codegen.gpu.kernel import ACTIVATION, Kernel, Launch, Parameter
from yolomlir.diagnostics import InternalError

SHARED_SYMBOL = "dynamic_shared"
"""The zero-length global that stands for dynamic shared memory."""
ELEMENT_BYTES = {"float32": 4, "float16": 2, "uint8": 1, "int32": 4}
_UNBOUNDED = 2**31 - 1
_WORD = 2**32


def element_type(dtype: str) -> ir.Type:
    """The MLIR type of `float32`, `float16`, `uint8` (signless i8) or `int32`."""
    if dtype == "float32":
        return ir.F32Type.get()
    if dtype == "float16":
        return ir.F16Type.get()
    if dtype in ("uint8", "int32"):
        return ir.IntegerType.get_signless(8 * ELEMENT_BYTES[dtype])
    raise InternalError(f"kernels have no element type '{dtype}'")


def i32_type() -> ir.Type:
    """The type of every offset and count."""
    return ir.IntegerType.get_signless(32)


def f32(value: float) -> ir.Value:
    """A float32 constant."""
    return arith.constant(ir.F32Type.get(), value)


def zero_of(dtype: str) -> ir.Value:
    """The zero of an element type."""
    return arith.constant(element_type(dtype), 0 if dtype in ("uint8", "int32") else 0.0)


def widen(value: ir.Value) -> ir.Value:
    """A float16 as float32; a float32 as it is."""
    return arith.extf(ir.F32Type.get(), value) if isinstance(value.type, ir.F16Type) else value


def narrow(value: ir.Value, dtype: str) -> ir.Value:
    """A float32 as `dtype`, rounded to nearest, ties to even, where that is float16."""
    return arith.truncf(ir.F16Type.get(), value) if dtype == "float16" else value


# ---- integers and conditions --------------------------------------------------------------------


class Int:
    """An i32: an SSA value (or none) plus a constant; arithmetic on constants folds in Python.

    Division, remainder, shifts right and comparisons are unsigned, so `x < n` with n >= 0 is also
    false for a negative x. Sums and products are assumed not to wrap.
    """

    __slots__ = ("addend", "base")

    def __init__(self, base: ir.Value | None, addend: int = 0) -> None:
        self.base = base
        self.addend = addend

    @staticmethod
    def of(x: Int | int | ir.Value) -> Int:
        """An Int from an Int, a Python integer or an i32 or index value."""
        if isinstance(x, Int):
            return x
        if isinstance(x, int):
            return Int(None, x)
        if isinstance(x.type, ir.IndexType):
            return Int(arith.index_cast(i32_type(), x))
        return Int(x)

    @property
    def known(self) -> int | None:
        """The value where it is a constant."""
        return self.addend if self.base is None else None

    @property
    def value(self) -> ir.Value:
        """The i32 as an SSA value."""
        if self.base is None:
            return arith.constant(i32_type(), _signed(self.addend))
        if self.addend == 0:
            return self.base
        return arith.addi(self.base, arith.constant(i32_type(), _signed(self.addend)))

    def index(self) -> ir.Value:
        """The integer as an `index` value, its constant added after the widening."""
        index = ir.IndexType.get()
        if self.base is None:
            return arith.constant(index, self.addend)
        wide = arith.index_cast(index, self.base)
        return arith.addi(wide, arith.constant(index, self.addend)) if self.addend else wide

    def __add__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.base is None or self.base is None:
            return Int(self.base or other.base, self.addend + other.addend)
        return Int(arith.addi(self.base, other.base), self.addend + other.addend)

    __radd__ = __add__

    def __sub__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.base is None:
            return Int(self.base, self.addend - other.addend)
        left = arith.constant(i32_type(), 0) if self.base is None else self.base
        return Int(arith.subi(left, other.base), self.addend - other.addend)

    def __rsub__(self, other: int) -> Int:
        return Int.of(other) - self

    def __mul__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if self.known is not None:
            self, other = other, self
        factor = other.known
        if factor is None:
            return Int(arith.muli(self.value, other.value))
        if factor == 0 or self.base is None:
            return Int(None, self.addend * factor)
        base = self.base if factor == 1 else arith.muli(self.base, Int.of(factor).value)
        return Int(base, self.addend * factor)

    __rmul__ = __mul__

    def __floordiv__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.known == 1:
            return self
        if self.known is not None and other.known is not None:
            return Int(None, self.known % _WORD // other.known)
        return Int(arith.divui(self.value, other.value))

    def __mod__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.known == 1:
            return Int(None, 0)
        if self.known is not None and other.known is not None:
            return Int(None, self.known % _WORD % other.known)
        return Int(arith.remui(self.value, other.value))

    def __xor__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if self.known is not None and other.known is not None:
            return Int(None, self.known ^ other.known)
        if other.known == 0 or self.known == 0:
            return other if self.known == 0 else self
        return Int(arith.xori(self.value, other.value))

    def __and__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if self.known is not None and other.known is not None:
            return Int(None, self.known & other.known)
        return Int(arith.andi(self.value, other.value))

    def __or__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if self.known is not None and other.known is not None:
            return Int(None, self.known | other.known)
        if other.known == 0 or self.known == 0:
            return other if self.known == 0 else self
        return Int(arith.ori(self.value, other.value))

    def __lshift__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.known is not None:
            return self * (1 << other.known)
        return Int(arith.shli(self.value, other.value))

    def __rshift__(self, other: Int | int) -> Int:
        other = Int.of(other)
        if other.known == 0:
            return self
        if self.known is not None and other.known is not None:
            return Int(None, self.known % _WORD >> other.known)
        return Int(arith.shrui(self.value, other.value))

    def __lt__(self, other: Int | int) -> Bool:
        return _compare(self, Int.of(other), arith.CmpIPredicate.ult)

    def __ge__(self, other: Int | int) -> Bool:
        return ~(self < other)

    def equals(self, other: Int | int) -> Bool:
        """Whether two integers are equal (`==` stays Python's identity)."""
        return _compare(self, Int.of(other), arith.CmpIPredicate.eq)


def _signed(value: int) -> int:
    """The i32 of the same bits."""
    return (value + _WORD // 2) % _WORD - _WORD // 2


def _compare(a: Int, b: Int, predicate: arith.CmpIPredicate) -> Bool:
    if a.known is not None and b.known is not None:
        x, y = a.known % _WORD, b.known % _WORD
        return Bool(None, x < y if predicate == arith.CmpIPredicate.ult else x == y)
    return Bool(arith.cmpi(predicate, a.value, b.value))


class Bool:
    """An i1 that may be known; `&`, `|` and `~` fold."""

    __slots__ = ("known", "ssa")

    def __init__(self, ssa: ir.Value | None, known: bool | None = None) -> None:
        self.ssa = ssa
        self.known = known

    @property
    def value(self) -> ir.Value:
        """The i1 as an SSA value."""
        if self.ssa is not None:
            return self.ssa
        return arith.constant(ir.IntegerType.get_signless(1), int(bool(self.known)))

    def __and__(self, other: Bool) -> Bool:
        if self.known is not None:
            return other if self.known else self
        if other.known is not None:
            return self if other.known else other
        return Bool(arith.andi(self.value, other.value))

    def __or__(self, other: Bool) -> Bool:
        if self.known is not None:
            return self if self.known else other
        if other.known is not None:
            return other if other.known else self
        return Bool(arith.ori(self.value, other.value))

    def __invert__(self) -> Bool:
        if self.known is not None:
            return Bool(None, not self.known)
        one = arith.constant(ir.IntegerType.get_signless(1), 1)
        return Bool(arith.xori(self.value, one))


TRUE = Bool(None, True)


def select(condition: Bool, yes: Int | int, no: Int | int) -> Int:
    """`yes` where the condition holds, else `no`."""
    if condition.known is not None:
        return Int.of(yes if condition.known else no)
    return Int(arith.select(condition.value, Int.of(yes).value, Int.of(no).value))


def select_float(condition: Bool, yes: ir.Value, no: ir.Value) -> ir.Value:
    """`yes` where the condition holds, else `no`, of any one type."""
    if condition.known is not None:
        return yes if condition.known else no
    return arith.select(condition.value, yes, no)


# ---- control flow -------------------------------------------------------------------------------


@contextmanager
def guard(condition: Bool) -> Iterator[None]:
    """The body runs on threads where the condition holds; no branch when it is known to."""
    if condition.known is True:
        yield
        return
    op = scf.IfOp(condition.value)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.yield_([])


@dataclass
class Loop:
    """A loop under construction: `index` and `carried` inside it, `results` after it."""

    index: Int
    carried: list[Int | ir.Value]
    results: list[Int | ir.Value] = field(default_factory=list)
    _next: list[ir.Value] = field(default_factory=list)

    def advance(self, values: Sequence[Int | ir.Value]) -> None:
        """What the next iteration carries (the results, after the last)."""
        if len(values) != len(self.carried):
            raise InternalError(f"a loop carries {len(self.carried)} values; got {len(values)}")
        self._next = [v.value if isinstance(v, Int) else v for v in values]


@contextmanager
def loop(
    lower: Int | int, upper: Int | int, step: int = 1, carried: Sequence[Int | ir.Value] = ()
) -> Iterator[Loop]:
    """`scf.for` over [lower, upper), signed, uniform bounds expected.

    With carried values the body must call `advance` on the `Loop` it gets.
    """
    first = [v.value if isinstance(v, Int) else v for v in carried]
    op = scf.ForOp(Int.of(lower).value, Int.of(upper).value, Int.of(step).value, first)

    def wrap(values: Sequence[ir.Value]) -> list[Int | ir.Value]:
        pairs = zip(values, carried, strict=True)
        return [Int(v) if isinstance(like, Int) else v for v, like in pairs]

    state = Loop(Int(op.induction_variable), wrap(list(op.inner_iter_args)))
    with ir.InsertionPoint(op.body):
        yield state
        if len(state._next) != len(first):
            raise InternalError("the body of a loop with carried values did not call advance()")
        scf.yield_(state._next)
    state.results = wrap(list(op.results_))


# ---- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """A flat memref of one element type in global or shared memory; offsets are in elements."""

    memref: ir.Value
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Size of an element."""
        return ELEMENT_BYTES[self.dtype]

    def load(self, offset: Int | int) -> ir.Value:
        """One element."""
        return memref.load(self.memref, [Int.of(offset).index()])

    def store(self, offset: Int | int, value: ir.Value) -> None:
        """One element."""
        memref.store(value, self.memref, [Int.of(offset).index()])

    def load_vector(self, offset: Int | int, width: int) -> list[ir.Value]:
        """`width` neighbours in one access; the address must be a multiple of its size."""
        if width == 1:
            return [self.load(offset)]
        type_ = ir.VectorType.get([width], element_type(self.dtype))
        bytes_ = width * self.element_bytes
        loaded = vector.load(type_, self.memref, [Int.of(offset).index()], alignment=bytes_)
        return [vector.extract(loaded, [], [i]) for i in range(width)]

    def load_packed(self, offset: Int | int, width: int) -> list[ir.Value]:
        """`load_vector` as registers hold it: float16 in pairs (`vector<2xf16>`), if it has any."""
        if self.dtype != "float16" or width == 1:
            return self.load_vector(offset, width)
        type_ = ir.VectorType.get([width], element_type(self.dtype))
        bytes_ = width * self.element_bytes
        loaded = vector.load(type_, self.memref, [Int.of(offset).index()], alignment=bytes_)
        if width == 2:
            return [loaded]
        return [vector.shuffle(loaded, loaded, [i, i + 1]) for i in range(0, width, 2)]

    def store_packed(self, offset: Int | int, values: Sequence[ir.Value]) -> None:
        """The inverse of `load_packed`, in one access."""
        if self.dtype != "float16" or not isinstance(values[0].type, ir.VectorType):
            self.store_vector(offset, values)
            return
        joined = list(values)
        while len(joined) > 1:
            count = ir.VectorType(joined[0].type).shape[0]
            whole = list(range(2 * count))
            pairs = zip(joined[::2], joined[1::2], strict=True)
            joined = [vector.shuffle(a, b, whole) for a, b in pairs]
        bytes_ = 2 * len(values) * self.element_bytes
        vector.store(joined[0], self.memref, [Int.of(offset).index()], alignment=bytes_)

    def store_vector(self, offset: Int | int, values: Sequence[ir.Value]) -> None:
        """Neighbours in one access; the address must be a multiple of its size."""
        if len(values) == 1:
            self.store(offset, values[0])
            return
        type_ = ir.VectorType.get([len(values)], element_type(self.dtype))
        bytes_ = len(values) * self.element_bytes
        packed = vector.from_elements(type_, list(values))
        vector.store(packed, self.memref, [Int.of(offset).index()], alignment=bytes_)


@dataclass(frozen=True)
class Argument:
    """A kernel argument: its memory and, for an activation, its pitch in elements."""

    buffer: Buffer
    pitch: Int | None = None

    def pitch_or_fail(self) -> Int:
        """The pitch of an activation. Raises InternalError for a weight."""
        if self.pitch is None:
            raise InternalError("a weight has no pitch")
        return self.pitch


class KernelBuilder:
    """A kernel under construction; a context manager that leaves the insertion point in its body.

    Args:
        name: the function's name, unique in an artifact.
        parameters: the ABI's operands, results and scratch, in order.
        threads: of a block (x only).
        shared_bytes: dynamic shared memory of a block.
        location: names the layer; every op gets it. The current context is used.
        attributes: more attributes of the function (`nvvm.minctasm`, `nvvm.cluster_dim`, …).
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Parameter],
        *,
        threads: int,
        shared_bytes: int,
        location: ir.Location | None = None,
        attributes: dict[str, ir.Attribute] | None = None,
    ) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.threads = threads
        self.shared_bytes = shared_bytes
        self._location = location or ir.Location.name(name)
        with self._location:
            self._build(attributes or {})

    def _build(self, attributes: dict[str, ir.Attribute]) -> None:
        self.module = ir.Module.create()
        self.module.operation.attributes["gpu.container_module"] = ir.UnitAttr.get()
        with ir.InsertionPoint(self.module.body):
            gpu_module = gpu.GPUModuleOp("kernels")
            body = gpu_module.bodyRegion.blocks.append()
        with ir.InsertionPoint(body):
            # gpu.dynamic_shared_memory would become a static array of one byte; a zero-length
            # global becomes PTX's `.extern .shared`.
            memref.GlobalOp(SHARED_SYMBOL, ir.TypeAttr.get(_shared_type("uint8", 0)), alignment=128)
            types: list[ir.Type] = []
            for parameter in self.parameters:
                types.append(_global_type(parameter.dtype))
                types.extend([i32_type()] if parameter.role == ACTIVATION else [])
            function = gpu.GPUFuncOp(
                ir.FunctionType.get(types, []),
                sym_name=self.name,
                kernel=True,
                known_block_size=[self.threads, 1, 1],
            )
            for key, attribute in attributes.items():
                function.operation.attributes[key] = attribute
            self._entry = function.add_entry_block()

    def __enter__(self) -> KernelBuilder:
        self._location.__enter__()
        self._point = ir.InsertionPoint(self._entry)
        self._point.__enter__()
        values = iter(self._entry.arguments)
        self.arguments = []
        for parameter in self.parameters:
            buffer = Buffer(next(values), parameter.dtype)
            pitch = Int(next(values)) if parameter.role == ACTIVATION else None
            self.arguments.append(Argument(buffer, pitch))
        self.thread = Int.of(gpu.thread_id(gpu.Dimension.x))
        self.block_x, self.block_y, self.block_z = (
            Int.of(gpu.block_id(d)) for d in (gpu.Dimension.x, gpu.Dimension.y, gpu.Dimension.z)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            gpu.return_([])
        self._point.__exit__(kind, error, trace)
        self._location.__exit__(kind, error, trace)

    def shared(self, dtype: str, count: int, *, offset_bytes: int = 0) -> Buffer:
        """A part of the block's dynamic shared memory. Raises InternalError beyond its end."""
        end = offset_bytes + count * ELEMENT_BYTES[dtype]
        if end > self.shared_bytes:
            raise InternalError(
                f"{self.name}: shared memory [{offset_bytes}, {end}) of {self.shared_bytes} bytes"
            )
        symbol = memref.get_global(_shared_type("uint8", 0), SHARED_SYMBOL)
        bytes_ = memref.reinterpret_cast(
            _shared_type("uint8", self.shared_bytes), symbol, [], [], [],
            static_offsets=[0], static_sizes=[self.shared_bytes], static_strides=[1],
        )  # fmt: skip
        shift = arith.constant(ir.IndexType.get(), offset_bytes)
        return Buffer(memref.view(_shared_type(dtype, count), bytes_, shift, []), dtype)

    def finish(
        self,
        grid: tuple[int, int, int],
        *,
        cluster: tuple[int, int, int] = (1, 1, 1),
        workspace_bytes: int = 0,
        programmatic: bool = False,
    ) -> Kernel:
        """The kernel, after the `with` block. Raises InternalError where the IR is invalid."""
        if not self.module.operation.verify():
            raise InternalError("the generated kernel does not verify", where=self.name)
        launch = Launch(
            function=self.name,
            grid=grid,
            block=(self.threads, 1, 1),
            shared_bytes=self.shared_bytes,
            parameters=self.parameters,
            cluster=cluster,
            workspace_bytes=workspace_bytes,
            programmatic=programmatic,
        )
        return Kernel(self.module, launch)


def _shared_type(dtype: str, count: int) -> ir.Type:
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    return ir.MemRefType.get([count], element_type(dtype), memory_space=space)


def _global_type(dtype: str) -> ir.Type:
    """A pointer: the bare-pointer ABI wants a static size, but the pitch is known at run time."""
    space = ir.Attribute.parse("#gpu.address_space<global>")
    return ir.MemRefType.get([_UNBOUNDED], element_type(dtype), memory_space=space)
