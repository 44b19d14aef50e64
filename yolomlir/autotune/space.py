"""What can be chosen for a dispatch: tiles, by kernel family, each with a stable textual key."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from yolomlir.autotune import untuned, window_model
from yolomlir.autotune.cost_model import DEFAULT, Constants, Device, Features, predict_us
from yolomlir.bindings import ir
from yolomlir.codegen.gpu import chain_tile, conv2d_kinds, conv2d_space
from yolomlir.codegen.gpu.chain_tile import ChainTile
from yolomlir.codegen.gpu.conv2d_kinds import Conv2dTile
from yolomlir.codegen.gpu.conv2d_space import ConvTiles
from yolomlir.codegen.gpu.conv2d_tile import SHARERS, ConvTile, block_ks
from yolomlir.codegen.gpu.conv_problem import ConvShape, match_conv
from yolomlir.codegen.gpu.epilogue import Epilogue
from yolomlir.codegen.gpu.tile import carveout_objection, plain, stated_options
from yolomlir.diagnostics import UnsupportedError, UserError
from yolomlir.dialects import yolo
from yolomlir.target import Target

SPACE_VERSION = 1
"""Of the options of the tiles and what they mean; measurements of another one do not count."""

Tile = Any
"""A family's dataclass of integers and flags, such as `ConvTile`."""

_MODULES = {"depthwise": "DepthwiseTile", "max_pool": "MaxPoolTile", "attention": "AttentionTile",
            "detect": "DetectTile", "merge_detections": "MergeTile",
            "chain": "ChainTile"}  # fmt: skip
_IN_BULK = 128
"""Of the most promising tiles so many are considered with weights by bulk copies as well."""
_CHAINS_IN_BULK = 4
"""The same of chains and windows: the search finds more of them beside what is fast."""
_VARIETY = 3
"""Candidates of one block size among the first ones: the model may be wrong about all of them."""
_OPENING, _OF_KIND = 10, 2
"""Of so many first tiles of a convolution at least so many are of either kind."""


@dataclass(frozen=True)
class Problem:
    """A dispatch to be tuned. shape: of the family's own kind, hashable (`ConvShape`, …)."""

    family: str
    shape: Any
    target: Target
    precision: str


def problem_of(function: ir.Operation, target: Target, precision: str) -> Problem:
    """Of a dispatch function at the linalg level. Raises UnsupportedError for other forms."""
    family = yolo.string(function, "yolo.family")
    if family == "conv2d":
        return Problem(family, match_conv(function, precision=precision).shape, target, precision)
    if family not in _MODULES:
        raise UnsupportedError(f"no tiles are known for family '{family}'")
    shape = _module(family).parse(function)
    if family == "depthwise":  # the tile does not depend on the epilogue, which holds IR
        shape = dataclasses.replace(shape, epilogue=Epilogue(None))
    return Problem(family, shape, target, precision)


# ---- keys ---------------------------------------------------------------------------------------


def key_of(tile: Tile) -> str:
    """`block_m=64,block_n=32,…`: the options in the order of the tile's fields, without those that
    came later (`later_option`) and have their default."""
    return ",".join(f"{name}={int(value)}" for name, value in stated_options(tile).items())


def tile_of(family: str, key: str) -> Tile:
    """The inverse; options that are not named have their defaults.

    Raises UserError for a key of another family or version.
    """
    kind = _tile_kind(family, [item.partition("=")[0] for item in key.split(",")])
    types = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    try:
        for item in key.split(","):
            name, _, text = item.partition("=")
            flag = str(types[name].type) == "bool"
            values[name] = bool(int(text)) if flag else int(text)
        return kind(**values)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"'{key}' is not a tile of family '{family}'", hint=f"options: {', '.join(types)}"
        ) from error


def tile_in(family: str, tile: ir.Attribute) -> Tile:
    """Of a `yolo.tile` dictionary. Raises UserError for one of another family or version."""
    options = (f"{option.name}={int(option.attr.value)}" for option in ir.DictAttr(tile))
    return tile_of(family, ",".join(options))


def attribute(tile: Tile) -> ir.Attribute:
    """The `yolo.tile` dictionary of a tile, in the current context."""
    return conv2d_kinds.attribute_of(tile)


