"""One kernel from the linalg level to object code."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from yolomlir.bindings import execution_engine, ir, passmanager
from yolomlir.codegen.cpu import math_expansion, phases, prepare
from yolomlir.codegen.cpu.isa import Isa
from yolomlir.codegen.cpu.kernel import KernelSource, build
from yolomlir.codegen.cpu.schedule import run_script, schedule
from yolomlir.diagnostics import InternalError
from yolomlir.dialects import yolo

_PADS = """module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%root: !transform.any_op) {
    %pads = transform.structured.match ops{["tensor.pad"]} in %root
      : (!transform.any_op) -> !transform.any_op
    transform.foreach %pads : !transform.any_op {
    ^bb0(%pad: !transform.any_op):
      %new = transform.structured.rewrite_in_destination_passing_style %pad
        : (!transform.any_op) -> !transform.any_op
      transform.yield
    }
    transform.yield
  }
}
"""
_CONCATS = """module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%root: !transform.any_op) {
    %kernel = transform.structured.match ops{["func.func"]} in %root
      : (!transform.any_op) -> !transform.any_op
    transform.apply_patterns to %kernel {
      transform.apply_patterns.tensor.decompose_concat
    } : !transform.any_op
    transform.yield
  }
}
"""
_BUFFERIZE = "builtin.module(cse,eliminate-empty-tensors,one-shot-bufferize,cse)"
_LOOPS = (
    "builtin.module(func.func(convert-linalg-to-loops,"
    "convert-vector-to-scf{full-unroll=1 target-rank=1}),cse,loop-invariant-code-motion)"
)
_LLVM = (
    "builtin.module(expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-vector-to-llvm{reassociate-fp-reductions=1},convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-cf-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm,"
    "convert-index-to-llvm,convert-ub-to-llvm,cse,reconcile-unrealized-casts)"
)
_OPTIMIZATION = 3


@dataclass(frozen=True)
class CompiledKernel:
    """Object code of a kernel. Its functions are `phases`' names, each
    `void(ptr operands…, ptr results…, ptr workspace, ptr scratch, i64 begin, i64 end)` behind the
    uniform entry `{name}_entry(ptr table, ptr workspace, ptr scratch, i64 begin, i64 end)`."""

    object_code: bytes
    phases: tuple[phases.Phase, ...]
    workspace_bytes: int
    scratch_bytes: int


def to_llvm(source: KernelSource, isa: Isa, symbol: str) -> tuple[ir.Module, phases.Phases]:
    """The kernel in the LLVM dialect. Needs a context with the `yolo` dialect to be current."""
    module = build(source)
    math_expansion.expand_exp(module)
    prepare.prepare(module, isa)
    schedule(module, isa)
    _remove_empty_pad_guards(module)
    run_script(module, _PADS)
    run_script(module, _CONCATS)
    _run(module, _BUFFERIZE)
    phases.forward_loop_memory(module)
    found = phases.outline(module, symbol)
    phases.copies_to_loops(module)
    _run(module, _LOOPS)
    _add_entries(module, found, len(source.operands) + len(source.results))
    _run(module, _LLVM)
    return module, found


def compile_kernel(source: KernelSource, isa: Isa, symbol: str) -> CompiledKernel:
    """Object code for this machine. Symbols begin with `symbol`."""
    with yolo.new_context(), ir.Location.unknown():
        module, found = to_llvm(source, isa, symbol)
        engine = execution_engine.ExecutionEngine(
            module, opt_level=_OPTIMIZATION, enable_object_dump=True
        )
        if not engine.raw_lookup(entry_name(found.phases[0].name)):
            raise InternalError("LLVM compiled no code", where=source.name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            engine.dump_to_object_file(str(path))
            code = path.read_bytes()
    return CompiledKernel(code, found.phases, found.workspace_bytes, found.scratch_bytes)


def entry_name(phase: str) -> str:
    """The symbol of a phase's uniform entry."""
    return f"{phase}_entry"


def _run(module: ir.Module, pipeline: str) -> None:
    passmanager.PassManager.parse(pipeline).run(module.operation)


def _remove_empty_pad_guards(module: ir.Module) -> None:
    """Tiling a pad asks at run time whether a tile lies wholly in the padding. None does.

    A block's first input row is at most `padding` < `kernel` rows outside, so it reads some row.
    """
    for op in list(yolo.ops_in(module, "scf.if")):
        if len(op.regions) < 2 or not op.regions[1].blocks:
            continue
        branches = [list(r.blocks[0].operations) for r in op.regions]
        names = [{view.operation.name for view in branch} for branch in branches]
        if "tensor.generate" not in names[0]:
            continue
        *body, terminator = branches[1]
        for view in body:
            view.operation.move_before(op)
        for result, value in zip(op.results, terminator.operation.operands, strict=True):
            result.replace_all_uses_with(value)
        op.erase()


def _add_entries(module: ir.Module, found: phases.Phases, buffers: int) -> None:
    """A uniform function for every phase, which takes its pointers from a table."""
    for phase in found.phases:
        lines, names = [], []
        for i in range(buffers):
            lines.append(
                f"%a{i} = llvm.getelementptr %table[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr"
            )
            lines.append(f"%p{i} = llvm.load %a{i} : !llvm.ptr -> !llvm.ptr")
            names.append(f"%p{i}")
        rest = ["%workspace", "%scratch", "%begin", "%end"]
        kinds = ["!llvm.ptr"] * (buffers + 2) + ["i64", "i64"]
        pointers = ", ".join(["!llvm.ptr"] * (buffers + 2))
        text = f"""
        func.func private @{phase.name}({pointers}, i64, i64)
        func.func @{entry_name(phase.name)}(%table: !llvm.ptr, %workspace: !llvm.ptr,
            %scratch: !llvm.ptr, %begin: i64, %end: i64) {{
          {chr(10).join(lines)}
          func.call @{phase.name}({", ".join([*names, *rest])}) : ({", ".join(kinds)}) -> ()
          return
        }}"""
        parsed = ir.Module.parse(text)
        entry = parsed.body.operations[1].operation
        entry.detach_from_parent()
        module.body.append(entry)
