"""What a simulation counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from yolomlir.simulator.banks import BankStatistics
from yolomlir.simulator.elements import Array


@dataclass
class SimulationReport:
    """Counts of one simulated launch.

    operations: op name to executions by a warp. bank_conflicts: ops whose shared-memory accesses
    took more wavefronts than they had to, worst first; shared_accesses: all of them.
    global_read_bytes, global_written_bytes: asked for by the lanes (no cache is modelled).
    mma_count: `mma.sync` instructions of a warp. barriers: block barriers passed, a block each.
    split_vectors: vector accesses whose op promises no alignment, which the compiler therefore
    splits into elements. written: for each argument that is an array, which of its elements the
    kernel wrote.
    """

    kernel: str
    blocks: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    bank_conflicts: list[BankStatistics] = field(default_factory=list)
    shared_accesses: list[BankStatistics] = field(default_factory=list)
    global_read_bytes: int = 0
    global_written_bytes: int = 0
    mma_count: int = 0
    barriers: int = 0
    split_vectors: list[str] = field(default_factory=list)
    written: dict[int, Array] = field(default_factory=dict)

    @property
    def worst_bank_conflict(self) -> int:
        """Ways of the worst conflict; 1 where there is none."""
        return max((b.worst_ways for b in self.shared_accesses), default=1)

    def __str__(self) -> str:
        lines = [
            f"{self.kernel}: {self.blocks} blocks, {self.mma_count} mma, {self.barriers} barriers, "
            f"{self.global_read_bytes} bytes read, {self.global_written_bytes} written",
        ]
        lines += [
            f"  {bank.worst_ways}-way bank conflict, {bank.excess} of {bank.wavefronts} "
            f"wavefronts lost: {bank.location}: {bank.op}"
            for bank in self.bank_conflicts
        ]
        lines += [f"  loaded or stored element by element: {where}" for where in self.split_vectors]
        return "\n".join(lines)