def illegal(problem: Problem, tile: Tile) -> str | None:
    """Why no kernel can be made of a tile; None where it can, as far as that is known."""
    options = [field.name for field in dataclasses.fields(tile)]
    if not isinstance(tile, _tile_kind(problem.family, options)):
        return f"is a tile of another family than '{problem.family}'"
    if problem.family == "conv2d":
        return conv2d_kinds.objection(tile, problem.shape, problem.target, problem.precision)
    if isinstance(tile, ChainTile):
        return chain_tile.objection(tile, problem.shape, problem.target, problem.precision)
    if (reason := carveout_objection(tile)) is not None:
        return reason
    return None if plain(tile) in _listed(problem) else "is not one of the family's tiles"


# ---- launches -----------------------------------------------------------------------------------


def with_carveout(tile: Tile, percent: int) -> Tile:
    """The tile of the same kernel, with another `carveout`."""
    return dataclasses.replace(tile, carveout=percent)


def released_otherwise(tile: Tile) -> Tile | None:
    """The tile that releases dependents at the other of two times; None where there is one only."""
    if not hasattr(tile, "release_early"):
        return None
    return dataclasses.replace(tile, release_early=not tile.release_early)


def siblings(problem: Problem, tile: Tile) -> list[Tile]:
    """The tiles that divide the work as this one does, but release dependents at the other time,
    or bring weights the other way, or both: only what runs beside a kernel tells which is best."""
    released = released_otherwise(tile)
    found = [] if released is None else [released]
    if isinstance(tile, ChainTile):
        found += [t for each in (tile, *found) for t in _brought(problem, each, 1 - tile.bulk)]
    return found


# ---- candidates ---------------------------------------------------------------------------------


def default(problem: Problem) -> Tile:
    """The tile that is taken without measurements. Raises UnsupportedError where none is legal."""
    family, shape, target = problem.family, problem.shape, problem.target
    if family == "conv2d":
        return untuned.default_tile(shape, target, problem.precision)
    choose: Callable[..., Tile] = _module(family).default_tile
    if family in ("attention", "chain"):
        return choose(shape, target, problem.precision)
    return choose(shape, target)


@lru_cache(maxsize=512)
def ranked(problem: Problem, constants: Constants = DEFAULT, count: int = 512) -> tuple[Tile, ...]:
    """The most promising tiles first: by the cost model for convolutions, else in a fixed order.

    Few tiles of one block size come among the first: the model may be wrong about all of them.
    """
    if problem.family != "conv2d":
        return _listed(problem)[:count]
    timed = [*_gathered(problem, constants, count), *_windows(problem)]
    timed.sort(key=lambda item: item[0])
    return tuple(_each_kind(_varied(timed[: 2 * count])[:count], timed))


def _gathered(problem: Problem, constants: Constants, count: int) -> list[tuple[float, Conv2dTile]]:
    """The tiles that gather rows of K which the cost model says are fastest, and their times."""
    shape: ConvShape = problem.shape
    device, precision = Device.of(problem.target), problem.precision
    tiles = conv2d_space.pipelines(conv2d_space.geometries(shape, problem.target))
    tiles = tiles.where(conv2d_space.legal(tiles, problem.target, precision))
    if not len(tiles):
        return []
    us = predict_us(Features.of(tiles, precision), device, constants)
    tiles = tiles.where(np.argsort(us, kind="stable")[:count])
    tiles, us = untuned.with_flags(tiles, problem.target, precision, constants)
    first = tiles.where(np.argsort(us, kind="stable")[:_IN_BULK])
    first = conv2d_space.in_bulk(first, problem.target, precision)
    first = first.where(first.cluster_m > 0)
    if len(first):
        tiles = ConvTiles.concatenate([tiles, first])
        us = np.append(us, predict_us(Features.of(first, precision), device, constants))
    order = [int(row) for row in np.argsort(us, kind="stable")[: 2 * count]]
    return [(float(us[row]), tiles.tile(row)) for row in order]


def _windows(problem: Problem) -> list[tuple[float, Conv2dTile]]:
    """Every window and its predicted time."""
    shape, target, precision = problem.shape, problem.target, problem.precision
    tiles = conv2d_kinds.window_tiles(shape, target, precision)
    us = window_model.predict_us(tiles, shape, target, precision)
    return list(zip(us, tiles, strict=True))


