"""Seeded checkpoints: untrained weights of the right shapes, for the demo and for tests.

They detect nothing. They are calibrated so that a numerical comparison means something at every
layer of every scale: the network is run once, in float64, on a few small pictures of noise, and
every batch norm's variance is the mean square of what its convolution puts out there. Values then
stay near unit scale and vary over positions to the last layer, and scores do not saturate.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from yolomlir.diagnostics import UserError
from yolomlir.frontend.network import BATCH_NORM_EPSILON, SCALES, Conv, Network
from yolomlir.frontend.state_dict import Array, Checkpoint

Values = NDArray[np.float64]
"""Activations of the calibration pictures, [N, C, H, W]."""

_PICTURES, _SIDE = 4, 64
"""Calibration pictures and their side in pixels: 4 x 4 positions are left at stride 32."""
_GAIN, _OFFSET = 2.0, 0.5
"""Deviations of a batch norm's result and of its betas. SiLU of larger values is nearly linear in
their scale, so that a picture unlike the calibration ones is not blown up layer by layer; for the
same reason running means are small jitter and do not centre the values."""
_QKV_GAIN = 1.5
"""Queries and keys of this deviation give attention logits of about 1.5**2, so that the softmax
singles out some positions instead of averaging all of them."""
_BOX_MEAN, _BOX_DEVIATION = 2.0, 0.5
"""Distances to a box's sides, in strides."""
_LOGIT_MEAN, _LOGIT_DEVIATION = -3.0, 0.6
_GRID = 256
"""Statistics are rounded to 1/256 of their scale, so that another machine's sum order, which
differs in the last bits, gives the same weights."""


def seeded_checkpoint(scale: str, classes: int, seed: int, *, fused: bool = False) -> Checkpoint:
    """Untrained weights (float32) that depend on the arguments only, on every machine.

    fused: the same network with its batch norms folded into weights and biases (folded in float64,
    rounded once). Raises UserError for an unknown scale or a class count below 1.
    """
    if scale not in SCALES:
        raise UserError(f"unknown scale '{scale}'", hint=f"one of: {', '.join(SCALES)}")
    if classes < 1:
        raise UserError(f"the class count is {classes}; it must be at least 1")
    ops = _Calibration(seed, fused=fused)
    Network[Values](ops, SCALES[scale], classes).forward(_pictures(ops.random("pictures")))
    return Checkpoint(ops.tensors, metadata={"seed": str(seed), "trained": "no"})


def _pictures(random: np.random.RandomState) -> Values:
    """Noise with more of it the coarser, as photos have it, in [0, 1], of varied contrast."""
    pictures = np.zeros((_PICTURES, 3, _SIDE, _SIDE))
    for cell in (1, 2, 4, 8, 16, 32):
        side = _SIDE // cell
        noise = random.uniform(-1, 1, (_PICTURES, 3, side, side))
        pictures += cell**0.5 * noise.repeat(cell, 2).repeat(cell, 3)
    low, high = pictures.min(), pictures.max()
    contrast = np.linspace(0.2, 1, _PICTURES)[:, None, None, None]
    return np.asarray(0.5 + contrast * ((pictures - low) / (high - low) - 0.5))


