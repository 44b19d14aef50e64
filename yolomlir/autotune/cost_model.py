"""Time of a convolution kernel from its tile and a GPU's figures, with constants that are fitted.

The model follows a block through its life: start, one step of K after the other, epilogue. A step
takes as long as the slowest of its asynchronous copies (L2 to shared memory), its tensor-core
products, the issue of its instructions, and the latency that its pipeline does not hide. Blocks
that share a multiprocessor share its rates; blocks beyond what fits take further waves. Constants
are cycles, bytes a cycle or ratios, so that they carry over to a GPU of another clock and size.

What such a picture does not have (how soon dependent kernels start, what L1 is good for, how well
wide warps use their registers) is left to a few factors, each a power of one property of the tile,
and what remains to a correction by trees (`correction.py`) over properties of these phases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.autotune.correction import Correction
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.target import Target

Floats = NDArray[np.float64]

_SHARING = 0.25
"""Of a cluster's cycles what sharing weights takes: its launch as one. A guess, not measured."""
_SCHEDULERS = 4
"""Of a multiprocessor; a warp uses one, and a quarter of the tensor cores."""


@dataclass(frozen=True)
class Constants:
    """What is fitted to measurements. Defaults: a guess from single kernels on an H200."""

    start: float = 1800.0
    """Cycles from the launch to the first step: indices, first bytes from L2."""
    port_bytes: float = 64.0
    """Bytes a cycle from L2 to one multiprocessor when the others are idle."""
    l2_bytes: float = 25.0
    """The same for each when all of them copy."""
    latency: float = 700.0
    """Cycles from L2."""
    mma_peak: float = 640.0
    """Multiply-adds of TF32 a cycle and multiprocessor that `mma.sync` reaches at most."""
    step: float = 60.0
    """Cycles a step for its wait, barrier and the first `ldmatrix`."""
    product: float = 30.0
    """Cycles of latency a step's product of depth 8, one after the other in a warp."""
    instruction: float = 2.5
    """Cycles an instruction of a warp that has a scheduler to itself."""
    rolled: float = 30.0
    """Instructions of a step that unrolling saves."""
    copy: float = 7.0
    """Instructions of an asynchronous copy of 16 bytes."""
    epilogue: float = 400.0
    """Cycles of the epilogue besides its outputs."""
    output: float = 10.0
    """Instructions an output."""
    staged: float = 400.0
    """Cycles for a result that goes through shared memory."""
    cluster: float = 2000.0
    """Cycles for a cluster: its launch as one, partial sums from other blocks."""
    log_release_early: float = 0.0
    """Logarithm of the factor of time where dependent kernels may start with this one. So, too:"""
    log_unroll: float = 0.0
    """an unrolled loop, beyond what its fewer instructions bring."""
    log_through_l1: float = 0.0
    """inputs that come through L1."""
    log_staged: float = 0.0
    """a result that goes through shared memory by choice."""
    log_warp_n: float = 0.0
    """a doubling of a warp's output channels."""
    log_block_n: float = 0.0
    """a doubling of a block's output channels."""
    log_warps: float = 0.0
    """the square of the binary logarithm of a block's warps: both few and many cost."""
    log_waves: float = 0.0
    """more blocks than fit at once: the last wave overlaps the one before."""
    correction: Correction | None = None
    """What is left over, by properties of the tile and its phases; None where nothing is known."""

    def vector(self) -> Floats:
        """The positive constants, in the order of the fields."""
        return np.array([getattr(self, name) for name in _POSITIVE], np.float64)

    def with_vector(self, values: Floats) -> Constants:
        """With other positive constants."""
        new: dict[str, Any] = {n: float(v) for n, v in zip(_POSITIVE, values, strict=True)}
        return dataclasses.replace(self, **new)

    def factors(self) -> Floats:
        """The logarithms of factors, in the order of the fields."""
        return np.array([getattr(self, name) for name in _FACTORS], np.float64)

    def with_factors(self, values: Floats) -> Constants:
        """With other factors."""
        new: dict[str, Any] = {n: float(v) for n, v in zip(_FACTORS, values, strict=True)}
        return dataclasses.replace(self, **new)


_FACTORS = tuple(f.name for f in dataclasses.fields(Constants) if f.name.startswith("log_"))
_POSITIVE = tuple(
    f.name for f in dataclasses.fields(Constants) if f.name not in (*_FACTORS, "correction")
)


DEFAULT = Constants()
"""Used where nothing was measured."""


@dataclass(frozen=True)
class Device:
    """A GPU's figures as the model uses them, per multiprocessor where that makes sense."""

    multiprocessors: int
    clock_hz: float
    shared_bytes: int
    threads: int
    registers: int
    tf32_peak: float
    """Multiply-adds of TF32 a cycle and multiprocessor."""
    l2_bytes: int
    dram_bytes_per_s: float

    @staticmethod
    def of(target: Target) -> Device:
        """The figures of a target's GPU."""
        clock = target.clock_hz
        return Device(
            target.multiprocessors,
            clock,
            target.shared_memory_per_sm_bytes,
            target.threads_per_sm,
            target.registers_per_sm,
            target.tf32_tflops * 1e12 / 2 / target.multiprocessors / clock,
            target.l2_bytes,
            target.dram_gb_per_s * 1e9,
        )


