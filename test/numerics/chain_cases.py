"""Chains of convolutions as `yolo` functions, their operands, and float64 values with error bounds.

An error bound is carried from stage to stage: what an input may be off by, through the sizes of the
weights, plus what the stage's own arithmetic adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gpu_dispatches import activated, activation, halved, lowered, stored_half, weight
from simulated_launch import round_to_tf32

from yolomlir.bindings import ir

TF32_ROUNDING = 2.0**-11
"""Largest relative error of rounding to nearest TF32."""


@dataclass(frozen=True)
class Part:
    """A part of a stage's input: argument of so many channels, or channels of an earlier stage."""

    channels: int
    stage: int | None = None
    offset: int = 0


@dataclass(frozen=True)
class Link:
    """A stage. add: None, `argument`, or the earlier stage whose result is added.

    kernel: side of a later stage's kernel, odd; its stride is 1.
    """

    out: int
    parts: tuple[Part, ...] = ()
    silu: bool = True
    add: int | str | None = None
    kernel: int = 1


@dataclass(frozen=True)
class ChainCase:
    """A chain whose first stage reads `channels` of height x width.

    stored: stages whose results the dispatch has; the last one's always is. depthwise: the first
    stage, which then has as many channels as it reads. joined: (channels, factor) of what the first
    stage reads, concatenated and enlarged by its factor; default one tensor of its own size.
    """

    height: int
    width: int
    channels: int
    links: tuple[Link, ...]
    kernel: int = 1
    stride: int = 1
    batch: int = 1
    stored: tuple[int, ...] = ()
    attributes: str = ""
    depthwise: bool = False
    joined: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """(channels, factor) of each tensor that the first stage reads."""
        return self.joined or ((self.channels, 1),)

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of every result."""
        half = self.kernel // 2
        rows = (self.height + 2 * half - self.kernel) // self.stride + 1
        return rows, (self.width + 2 * half - self.kernel) // self.stride + 1

    @property
    def results(self) -> list[int]:
        """The stages that are results, in order."""
        return sorted({*self.stored, len(self.links) - 1})

    def kernel_of(self, index: int) -> int:
        """Side of a stage's kernel."""
        return self.links[index].kernel if index else self.kernel

    def in_channels(self, index: int) -> int:
        """Channels that a stage reads."""
        parts = self.links[index].parts
        return self.channels if index == 0 else sum(p.channels for p in parts)


@dataclass
class ChainText:
    """The function being written: arguments with what they are, lines, values of stages."""

    types: list[str] = field(default_factory=list)
    roles: list[tuple[str, int, int]] = field(default_factory=list)
    """(input | part | weight | bias | residual, stage, part) of each argument."""
    lines: list[str] = field(default_factory=list)

    def argument(self, type_: str, role: str, stage: int, part: int = 0) -> str:
        """A new argument's name."""
        self.types.append(type_)
        self.roles.append((role, stage, part))
        return f"%a{len(self.types) - 1}"


def chain_text(case: ChainCase) -> tuple[str, list[tuple[str, int, int]]]:
    """The dispatch's function at the `yolo` level, and what its arguments are."""
    text = ChainText()
    rows, columns = case.out_size
    values: list[str] = []
    for index, link in enumerate(case.links):
        kernel = case.kernel_of(index)
        x, x_type = _input(case, index, text, values)
        depthwise = case.depthwise and index == 0
        fan_in, layout = (1, "hwio") if depthwise else (case.in_channels(index), "ohwi")
        w_type = weight(link.out, fan_in, kernel, kernel, layout=layout)
        y_type = activation(case.batch, link.out, rows, columns)
        w = text.argument(w_type, "weight", index)
        b = text.argument(f"tensor<{link.out}xf32>", "bias", index)
        half, stride = kernel // 2, case.stride if index == 0 else 1
        text.lines.append(
            f'%c{index} = "yolo.conv2d"({x}, {w}, {b}) {{strides = array<i64: {stride}, {stride}>, '
            f"padding = array<i64: {half}, {half}, {half}, {half}>, "
            f"groups = {link.out if depthwise else 1} : i64}} : "
            f"({x_type}, {w_type}, tensor<{link.out}xf32>) -> {y_type}"
        )
        value = f"%c{index}"
        if link.silu:
            text.lines.append(f'%s{index} = "yolo.silu"({value}) : ({y_type}) -> {y_type}')
            value = f"%s{index}"
        if link.add is not None:
            other = text.argument(y_type, "residual", index) if link.add == "argument" else ""
            other = other or values[int(link.add)]
            text.lines.append(
                f'%r{index} = "yolo.add"({value}, {other}) : ({y_type}, {y_type}) -> {y_type}'
            )
            value = f"%r{index}"
        values.append(value)
    returned = [values[i] for i in case.results]
    types = [activation(case.batch, case.links[i].out, rows, columns) for i in case.results]
    arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate(text.types))
    body = "\n  ".join([*text.lines, f"return {', '.join(returned)} : {', '.join(types)}"])
    head = f"func.func private @chain({arguments}) -> ({', '.join(types)})"
    return (
        f'{head} attributes {{yolo.family = "chain"{case.attributes}}} {{\n  {body}\n}}',
        text.roles,
    )


