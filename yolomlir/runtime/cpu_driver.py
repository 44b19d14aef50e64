"""The driver of a CPU program in LLVM IR: one call a thread runs a whole inference.

All threads of a team run the same steps. Each thread has its share of a step's blocks, the same
part of the image in every step, so that what it reads next is in its own cache; whoever is done
takes blocks of the others' shares. Atomic counters deal the blocks out, and a barrier, which spins
and then yields, ends the step; so no lock, no Python and no allocation is met between the first
step and the last.
"""

from __future__ import annotations

import ctypes
import sys

from llvmlite import binding

DRIVER = "driver.o"
ENTRY = "yolomlir_cpu_run_shares"
COUNTER_STRIDE = 64
"""Bytes between two counters, of which a step has one a thread: a cache line each."""
BEGIN_OFFSET, END_OFFSET = 8, 16
"""Where in a step's first line the driver writes when its first block was taken, and when its last
thread was done: two readings of the time-stamp counter a step, about 20 ns."""
_SPINS = 4096
"""Rounds of a barrier before it yields: about 50 us of `pause`, more than most steps differ by."""


class StepRecord(ctypes.Structure):
    """One phase of one step, as the driver reads it."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
    )


class BarrierRecord(ctypes.Structure):
    """Threads that have arrived, and how often the barrier has opened; a cache line each."""

    _fields_ = (
        ("arrived", ctypes.c_int64),
        ("pad0", ctypes.c_int64 * 7),
        ("generation", ctypes.c_int64),
        ("pad1", ctypes.c_int64 * 7),
    )


def _relax() -> tuple[str, str]:
    """The declaration and the call of an instruction that tells the core it is spinning."""
    triple = binding.get_process_triple()
    if triple.startswith(("x86_64", "i686")):
        return "declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"
    if triple.startswith(("aarch64", "arm64")):
        return "declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"
    return "", ""


def _ticks() -> tuple[str, str]:
    """The declaration and the expression of a clock that user code may read."""
    triple = binding.get_process_triple()
    if triple.startswith(("x86_64", "i686")):
        return "declare i64 @llvm.readcyclecounter()", "call i64 @llvm.readcyclecounter()"
    if triple.startswith(("aarch64", "arm64")):
        return "declare i64 @llvm.readsteadycounter()", "call i64 @llvm.readsteadycounter()"
    return "", "add i64 0, 0"


def _yield() -> tuple[str, str]:
    """The declaration and the call that give the core away."""
    if sys.platform == "win32":
        return "declare i32 @SwitchToThread()", "%y = call i32 @SwitchToThread()"
    return "declare i32 @sched_yield()", "%y = call i32 @sched_yield()"


def driver_ir() -> str:
    """`void run(ptr steps, i64 count, ptr counters, ptr barrier, i64 threads, i64 thread, ptr
    workspace, ptr scratch)`: what one thread does of one inference. Counters must be 0 before."""
    declaration, give_way = _yield()
    relax_declaration, relax = _relax()
    clock_declaration, clock = _ticks()
    return f"""
{declaration}
{relax_declaration}
{clock_declaration}

define void @{ENTRY}(ptr %steps, i64 %count, ptr %counters, ptr %barrier, i64 %threads,
                     i64 %thread, ptr %workspace, ptr %scratch) {{
start:
  %generation = getelementptr i8, ptr %barrier, i64 64
  %last = sub i64 %threads, 1
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %end, label %step

step:
  %i = phi i64 [ 0, %start ], [ %next, %following ]
  %record = getelementptr {{ ptr, ptr, i64 }}, ptr %steps, i64 %i
  %entry = load ptr, ptr %record
  %pointers.at = getelementptr {{ ptr, ptr, i64 }}, ptr %record, i64 0, i32 1
  %pointers = load ptr, ptr %pointers.at
  %blocks.at = getelementptr {{ ptr, ptr, i64 }}, ptr %record, i64 0, i32 2
  %blocks = load i64, ptr %blocks.at
  %lines.before = mul i64 %i, %threads
  %lines.place = mul i64 %lines.before, {COUNTER_STRIDE}
  %lines = getelementptr i8, ptr %counters, i64 %lines.place
  br label %share

share:
  %k = phi i64 [ 0, %step ], [ %k.next, %exhausted ]
  %around = add i64 %thread, %k
  %over = icmp uge i64 %around, %threads
  %wrapped = sub i64 %around, %threads
  %owner = select i1 %over, i64 %wrapped, i64 %around
  %low.scaled = mul i64 %owner, %blocks
  %low = udiv i64 %low.scaled, %threads
  %owner.next = add i64 %owner, 1
  %high.scaled = mul i64 %owner.next, %blocks
  %high = udiv i64 %high.scaled, %threads
  %place = mul i64 %owner, {COUNTER_STRIDE}
  %counter = getelementptr i8, ptr %lines, i64 %place
  br label %take

take:
  %taken = atomicrmw add ptr %counter, i64 1 monotonic
  %block = add i64 %low, %taken
  %some = icmp ult i64 %block, %high
  br i1 %some, label %some.block, label %exhausted

exhausted:
  %k.next = add i64 %k, 1
  %all = icmp eq i64 %k.next, %threads
  br i1 %all, label %finished, label %share

some.block:
  %is.first = icmp eq i64 %block, 0
  br i1 %is.first, label %begin, label %compute

begin:
  %began = {clock}
  %begin.at = getelementptr i8, ptr %lines, i64 {BEGIN_OFFSET}
  store i64 %began, ptr %begin.at
  br label %compute

compute:
  %after = add i64 %block, 1
  call void %entry(ptr %pointers, ptr %workspace, ptr %scratch, i64 %block, i64 %after)
  br label %take

finished:
  %before = load atomic i64, ptr %generation acquire, align 8
  %arrived = atomicrmw add ptr %barrier, i64 1 acq_rel
  %is.last = icmp eq i64 %arrived, %last
  br i1 %is.last, label %open, label %wait

open:
  %ended = {clock}
  %end.at = getelementptr i8, ptr %lines, i64 {END_OFFSET}
  store i64 %ended, ptr %end.at
  store atomic i64 0, ptr %barrier monotonic, align 8
  %opened = atomicrmw add ptr %generation, i64 1 release
  br label %following

wait:
  %spins = phi i64 [ 0, %finished ], [ %more, %pause ], [ {_SPINS}, %yield ]
  %now = load atomic i64, ptr %generation acquire, align 8
  %closed = icmp eq i64 %now, %before
  br i1 %closed, label %still, label %following

still:
  %patient = icmp slt i64 %spins, {_SPINS}
  br i1 %patient, label %pause, label %yield

pause:
  {relax}
  %more = add i64 %spins, 1
  br label %wait

yield:
  {give_way}
  br label %wait

following:
  %next = add i64 %i, 1
  %done = icmp eq i64 %next, %count
  br i1 %done, label %end, label %step

end:
  ret void
}}
"""


def initialize_llvm() -> None:
    """Prepare llvmlite's native target; a second call does nothing."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


def target_machine() -> binding.TargetMachine:
    """A code generator for this process, of position-independent code as a JIT wants it."""
    initialize_llvm()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(opt=3, reloc="pic", codemodel="jitdefault", jit=True)


def driver_object() -> bytes:
    """The driver as object code for this kind of machine."""
    machine = target_machine()
    module = binding.parse_assembly(driver_ir())
    module.triple = machine.triple
    return bytes(machine.emit_object(module))