@dataclass(frozen=True)
class Features:
    """What the model needs of tiles, a value a row; rows may be of several shapes."""

    columns: dict[str, Floats]

    def __getattr__(self, name: str) -> Floats:
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None

    @staticmethod
    def of(tiles: ConvTiles, precision: str) -> Features:
        """Of the tiles of one shape."""
        t, shape = tiles, tiles.shape
        size = len(t)
        converted = shape.source_vector == 0
        # What the kernel is likely to use; the assembler keeps it within what a block may have.
        registers = 40 + t.warp_m * t.warp_n // 32 + t.warp_m // 4 + t.warp_n // 4
        bytes_, sharers = shape.element.bytes, np.maximum(t.cluster_m, 1)
        once = bytes_ * (shape.pixels * (shape.in_channels + shape.out_channels))
        columns = {
            "blocks": t.blocks,
            "warps": t.warps,
            "registers": np.minimum(registers, np.minimum(255, 65536 // (32 * t.warps))),
            "shared_bytes": t.shared_bytes,
            "block_m": t.block_m,
            "block_n": t.block_n,
            "block_k": t.block_k * bytes_ / 4,
            "warps_k": t.warps_k,
            "cluster_k": t.cluster_k,
            "rows": t.block_m / shape.out_w,
            "padded_channels": -(-shape.out_channels // t.block_n) * t.block_n / shape.out_channels,
            "warp_m": t.warp_m,
            "warp_n": t.warp_n,
            "steps": np.maximum(t.block_k // shape.element.k_step // t.warps_k, 1),
            "k_tiles": t.k_tiles,
            "stages": t.stages,
            "products": np.full(size, 3 if precision == "fp32" else 1),
            "stage_bytes": bytes_ * (t.block_m + t.block_n) * t.block_k,
            "fetched_bytes": bytes_ * (t.block_m + t.block_n / sharers) * t.block_k,
            "copied": (t.block_m + t.block_n * (t.cluster_m == 0))
            * t.block_k
            / max(1, shape.source_vector),
            "outputs": t.block_m * t.block_n,
            "conversion": 6 * t.block_k * -(-t.block_m // (32 * t.warps)) * int(converted),
            "staged": t.is_staged,
            "clustered": (t.cluster_k > 1) + _SHARING * (t.cluster_m > 1),
            "unrolled": t.unrolled,
            "log_release_early": t.release_early,
            "log_unroll": (t.unroll > 0) & (t.k_tiles > t.stages),
            "log_through_l1": t.through_l1 * int(shape.taps > 1),
            "log_staged": (t.staged > 0) & (t.warps_k == 1) & (t.cluster_k == 1),
            "log_warp_n": np.log2(t.warp_n),
            "log_block_n": np.log2(t.block_n),
            "log_warps": np.log2(t.warps) ** 2,
            "footprint": np.full(size, once + bytes_ * shape.k * shape.out_channels),
        }
        return Features({n: np.asarray(c, np.float64) for n, c in columns.items()})

    @staticmethod
    def concatenate(parts: Sequence[Features]) -> Features:
        """The rows of several, one after the other."""
        names = parts[0].columns
        return Features({n: np.concatenate([p.columns[n] for p in parts]) for n in names})

    def where(self, chosen: NDArray[np.bool_]) -> Features:
        """The chosen rows."""
        return Features({n: c[chosen] for n, c in self.columns.items()})


@dataclass(frozen=True)
class _Phases:
    """What a row's time is made of. together: blocks that share a multiprocessor, 0 where not one
    fits. resident: those that do at first. tensor, copy, issue: cycles of a step if only that took
    time; step: the slowest. a_step: cycles of a step, with what is not hidden."""

    together: Floats
    waves: Floats
    resident: Floats
    tensor: Floats
    copy: Floats
    issue: Floats
    step: Floats
    a_step: Floats
    cycles: Floats


def predict_us(features: Features, device: Device, constants: Constants = DEFAULT) -> Floats:
    """Microseconds of each row; infinity where not one block fits a multiprocessor."""
    f, c = features, constants
    phases = _phases(f, device, c)
    cycles = phases.cycles
    if c.correction is not None:
        cycles = cycles * np.exp(c.correction.log_factor(_describe(f, device, phases)))
    spilled = np.where(f.footprint > device.l2_bytes, f.footprint / device.dram_bytes_per_s, 0.0)
    us = 1e6 * np.maximum(cycles / device.clock_hz, spilled)
    return np.where(phases.together >= 1, us, np.inf)


def _phases(f: Features, device: Device, c: Constants) -> _Phases:
    together, waves = _waves(f, device)
    sms, most = device.multiprocessors, np.maximum(together, 1)
    busy = np.minimum(f.blocks, sms)
    side_by_side = np.minimum(f.blocks, sms * most) / busy
    queue = np.ceil(side_by_side * f.warps / _SCHEDULERS)
    pace = np.maximum(c.instruction, queue)
    tensor = _tensor_cycles(f, c, device, queue)
    copy = _copy_cycles(f, c, device, busy, side_by_side)
    issue = _instructions(f, c) * pace
    step = np.maximum.reduce([tensor, copy, issue])
    hidden = c.latency / np.maximum(1, f.stages - 1)
    latency = c.product * f.steps + np.where(f.k_tiles > f.stages, hidden, 0.0)
    a_step = c.step + np.maximum(step, latency)
    epilogue = c.epilogue + pace * c.output * f.outputs / (32 * f.warps)
    epilogue += c.staged * f.staged + c.cluster * f.clustered
    cycles = waves * (f.k_tiles * a_step + epilogue + c.start)
    cycles *= np.exp(_factor_columns(f, waves) @ c.factors())
    resident = np.minimum(np.ceil(f.blocks / sms), most)
    return _Phases(together, waves, resident, tensor, copy, issue, step, a_step, cycles)


def correction_columns(
    features: Features, device: Device, constants: Constants
) -> dict[str, Floats]:
    """What a correction of these constants is a function of, a value a row each."""
    return _describe(features, device, _phases(features, device, constants))


def _describe(f: Features, device: Device, p: _Phases) -> dict[str, Floats]:
    """Properties of a tile and its phases that mean the same on every GPU, sizes as logarithms."""
    fill = f.blocks / (device.multiprocessors * np.maximum(p.together, 1))
    log = np.log2
    return {
        "cycles": log(p.cycles),
        "tensor": log(p.tensor / p.step),
        "copy": log(p.copy / p.step),
        "issue": log(p.issue / p.step),
        "loop": p.waves * f.k_tiles * p.a_step / p.cycles,
        "fill": log(fill),
        "tail": log(p.waves / fill),
        "waves": p.waves,
        "rounds": log(np.ceil(f.blocks / device.multiprocessors)),
        "resident": log(p.resident * f.warps),
        "shared": f.shared_bytes / device.shared_bytes,
        "wasted": log(f.padded_channels),
        "block": log(f.block_m * f.block_n),
        "block_n": log(f.block_n),
        "block_k": log(f.block_k),
        "warps": log(f.warps),
        "warps_k": log(f.warps_k),
        "warp_n": log(f.warp_n),
        "warp_shape": log(f.warp_m / f.warp_n),
        "loads": log((f.warp_m + f.warp_n) / (f.warp_m * f.warp_n)),
        "cluster": log(f.cluster_k),
        "outputs": log(f.outputs / (32 * f.warps)),
        "steps": log(f.steps),
        "k_tiles": log(f.k_tiles),
        "ahead": log(np.minimum(f.stages, f.k_tiles) * f.block_k),
        "refills": log(f.k_tiles / f.stages),
        "rows": log(f.rows),
        "staged": f.log_staged,
        "release_early": f.log_release_early,
        "through_l1": f.log_through_l1,
    }


def _waves(f: Features, device: Device) -> tuple[Floats, Floats]:
    """Blocks that share a multiprocessor (0 where not one fits), and the waves they come in."""
    together = np.minimum.reduce(
        [
            device.shared_bytes // (f.shared_bytes + 1024),
            device.threads // (32 * f.warps),
            device.registers // (f.registers * 32 * f.warps),
            np.ceil(f.blocks / device.multiprocessors),
        ]
    )
    return together, np.ceil(f.blocks / (device.multiprocessors * np.maximum(together, 1)))


def factor_columns(features: Features, device: Device) -> Floats:
    """What the logarithm of each factor is multiplied by: a row a tile, a column a factor."""
    return _factor_columns(features, _waves(features, device)[1])


def _factor_columns(f: Features, waves: Floats) -> Floats:
    columns = [waves > 1 if name == "log_waves" else f.columns[name] for name in _FACTORS]
    return np.stack(columns, axis=1).astype(np.float64)


def _tensor_cycles(f: Features, c: Constants, device: Device, queue: Floats) -> Floats:
    # A product of float16 takes as long as one of TF32: it is twice as deep, at twice the rate.
    peak = min(device.tf32_peak, c.mma_peak) / _SCHEDULERS
    return queue * f.warp_m * f.warp_n * 8 * f.steps * f.products / peak


def _copy_cycles(
    f: Features, c: Constants, device: Device, busy: Floats, side_by_side: Floats
) -> Floats:
    # What blocks of a cluster share leaves L2 once, but comes to each.
    rate = c.l2_bytes * device.multiprocessors / busy
    arriving = f.stage_bytes * side_by_side / c.port_bytes
    return np.maximum(arriving, f.fetched_bytes * side_by_side / rate)


def _instructions(f: Features, c: Constants) -> Floats:
    """Of a warp a step."""
    rows, columns = f.warp_m // 16, np.ceil(f.warp_n / 8)
    products = f.steps * (rows * 9 + columns + rows * columns * 2 * f.products)
    copies = c.copy * f.copied / (32 * f.warps)
    return c.rolled * (1 - f.unrolled) + products + copies + f.conversion
