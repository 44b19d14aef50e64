"""The time of a chain's kernel, to choose a tile by where nothing was measured.

A sum of terms, each a count that follows from the tile times the cycles that one of it takes: of
the busiest multiprocessor for what its blocks share (bytes, issue of instructions), and of one
block after the other for what is latency. Cycles, so that they mean the same on another GPU.

The weights are fitted to times of 7,120 tiles of 178 functions (YOLO26 n and s, one and eight
images, TF32 and float16) and of 582 windows of single convolutions, measured on an H200, each alone
in a chain of launches: least relative squares, none negative, the functions alike. Functions that
were left out of the fit, a sixth at a time: median error 9 %; for one image the tile of the least
estimate took 4 % more than the fastest measured one, for eight 10 % at TF32 and 15 % at float16; of
the eight least estimates one took at most 1.5 % more. Nothing was fitted at `fp32`, whose operands
are split in the kernel, which `_instructions` does not count.
"""

from __future__ import annotations

from yolomlir.codegen.gpu.chain_tile import ChainPlan, ChainShape, ChainTile, StagePlan, plan
from yolomlir.target import Target

_SCHEDULERS = 4
"""Of a multiprocessor."""
_PORT_BYTES = 64.0
"""Bytes a cycle from L2 to one multiprocessor when the others are idle."""
_L2_BYTES = 25.0
"""The same for each when all of them copy."""
_MMA_PEAK = 640.0
"""Multiply-adds of TF32 a cycle and multiprocessor that `mma.sync` reaches at most."""
_COPY_BYTES = 16

WEIGHTS: dict[str, float] = {
    "launch": 1600.0, "window": 1.3, "first": 0.148, "issue": 2.61, "outputs": 1.21,
    "copies": 29.1, "wait": 111.0, "exchange": 388.0, "sent": 26.4, "stage": 300.0, "work": 117.0,
    "depthwise": 2.71, "gathered": 17.9, "gathering": 6.42,
}  # fmt: skip
"""By term: cycles of each unit of what `terms` counts."""


def estimate_us(tile: ChainTile, shape: ChainShape, target: Target, precision: str) -> float:
    """Microseconds of the kernel in a chain of launches, its weights in L2."""
    work = plan(tile, shape)
    counts = terms(work, target, precision)
    cycles = {name: weight * counts[name] for name, weight in WEIGHTS.items()}
    cycles["issue"] = max(cycles["issue"], _tensor_cycles(work, target, precision))
    return 1e6 * sum(cycles.values()) / target.clock_hz


def terms(work: ChainPlan, target: Target, precision: str) -> dict[str, float]:
    """What the time is a weighted sum of, but for the rate of the tensor cores.

    launch: one. window: cycles in which the busiest multiprocessor's windows come; first: those of
    the operands that fit in the ring. issue, outputs, copies: instructions of each scheduler for
    products, for the stages' results (in units of a result's), and for inputs that come by steps.
    work: a warp's share of a stage's fixed cost. stage, wait, exchange: stages, steps that wait for
    operands, and exchanges of a cluster, as often as blocks follow each other; sent: results that a
    thread sends. depthwise, gathered: taps of a thread's results in a depthwise first stage, from a
    window or from global memory; gathering: those of each scheduler.
    """
    blocks = work.clusters * work.tile.cluster_n
    rounds, waves = _turns(work, blocks, target)
    busy = min(blocks, target.multiprocessors)
    rate = min(_PORT_BYTES, _L2_BYTES * target.multiprocessors / busy)
    issued = rounds * work.tile.warps / _SCHEDULERS
    bytes_ = work.shape.element.bytes
    counts = dict.fromkeys(WEIGHTS, 0.0)
    counts["launch"] = 1.0
    counts["window"] = bytes_ * (work.window.loaded if work.window else 0) * rounds / rate
    operands = 0.0
    for index, (stage, (k, _)) in enumerate(zip(work.stages, work.shape.sizes(), strict=True)):
        results = stage.m * stage.n / work.threads
        counts["stage"] += waves
        counts["work"] += issued
        if work.tile.cluster_n > 1 and index < len(work.shape.later):
            counts["exchange"] += waves
            counts["sent"] += results * (work.tile.cluster_n - 1) * waves
        if not stage.steps:
            counts["depthwise" if work.window else "gathered"] += (
                results * k * (issued if work.window else waves)
            )
            counts["gathering"] += 0.0 if work.window else results * k * issued
            continue
        rows = work.loaded_rows(index)
        operands += bytes_ * k * (rows + stage.n)
        counts["issue"] += _instructions(stage, k, precision) * rounds / _SCHEDULERS
        counts["outputs"] += results * (14 + 2 * stage.warps_k) * issued
        counts["copies"] += rows * k * bytes_ / _COPY_BYTES / work.threads * issued
        counts["wait"] += 0.0 if work.resident else stage.steps * waves
    counts["first"] = min(operands, bytes_ * sum(work.ring)) * rounds / rate
    return counts


def _turns(work: ChainPlan, blocks: int, target: Target) -> tuple[float, float]:
    """Blocks of a multiprocessor, and how often blocks follow each other on it: between what the
    busiest one has and the mean, which dynamic scheduling comes close to."""
    most = max((s.m // 16 // s.warps_m) * (s.n // 8 // s.warps_n) for s in work.stages)
    registers = min(max(64 + 4 * most, 96), target.registers_per_sm // work.threads)
    together = min(
        target.shared_memory_per_sm_bytes // (work.shared_bytes + 1024),
        target.threads_per_sm // work.threads,
        target.registers_per_sm // (registers * work.threads),
    )
    places = target.multiprocessors * max(1, together)
    return _between(blocks, target.multiprocessors), _between(blocks, places)


def _between(blocks: int, places: int) -> float:
    return (-(-blocks // places) + max(1.0, blocks / places)) / 2


def _instructions(stage: StagePlan, k: int, precision: str) -> float:
    """Of all warps for a stage's products: loads of fragments, rounding, products."""
    rows, columns = stage.m // 16 // stage.warps_m, stage.n // 8 // stage.warps_n
    multiplied = 3 if precision == "fp32" else 1
    depth = -(-k // (stage.k_step * stage.warps_k))
    each = depth * (3 * rows + 2 * columns + 2 * rows * columns * multiplied)
    return each * stage.warps_m * stage.warps_n * stage.warps_k


def _tensor_cycles(work: ChainPlan, target: Target, precision: str) -> float:
    """Of the busiest multiprocessor's tensor cores: the limit where their rate is low."""
    multiplied = 3 if precision == "fp32" else 1
    vendor = target.tf32_tflops * 1e12 / 2 / target.multiprocessors / target.clock_hz
    peak = min(vendor, _MMA_PEAK) * work.shape.element.k_step / 8
    sizes = zip(work.stages, work.shape.sizes(), strict=True)
    products = sum(s.m * s.n * k * multiplied for s, (k, _) in sizes if s.steps)
    blocks = work.clusters * work.tile.cluster_n
    return -(-blocks // target.multiprocessors) * products / peak


__all__ = ["WEIGHTS", "estimate_us", "terms"]
