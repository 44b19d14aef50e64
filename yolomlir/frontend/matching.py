"""Which YOLO26 a checkpoint is, told by its weights' shapes, and why it is none where it is not."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.frontend.checkpoint import Checkpoint
from yolomlir.frontend.network import HEAD, SCALES

_STEM = "model.0.conv.weight"
_LISTED = 10
_ONE_TO_MANY = re.compile(rf"{re.escape(HEAD)}\.cv[23]\.")
_END_TO_END = f"{HEAD}.one2one_"


@dataclass(frozen=True)
class Architecture:
    """What the shapes say: fused means that batch norms are folded into the biases."""

    scale: str
    classes: int
    fused: bool


def infer_architecture(checkpoint: Checkpoint, scale: str | None = None) -> Architecture:
    """Infer scale, class count and form. Raises UserError where they contradict or are missing."""
    keys = checkpoint.tensors.keys()
    if _STEM not in keys:
        raise _no_match(checkpoint, f"has no '{_STEM}'")
    _refuse_other_tasks(checkpoint)
    inferred = _scale(checkpoint)
    if scale is not None and scale != inferred:
        raise UserError(
            f"the weights are of scale '{inferred}', not '{scale}'",
            where=checkpoint.path,
            hint=f"pass scale='{inferred}' or another checkpoint",
        )
    fused = not any(".bn." in key for key in keys)
    return Architecture(inferred, _classes(checkpoint), fused)


def _no_match(checkpoint: Checkpoint, what: str) -> UserError:
    sample = ", ".join(list(checkpoint.tensors)[:3]) or "none"
    return UserError(
        f"{what}; it has {len(checkpoint.tensors)} tensors ({sample}, …)",
        where=checkpoint.path,
        hint="yolomlir reads checkpoints of YOLO26 detection",
    )


_OTHER_TASKS = (
    (re.compile(r"model\.\d+\.proto\."), "a segmentation model"),
    (re.compile(r"model\.\d+\.(one2one_)?(cv4|flow_model)"), "a pose or OBB model"),
    (re.compile(r"model\.\d+\.linear\."), "a classification model"),
    (re.compile(r"model\.\d+\.dfl\.conv\."), "of an earlier YOLO (it has DFL boxes)"),
)  # fmt: skip


def _other_task(keys: Collection[str]) -> str | None:
    for pattern, what in _OTHER_TASKS:
        if any(pattern.match(key) for key in keys):
            return what
    return None


def _refuse_other_tasks(checkpoint: Checkpoint) -> None:
    keys = checkpoint.tensors.keys()
    other = _other_task(keys)
    if other is not None:
        raise _no_match(checkpoint, f"the checkpoint is {other}, not YOLO26 detection")
    if any(key.startswith(_END_TO_END) for key in keys):
        return
    if any(_ONE_TO_MANY.match(key) for key in keys):
        raise UserError(
            f"has only the one-to-many head ({HEAD}.cv2, cv3), whose boxes need non-maximum "
            f"suppression; the end-to-end head ({_END_TO_END}cv2, cv3) is missing",
            where=checkpoint.path,
            hint="export or save the checkpoint with end2end=True",
        )


def _scale(checkpoint: Checkpoint) -> str:
    """Width from the first convolution, depth from whether a second inner module is there."""
    shape = checkpoint.tensors[_STEM].shape
    outputs = shape[0] if shape else 0
    deep = any(key.startswith("model.6.m.1.") for key in checkpoint.tensors)
    repeats = 2 if deep else 1
    for name, size in SCALES.items():
        if size.channels(64) == outputs and size.repeats(2) == repeats:
            return name
    known = ", ".join(f"{n}: {s.channels(64)} and {s.repeats(2)}" for n, s in SCALES.items())
    raise UserError(
        f"no scale of YOLO26 has {outputs} channels in 'model.0.conv' and {repeats} inner "
        f"module{'s' if deep else ''} in 'model.6.m' ({known})",
        where=checkpoint.path,
        hint="was the network changed, or is this another YOLO?",
    )


def _classes(checkpoint: Checkpoint) -> int:
    counts = {}
    for level in range(3):
        key = f"{_END_TO_END}cv3.{level}.2.weight"
        if key not in checkpoint.tensors:
            raise _no_match(checkpoint, f"has no '{key}', the class scores of the end-to-end head")
        shape = checkpoint.tensors[key].shape
        counts[key] = shape[0] if shape else 0
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        found = ", ".join(f"{key}: {count}" for key, count in counts.items())
        raise UserError(f"the levels disagree on the class count ({found})", where=checkpoint.path)
    return next(iter(counts.values()))


# ---- keys and shapes ----------------------------------------------------------------------------


def check_weights(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], architecture: Architecture
) -> None:
    """Every expected tensor is there, of its shape and finite, and there is no other.

    Batch counters and the one-to-many head, which inference does not use, are ignored. Raises
    UserError that lists up to ten keys of a kind and guesses why.
    """
    tensors = checkpoint.tensors
    missing = [key for key in expected if key not in tensors]
    extra = [key for key in tensors if key not in expected and not _ignored(key)]
    misshapen = [
        f"{key} is {_shape(tensors[key].shape)}, expected {_shape(shape)}"
        for key, shape in expected.items()
        if key in tensors and tensors[key].shape != shape
    ]
    problems = [
        _listing("missing", missing),
        _listing("unexpected", extra),
        _listing("misshapen", misshapen),
    ]
    if any(problems):
        form = "fused" if architecture.fused else "unfused"
        raise UserError(
            f"does not match YOLO26{architecture.scale} with {architecture.classes} classes, "
            f"{form}: {'; '.join(p for p in problems if p)}",
            where=checkpoint.path,
            hint=_guess(missing, extra, misshapen, architecture),
        )
    _check_values(checkpoint, expected)


def _ignored(key: str) -> bool:
    return key.endswith(".num_batches_tracked") or _ONE_TO_MANY.match(key) is not None


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _listing(kind: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    shown = ", ".join(items[:_LISTED])
    more = f", … and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{len(items)} {kind} ({shown}{more})"


def _guess(
    missing: Sequence[str],
    extra: Sequence[str],
    misshapen: Sequence[str],
    architecture: Architecture,
) -> str:
    if any(".bn." in key for key in missing) and any(key.endswith("conv.bias") for key in extra):
        return "some batch norms are folded and some are not: save it again, fused or unfused"
    if missing and all(key.endswith("conv.bias") for key in missing):
        return "the batch norms' tensors are left out and nothing was fused: save it with them"
    if missing and all(key.startswith(_END_TO_END) for key in missing):
        return "the end-to-end head is incomplete: was it removed on export?"
    if missing and not extra and not misshapen:
        return "the file looks cut short: save or download it again"
    if extra and not missing and not misshapen:
        return "is it another task, or a network with layers added?"
    return f"the first layer says scale '{architecture.scale}'; was the network changed?"


def _check_values(checkpoint: Checkpoint, expected: Collection[str]) -> None:
    for key in expected:
        tensor = checkpoint.tensors[key]
        if not np.issubdtype(tensor.dtype, np.floating):
            raise UserError(
                f"'{key}' holds {tensor.dtype}; expected floating-point numbers",
                where=checkpoint.path,
                hint="save the checkpoint in float32 or float16",
            )
        with np.errstate(over="ignore"):
            finite = bool(np.isfinite(tensor.astype(np.float32, copy=False)).all())
        if not finite:
            raise UserError(
                f"'{key}' holds values that are not finite",
                where=checkpoint.path,
                hint="did training diverge, or was it saved with too small a type?",
            )
        if key.endswith("running_var") and float(tensor.min()) < 0:
            raise UserError(f"'{key}' holds a negative variance", where=checkpoint.path)
