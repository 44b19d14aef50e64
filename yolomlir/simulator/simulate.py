"""The entry point: decode a kernel, lay out its arguments, run its blocks, report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np

from yolomlir.bindings import ir
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.simulator.banks import BankCounter, BankStatistics
from yolomlir.simulator.decode import Program
from yolomlir.simulator.elements import ELEMENTS, Array, Value, element_of
from yolomlir.simulator.faults import SimulationError
from yolomlir.simulator.kernel_reader import read_kernel
from yolomlir.simulator.machine import Checks, Dimensions, Machine
from yolomlir.simulator.memory import PDL_GUARDED, PROTECTED, GlobalMemory, Reference, Segment
from yolomlir.simulator.report import SimulationReport

logger = logging.getLogger(__name__)

Schedule = Literal["auto", "lockstep", "warps"]
_AUTO_WARP_CLUSTERS = 1
_ACTIVATION = "activation"


def simulate(
    kernel: Any,
    launch: Any,
    arguments: Sequence[Any],
    *,
    seed: int = 0,
    blocks: int | Iterable[Dimensions] | None = None,
    pdl_inputs: Sequence[int] | None = None,
    outputs: Sequence[int] | Mapping[int, Array | None] = (),
    schedule: Schedule = "auto",
    check: Checks | None = None,
) -> SimulationReport:
    """Run a kernel on numpy arrays as a GPU may, in an adversarial order; faults are raised.

    Args:
        kernel: a `gpu.func`, or a module that holds one named `launch.function`.
        launch: grid and block (x, y, z), `cluster`, `shared_bytes` (dynamic) and `function`: the
            record of `yolomlir.codegen.gpu.kernel`, or anything with its attributes.
        arguments: the bare-pointer ABI in order: a contiguous array a memref, an integer an i32.
            Arrays that are views of one array keep their relative places. They are changed in
            place where the kernel writes.
        seed: of the order of blocks and warps.
        blocks: which blocks run: all, about that many (the first, the last and random ones), or
            those named. A cluster runs whole.
        pdl_inputs: indices into `arguments` of arrays that a previous kernel of a programmatic
            launch writes: not to be read before `griddepcontrol.wait`, when nothing may be written
            either. None: where `launch.programmatic`, every activation that is not an output.
        outputs: indices of arrays that hold nothing before: reading an element of them that the
            kernel has not written is a fault. As a mapping, index to a boolean mask of the
            elements that may (and, with `check.outputs_written`, must) be written; None for all.
        schedule: `lockstep` runs a block's warps together (fast), `warps` one after another between
            barriers, in random order; `auto` takes `warps` for one cluster and lockstep for the
            rest. Races are found alike in both.
        check: further checks.

    Raises:
        SimulationError: the kernel is at fault. InternalError: an op is unknown to the simulator.
        UserError: the arguments do not fit the kernel.
    """
    checks = check or Checks()
    program = read_kernel(kernel, getattr(launch, "function", None))
    _check_launch(program, launch, arguments)
    wanted = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    if pdl_inputs is None:
        pdl_inputs = _programmatic_inputs(launch, wanted)
    memory, values = _arguments(program, arguments, wanted, pdl_inputs)
    report = SimulationReport(program.name)
    banks = BankCounter()
    random = np.random.default_rng(seed)
    machine = Machine(
        program, launch, memory, report, banks, checks, random, guarded=bool(pdl_inputs)
    )
    clusters = _clusters(machine, blocks, random)
    try:
        with np.errstate(all="ignore"):
            _run(machine, clusters, values, schedule)
    finally:
        memory.copy_back()
    _finish(report, program, banks, memory, arguments, len(clusters) * machine.cluster_blocks)
    if checks.outputs_written:
        _check_written(program, report, arguments, wanted)
    return report


def _run(machine: Machine, clusters: list[Dimensions], values: list[Value], schedule: str) -> None:
    for position, cluster_id in enumerate(clusters):
        warps = schedule == "warps" or machine.program.needs_warps
        if schedule == "auto" and position < _AUTO_WARP_CLUSTERS:
            warps = True
        machine.run(position + 1, cluster_id, values, warps=warps)
        logger.debug("%s: cluster %s done", machine.program.name, cluster_id)


def _check_launch(program: Program, launch: Any, arguments: Sequence[Any]) -> None:
    if len(arguments) != len(program.argument_types):
        raise UserError(
            f"{program.name} takes {len(program.argument_types)} arguments, {len(arguments)} came",
            hint="a pointer and a pitch an activation, a pointer a weight, a pointer for scratch",
        )
    cluster = tuple(getattr(launch, "cluster", None) or (1, 1, 1))
    if any(g % c for g, c in zip(launch.grid, cluster, strict=True)):
        raise UserError(f"the grid {launch.grid} is not a multiple of the cluster {cluster}")


def _programmatic_inputs(launch: Any, outputs: Mapping[int, Array | None]) -> list[int]:
    """Flat indices of the activations that a programmatic launch must wait for."""
    if not getattr(launch, "programmatic", False):
        return []
    position = 0
    inputs = []
    for parameter in launch.parameters:
        if parameter.role == _ACTIVATION:
            inputs += [position] if position not in outputs else []
            position += 1
        position += 1
    return inputs


def _arguments(
    program: Program,
    arguments: Sequence[Any],
    outputs: Mapping[int, Array | None],
    pdl_inputs: Sequence[int],
) -> tuple[GlobalMemory, list[Value]]:
    arrays: list[Array] = []
    names: list[str] = []
    for i, (argument, type_) in enumerate(zip(arguments, program.argument_types, strict=True)):
        if not isinstance(type_, ir.MemRefType):
            continue
        _check_array(program, i, argument, type_)
        arrays.append(argument)
        names.append(f"argument {i}")
    constants = sum(-(-data.nbytes // 256) * 256 + 256 for data in program.constants.values())
    memory = GlobalMemory(arrays, names, constants)
    segments = iter(list(memory.segments))
    values: list[Value] = []
    claimed: list[tuple[Segment, Array | None]] = []
    for i, (argument, type_) in enumerate(zip(arguments, program.argument_types, strict=True)):
        if not isinstance(type_, ir.MemRefType):
            values.append(_scalar(program, i, argument, type_))
            continue
        segment = next(segments)
        if i in outputs:
            claimed.append((segment, _mask(program, i, argument, outputs[i])))
        if i in pdl_inputs:
            memory.flag(segment, PDL_GUARDED)
        values.append(_reference(segment.start, segment.end, type_))
    # Outputs may be slices of one buffer: first close what lies between, then open what is theirs.
    for segment, mask in claimed:
        if mask is not None:
            memory.flag(segment, PROTECTED, ~mask)
    for segment, mask in claimed:
        memory.claim(segment, mask)
    for name, data in list(program.constants.items()):
        program.constants[name] = memory.add_constant(name, data)
    return memory, values


def _mask(program: Program, position: int, argument: Array, mask: Any) -> Array | None:
    if mask is None:
        return None
    flat: Array = np.asarray(mask, np.bool_).reshape(-1)
    if flat.size != argument.size:
        raise UserError(
            f"the mask of argument {position} of {program.name} has {flat.size} elements, "
            f"the array {argument.size}"
        )
    return flat


def _reference(start: int, end: int, type_: Any) -> Reference:
    """A kernel argument: its extent is the array's, whatever the type's bound says."""
    shape = list(type_.shape)
    strides, _ = type_.get_strides_and_offset()
    if any(s < 0 for s in strides):
        raise InternalError(f"a kernel argument of type {type_} has unknown strides")
    sizes: tuple[Value, ...] = (None,) * len(shape)
    if len(shape) > 1:
        sizes = tuple(None if s < 0 else np.int64(s) for s in shape)
    return Reference(
        "global",
        np.int64(start),
        np.int64(start),
        np.int64(end),
        element_of(type_),
        sizes,
        tuple(np.int64(s) for s in strides),
    )


def _check_array(program: Program, position: int, argument: Any, type_: Any) -> None:
    element = element_of(type_)
    if not isinstance(argument, np.ndarray):
        raise UserError(
            f"argument {position} of {program.name} is a {type_}; got {type(argument).__name__}"
        )
    kinds = "biu" if element.memory.kind in "iu" else element.memory.kind
    if argument.dtype.itemsize != element.size_bytes or argument.dtype.kind not in kinds:
        raise UserError(
            f"argument {position} of {program.name} is a {type_}; got an array of {argument.dtype}"
        )


def _scalar(program: Program, position: int, argument: Any, type_: Any) -> Value:
    if isinstance(argument, np.ndarray) and argument.ndim:
        raise UserError(f"argument {position} of {program.name} is a {type_}; got an array")
    element = ELEMENTS[str(type_)]
    if element.is_float:
        return element.register.type(argument)
    return np.array(int(argument) & (2**element.bits - 1)).astype(element.register)[()]


def _clusters(
    machine: Machine, blocks: int | Iterable[Dimensions] | None, random: np.random.Generator
) -> list[Dimensions]:
    """The clusters to run, in a random order."""
    counts = [g // c for g, c in zip(machine.grid, machine.cluster, strict=True)]
    if blocks is None or isinstance(blocks, int):
        every = [(x, y, z) for z, y, x in product(*(range(n) for n in reversed(counts)))]
        if blocks is not None and blocks < len(every):
            inner = random.permutation(np.arange(1, len(every) - 1))[: max(0, blocks - 2)]
            every = [every[0], every[-1], *(every[i] for i in inner)][:blocks]
    else:
        named = {
            tuple(b // c for b, c in zip(block, machine.cluster, strict=True)) for block in blocks
        }
        every = [(x, y, z) for x, y, z in sorted(named)]
    return [every[i] for i in random.permutation(len(every))]


def _finish(
    report: SimulationReport,
    program: Program,
    banks: BankCounter,
    memory: GlobalMemory,
    arguments: Sequence[Any],
    blocks: int,
) -> None:
    report.blocks = blocks
    report.split_vectors = [f"{s.location}: {s.label}" for s in program.split_vectors]
    for code in program.blocks:
        for name in code.names:
            report.operations[name] = report.operations.get(name, 0) + code.visits
    report.mma_count = sum(report.operations.get(n, 0) for n in ("nvvm.mma.sync", "nvgpu.mma.sync"))
    for index, (requests, wavefronts, ideal, ways) in sorted(banks.totals.items()):
        site = program.sites[index]
        report.shared_accesses.append(
            BankStatistics(site.location, site.label, requests, wavefronts, ideal, ways)
        )
    conflicts = [b for b in report.shared_accesses if b.excess > 0]
    report.bank_conflicts = sorted(conflicts, key=lambda b: -b.excess)
    positions = [i for i, a in enumerate(arguments) if isinstance(a, np.ndarray) and a.ndim]
    for position, segment in zip(positions, memory.segments, strict=False):
        each = arguments[position].itemsize // memory.granule_bytes
        written = memory.written(segment)[: arguments[position].size * each]
        report.written[position] = np.asarray(written.reshape(-1, each).all(1))


def _check_written(
    program: Program,
    report: SimulationReport,
    arguments: Sequence[Any],
    outputs: Mapping[int, Array | None],
) -> None:
    for position, mask in outputs.items():
        written = report.written[position]
        missing = ~written if mask is None else ~written & np.asarray(mask, np.bool_).reshape(-1)
        if missing.any():
            raise SimulationError(
                program.body.terminator.location if program.body.terminator else program.name,
                "not-written",
                f"{int(missing.sum())} of {missing.size} elements of argument {position} were "
                f"never written, the first is element {int(np.argmax(missing))}",
            )
