"""Time of a convolution kernel from its tile and a GPU's figures, with constants that are fitted.

The model follows a block through its life: start, one step of K after the other, epilogue. A step
takes as long as the slowest of its asynchronous copies (L2 to shared memory), its tensor-core
products, the issue of its instructions, and the latency that its pipeline does not hide. Blocks
that share a multiprocessor share its rates; blocks beyond what fits take further waves. Constants
are cycles, bytes a cycle or ratios, so that they carry over to a GPU of another clock and size.

What such a picture does not have (how soon dependent kernels start, what L1 is good for, how well
wide warps use their registers) is left to a few factors, each a power of one property of the tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.target import Target

Floats = NDArray[np.float64]

_CLOCK_HZ = {"sm_80": 1.41e9, "sm_86": 1.70e9, "sm_89": 2.52e9, "sm_90": 1.755e9, "sm_120": 2.51e9}
"""Published boost clocks of the GPUs of `target.TARGETS`; an H200's is what it keeps under load."""
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
    """Multiply-adds a cycle and multiprocessor that `mma.sync` reaches at most."""
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
    """Cycles for a cluster: its launch as one, two barriers, partial sums from other blocks."""
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

    def vector(self) -> Floats:
        """The positive constants, in the order of the fields."""
        return np.array([getattr(self, name) for name in _POSITIVE], np.float64)

    def with_vector(self, values: Floats) -> Constants:
        """With other positive constants."""
        new = {n: float(v) for n, v in zip(_POSITIVE, values, strict=True)}
        return dataclasses.replace(self, **new)

    def factors(self) -> Floats:
        """The logarithms of factors, in the order of the fields."""
        return np.array([getattr(self, name) for name in _FACTORS], np.float64)

    def with_factors(self, values: Floats) -> Constants:
        """With other factors."""
        new = {n: float(v) for n, v in zip(_FACTORS, values, strict=True)}
        return dataclasses.replace(self, **new)


