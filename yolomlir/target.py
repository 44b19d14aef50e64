"""Targets: a row a chip. What differs between GPUs is a number here, never an `if` in a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.diagnostics import UserError


@dataclass(frozen=True)
class Target:
    """What the compiler needs to know of a chip; the rates are the vendor's figures.

    shared_memory_bytes: the most one block may use (opt-in limit). clock_hz: the published boost
    clock; of an H200 what it keeps under load.
    """

    name: str
    kind: str
    chip: str = ""
    ptx: str = ""
    multiprocessors: int = 0
    shared_memory_bytes: int = 0
    shared_memory_per_sm_bytes: int = 0
    registers_per_sm: int = 65536
    threads_per_sm: int = 0
    l2_bytes: int = 0
    dram_gb_per_s: float = 0.0
    clock_hz: float = 0.0
    tf32_tflops: float = 0.0
    fp32_tflops: float = 0.0
    clusters: bool = False
    programmatic_launch: bool = False

    def peak_tflops(self, precision: str) -> float:
        """Dense operations a second, in 10^12, of products of a precision summed in float32.

        Of float16 every one of these GPUs does twice as many as of TF32.
        """
        if precision == "fp32":
            return self.fp32_tflops
        return self.tf32_tflops * (2 if precision == "fp16" else 1)


_KB = 1024
_MB = 1024 * 1024

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("cpu", "cpu"),
        Target(
            "sm_80", "gpu", "sm_80", "+ptx80", 108, 163 * _KB, 164 * _KB,
            threads_per_sm=2048, l2_bytes=40 * _MB, dram_gb_per_s=1555.0,
            clock_hz=1.41e9, tf32_tflops=156.0, fp32_tflops=19.5,
        ),
        Target(
            "sm_86", "gpu", "sm_86", "+ptx80", 82, 99 * _KB, 100 * _KB,
            threads_per_sm=1536, l2_bytes=6 * _MB, dram_gb_per_s=936.0,
            clock_hz=1.70e9, tf32_tflops=35.6, fp32_tflops=35.6,
        ),
        Target(
            "sm_89", "gpu", "sm_89", "+ptx80", 128, 99 * _KB, 100 * _KB,
            threads_per_sm=1536, l2_bytes=72 * _MB, dram_gb_per_s=1008.0,
            clock_hz=2.52e9, tf32_tflops=82.6, fp32_tflops=82.6,
        ),
        Target(
            "sm_90", "gpu", "sm_90", "+ptx81", 132, 227 * _KB, 228 * _KB,
            threads_per_sm=2048, l2_bytes=60 * _MB, dram_gb_per_s=4800.0,
            clock_hz=1.755e9, tf32_tflops=494.0, fp32_tflops=67.0,
            clusters=True, programmatic_launch=True,
        ),
        Target(
            "sm_120", "gpu", "sm_120", "+ptx87", 48, 99 * _KB, 100 * _KB,
            threads_per_sm=1536, l2_bytes=48 * _MB, dram_gb_per_s=672.0,
            clock_hz=2.51e9, tf32_tflops=30.9, fp32_tflops=30.9,
            clusters=True, programmatic_launch=True,
        ),
    )
}  # fmt: skip
"""sm_80 is an A100, 86 an RTX 3090, 89 an RTX 4090, 90 an H200, 120 an RTX 5070."""


def target_named(name: str) -> Target:
    """The row of that name. Raises UserError that lists the names."""
    if name not in TARGETS:
        raise UserError(f"unknown target '{name}'", hint=f"one of: {', '.join(TARGETS)}")
    return TARGETS[name]