class _Calibration:
    """`Operations` that draw weights and compute with them, in float64."""

    def __init__(self, seed: int, *, fused: bool) -> None:
        self.seed = seed
        self.fused = fused
        self.tensors: dict[str, Array] = {}

    def random(self, key: str) -> np.random.RandomState:
        """A stream a key. RandomState's streams are frozen: no numpy release changes them."""
        return np.random.RandomState([self.seed & 0xFFFFFFFF, zlib.crc32(key.encode())])

    def channels(self, x: Values) -> int:
        return int(x.shape[1])

    def conv(self, conv: Conv, x: Values) -> Values:
        w = self.random(conv.name).standard_normal(conv.weight_shape).astype(np.float32)
        w *= np.float32(1 / math.sqrt(math.prod(conv.weight_shape[1:])))
        y = _convolve(x, w.astype(np.float64), conv)
        if conv.norm is None:
            return self._last(conv, w, y)
        gain = _QKV_GAIN if conv.name.endswith(".qkv.conv") else _GAIN
        gamma, beta, mean, variance = self._norm(conv.norm, y, gain)
        factor = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
        if self.fused:
            self.tensors[f"{conv.name}.weight"] = _f4(w * factor[:, None, None, None])
            self.tensors[f"{conv.name}.bias"] = _f4(beta - mean * factor)
        else:
            self.tensors[f"{conv.name}.weight"] = w
            for part, value in zip(
                ("weight", "bias", "running_mean", "running_var"),
                (gamma, beta, mean, variance),
                strict=True,
            ):
                self.tensors[f"{conv.norm}.{part}"] = _f4(value)
        z = (y - mean[:, None, None]) * factor[:, None, None] + beta[:, None, None]
        return z if conv.act is None else z / (1 + np.exp(-z))

    def _norm(self, name: str, y: Values, gain: float) -> tuple[Values, Values, Values, Values]:
        """Gamma, beta, mean and variance, exact in float32; jittered so that no two are alike."""
        random, channels = self.random(name), y.shape[1]
        square = _coarse(float((y**2).mean()))
        gamma = gain * random.uniform(0.8, 1.2, channels)
        beta = _OFFSET * random.standard_normal(channels)
        mean = 0.1 * math.sqrt(square) * random.standard_normal(channels)
        variance = square * random.uniform(0.8, 1.25, channels)
        return _exact(gamma), _exact(beta), _exact(mean), _exact(variance)

    def _last(self, conv: Conv, w: NDArray[np.float32], y: Values) -> Values:
        """The head's last convolutions, scaled to plausible boxes and scores."""
        box = ".one2one_cv2." in conv.name
        centre, spread = (_BOX_MEAN, _BOX_DEVIATION) if box else (_LOGIT_MEAN, _LOGIT_DEVIATION)
        mean = y.mean((0, 2, 3))
        deviation = math.sqrt(_coarse(float(((y - mean[:, None, None]) ** 2).mean())))
        mean = np.round(mean / deviation * _GRID) / _GRID * deviation
        factor = spread / deviation
        jitter = 0.2 * spread * self.random(f"{conv.name}.bias").standard_normal(conv.outputs)
        bias = centre - mean * factor + jitter
        self.tensors[f"{conv.name}.weight"] = _f4(w * factor)
        self.tensors[f"{conv.name}.bias"] = _f4(bias)
        return np.asarray(y * factor + bias[:, None, None])

    def add(self, name: str, lhs: Values, rhs: Values) -> Values:
        return lhs + rhs

    def concat(self, name: str, xs: Sequence[Values]) -> Values:
        return np.concatenate(list(xs), 1)

    def slice(self, name: str, x: Values, offset: int, size: int) -> Values:
        return x[:, offset : offset + size]

    def max_pool(self, name: str, x: Values, kernel: int) -> Values:
        pad = kernel // 2
        edges = ((0, 0), (0, 0), (pad, pad), (pad, pad))
        padded = np.pad(x, edges, constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (2, 3))
        return np.asarray(windows.max((-2, -1)))

    def upsample(self, name: str, x: Values) -> Values:
        return x.repeat(2, 2).repeat(2, 3)

    def attention(self, name: str, qkv: Values, heads: int) -> Values:
        per_head = qkv.shape[1] // heads
        key = per_head // 4
        x = qkv.reshape(len(qkv), heads, per_head, -1)
        logits = x[:, :, :key].swapaxes(2, 3) @ x[:, :, key : 2 * key] * key**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = x[:, :, 2 * key :] @ weights.swapaxes(2, 3)
        return np.asarray(y.reshape(len(qkv), -1, *qkv.shape[2:]))


def _convolve(x: Values, w: Values, conv: Conv) -> Values:
    """Cross-correlation, a tap of the kernel at a time.

    The picture is a torus: zeros around such small maps would lower the values' mean square, and
    it would rise from layer to layer on larger pictures.
    """
    pad, step = conv.kernel // 2, conv.stride
    height, width = (size // step for size in x.shape[2:])
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="wrap")
    y = np.zeros((len(x), conv.outputs, height, width))
    for i, j in np.ndindex(conv.kernel, conv.kernel):
        tap = padded[:, :, i : i + step * height : step, j : j + step * width : step]
        if conv.groups == 1:
            y += (w[:, :, i, j] @ tap.reshape(len(x), conv.inputs, -1)).reshape(y.shape)
        else:
            y += w[:, 0, i, j][:, None, None] * tap
    return y


def _coarse(x: float) -> float:
    """x with few bits of mantissa."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * _GRID) / _GRID, exponent)


def _f4(x: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, np.float32)


def _exact(x: Values | float) -> Values:
    """Rounded to float32, in float64."""
    return np.asarray(np.asarray(x, np.float32), np.float64)