@lru_cache(maxsize=512)
def ranked_keys(problem: Problem, constants: Constants = DEFAULT) -> tuple[str, ...]:
    """Their keys."""
    return tuple(key_of(tile) for tile in ranked(problem, constants))


def _varied(timed: list[tuple[float, Conv2dTile]]) -> list[Conv2dTile]:
    """Tiles in their order, but of each block size at most `_VARIETY` in each turn."""
    turns: dict[int, list[Conv2dTile]] = {}
    seen: dict[tuple[int, ...], int] = {}
    for _, tile in timed:
        block = conv2d_kinds.block_of(tile)
        turn = seen.get(block, 0)
        seen[block] = turn + 1
        turns.setdefault(turn // _VARIETY, []).append(tile)
    return [tile for turn in sorted(turns) for tile in turns[turn]]


def _each_kind(tiles: list[Conv2dTile], timed: list[tuple[float, Conv2dTile]]) -> list[Conv2dTile]:
    """The first `_OPENING` with the best few of either kind, behind what is better: the models of
    the kinds are more often right about an order within one than between them."""
    missing: list[Conv2dTile] = []
    for kind in (ConvTile, ChainTile):
        best = [tile for _, tile in timed if isinstance(tile, kind)][:_OF_KIND]
        missing += [tile for tile in best if tile not in tiles[:_OPENING]]
    kept = tiles[: max(0, _OPENING - len(missing))]
    return list(dict.fromkeys([*kept, *missing, *tiles]))[: len(tiles)]


def predicted_us(
    problem: Problem, tiles: list[Tile], constants: Constants = DEFAULT
) -> list[float]:
    """The model's time of each tile of a convolution, microseconds."""
    shape, target, precision = problem.shape, problem.target, problem.precision
    return untuned.predict_us(tiles, shape, target, precision, constants)


def neighbours(problem: Problem, tile: Tile) -> list[Tile]:
    """Legal tiles that differ from one in one option or two, in a fixed order."""
    if isinstance(tile, ChainTile):
        return list(_near_chains(problem, tile))
    if problem.family != "conv2d":
        return list(_listed(problem))
    changed = dict.fromkeys(_changes(tile, block_ks(problem.shape.element)))
    return [t for t in changed if t != tile and illegal(problem, t) is None]


def _near_chains(problem: Problem, tile: ChainTile) -> Iterator[ChainTile]:
    """First the same tile with its weights brought in the other way, then others that bring them
    as this one does: of a window those near it, of a chain all that are listed."""
    yield from _brought(problem, tile, 1 - tile.bulk)
    if problem.family == "conv2d":
        windows = conv2d_kinds.window_tiles(problem.shape, problem.target, problem.precision)
        others = [t for t in windows if _differing(t, tile) <= 2 + tile.bulk]
    else:
        others = [t for t in _listed(problem) if not t.bulk]
    for other in others:
        yield from (t for t in _brought(problem, other, tile.bulk) if t != tile)


def _brought(problem: Problem, tile: ChainTile, bulk: int) -> list[ChainTile]:
    """The tile with weights by bulk copies, or without; none where that is not legal."""
    other = dataclasses.replace(tile, bulk=bulk)
    return [other] if illegal(problem, other) is None else []


def _differing(one: Tile, other: Tile) -> int:
    """Options that two tiles of a kind do not share."""
    fields = dataclasses.fields(one)
    return sum(getattr(one, f.name) != getattr(other, f.name) for f in fields)


def _changes(tile: ConvTile, depths: tuple[int, ...]) -> Iterator[ConvTile]:
    def change(**options: Any) -> ConvTile:
        return dataclasses.replace(tile, **options)

    for name in conv2d_space.FLAGS:
        yield change(**{name: not getattr(tile, name)})
    for stages in _around(conv2d_space.DEPTHS, tile.stages):
        yield change(stages=stages)
    for block_k in _around(depths, tile.block_k):
        yield change(block_k=block_k)
        yield change(block_k=block_k, stages=max(2, tile.stages * tile.block_k // block_k))
    for name in ("warps_m", "warps_n", "warps_k", "cluster_k"):
        for value in (getattr(tile, name) * 2, getattr(tile, name) // 2):
            if value >= 1:
                yield change(**{name: value})
    for sharers in (0, *SHARERS):
        yield change(cluster_m=sharers)
        yield change(cluster_m=sharers, stages=tile.stages + 1)
    for grown, shrunk in (("warps_k", "warps_m"), ("warps_k", "warps_n"), ("warps_m", "warps_n"),
                          ("warps_m", "warps_k"), ("warps_n", "warps_k"), ("warps_n", "warps_m"),
                          ("cluster_k", "warps_k"), ("warps_k", "cluster_k")):  # fmt: skip
        if getattr(tile, shrunk) % 2 == 0:
            larger, smaller = 2 * getattr(tile, grown), getattr(tile, shrunk) // 2
            yield change(**{grown: larger, shrunk: smaller})
    for name, warps in (("block_m", "warps_m"), ("block_n", "warps_n")):
        for size in (2 * getattr(tile, name), getattr(tile, name) // 2):
            yield change(**{name: size})
            count = max(1, getattr(tile, warps) * size // getattr(tile, name))
            yield change(**{name: size, warps: count})


def _around(values: tuple[int, ...], value: int) -> list[int]:
    """The next smaller and the next larger one."""
    smaller = [v for v in values if v < value]
    larger = [v for v in values if v > value]
    return smaller[-1:] + larger[:1]


def sample(problem: Problem, count: int, seed: str) -> list[Tile]:
    """Legal tiles at random, the same for the same seed: they show where the model is wrong."""
    generator = random.Random(seed)
    if problem.family != "conv2d":
        listed = list(_listed(problem))
        return generator.sample(listed, min(count, len(listed)))
    pool = list(ranked(problem))
    return generator.sample(pool, min(count, len(pool)))


# ---- the small families: every tile -------------------------------------------------------------


@lru_cache(maxsize=512)
def _listed(problem: Problem) -> tuple[Tile, ...]:
    usual = default(problem)
    kind = type(usual)
    module, target = _module(problem.family), problem.target
    tiles: list[Tile]
    if problem.family == "chain":
        tiles = module.likely_tiles(problem.shape, target, problem.precision)
        first = [t for tile in tiles[:_CHAINS_IN_BULK] for t in (tile, *_brought(problem, tile, 1))]
        tiles = [*first, *tiles[_CHAINS_IN_BULK:]]
    elif problem.family == "depthwise":
        width = problem.shape.shape.out_width
        sizes = [p for p in (1, 2, 4, 8) if p <= width]
        tiles = [kind(p, threads) for p in sizes for threads in (32, 64, 128, 256, 512)]
    elif problem.family == "max_pool":
        tiles = _pool_tiles(problem, kind)
        limit = target.shared_memory_bytes
        tiles = [t for t in tiles if module.shared_bytes(problem.shape, t) <= limit]
    elif problem.family == "merge_detections":
        tiles = module.tiles(problem.shape, target)
    elif problem.family == "attention":
        tiles = module.tiles(problem.shape, target, problem.precision)
        limit = target.shared_memory_bytes
        tiles = [t for t in tiles if module.shared_bytes(problem.shape, t) <= limit]
    else:
        threads = (512, 640, 768, 1024)
        tiles = [kind(count, lanes) for count in threads for lanes in (1, 2, 4, 8, 16)]
    return tuple(dict.fromkeys([usual, *tiles]))


def _pool_tiles(problem: Problem, kind: Any) -> list[Tile]:
    pool = problem.shape
    tiles = []
    for parts in range(1, max(pool.out_height, pool.out_width) + 1):
        rows, columns = -(-pool.out_height // parts), -(-pool.out_width // parts)
        if parts <= 5:
            tiles += [kind(rows, columns, c, t) for c in (4, 8, 16) for t in (128, 256)]
    return [t for t in tiles if pool.channels % t.channels == 0 and t.channels % pool.vector == 0]


def _module(family: str) -> Any:
    return importlib.import_module(f"yolomlir.codegen.gpu.{family}")


def _tile_kind(family: str, options: Collection[str]) -> type[Any]:
    if family == "conv2d":
        return conv2d_kinds.kind_named(options)
    if family not in _MODULES:
        raise UserError(f"no tiles are known for family '{family}'")
    return cast("type[Any]", getattr(_module(family), _MODULES[family]))
