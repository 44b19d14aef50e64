"""Shapes of results: what the builders infer and the verifiers expect, all logical."""

from __future__ import annotations

from collections.abc import Sequence

LEVELS = 3
"""Levels of the detection head: strides 8, 16 and 32."""
DETECTION_COLUMNS = 6
"""Of a detection: x1, y1, x2, y2, score, class."""
CANDIDATE_COLUMNS = 8
"""Of a candidate: a detection's, its logit, the largest logit of its anchor."""


def window_output(size: int, kernel: int, stride: int, before: int, after: int) -> int:
    """Outputs of a sliding window: floor((size + before + after - kernel) / stride) + 1."""
    return (size + before + after - kernel) // stride + 1


def window_shape(
    x: Sequence[int],
    channels: int,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
) -> list[int]:
    """Of `channels` maps of windows that slide over x [N, C, H, W]; padding top, left, bottom,
    right."""
    n, _, height, width = x
    top, left, bottom, right = padding
    rows = window_output(height, kernel[0], strides[0], top, bottom)
    return [n, channels, rows, window_output(width, kernel[1], strides[1], left, right)]


def with_channels(x: Sequence[int], channels: int) -> list[int]:
    """x [N, C, H, W] with another number of channels."""
    n, _, height, width = x
    return [n, channels, height, width]


def enlarged(x: Sequence[int], factor: int) -> list[int]:
    """x [N, C, H, W] with a whole factor more rows and columns."""
    n, channels, height, width = x
    return [n, channels, height * factor, width * factor]
