"""What the cost model's picture misses, learnt from measurements: a factor of the predicted time.

A sum of small trees over properties that follow from the model itself (how full the last wave is,
which of copies, products and issue limits a step, how deep the pipeline is, …), so that it means
the same on a GPU of another size. Each tree asks a few yes-or-no questions, the same in each of its
branches, and gives a logarithm for each combination of answers. Unlike a line, it says of a tile
that is unlike all measured ones no more than of the nearest measured ones.

Trees are grown one after the other on what the earlier ones leave over (gradient boosting), each
with a fraction of its step. Rows are compared within their function only: how fast functions are
relative to each other is the model's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TREES = 200
_DEPTH = 4
_SHARE = 0.15
"""Of its step that a tree takes: small, so that no tree alone decides."""
_RIDGE = 5.0
"""Leaves are drawn to 0 as if so many rows more said so for each."""
_BINS = 24
"""Thresholds considered a column, at most."""
_CACHED = 1 << 14
"""Rows times columns that are counted at once: few large counts are faster, while caches hold
them."""
_MOST = 0.6
"""The sum never moves a time by more than a factor of e to this, 1.8."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Trees over columns. names: the columns, in the order of their numbers in `questions`.

    questions: a column's number for each tree and level. thresholds: the answer is whether the
    column's value is above. values: a logarithm for each tree and combination of answers, the first
    level's answer being the highest bit. offset: added to the sum.
    """

    names: tuple[str, ...]
    questions: NDArray[np.int64]
    thresholds: Floats
    values: Floats
    offset: float = 0.0

    def log_factor(self, columns: dict[str, Floats]) -> Floats:
        """The logarithm of the factor of each row."""
        table = [np.ascontiguousarray(columns[name], np.float64) for name in self.names]
        total = np.full(len(table[0]), self.offset)
        leaf = np.empty(len(total), np.intp)
        for columns_, limits, values in zip(
            self.questions, self.thresholds, self.values, strict=True
        ):
            leaf[:] = 0
            for column, limit in zip(columns_, limits, strict=True):
                leaf <<= 1
                leaf |= table[column] > limit
            total += values[leaf]
        bounded: Floats = np.clip(total, -_MOST, _MOST)
        return bounded

    def as_json(self) -> dict[str, Any]:
        """As plain lists: names, then a row a tree of its columns, thresholds and values."""
        trees = [
            [q.tolist(), [_short(v) for v in t], [_short(v, 4) for v in values]]
            for q, t, values in zip(self.questions, self.thresholds, self.values, strict=True)
        ]
        return {"columns": list(self.names), "offset": _short(self.offset), "trees": trees}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Correction:
        """The inverse. Raises KeyError or ValueError where the data have another form."""
        questions, thresholds, values = zip(*data["trees"], strict=True)
        return Correction(
            tuple(str(name) for name in data["columns"]),
            np.array(questions, np.int64),
            np.array(thresholds, np.float64),
            np.array(values, np.float64),
            float(data["offset"]),
        )


def _short(value: float, digits: int = 7) -> float:
    return float(f"{value:.{digits}g}")


def fit_correction(
    columns: dict[str, Floats], rest: Floats, groups: NDArray[np.int64], weight: Floats
) -> Correction:
    """Trees for what is left over.

    columns: a value a row each. rest: logarithms of measured over predicted time. groups: numbers
    of the rows' functions from 0 on. weight: of the rows, about 1.
    """
    names = tuple(columns)
    edges = [_edges(columns[name]) for name in names]
    grower = _Grower(names, columns, edges, weight)
    left = _centred(rest, groups, weight)
    questions, thresholds, values = [], [], []
    for _ in range(_TREES):
        asked, leaf, value = grower.tree(left)
        questions.append([column for column, _ in asked])
        thresholds.append([float(edges[column][place]) for column, place in asked])
        values.append(_SHARE * value)
        left = _centred(left - values[-1][leaf], groups, weight)
    found = Correction(names, np.array(questions), np.array(thresholds), np.array(values))
    mean = float(np.average(found.log_factor(columns), weights=weight))
    return Correction(names, found.questions, found.thresholds, found.values, -mean)


def _edges(column: Floats) -> Floats:
    """Thresholds between the values of a column; at least one."""
    values = np.unique(column)
    if len(values) > _BINS:
        values = np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)))
    return (values[1:] + values[:-1]) / 2 if len(values) > 1 else values


def _centred(values: Floats, groups: NDArray[np.int64], weight: Floats) -> Floats:
    """About the mean of each group."""
    mean = np.bincount(groups, weight * values) / np.bincount(groups, weight)
    return values - mean[groups]


class _Grower:
    """Grows one tree after the other over the same rows."""

    def __init__(
        self,
        names: tuple[str, ...],
        columns: dict[str, Floats],
        edges: list[Floats],
        weight: Floats,
    ) -> None:
        self._weight = weight
        self._at_once = max(1, _CACHED // len(weight))
        self._weights = np.tile(weight, self._at_once)
        self._width = max(len(e) for e in edges) + 1
        # The bin of every row in every column: above how many thresholds it is.
        self._bins = np.stack(
            [
                np.searchsorted(e, columns[name], side="left")
                for name, e in zip(names, edges, strict=True)
            ]
        )
        self._usable = np.stack([np.arange(self._width) < len(e) for e in edges])

    def tree(self, left: Floats) -> tuple[list[tuple[int, int]], NDArray[np.intp], Floats]:
        """Questions (column, threshold), the leaf of each row, and the leaves' values."""
        leaf = np.zeros(len(left), np.intp)
        pull = self._weight * left
        pulls = np.tile(pull, self._at_once)
        asked = []
        for level in range(_DEPTH):
            gains = np.concatenate(
                [
                    self._gains(leaf, 1 << level, pulls, slice(first, first + self._at_once))
                    for first in range(0, len(self._bins), self._at_once)
                ]
            )
            column, place = divmod(int(np.argmax(gains)), self._width)  # the first of equal ones
            asked.append((column, place))
            leaf = 2 * leaf + (self._bins[column] > place)
        size = 1 << _DEPTH
        weight = np.bincount(leaf, self._weight, size)
        return asked, leaf, np.bincount(leaf, pull, size) / (weight + _RIDGE)

    def _gains(self, leaf: NDArray[np.intp], leaves: int, pulls: Floats, chosen: slice) -> Floats:
        """How much of the squares each threshold of some columns explains, all leaves together."""
        bins = self._bins[chosen]
        shape = (len(bins), leaves, self._width)
        first = np.arange(len(bins))[:, None] * (leaves * self._width)
        cell = (bins + leaf * self._width + first).ravel()
        size = shape[0] * shape[1] * shape[2]
        weight = np.bincount(cell, self._weights[: len(cell)], size).reshape(shape).cumsum(axis=2)
        below = np.bincount(cell, pulls[: len(cell)], size).reshape(shape).cumsum(axis=2)
        above, rest = below[..., -1:] - below, weight[..., -1:] - weight
        gain = below**2 / (weight + _RIDGE) + above**2 / (rest + _RIDGE)
        return np.where(self._usable[chosen], gain.sum(axis=1), -np.inf)


__all__ = ["Correction", "fit_correction"]