def _input(case: ChainCase, index: int, text: ChainText, values: list[str]) -> tuple[str, str]:
    """A stage's input value and its type; what makes it is appended to the function."""
    rows, columns = case.out_size
    if index == 0:
        return _first_input(case, text)
    joined, joined_type, channels = "", "", 0
    for number, part in enumerate(case.links[index].parts):
        type_ = activation(case.batch, part.channels, rows, columns)
        if part.stage is None:
            value = text.argument(type_, "part", index, number)
        else:
            value = values[part.stage]
            whole = case.links[part.stage].out
            if (part.offset, part.channels) != (0, whole):
                name = f"%p{index}_{number}"
                text.lines.append(
                    f'{name} = "yolo.slice"({value}) {{offset = {part.offset} : i64, size = '
                    f"{part.channels} : i64}} : ({activation(case.batch, whole, rows, columns)}) "
                    f"-> {type_}"
                )
                value = name
        channels += part.channels
        if not joined:
            joined, joined_type = value, type_
            continue
        both = activation(case.batch, channels, rows, columns)
        name = f"%j{index}_{number}"
        text.lines.append(
            f'{name} = "yolo.concat"({joined}, {value}) : ({joined_type}, {type_}) -> {both}'
        )
        joined, joined_type = name, both
    return joined, joined_type


