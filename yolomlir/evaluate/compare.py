"""Two runs of a network, layer by layer: which is the first that leaves its derived tolerance?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.detections import DetectionMatch, match_detections
from yolomlir.evaluate.graph import Graph, Node
from yolomlir.evaluate.subjects import Run, Subject
from yolomlir.evaluate.tolerance import DEVIATIONS, exact_reference, local_errors

Array = NDArray[Any]
EDGES = (0.0, 1e-3, 1e-2, 1e-1, 0.5, 1.0, 2.0, 10.0, 100.0, np.inf)
"""Edges of the histogram's bins: error divided by tolerance."""


@dataclass(frozen=True)
class LayerComparison:
    """One layer of two runs.

    An element's error is the difference of what the layer itself added in each run: the run's value
    less float64's on the run's own inputs to the layer. Of layers that a run computes in one kernel
    and keeps on the chip, the error and its tolerance are in those of the next one that it stores.
    worst, tolerance, first, second, index: of
    the element whose error is the largest relative to its tolerance (`ratio`); index is n, c, h, w.
    difference: the largest of the plain differences of the values, which earlier layers add to.
    rms_ratio: the root mean square of error by tolerance. histogram: elements by it, see `EDGES`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    difference: float
    worst: float
    ratio: float
    rms_ratio: float
    index: tuple[int, ...]
    first: float
    second: float
    tolerance: float
    histogram: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """Whether every element is within its tolerance."""
        return self.ratio <= 1


@dataclass(frozen=True)
class Comparison:
    """Two runs of a network on the same images.

    layers: in the network's order; none unless asked for. detections: of scores from `confidence`
    up. box_tolerance_px, score_tolerance: derived, for pairs of detections.
    """

    first: str
    second: str
    layers: tuple[LayerComparison, ...]
    detections: DetectionMatch
    confidence: float
    box_tolerance_px: float
    score_tolerance: float

    @property
    def culprit(self) -> LayerComparison | None:
        """The first layer that leaves its tolerance."""
        return next((layer for layer in self.layers if not layer.agrees), None)

    @property
    def agrees(self) -> bool:
        """Whether all layers and all detections are within their tolerances."""
        within = self.detections.within(self.box_tolerance_px, self.score_tolerance)
        return within and self.culprit is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "compare",
            "first": self.first,
            "second": self.second,
            "agrees": self.agrees,
            "first_layer_out_of_tolerance": self.culprit.name if self.culprit else None,
            "confidence": self.confidence,
            "box_tolerance_px": self.box_tolerance_px,
            "score_tolerance": self.score_tolerance,
            "detections": {**asdict(self.detections), "changed": self.detections.changed},
            "histogram_edges": list(map(str, EDGES)),
            "layers": [asdict(layer) for layer in self.layers],
        }


def compare(
    first: Subject,
    second: Subject | None,
    graph: Graph,
    images: NDArray[np.uint8],
    *,
    layers: bool = True,
    confidence: float = 0.25,
) -> Comparison:
    """Run both on images [N, H, W, 3]; second: None takes the exact reference.

    graph: the network with the weights that count as right, which a layer's error is relative to.
    Raises UserError where the runs have no layer in common.
    """
    one = first.run(images, layers)
    max_det = one.rows.shape[1]
    pixels = images.transpose(0, 3, 1, 2)
    exact = exact_reference(graph, pixels, one.precision or "fp32", max_det=max_det)
    references = [exact]
    if second is None:
        two = Run("reference (float64)", None, exact.rows, exact.values)
    else:
        two = second.run(images, layers)
    if two.precision is not None:
        same = two.precision == one.precision
        references.append(
            exact if same else exact_reference(graph, pixels, two.precision, max_det=max_det)
        )
    found = tuple(_compare_layers(one, two, graph, pixels)) if layers else ()
    if layers and not found:
        raise UserError(f"{one.name} and {two.name} have no layer in common")
    box = DEVIATIONS * _hypotenuse([r.box_deviation for r in references])
    score = DEVIATIONS * _hypotenuse([r.score_deviation for r in references])
    match = match_detections(one.rows, two.rows, confidence=confidence, cut=score)
    return Comparison(one.name, two.name, found, match, confidence, box, score)


def _hypotenuse(deviations: Sequence[float]) -> float:
    """The deviation of a difference of independent errors."""
    return float(np.sqrt(sum(d**2 for d in deviations)))


def _compare_layers(
    one: Run, two: Run, graph: Graph, pixels: NDArray[np.uint8]
) -> Iterator[LayerComparison]:
    """Both runs are cut at the layers that both have."""
    common = [n.name for n in graph.nodes if n.name in one.layers and n.name in two.layers]
    for name in common:
        shapes = one.layers[name].shape, two.layers[name].shape
        if shapes[0] != shapes[1]:
            raise UserError(f"shapes differ: {shapes[0]} and {shapes[1]}", where=name)
    firsts = local_errors(graph, pixels, one.precision or "fp32", _only(one, common))
    if two.precision is None:
        for node, local in firsts:
            yield _layer(node, one, two, local.error, local.deviation)
        return
    seconds = local_errors(graph, pixels, two.precision, _only(two, common))
    for (node, a), (_, b) in zip(firsts, seconds, strict=True):
        yield _layer(node, one, two, a.error - b.error, np.hypot(a.deviation, b.deviation))


def _only(run: Run, names: Sequence[str]) -> dict[str, Array]:
    return {name: run.layers[name] for name in names}


def _layer(node: Node, one: Run, two: Run, error: Array, deviation: Array) -> LayerComparison:
    a, b = one.layers[node.name], two.layers[node.name]
    tolerance = DEVIATIONS * deviation + np.finfo(np.float32).smallest_normal
    with np.errstate(invalid="ignore"):
        quotient = np.abs(error) / tolerance
    quotient[~np.isfinite(quotient)] = np.finfo(np.float64).max
    index = np.unravel_index(int(quotient.argmax()), quotient.shape)
    counts, _ = np.histogram(quotient, bins=EDGES)
    return LayerComparison(
        node.name,
        node.kind,
        tuple(a.shape),
        float(np.abs(a.astype(np.float64) - b).max()),
        float(np.abs(error[index])),
        float(quotient[index]),
        float(np.sqrt((np.minimum(quotient, 1e100) ** 2).mean())),
        tuple(int(i) for i in index),
        float(a[index]),
        float(b[index]),
        float(tolerance[index]),
        tuple(int(c) for c in counts),
    )
