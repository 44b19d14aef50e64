"""The weight store: tensors that live beside the IR, keyed by the name of `yolo.weight`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class WeightStore:
    """Tensors by name, each in the *physical* order that the `yolo.weight` op of its name states.

    A pass that changes weights derives new names from old ones and rewrites the ops together with
    them; it never changes a tensor in place, so several modules may share one store.
    """

    def __init__(self, tensors: Mapping[str, Array] | None = None) -> None:
        self._tensors: dict[str, Array] = dict(tensors or {})

    def __getitem__(self, name: str) -> Array:
        """The tensor of that name. Raises KeyError."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def derive(self, name: str, sources: Sequence[str], function: Callable[..., Array]) -> None:
        """Define `name` as `function(*tensors of sources)`; defining a name again replaces it.

        `function` gets and returns arrays in physical order, float32 unless the op's type says
        otherwise; it should compute in float64 and round once.
        """
        self._tensors[name] = np.ascontiguousarray(function(*(self[s] for s in sources)))


class AbstractWeights(WeightStore):
    """A store without data, for IR that came alone (`yolomlir-opt file.mlir`)."""

    def derive(self, name: str, sources: Sequence[str], function: Callable[..., Array]) -> None:
        """Do nothing: the module is rewritten, and there is no data to rewrite with it."""
