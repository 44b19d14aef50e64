"""Decoding: every op once into a Python function over lanes, attributes parsed at that time.

`OPERATIONS` is the dispatch table. A decoder takes the op and the `Scope`, and returns a `Step`
(a function of the lanes), a `Control` (a generator function, for ops that have regions or that
wait for other warps; it yields wherever its lanes cannot go on), or None where there is nothing to
do at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from yolomlir.diagnostics import InternalError
from yolomlir.simulator.elements import Value
from yolomlir.simulator.faults import Site
from yolomlir.simulator.memory import Reference

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

Step: TypeAlias = "Callable[[Lanes], None]"
Execution: TypeAlias = "Generator[None, None, None]"


@dataclass(frozen=True)
class Control:
    """A step that may suspend its lanes."""

    run: Callable[[Lanes], Execution]


Decoder: TypeAlias = "Callable[[Any, Scope], Step | Control | None]"

OPERATIONS: dict[str, Decoder] = {}
"""Decoders by the op's name."""

TERMINATORS = frozenset({"scf.yield", "gpu.return", "gpu.yield"})


def operation(*names: str) -> Callable[[Decoder], Decoder]:
    """Register the decoder of ops of these names."""

    def register(decoder: Decoder) -> Decoder:
        for name in names:
            if name in OPERATIONS:
                raise InternalError(f"two decoders of '{name}' in the simulator")
            OPERATIONS[name] = decoder
        return decoder

    return register


@dataclass
class BlockCode:
    """A decoded block. visits: how many warps have executed it.

    arguments, results: register slots of the block's arguments and of its terminator's operands.
    """

    arguments: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    steps: list[tuple[Any, bool]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    visits: int = 0
    terminator: Site | None = None


def execute(code: BlockCode, lanes: Lanes) -> Execution:
    """Run a block on the active lanes."""
    code.visits += lanes.active_warps
    for step, suspends in code.steps:
        if suspends:
            yield from step(lanes)
        else:
            step(lanes)


@dataclass
class Program:
    """A decoded kernel.

    preset: the registers at the start: constants where known, else None. shared_globals: name to
    (offset, bytes) of static shared globals; dynamic ones start at `static_shared_bytes`.
    granule_bytes: the smallest shared access.
    needs_warps: the kernel synchronises parts of a block, so warps must run one by one.
    mbarriers: how many a block makes.
    """

    name: str
    preset: list[Value] = field(default_factory=list)
    body: BlockCode = field(default_factory=BlockCode)
    blocks: list[BlockCode] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    argument_types: list[Any] = field(default_factory=list)
    attributions: list[Any] = field(default_factory=list)
    shared_globals: dict[str, tuple[int, int]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    static_shared_bytes: int = 0
    local_bytes: int = 0
    granule_bytes: int = 4
    needs_warps: bool = False
    mbarriers: int = 0
    split_vectors: list[Site] = field(default_factory=list)


class Scope:
    """Names values while decoding; what decoders use to find their operands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._slots: dict[Any, int] = {}
        self._site: Site | None = None

    @property
    def site(self) -> Site:
        """The op being decoded."""
        if self._site is None:
            raise InternalError("no op is being decoded")
        return self._site

    def define(self, value: Any) -> int:
        """A new register slot for a value."""
        slot = self._slots[value] = len(self.program.preset)
        self.program.preset.append(None)
        return slot

    def constant(self, value: Any, known: Value) -> None:
        """A new slot that always holds `known`: no step is needed."""
        self.program.preset[self.define(value)] = known

    def use(self, value: Any) -> int:
        """The slot of a value defined earlier."""
        return self._slots[value]

    def uses(self, values: Sequence[Any]) -> list[int]:
        """The slots of values defined earlier."""
        return [self._slots[v] for v in values]

    def defines(self, values: Sequence[Any]) -> list[int]:
        """New slots for values."""
        return [self.define(v) for v in values]

    def note_access(self, size_bytes: int) -> None:
        """A shared-memory access of that many bytes exists: granules must not be larger."""
        self.program.granule_bytes = min(self.program.granule_bytes, size_bytes)

    def block(self, block: Any) -> BlockCode:
        """Decode a block (and what is nested in it)."""
        code = BlockCode(arguments=self.defines(list(block.arguments)))
        self.program.blocks.append(code)
        for view in block.operations:
            self._decode(view.operation, code)
        return code

    def _decode(self, op: Any, code: BlockCode) -> None:
        site = Site(len(self.program.sites), op.name, op)
        self.program.sites.append(site)
        if op.name in TERMINATORS or op.name == "scf.condition":
            code.results = self.uses(list(op.operands))
            code.terminator = site
            return
        decoder = OPERATIONS.get(op.name)
        if decoder is None:
            raise InternalError(
                f"the simulator does not know the op '{op.name}': {site.text()}",
                where=site.location,
                hint="add it to yolomlir/simulator",
            )
        self._site = site
        step = decoder(op, self)
        code.names.append(op.name)
        if step is None:
            return
        if isinstance(step, Control):
            code.steps.append((step.run, True))
        else:
            code.steps.append((step, False))


def reference_in(lanes: Lanes, slot: int) -> Reference:
    """The memref in a register."""
    value: Value = lanes.registers[slot]
    if not isinstance(value, Reference):
        raise InternalError(f"a register holds {type(value).__name__} where a memref is expected")
    return value
