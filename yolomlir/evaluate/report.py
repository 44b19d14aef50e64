"""The result of an evaluation: a table, JSON, detections in COCO's format, curves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.environment import environment
from yolomlir.evaluate.outputs import write_json, write_text
from yolomlir.evaluate.scoring import ClassScore

_MEANINGS = {
    "AP": "IoU .50:.95, all areas",
    "AP50": "IoU .50",
    "AP75": "IoU .75",
    "APs": "area below 32²",
    "APm": "area 32² to 96²",
    "APl": "area above 96²",
    "AR1": "at most 1 detection",
    "AR10": "at most 10 detections",
    "AR100": "at most 100 detections",
    "ARs": "area below 32²",
    "ARm": "area 32² to 96²",
    "ARl": "area above 96²",
}


@dataclass(frozen=True)
class EvaluationResult:
    """A score, and everything that is needed to believe it.

    figures: COCO's twelve by name, 0..1, -1 where there is nothing to score. detections: in COCO's
    results format, of all images. unreadable: an error a decoded image that failed; their objects
    count as missed. resumed: images taken from a journal. precision_curves: [10, 101, categories].
    """

    figures: dict[str, float]
    classes: tuple[ClassScore, ...]
    precision_curves: npt.NDArray[np.float64] = field(repr=False)
    detections: list[dict[str, Any]] = field(repr=False)
    settings: dict[str, Any]
    images: int
    unreadable: list[str]
    resumed: int
    seconds: float
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The twelve figures by name, then settings, counts, warnings and figures by class."""
        return {
            **self.figures,
            "settings": self.settings,
            "images": self.images,
            "detections": len(self.detections),
            "unreadable": self.unreadable,
            "resumed_images": self.resumed,
            "seconds": round(self.seconds, 3),
            "warnings": self.warnings,
            "classes": [
                {
                    "name": c.name,
                    "category_id": c.category_id,
                    "objects": c.objects,
                    "AP": None if math.isnan(c.ap) else c.ap,
                    "AP50": None if math.isnan(c.ap50) else c.ap50,
                }
                for c in self.classes
            ],
            "environment": environment(),
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file. Raises UserError when it cannot be written."""
        write_json(path, self.to_dict())

    def write_detections(self, path: str | os.PathLike[str]) -> None:
        """Write the detections in COCO's results format. Raises UserError as `write_json`."""
        write_text(path, json.dumps(self.detections) + "\n")

    def print(self, console: Console, *, by_class: bool = False) -> None:
        """Print settings, figures and warnings."""
        s = self.settings
        size = "x".join(map(str, s["imgsz"]))
        console.print(
            f"{s['model']} on {s['dataset']}: {self.images} images, imgsz {size} (height x width), "
            f"letterbox {s['letterbox']}, confidence > {s['confidence']}, max_det {s['max_det']}, "
            f"precision {s['precision']}, class map {s['class_map']}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if self.resumed:
            console.print(f"{self.resumed} images were taken from an interrupted run")
        table = Table(box=None)
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("of")
        for name, value in self.figures.items():
            table.add_row(name, "none" if value == -1 else f"{value:.4f}", _MEANINGS[name])
        console.print(table)
        if by_class:
            console.print(self._class_table())
        for text in [*self.unreadable, *self.warnings]:
            line = f"warning: {text}"
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def _class_table(self) -> Table:
        table = Table(box=None)
        table.add_column("class")
        for column in ("objects", "AP", "AP50"):
            table.add_column(column, justify="right")
        for c in self.classes:
            values = ["none" if math.isnan(v) else f"{v:.4f}" for v in (c.ap, c.ap50)]
            table.add_row(c.name, str(c.objects), *values)
        return table

    def plot(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Draw precision over recall, all classes and each, as PNG files in a folder.

        Raises UserError without matplotlib, and when the folder cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError(
                "plots need matplotlib, which is not installed", hint="pip install matplotlib"
            ) from error
        folder = Path(folder)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / "precision_recall.png", folder / "precision_recall_by_class.png"]
            figures = [Figure(figsize=(7, 5)), Figure(figsize=(9, 6))]
            self._plot_overall(figures[0])
            self._plot_classes(figures[1])
            for figure, path in zip(figures, paths, strict=True):
                figure.savefig(path, dpi=120)
        return paths

    def _plot_overall(self, figure: Any) -> None:
        axes = _axes(figure, f"{self.settings['model']}: precision over recall, mean of classes")
        recall = np.linspace(0, 1, self.precision_curves.shape[1])
        for index, threshold in ((0, "IoU .50"), (5, "IoU .75"), (None, "IoU .50:.95")):
            curves = self.precision_curves if index is None else self.precision_curves[[index]]
            known = np.where(curves > -1, curves, np.nan)
            known = known[:, :, ~np.isnan(known).all(axis=(0, 1))]
            mean = known.mean(axis=(0, 2))
            axes.plot(recall, mean, label=f"{threshold}: {mean.mean():.3f}")
        axes.legend()

    def _plot_classes(self, figure: Any) -> None:
        axes = _axes(figure, f"{self.settings['model']}: precision over recall at IoU .50")
        recall = np.linspace(0, 1, self.precision_curves.shape[1])
        known = [(k, c) for k, c in enumerate(self.classes) if not math.isnan(c.ap50)]
        for k, score in sorted(known, key=lambda item: -item[1].objects):
            axes.plot(recall, self.precision_curves[0, :, k], lw=0.8, label=score.name)
        if len(known) <= 20:
            axes.legend(fontsize="small")


def _axes(figure: Any, title: str) -> Any:
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    return axes


@contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            where=os.fspath(path),
            hint="name a place that you may write to",
        ) from error
