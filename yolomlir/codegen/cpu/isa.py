"""What code generation asks of the host's instruction set: vector width and registers."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass

from llvmlite import binding


@dataclass(frozen=True)
class Isa:
    """name: of the instruction set. lanes: float32 a vector register. registers: how many.

    cores: of the machine, which blocks should keep busy.
    """

    name: str
    lanes: int
    registers: int
    cores: int = 1


@dataclass(frozen=True)
class Host:
    """The machine that code is compiled for. features: sorted, `+avx2`, without those it lacks."""

    triple: str
    cpu: str
    features: tuple[str, ...]
    cores: int = 1

    @property
    def isa(self) -> Isa:
        """The widest vectors of the host."""
        return dataclasses.replace(_isa(self.triple, self.features), cores=self.cores)


@functools.lru_cache(maxsize=1)
def host() -> Host:
    """This machine, as LLVM sees it."""
    features = binding.get_host_cpu_features()
    have = tuple(sorted(f"+{name}" for name, present in features.items() if present))
    cores = os.cpu_count() or 1
    return Host(binding.get_process_triple(), binding.get_host_cpu_name(), have, cores)


def _isa(triple: str, features: tuple[str, ...]) -> Isa:
    if "+avx512f" in features:
        return Isa("avx512", 16, 32)
    if "+avx" in features:
        return Isa("avx2", 8, 16)
    if triple.startswith(("aarch64", "arm64")):
        return Isa("neon", 4, 32)
    return Isa("sse", 4, 16)