_FACTORS = tuple(f.name for f in dataclasses.fields(Constants) if f.name.startswith("log_"))
_POSITIVE = tuple(f.name for f in dataclasses.fields(Constants) if f.name not in _FACTORS)


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
        clock = _CLOCK_HZ[target.name]
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
        once = 4 * (shape.pixels * (shape.in_channels + shape.out_channels))
        columns = {
            "blocks": t.blocks,
            "warps": t.warps,
            "registers": np.minimum(registers, np.minimum(255, 65536 // (32 * t.warps))),
            "shared_bytes": t.shared_bytes,
            "warp_m": t.warp_m,
            "warp_n": t.warp_n,
            "steps": np.maximum(t.block_k // 8 // t.warps_k, 1),
            "k_tiles": t.k_tiles,
            "stages": t.stages,
            "products": np.full(size, 3 if precision == "fp32" else 1),
            "stage_elements": (t.block_m + t.block_n) * t.block_k,
            "copied": (t.block_m + t.block_n) * t.block_k / max(1, min(4, shape.source_vector)),
            "outputs": t.block_m * t.block_n,
            "conversion": 6 * t.block_k * -(-t.block_m // (32 * t.warps)) * int(converted),
            "staged": t.is_staged,
            "clustered": t.cluster_k > 1,
            "unrolled": t.unrolled,
            "log_release_early": t.release_early,
            "log_unroll": (t.unroll > 0) & (t.k_tiles > t.stages),
            "log_through_l1": t.through_l1 * int(shape.taps > 1),
            "log_staged": (t.staged > 0) & (t.warps_k == 1) & (t.cluster_k == 1),
            "log_warp_n": np.log2(t.warp_n),
            "log_block_n": np.log2(t.block_n),
            "log_warps": np.log2(t.warps) ** 2,
            "footprint": np.full(size, once + 4 * shape.k * shape.out_channels),
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


def predict_us(features: Features, device: Device, constants: Constants = DEFAULT) -> Floats:
    """Microseconds of each row; infinity where not one block fits a multiprocessor."""
    f, c = features, constants
    sms = device.multiprocessors
    together, waves = _waves(f, device)
    fits = together >= 1
    together = np.maximum(together, 1)
    busy = np.minimum(f.blocks, sms)
    side_by_side = np.minimum(f.blocks, sms * together) / busy
    queue = np.ceil(side_by_side * f.warps / _SCHEDULERS)
    pace = np.maximum(c.instruction, queue)
    step = np.maximum.reduce(
        [
            _tensor_cycles(f, c, device, queue),
            _copy_cycles(f, c, device, busy, side_by_side),
            _instructions(f, c) * pace,
        ]
    )
    hidden = c.latency / np.maximum(1, f.stages - 1)
    latency = c.product * f.steps + np.where(f.k_tiles > f.stages, hidden, 0.0)
    a_step = c.step + np.maximum(step, latency)
    epilogue = c.epilogue + pace * c.output * f.outputs / (32 * f.warps)
    epilogue += c.staged * f.staged + c.cluster * f.clustered
    cycles = waves * (f.k_tiles * a_step + epilogue + c.start)
    cycles *= np.exp(_factor_columns(f, waves) @ c.factors())
    spilled = np.where(f.footprint > device.l2_bytes, f.footprint / device.dram_bytes_per_s, 0.0)
    us = 1e6 * np.maximum(cycles / device.clock_hz, spilled)
    return np.where(fits, us, np.inf)


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


def _factor_columns(f: Features, waves: Floats) -> Floats:
    """A column a factor: what its logarithm is multiplied by."""
    columns = [waves > 1 if name == "log_waves" else f.columns[name] for name in _FACTORS]
    return np.stack(columns, axis=1).astype(np.float64)


def _tensor_cycles(f: Features, c: Constants, device: Device, queue: Floats) -> Floats:
    peak = min(device.tf32_peak, c.mma_peak) / _SCHEDULERS
    return queue * f.warp_m * f.warp_n * 8 * f.steps * f.products / peak


def _copy_cycles(
    f: Features, c: Constants, device: Device, busy: Floats, side_by_side: Floats
) -> Floats:
    rate = np.minimum(c.port_bytes, c.l2_bytes * device.multiprocessors / busy)
    return 4 * f.stage_elements * side_by_side / rate


def _instructions(f: Features, c: Constants) -> Floats:
    """Of a warp a step."""
    rows, columns = f.warp_m // 16, np.ceil(f.warp_n / 8)
    products = f.steps * (rows * 9 + columns + rows * columns * 2 * f.products)
    copies = c.copy * f.copied / (32 * f.warps)
    return c.rolled * (1 - f.unrolled) + products + copies + f.conversion


# ---- fitting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Measurements of one shape: features, microseconds a row, and a name for the shape."""

    name: str
    features: Features
    us: Floats


def fit(
    data: Sequence[Measured], device: Device, start: Constants = DEFAULT, *, rounds: int = 40
) -> Constants:
    """Constants that minimise the squared error of the logarithm of time.

    First the positive ones; then the factors, by what is left within each shape; then the positive
    ones again, beside these factors.
    """
    found = _fit_positive(data, device, start, rounds)
    found = _fit_factors(data, device, found)
    return _fit_positive(data, device, found, rounds)


def _fit_factors(data: Sequence[Measured], device: Device, constants: Constants) -> Constants:
    """Ridge regression of the residuals, each shape about its mean: factors order the tiles of a
    shape and leave the level of shapes to the rest of the model."""
    rows, left = [], []
    for item in data:
        waves = _waves(item.features, device)[1]
        columns = _factor_columns(item.features, waves)
        rest = np.log(item.us / predict_us(item.features, device, constants))
        rows.append(columns - columns.mean(axis=0))
        left.append(rest - rest.mean())
    matrix, rest = np.concatenate(rows), np.concatenate(left)
    normal = matrix.T @ matrix + _RIDGE * np.eye(matrix.shape[1])
    change = np.linalg.solve(normal, matrix.T @ rest)
    return constants.with_factors(constants.factors() + change)


_RIDGE = 3.0
"""Factors are drawn to 1 as if three rows more said so for each."""


def _fit_positive(
    data: Sequence[Measured], device: Device, start: Constants, rounds: int
) -> Constants:
    """Levenberg-Marquardt on the logarithms of the constants (which keeps them positive), each
    drawn to its start as if that were known to a factor of 3, so that what no measurement tells
    stays."""
    features = Features.concatenate([d.features for d in data])
    observed = np.log(np.concatenate([d.us for d in data]))
    weight = np.concatenate([np.full(len(d.us), len(d.us) ** -0.5) for d in data])
    weight /= np.sqrt(np.mean(weight**2))
    origin = np.log(start.vector())
    pull = 0.1 / np.log(3.0) * np.sqrt(len(observed)) / 10

    def residuals(x: Floats) -> Floats:
        us = predict_us(features, device, start.with_vector(np.exp(x)))
        off = np.clip(np.log(us) - observed, -_CLIP, _CLIP) * weight
        return np.concatenate([off, pull * (x - origin)])

    x, damping = origin.copy(), 1e-2
    error = residuals(x)
    for _ in range(rounds):
        jacobian = _jacobian(residuals, x, error)
        normal = jacobian.T @ jacobian
        gradient = jacobian.T @ error
        for _ in range(8):
            scaled = normal + damping * np.diag(np.diag(normal) + 1e-9)
            moved = x - np.linalg.solve(scaled, gradient)
            moved = np.clip(moved, origin - _RANGE, origin + _RANGE)
            tried = residuals(moved)
            if tried @ tried < error @ error:
                gain = 1 - (tried @ tried) / (error @ error)
                x, error, damping = moved, tried, damping / 3
                break
            damping *= 4
        else:
            break
        if gain < 1e-6:
            break
    return start.with_vector(np.exp(x))


_CLIP = 1.0
"""A row may be off by a factor of e at most: outliers do not decide."""
_RANGE = np.log(10.0)
"""No constant moves by more than a factor of 10."""


def _jacobian(function: object, x: Floats, at: Floats) -> Floats:
    """Differences over 2 %: the model has steps (waves, queues) that a smaller one would miss."""
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += 0.02
        columns.append((function(moved) - at) / 0.02)  # type: ignore[operator]
    return np.stack(columns, axis=1)


# ---- how good it is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """Of predictions for shapes that the fit has not seen.

    spearman: rank correlation over all rows. within: the median over shapes of the rank correlation
    within a shape. error: median of |log(predicted / measured)|. hits: share of shapes of whose
    best `top` predictions one is within 5 % of the fastest measured.
    """

    shapes: int
    rows: int
    spearman: float
    within: float
    error: float
    hits: float
    top: int

    def __str__(self) -> str:
        return (
            f"{self.shapes} held-out shapes, {self.rows} points: Spearman {self.spearman:.3f} "
            f"(within a shape, median: {self.within:.3f}), median error "
            f"{100 * (np.exp(self.error) - 1):.0f} %, best {self.top} predictions within 5 % of "
            f"the best for {100 * self.hits:.0f} % of the shapes"
        )


def held_out_quality(
    data: Sequence[Measured],
    device: Device,
    *,
    folds: int = 5,
    top: int = 8,
    start: Constants = DEFAULT,
) -> Quality:
    """Fit without a fifth of the shapes, predict those, and so on for each fifth."""
    ordered = sorted(data, key=lambda d: d.name)
    predictions: list[tuple[Measured, Floats]] = []
    for fold in range(min(folds, len(ordered))):
        seen = [d for i, d in enumerate(ordered) if i % folds != fold]
        constants = fit(seen, device, start) if seen else start
        held = [d for i, d in enumerate(ordered) if i % folds == fold]
        predictions += [(d, predict_us(d.features, device, constants)) for d in held]
    return quality(predictions, top=top)


def quality(predictions: Sequence[tuple[Measured, Floats]], *, top: int = 8) -> Quality:
    """How well predictions (microseconds a row) agree with the measurements they belong to."""
    measured = np.concatenate([d.us for d, _ in predictions])
    predicted = np.concatenate([p for _, p in predictions])
    within = [spearman(d.us, p) for d, p in predictions if len(p) > 2]
    hits = []
    for data, prediction in predictions:
        chosen = np.argsort(prediction, kind="stable")[:top]
        hits.append(bool(data.us[chosen].min() <= 1.05 * data.us.min()))
    return Quality(
        len(predictions),
        len(measured),
        spearman(measured, predicted),
        float(np.median(within)) if within else 0.0,
        float(np.median(np.abs(np.log(predicted / measured)))),
        float(np.mean(hits)),
        top,
    )


def spearman(some: Floats, others: Floats) -> float:
    """Correlation of the ranks; equal values share the mean of their ranks."""
    a, b = _ranks(some), _ranks(others)
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale else 0.0


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle = last - (counts - 1) / 2
    ranks: Floats = middle[place]
    return ranks
