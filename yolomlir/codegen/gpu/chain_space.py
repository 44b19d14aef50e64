"""Which tiles of a chain are worth considering, and a rough time of each to choose by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from yolomlir.codegen.gpu.chain_tile import ChainShape, ChainTile, objection, plan
from yolomlir.diagnostics import UnsupportedError
from yolomlir.target import Target

_RECTANGLES = ((16, 4), (32, 4), (32, 2), (64, 8), (64, 4), (128, 8), (128, 4), (256, 16), (256, 8))
"""block_m and rows worth considering."""
_RINGS = ((8, 2), (8, 4), (16, 2), (16, 4), (16, 12), (32, 3))
"""step_kib and slots worth considering where the input comes as a window."""


def tile_space(shape: ChainShape, target: Target, precision: str) -> Iterator[ChainTile]:
    """Every candidate worth considering, all legal, in a fixed order."""
    for block_m in (16, 32, 64, 128, 256) if not shape.inner else ():
        for cluster_n in (1, 2, 4, 8):
            for warps in (4, 8, 16):
                for step_kib in (8, 16, 32):
                    for slots in (2, 3, 4, 6, 8, 12):
                        tile = ChainTile(block_m, cluster_n, warps, step_kib, slots)
                        if objection(tile, shape, target, precision) is None:
                            yield tile
    if shape.first.taps > 1:
        yield from window_space(shape, target, precision)


def window_space(shape: ChainShape, target: Target, precision: str) -> Iterator[ChainTile]:
    """The candidates of a window: its size leaves fewer choices than loading by steps."""
    for (block_m, rows), cluster_n, warps in product(_RECTANGLES, (1, 2, 4), (4, 8, 16)):
        for step_kib, slots in _RINGS:
            tile = ChainTile(block_m, cluster_n, warps, step_kib, slots, rows)
            if objection(tile, shape, target, precision) is None:
                yield tile


# ---- a choice with no measurements --------------------------------------------------------------

_CLOCK_HZ = 1.7e9
_PORT_BYTES_PER_CYCLE = 48.0
"""Bytes a cycle from L2 to one SM, as its copies reach."""
_L2_BYTES_PER_CYCLE = 25.0
"""The same for each SM when all of them copy."""
_START = 1500.0
"""Cycles from the launch to the first product: indices, first bytes from L2."""
_STEP = 80.0
"""Cycles of a step for its wait, barrier and first `ldmatrix`."""
_EPILOGUE = 350.0
"""Cycles of a stage's epilogue but for its arithmetic: two barriers, partial sums, stores."""
_DEPTHWISE = 900.0
"""Cycles of a depthwise first stage but for its arithmetic: its inputs come from L2."""
_CLUSTER_START = 500.0
_EXCHANGE = 350.0
"""Cycles of a cluster's barrier after a stage, with its remote stores."""
_ALONE = 600.0
"""Cycles that a block loses which does not fit beside one of the kernel before or after: none of
its weights arrive before that one ends."""
_MMA_SYNC_PEAK = 640.0
"""Multiply-adds of TF32 a cycle and SM that `mma.sync` reaches where WGMMA is faster (sm_90); of
float16 it reaches twice as many, as everywhere."""


