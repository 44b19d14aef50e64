"""Time of a convolution whose tile is a window (`conv2d_kinds.py`), on the cost model's scale.

Such a kernel has no steps that repeat as those of `cost_model.py`: a block loads its window and (as
a rule) all its weights, multiplies, stores. The time is a sum of ten terms: cycles of the busiest
multiprocessor for what its blocks share (bytes, issue of instructions), and of one block after the
other for what is latency.

The weights of the terms are fitted to times of 240 such tiles of 15 convolutions (12 shapes) of
YOLO26n on an H200, TF32, each alone in a chain of launches: least relative squares, none negative.
On shapes left out of the fit, one at a time: median error 5 %, Spearman 0.98 over all tiles and
0.91 within a shape (median), the first four tiles of every shape have one within 0.3 % of the
fastest measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from yolomlir.autotune.cost_model import Device
from yolomlir.codegen.gpu.chain_tile import ChainTile, plan
from yolomlir.codegen.gpu.conv2d_kinds import as_chain
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.target import Target

_SCHEDULERS = 4
_PORT_BYTES = 64.0
"""Bytes a cycle from L2 to one multiprocessor when the others are idle."""
_L2_BYTES = 25.0
"""The same for each when all of them copy."""
_MMA_PEAK = 640.0
"""Multiply-adds of TF32 a cycle and multiprocessor that `mma.sync` reaches at most."""
_PACE = 2.5
"""Cycles an instruction of a warp that has a scheduler to itself."""
_COPY_BYTES = 16

WEIGHTS = {
    "launch": 1974.0, "round": 318.0, "warp": 58.3, "window": 1.147, "issue": 1.821, "alone": 0.756,
    "output": 2.943, "copy": 9.2, "wait": 79.8, "cluster": 356.0,
}  # fmt: skip
"""By term: cycles of each unit of what `terms` counts."""


def terms(tile: ChainTile, shape: ConvShape, target: Target, precision: str) -> dict[str, float]:
    """What the time is a weighted sum of, but for the rate of the tensor cores.

    launch: one. round: blocks of the busiest multiprocessor after its first. warp: warps of a
    block. window: cycles of its bytes. issue, copy: instructions for the products, and copies, of
    each scheduler; alone: cycles of the products' instructions in one warp, output: of a thread's
    outputs, wait: steps that wait for weights, each as often as blocks follow each other.
    """
    work, device = plan(tile, as_chain(shape)), Device.of(target)
    stage, sms, bytes_ = work.stages[0], device.multiprocessors, shape.element.bytes
    window = work.window
    blocks = work.clusters * tile.cluster_n
    rounds = -(-blocks // sms)
    rate = min(_PORT_BYTES, _L2_BYTES * sms / min(blocks, sms))
    rows, columns = tile.block_m // 16 // stage.warps_m, stage.n // 8 // stage.warps_n
    multiplied = 3 if precision == "fp32" else 1
    registers = min(64 + 4 * rows * columns, 65536 // work.threads)
    together = min(
        device.shared_bytes // (work.shared_bytes + 1024),
        device.threads // work.threads,
        device.registers // (registers * work.threads),
    )
    waves = -(-blocks // (sms * max(1, together)))
    depth = -(-shape.k // (shape.element.k_step * stage.warps_k))
    instructions = depth * (3 * rows + 2 * columns + 2 * rows * columns * multiplied)
    used = stage.warps_m * stage.warps_n * stage.warps_k
    copies = stage.n * shape.k * bytes_ / _COPY_BYTES / work.threads
    copies += window.copies(work.threads) if window else 0
    outputs = tile.block_m * stage.n / work.threads
    return {
        "launch": 1.0,
        "round": rounds - 1,
        "warp": tile.warps,
        "window": bytes_ * (window.loaded if window else 0) * rounds / rate,
        "issue": instructions * used * rounds / _SCHEDULERS,
        "alone": instructions * _PACE * waves,
        "output": outputs * (14 + 2 * stage.warps_k) * waves,
        "copy": copies * rounds * tile.warps / _SCHEDULERS,
        "wait": 0.0 if work.resident else stage.steps * waves,
        "cluster": float(tile.cluster_n > 1),
    }


def predict_us(
    tiles: Sequence[ChainTile], shape: ConvShape, target: Target, precision: str
) -> list[float]:
    """Microseconds of each tile's kernel in a chain of launches."""
    return [_predict(tile, shape, target, precision) for tile in tiles]


def _predict(tile: ChainTile, shape: ConvShape, target: Target, precision: str) -> float:
    device = Device.of(target)
    cycles = {n: WEIGHTS[n] * v for n, v in terms(tile, shape, target, precision).items()}
    cycles["issue"] = max(cycles["issue"], _tensor_cycles(tile, shape, device, precision))
    return 1e6 * sum(cycles.values()) / device.clock_hz


def _tensor_cycles(tile: ChainTile, shape: ConvShape, device: Device, precision: str) -> float:
    """Of the tensor cores of the busiest multiprocessor: the limit where their rate is low."""
    work = plan(tile, as_chain(shape))
    multiplied = 3 if precision == "fp32" else 1
    peak = min(device.tf32_peak, _MMA_PEAK) * shape.element.k_step / 8
    rounds = -(-work.clusters * tile.cluster_n // device.multiprocessors)
    return rounds * tile.block_m * work.stages[0].n * shape.k * multiplied / peak


__all__ = ["WEIGHTS", "predict_us", "terms"]
