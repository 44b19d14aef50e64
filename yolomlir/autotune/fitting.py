"""Fitting the cost model to measurements, and how good its predictions are.

Constants first, by their physics; then the factors, by what is left over within a function; then
the correction, by what is left over after those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from yolomlir.autotune import cost_model
from yolomlir.autotune.correction import fit_correction
from yolomlir.autotune.cost_model import (
    DEFAULT,
    Constants,
    Device,
    Features,
    Floats,
    correction_columns,
    predict_us,
)


@dataclass(frozen=True)
class Measured:
    """Measurements of one function: features, microseconds a row, and a name for its shape, which
    functions with other epilogues may have, too."""

    name: str
    features: Features
    us: Floats


def fit(
    data: Sequence[Measured], device: Device, start: Constants = DEFAULT, *, rounds: int = 40
) -> Constants:
    """Constants that minimise the squared error of the logarithm of time.

    First the positive ones; then the factors, by what is left within each function; then the
    positive ones again, beside these factors; at last the correction, where there are enough
    functions to learn one from.
    """
    found = _fit_positive(data, device, replace(start, correction=None), rounds)
    found = _fit_factors(data, device, found)
    found = _fit_positive(data, device, found, rounds)
    return _with_correction(data, device, found)


def _with_correction(data: Sequence[Measured], device: Device, constants: Constants) -> Constants:
    """Trees for what is left within each function. A row counts the less the slower it is: only
    the order of the fast ones decides anything."""
    if len(data) < _FEWEST_FUNCTIONS:
        return constants
    features = Features.concatenate([d.features for d in data])
    us = np.concatenate([d.us for d in data])
    fastest = np.concatenate([np.full(len(d.us), d.us.min()) for d in data])
    groups = np.repeat(np.arange(len(data)), [len(d.us) for d in data])
    columns = correction_columns(features, device, constants)
    rest = np.clip(np.log(us / predict_us(features, device, constants)), -_CLIP, _CLIP)
    weight = (fastest / us) ** _FAST
    return replace(constants, correction=fit_correction(columns, rest, groups, weight))


_FEWEST_FUNCTIONS = 20
"""Fewer would be learnt by heart."""
_FAST = 3
"""A row twice as slow as its function's fastest counts an eighth."""


def _fit_factors(data: Sequence[Measured], device: Device, constants: Constants) -> Constants:
    """Ridge regression of the residuals, each function's about their mean: factors order the tiles
    of a function and leave its level to the rest of the model."""
    rows, left = [], []
    for item in data:
        columns = cost_model.factor_columns(item.features, device)
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


def _jacobian(function: Callable[[Floats], Floats], x: Floats, at: Floats) -> Floats:
    """Differences over 2 %: the model has steps (waves, queues) that a smaller one would miss."""
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += 0.02
        columns.append((function(moved) - at) / 0.02)
    return np.stack(columns, axis=1)


# ---- how good it is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """Of predictions for shapes that the fit has not seen.

    functions: measured ones; several may have one shape. spearman: rank correlation over all rows.
    within: the median over functions of the rank correlation within a function. error: median of
    |log(predicted / measured)|. hits: share of functions of whose best `top` predictions one is
    within 5 % of the fastest measured.
    """

    shapes: int
    functions: int
    rows: int
    spearman: float
    within: float
    error: float
    hits: float
    top: int

    def __str__(self) -> str:
        return (
            f"{self.shapes} held-out shapes ({self.functions} functions, {self.rows} points): "
            f"Spearman {self.spearman:.3f} (within a function, median: {self.within:.3f}), median "
            f"error {100 * (np.exp(self.error) - 1):.0f} %, best {self.top} predictions within 5 % "
            f"of the best for {100 * self.hits:.0f} % of the functions"
        )


def held_out_quality(
    data: Sequence[Measured],
    device: Device,
    *,
    folds: int = 5,
    top: int = 8,
    start: Constants = DEFAULT,
) -> Quality:
    """Fit without a fifth of the shapes, predict those, and so on for each fifth.

    All functions of a shape are held out together.
    """
    names = sorted({d.name for d in data})
    predictions: list[tuple[Measured, Floats]] = []
    for fold in range(min(folds, len(names))):
        out = set(names[fold::folds])
        seen = [d for d in data if d.name not in out]
        constants = fit(seen, device, start) if seen else start
        held = [d for d in data if d.name in out]
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
        len({d.name for d, _ in predictions}),
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
