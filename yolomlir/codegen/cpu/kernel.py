"""The kernel around a dispatch's function: memory in, memory out, one MLIR module a kernel.

Every operand is a pointer; shapes and pitches are part of the kernel, so that all addresses are
constants next to a few registers. Two dispatches share a kernel if they agree in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.bindings import ir, passmanager


@dataclass(frozen=True)
class Buffer:
    """One operand or result of a kernel.

    shape: physical. pitch: elements between neighbours of the second last dimension of a 4-D
    activation; 0 for a tensor without gaps (weights, and whatever is not 4-D).
    """

    shape: tuple[int, ...]
    element: str = "f32"
    pitch: int = 0

    @property
    def tensor(self) -> str:
        """Its tensor type."""
        return f"tensor<{''.join(f'{n}x' for n in self.shape)}{self.element}>"

    @property
    def strided(self) -> bool:
        """Whether it is addressed by a pitch."""
        return self.pitch != 0

    @property
    def rows(self) -> int:
        """Pixels of all images of a 4-D activation."""
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass(frozen=True)
class KernelSource:
    """All that a kernel is made from: everything here is part of its key.

    name: of the function. text: a module that holds it alone, at the linalg level. operands,
    results: its buffers in order.
    """

    name: str
    text: str
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]


_DESCRIPTOR = "!llvm.struct<(ptr, ptr, i64, array<{rank} x i64>, array<{rank} x i64>)>"


class _Body:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def op(self, text: str) -> str:
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def memref(self, pointer: str, type_: str, rank: int) -> str:
        """A memref over a bare pointer; its sizes and strides are static, so none is stored."""
        struct = _DESCRIPTOR.format(rank=rank)
        value = self.op(f"llvm.mlir.zero : {struct}")
        for place in (0, 1):
            value = self.op(f"llvm.insertvalue {pointer}, {value}[{place}] : {struct}")
        return self.op(f"builtin.unrealized_conversion_cast {value} : {struct} to {type_}")


def _flat_type(buffer: Buffer, kind: str) -> str:
    rows, channels = buffer.rows, buffer.shape[3]
    layout = f", strided<[{buffer.pitch}, 1]>" if kind == "memref" else ""
    return f"{kind}<{rows}x{channels}x{buffer.element}{layout}>"


def _read(body: _Body, pointer: str, buffer: Buffer) -> str:
    """An operand as a tensor."""
    if not buffer.strided:
        type_ = buffer.tensor.replace("tensor", "memref")
        memory = body.memref(pointer, type_, len(buffer.shape))
        return body.op(f"bufferization.to_tensor {memory} restrict : {type_} to {buffer.tensor}")
    type_, flat = _flat_type(buffer, "memref"), _flat_type(buffer, "tensor")
    memory = body.memref(pointer, type_, 2)
    tensor = body.op(f"bufferization.to_tensor {memory} restrict : {type_} to {flat}")
    sizes = ", ".join(map(str, buffer.shape))
    return body.op(
        f"tensor.expand_shape {tensor} [[0, 1, 2], [3]] output_shape [{sizes}] "
        f": {flat} into {buffer.tensor}"
    )


def _destination(body: _Body, pointer: str, buffer: Buffer) -> tuple[str, str]:
    """A result's memory, and its type."""
    shape = "".join(f"{n}x" for n in buffer.shape)
    if not buffer.strided:
        type_ = f"memref<{shape}{buffer.element}>"
        return body.memref(pointer, type_, len(buffer.shape)), type_
    _, height, width, _ = buffer.shape
    strides = [height * width * buffer.pitch, width * buffer.pitch, buffer.pitch, 1]
    type_ = f"memref<{shape}{buffer.element}, strided<{strides}>>"
    flat = _flat_type(buffer, "memref")
    memory = body.memref(pointer, flat, 2)
    sizes = ", ".join(map(str, buffer.shape))
    expanded = body.op(
        f"memref.expand_shape {memory} [[0, 1, 2], [3]] output_shape [{sizes}] "
        f": {flat} into {type_}"
    )
    return expanded, type_


def build(source: KernelSource) -> ir.Module:
    """The kernel's module: `@kernel(pointers of operands and results…, workspace, scratch, begin,
    end)` with the function inlined, still on tensors."""
    body = _Body()
    pointers = [f"%p{i}" for i in range(len(source.operands) + len(source.results))]
    reads = [_read(body, p, b) for p, b in zip(pointers, source.operands, strict=False)]
    destinations = [
        _destination(body, p, b)
        for p, b in zip(pointers[len(source.operands) :], source.results, strict=True)
    ]
    inputs = ", ".join(b.tensor for b in source.operands)
    outputs = ", ".join(b.tensor for b in source.results)
    count = len(source.results)
    call = f"func.call @{source.name}({', '.join(reads)}) : ({inputs}) -> ({outputs})"
    body.lines.append(f"  %y:{count} = {call}")
    for i, (buffer, (memory, type_)) in enumerate(zip(source.results, destinations, strict=True)):
        body.lines.append(
            f"  bufferization.materialize_in_destination %y#{i} in restrict writable {memory} "
            f": ({buffer.tensor}, {type_}) -> ()"
        )
    head = ", ".join(f"{p}: !llvm.ptr {{llvm.noalias}}" for p in pointers)
    extra = (
        "%workspace: !llvm.ptr {llvm.noalias}, %scratch: !llvm.ptr {llvm.noalias}, "
        "%begin: i64, %end: i64"
    )
    text = "\n".join([f"func.func @kernel({head}, {extra}) {{", *body.lines, "  return", "}"])
    module = ir.Module.parse(source.text)
    kernel = ir.Module.parse(_with_declaration(text, source))
    for view in list(kernel.body.operations):
        op = view.operation
        if ir.StringAttr(op.attributes["sym_name"]).value == "kernel":
            op.detach_from_parent()
            module.body.append(op)
    pipeline = "builtin.module(inline,canonicalize,cse,symbol-dce)"
    passmanager.PassManager.parse(pipeline).run(module.operation)
    return module


def _with_declaration(text: str, source: KernelSource) -> str:
    inputs = ", ".join(b.tensor for b in source.operands)
    outputs = ", ".join(b.tensor for b in source.results)
    return f"func.func private @{source.name}({inputs}) -> ({outputs})\n{text}"
