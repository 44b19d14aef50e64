"""From a `gpu.func` to a decoded `Program`: the function, its globals, its attributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.simulator import (  # noqa: F401  (their decoders register themselves)
    arith_ops,
    bulk_copy,
    cast_ops,
    gpu_ops,
    llvm_ops,
    math_ops,
    mbarrier_ops,
    memref_ops,
    nvgpu_ops,
    nvvm_ops,
    nvvm_warp_ops,
    scf_ops,
    vector_ops,
)
from yolomlir.simulator.decode import Program, Scope
from yolomlir.simulator.elements import element_of
from yolomlir.simulator.memory import Reference
from yolomlir.simulator.references import is_shared, local_reference, shared_reference

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

_STATIC_ALIGNMENT = 128


def read_kernel(kernel: Any, function: str | None) -> Program:
    """Decode a kernel. Raises UserError where there is none, InternalError for an unknown op."""
    op = _find(kernel, function)
    name = ir.StringAttr(op.attributes["sym_name"]).value
    program = Program(name)
    for view in op.parent.regions[0].blocks[0].operations:
        if view.operation.name == "memref.global":
            _read_global(view.operation, program)
    block = op.regions[0].blocks[0]
    types = list(ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value).inputs)
    program.argument_types = [_specific(t) for t in types]
    workgroup = 0
    if "workgroup_attributions" in op.attributes:
        workgroup = ir.IntegerAttr(op.attributes["workgroup_attributions"]).value
    for i, argument in enumerate(list(block.arguments)[len(types) :]):
        program.attributions.append(_attribution(program, argument.type, shared=i < workgroup))
    program.body = Scope(program).block(block)
    return program


def _specific(type_: Any) -> Any:
    return ir.MemRefType(type_) if isinstance(type_, ir.MemRefType) else type_


def _find(kernel: Any, function: str | None) -> Any:
    op = getattr(kernel, "operation", kernel)
    if op.name == "gpu.func":
        return op
    functions = list(_functions(op))
    named = [f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == function]
    if len(named) == 1:
        return named[0]
    if function is None and len(functions) == 1:
        return functions[0]
    names = [ir.StringAttr(f.attributes["sym_name"]).value for f in functions]
    raise UserError(f"no kernel named '{function}' in the module; it has {names}")


def _functions(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = view.operation
                if inner.name == "gpu.func":
                    yield inner
                elif inner.name == "gpu.module":
                    yield from _functions(inner)


def _read_global(op: Any, program: Program) -> None:
    name = ir.StringAttr(op.attributes["sym_name"]).value
    type_ = ir.MemRefType(ir.TypeAttr(op.attributes["type"]).value)
    element = element_of(type_)
    count = int(np.prod(list(type_.shape)))
    if is_shared(type_):
        if count:
            offset = _static(program, count * element.size_bytes)
            program.shared_globals[name] = (offset, count * element.size_bytes)
        return
    if "initial_value" not in op.attributes or "constant" not in op.attributes:
        raise InternalError(f"the simulator wants a constant with a value; '{name}' is none")
    dense = op.attributes["initial_value"]
    values = np.array([dense[i] for i in range(len(dense))], element.register)
    if len(values) != count:
        raise InternalError(f"the constant '{name}' has {len(values)} of {count} values")
    program.constants[name] = element.to_memory(values)


def _static(program: Program, size_bytes: int) -> int:
    offset = program.static_shared_bytes
    program.static_shared_bytes = -(-(offset + size_bytes) // _STATIC_ALIGNMENT) * _STATIC_ALIGNMENT
    return offset


def _attribution(program: Program, raw: Any, *, shared: bool) -> Callable[[Lanes], Reference]:
    """A workgroup or private buffer of the function's header."""
    type_ = ir.MemRefType(raw)
    element = element_of(type_)
    shape = list(type_.shape)
    size = int(np.prod(shape)) * element.size_bytes
    strides, _ = type_.get_strides_and_offset()
    sizes = tuple(np.int64(s) for s in shape)
    steps = tuple(np.int64(s) for s in strides)
    if shared:
        offset = _static(program, size)
        return lambda lanes: shared_reference(lanes, offset, size, element, sizes, steps)
    place = program.local_bytes
    program.local_bytes += -(-size // 16) * 16
    return lambda lanes: local_reference(lanes, place, size, element, sizes, steps)