def estimate_us(tile: ChainTile, shape: ChainShape, target: Target, precision: str) -> float:
    """A rough time of the kernel alone, microseconds, to rank tiles before any measurement."""
    p = plan(tile, shape)
    blocks = p.clusters * tile.cluster_n
    registers = 128 if p.threads <= 256 else 96
    together = min(
        target.shared_memory_per_sm_bytes // (p.shared_bytes + 1024),
        target.threads_per_sm // p.threads,
        target.registers_per_sm // (registers * p.threads),
        -(-blocks // target.multiprocessors),
    )
    if together < 1:
        return float("inf")
    busy = min(blocks, target.multiprocessors)
    waves = -(-blocks // (target.multiprocessors * together))
    sharing = min(blocks, target.multiprocessors * together) / busy
    port = min(_PORT_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE * target.multiprocessors / busy)
    peak = min(target.tf32_tflops * 1e12 / 2 / target.multiprocessors / _CLOCK_HZ, _MMA_SYNC_PEAK)
    products = 3 if precision == "fp32" else 1
    bytes_, k_step = shape.element.bytes, shape.element.k_step
    copied, worked = 0.0, _START + (_CLUSTER_START if tile.cluster_n > 1 else 0.0)
    ahead = sum(p.ring) * bytes_
    if p.window is not None:  # no product begins before all of it is there
        worked += bytes_ * p.window.loaded * sharing / port
    for index, (stage, (k, _)) in enumerate(zip(p.stages, shape.sizes(), strict=True)):
        elements = stage.m * stage.n / p.threads
        queue = max(1.0, sharing * tile.warps / 8)
        exchange = _EXCHANGE if tile.cluster_n > 1 and index < len(shape.later) else 0.0
        if not stage.steps:
            latency = _DEPTHWISE if p.window is None else _EPILOGUE
            worked += latency + elements * k * 4 * queue + exchange
            continue
        rows = p.loaded_rows(index)
        copied += bytes_ * k * (rows + stage.n)
        r, c = stage.m // 16 // stage.warps_m, stage.n // 8 // stage.warps_n
        count = -(-k // (k_step * stage.warps_k))
        used = stage.warps_m * stage.warps_n * stage.warps_k
        issue = count * (3 * r + 2 * c + 2 * r * c * products) * max(2.5, sharing * used / 4)
        issue = max(issue, count * products * (18 if r * c < 4 else 5 * r * c))
        tensor = sharing * stage.m * stage.n * k * products / (peak * k_step / 8)
        epilogue = _EPILOGUE + elements * (14 + 2 * stage.warps_k) * queue
        waits = 1 if p.resident else stage.steps
        worked += max(issue, tensor) + waits * _STEP + epilogue + exchange
    streamed = max(0.0, copied - ahead) * sharing / port
    first = min(copied, ahead) * sharing / port / 2  # half of it while the kernel before still runs
    cycles = max(worked, _START + first + streamed) + 0.3 * min(worked, streamed)
    if 2 * (p.shared_bytes + 1024) > target.shared_memory_per_sm_bytes:
        cycles += _ALONE
    return waves * cycles / _CLOCK_HZ * 1e6


def likely_tiles(
    shape: ChainShape, target: Target, precision: str, count: int = 160
) -> list[ChainTile]:
    """The tiles of the least estimates, the best first; at most a few of one size and cluster.

    Of tiles that make the same kernel, as steps of 16 and 32 KiB do where no stage has a step of
    more than 16, the first.
    """
    tiles = list(tile_space(shape, target, precision))
    tiles.sort(key=lambda t: estimate_us(t, shape, target, precision))
    turns: dict[tuple[int, ...], int] = {}
    order: list[tuple[int, int]] = []
    seen = set()
    for rank, tile in enumerate(tiles):
        size = (tile.block_m, tile.cluster_n, tile.warps, tile.rows)
        work = plan(tile, shape)
        kernel = (size, work.ring, work.stages)
        if kernel in seen:
            continue
        seen.add(kernel)
        turns[size] = turns.get(size, 0) + 1
        order.append((turns[size] // 4, rank))
    return [tiles[rank] for _, rank in sorted(order)[:count]]


@lru_cache(maxsize=1024)
def default_tile(shape: ChainShape, target: Target, precision: str) -> ChainTile:
    """The legal tile of the least estimate, the first among equals.

    Raises UnsupportedError where no tile is legal.
    """
    tiles = tile_space(shape, target, precision)
    best = min(tiles, key=lambda t: estimate_us(t, shape, target, precision), default=None)
    if best is None:
        raise UnsupportedError(
            f"no chain tile fits {shape} on {target.name}",
            hint="optimisation level 2 makes no chains",
        )
    return best


__all__ = ["default_tile", "estimate_us", "likely_tiles", "tile_space", "window_space"]