def _first_input(case: ChainCase, text: ChainText) -> tuple[str, str]:
    """The first stage's input: an argument, or several, enlarged and concatenated."""
    joined, joined_type, total = "", "", 0
    for number, (channels, factor) in enumerate(case.sources):
        whole = activation(case.batch, channels, case.height, case.width)
        own = activation(case.batch, channels, case.height // factor, case.width // factor)
        value = text.argument(own, "input", 0, number)
        if factor > 1:
            name = f"%u{number}"
            text.lines.append(
                f'{name} = "yolo.upsample"({value}) {{factor = {factor} : i64}} : '
                f"({own}) -> {whole}"
            )
            value = name
        total += channels
        if not joined:
            joined, joined_type = value, whole
            continue
        both = activation(case.batch, total, case.height, case.width)
        text.lines.append(
            f'%i{number} = "yolo.concat"({joined}, {value}) : ({joined_type}, {whole}) -> {both}'
        )
        joined, joined_type = f"%i{number}", both
    return joined, joined_type


def chain_module(
    case: ChainCase, *, half: bool = False
) -> tuple[ir.Module, list[tuple[str, int, int]]]:
    """The module of a case's function at the linalg level, and what its arguments are. half: with
    activations and weights of float16."""
    text, roles = chain_text(case)
    return lowered(halved(text) if half else text), roles


def random_operands(
    case: ChainCase, roles: list[tuple[str, int, int]], seed: int
) -> list[np.ndarray]:
    """Dense operands in the function's order: N x H x W x C, O x KH x KW x C, C."""
    rng = np.random.default_rng(seed)
    rows, columns = case.out_size
    found = []
    for role, stage, part in roles:
        link, kernel = case.links[stage], case.kernel_of(stage)
        channels = case.in_channels(stage)
        own, factor = case.sources[part if role == "input" else 0]
        shape = {
            "input": (case.batch, case.height // factor, case.width // factor, own),
            "part": (case.batch, rows, columns, link.parts[part].channels if link.parts else 0),
            "weight": (link.out, kernel, kernel, channels),
            "bias": (link.out,),
            "residual": (case.batch, rows, columns, link.out),
        }[role]
        if role == "weight" and stage == 0 and case.depthwise:
            shape, channels = (kernel, kernel, 1, link.out), 1
        scale = 1 / np.sqrt(channels * kernel * kernel) if role == "weight" else 1.0
        found.append((rng.standard_normal(shape) * scale).astype(np.float32))
    return found


def convolve(x: np.ndarray, w: np.ndarray, stride: int) -> np.ndarray:
    """N x H x W x C with O x KH x KW x C, padded by half the kernel, float64."""
    kernel = w.shape[1]
    half = kernel // 2
    x = np.pad(x.astype(np.float64), ((0, 0), (half, half), (half, half), (0, 0)))
    rows = (x.shape[1] - kernel) // stride + 1
    columns = (x.shape[2] - kernel) // stride + 1
    total = np.zeros((x.shape[0], rows, columns, w.shape[0]))
    for i in range(kernel):
        for j in range(kernel):
            part = x[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
            total += part @ w[:, i, j].astype(np.float64).T
    return total


def expected_results(
    case: ChainCase,
    roles: list[tuple[str, int, int]],
    operands: list[np.ndarray],
    precision: str,
    partial_sums: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Value and tolerance of every result.

    tf32: an input from outside is rounded as the kernel rounds it, so its products are exact; one
    from an earlier stage is rounded from a value that is itself off, so it may round to either
    side: 2^-11 of its size besides its own bound. Depthwise products are of float32. Each of the K
    / 8 tensor-core steps, partial sums and the bias round by at most 2^-23 of the sum of
    magnitudes; fp32 leaves 3 x 2^-22 of each product. fp16: operands are float16 already, a
    tensor-core step has 16 of K, and every stage's result is rounded to float16, for whoever reads
    it.
    """
    given = dict(zip(roles, operands, strict=True))
    exact, half = precision == "fp32", precision == "fp16"
    handing_on = 0.0 if exact or half else TF32_ROUNDING
    done: list[tuple[np.ndarray, np.ndarray]] = []
    for index, link in enumerate(case.links):
        w, bias = given["weight", index, 0], given["bias", index, 0].astype(np.float64)
        depthwise = case.depthwise and index == 0
        w = w if exact or depthwise else round_to_tf32(w)
        values, errors = [], []
        for number, (_, factor) in enumerate(case.sources if index == 0 else ()):
            x = given["input", 0, number].repeat(factor, 1).repeat(factor, 2)
            values.append((x if exact or depthwise else round_to_tf32(x)).astype(np.float64))
            errors.append(np.zeros(x.shape))
        for number, part in enumerate(link.parts):
            if part.stage is None:
                x = given["part", index, number]
                values.append((x if exact else round_to_tf32(x)).astype(np.float64))
                errors.append(np.zeros(x.shape))
                continue
            span = slice(part.offset, part.offset + part.channels)
            value, error = (a[..., span] for a in done[part.stage])
            values.append(value)
            errors.append(error + handing_on * (np.abs(value) + error))
        x, off = np.concatenate(values, 3), np.concatenate(errors, 3)
        stride = case.stride if index == 0 else 1
        if depthwise:  # as a dense convolution of which each channel reads one
            w = np.eye(link.out)[:, None, None, :] * w.reshape(case.kernel, case.kernel, -1)
        value = convolve(x, w, stride) + bias
        magnitude = convolve(np.abs(x) + off, np.abs(w), stride) + np.abs(bias)
        k = 8 * case.kernel**2 if depthwise else w[0].size
        steps = -(-k // (16 if half else 8)) * (3 if exact else 1) + partial_sums + 2
        tolerance = convolve(off, np.abs(w), stride)
        tolerance += magnitude * (steps * 2.0**-23 + (3 * 2.0**-22 if exact else 0.0))
        if link.silu:
            value, tolerance = activated(value, tolerance)
        if link.add == "argument":
            value = value + given["residual", index, 0]
        elif link.add is not None:
            other, error = done[int(link.add)]
            value, tolerance = value + other, tolerance + error
        tolerance = tolerance + np.abs(value) * 2.0**-23
        done.append((value, stored_half(value, tolerance) if half else tolerance))
    return [done[i] for i in case.results]
