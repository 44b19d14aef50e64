"""What a checkpoint holds, whatever its format: tensors under canonical keys, class names."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one model.

    tensors: by canonical name (`model.0.conv.weight`), in the order and dtype of the file;
    bfloat16 is widened to float32, exactly, since numpy has no such type. names: class names by
    index, None where the file has none. metadata: what else the file says of itself, as text.
    """

    tensors: dict[str, Array]
    names: dict[int, str] | None = None
    path: Path | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns as float32: they are its upper halves."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


_KEY = re.compile(r"(?P<prefix>(?:(?:ema|model|module|state_dict)\.)*)(?P<rest>\d+\..+)")


def canonical_keys(tensors: Mapping[str, Array], where: object = None) -> dict[str, Array]:
    """Tensors with prefixes such as `ema.` and `model.model.` replaced by `model.`.

    A file with several sets of weights under different prefixes gives the averaged one (`ema.`).
    Other keys stay as they are. Raises UserError where the choice would be a guess.
    """
    groups: dict[str, dict[str, Array]] = {}
    others: dict[str, Array] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            others[key] = tensor
        else:
            groups.setdefault(match["prefix"], {})[f"model.{match['rest']}"] = tensor
    averaged = [prefix for prefix in groups if "ema." in prefix]
    candidates = averaged or list(groups)
    if len(candidates) > 1:
        found = ", ".join(f"'{prefix}'" for prefix in candidates)
        raise UserError(
            f"holds several sets of weights, under the prefixes {found}",
            where=where,
            hint="keep one of them",
        )
    chosen = groups[candidates[0]] if candidates else {}
    return chosen | others


def parse_names(value: object) -> dict[int, str] | None:
    """Class names from a dictionary, a list or the text of one; None where there are none."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return None
    if not all(isinstance(index, (int, str)) for index in value):
        return None
    if not all(isinstance(name, (int, str)) for name in value.values()):
        return None
    try:
        return dict(sorted((int(index), str(name)) for index, name in value.items()))
    except ValueError:
        return None
