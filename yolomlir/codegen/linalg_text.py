"""A writer of functions at the linalg level, as text that MLIR parses.

Text rather than builders: a `linalg.generic` reads here as it prints, and one parse a function is
cheaper than thousands of calls through the bindings. Shapes are physical (activations N, H, W, C).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """An SSA name with the shape and element type of its tensor."""

    name: str
    shape: tuple[int, ...]
    element: str = "f32"

    @property
    def type(self) -> str:
        """The tensor type as MLIR prints it."""
        return "tensor<" + "".join(f"{size}x" for size in self.shape) + f"{self.element}>"


@dataclass(frozen=True)
class Mapped:
    """An operand of a `linalg.generic` with the result expressions of its map, `"n, h, w, c"`."""

    tensor: Tensor
    map: str


_INFINITIES = {"f32": ("0x7F800000", "0xFF800000"), "f16": ("0x7C00", "0xFC00")}
"""Bits of plus and minus infinity, which MLIR has no decimal literal for."""


def float_literal(value: float, type_: str = "f32") -> str:
    """A literal that MLIR parses to the float nearest to `value`; type_: `f32` or `f16`."""
    if math.isinf(value):
        return _INFINITIES[type_][value < 0]
    text = repr(float(value))
    mantissa, e, exponent = text.partition("e")
    return text if "." in mantissa else f"{mantissa}.0{e}{exponent}"


class Writer:
    """Lines of a function body. `location` is MLIR's text of the location ops get from here on."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.location = "loc(unknown)"
        self._names = 0
        self._depth = 1
        self._constants: dict[tuple[str, str], str] = {}

    def name(self) -> str:
        """A new SSA name."""
        self._names += 1
        return f"%{self._names - 1}"

    def line(self, text: str, *, located: bool = True) -> None:
        """One line at the current depth, with the current location unless it opens a region."""
        suffix = f" {self.location}" if located else ""
        self.lines.append("  " * self._depth + text + suffix)

    def op(self, text: str) -> str:
        """An op of one result; returns the result's name."""
        name = self.name()
        self.line(f"{name} = {text}")
        return name

    def tensor(self, text: str, shape: Sequence[int], element: str = "f32") -> Tensor:
        """An op whose one result is a tensor."""
        return Tensor(self.op(text), tuple(shape), element)

    @contextmanager
    def region(self, opening: str, closing: str = "}") -> Iterator[None]:
        """An op with a region: `opening` ends in a brace, `closing` begins with one."""
        outer = dict(self._constants)
        self.line(opening, located=False)
        self._depth += 1
        yield
        self._depth -= 1
        self._constants = outer
        self.line(closing)

    def _block(self, arguments: Iterable[str]) -> None:
        located = ", ".join(f"{argument} {self.location}" for argument in arguments)
        self.line(f"^bb0({located}):", located=False)

    def constant(self, value: float, type_: str = "f32") -> str:
        """An `arith.constant`, one a value and region."""
        text = float_literal(value, type_) if type_.startswith("f") else str(int(value))
        key = (text, type_)
        if key not in self._constants:
            self._constants[key] = self.op(f"arith.constant {text} : {type_}")
        return self._constants[key]

    def empty(self, shape: Sequence[int], element: str = "f32") -> Tensor:
        """A `tensor.empty`."""
        type_ = Tensor("", tuple(shape), element).type
        return self.tensor(f"tensor.empty() : {type_}", shape, element)

    def filled(self, shape: Sequence[int], value: float, element: str = "f32") -> Tensor:
        """A `linalg.fill` of a new tensor."""
        constant, out = self.constant(value, element), self.empty(shape, element)
        text = (
            f"linalg.fill ins({constant} : {element}) outs({out.name} : {out.type}) -> {out.type}"
        )
        return self.tensor(text, shape, element)

    def pad(self, x: Tensor, padding: Sequence[int], value: float) -> Tensor:
        """`tensor.pad` of N, H, W, C by (top, left, bottom, right); x itself where all are 0."""
        if not any(padding):
            return x
        top, left, bottom, right = padding
        n, height, width, channels = x.shape
        shape = (n, height + top + bottom, width + left + right, channels)
        constant = self.constant(value, x.element)
        result = Tensor(self.name(), shape, x.element)
        opening = (
            f"{result.name} = tensor.pad {x.name} low[0, {top}, {left}, 0] "
            f"high[0, {bottom}, {right}, 0] {{"
        )
        with self.region(opening, f"}} : {x.type} to {result.type}"):
            self._block(f"%p{i}: index" for i in range(4))
            self.line(f"tensor.yield {constant} : {x.element}")
        return result

    def extract_slice(
        self, x: Tensor, offsets: Sequence[int | str], sizes: Sequence[int], rank: int | None = None
    ) -> Tensor:
        """A unit-stride `tensor.extract_slice`; `rank` drops leading dimensions of size 1."""
        shape = tuple(sizes)[len(sizes) - (rank or len(sizes)) :]
        where = "".join(
            f"[{', '.join(str(v) for v in values)}]"
            for values in (offsets, sizes, [1] * len(sizes))
        )
        type_ = Tensor("", shape, x.element).type
        return self.tensor(
            f"tensor.extract_slice {x.name}{where} : {x.type} to {type_}", shape, x.element
        )

    def reshape(self, x: Tensor, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Tensor:
        """`tensor.collapse_shape` or `expand_shape`; `groups` index the tensor of higher rank."""
        result = Tensor("", tuple(shape), x.element).type
        grouped = "[" + ", ".join(f"[{', '.join(map(str, g))}]" for g in groups) + "]"
        if len(shape) < len(x.shape):
            text = f"tensor.collapse_shape {x.name} {grouped} : {x.type} into {result}"
        else:
            sizes = ", ".join(map(str, shape))
            text = (
                f"tensor.expand_shape {x.name} {grouped} output_shape [{sizes}] "
                f": {x.type} into {result}"
            )
        return self.tensor(text, shape, x.element)

    def concat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """`tensor.concat`; the tensor itself where there is one."""
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[dim] = sum(x.shape[dim] for x in xs)
        result = Tensor("", tuple(shape), xs[0].element)
        names, types = ", ".join(x.name for x in xs), ", ".join(x.type for x in xs)
        text = f"tensor.concat dim({dim}) {names} : ({types}) -> {result.type}"
        return self.tensor(text, shape, result.element)

    def generic(
        self,
        dims: str,
        inputs: Sequence[Mapped],
        out: Mapped,
        body: Sequence[str],
        *,
        reduced: str = "",
    ) -> Tensor:
        """A `linalg.generic` of one output.

        dims: the loops, a letter each; `reduced` names those that reduce. body: lines that use
        %in0, %in1, … and %out, and define %y, which is yielded; a line `%y = %in0` yields it as is.
        """
        spaced = ", ".join(dims)
        maps = ", ".join(f"affine_map<({spaced}) -> ({m.map})>" for m in [*inputs, out])
        kinds = ", ".join('"reduction"' if d in reduced else '"parallel"' for d in dims)
        ins = ", ".join(m.tensor.name for m in inputs)
        types = ", ".join(m.tensor.type for m in inputs)
        ins = f" ins({ins} : {types})" if inputs else ""
        result = Tensor(self.name(), out.tensor.shape, out.tensor.element)
        opening = (
            f"{result.name} = linalg.generic "
            f"{{indexing_maps = [{maps}], iterator_types = [{kinds}]}}{ins} "
            f"outs({out.tensor.name} : {out.tensor.type}) {{"
        )
        arguments = [f"%in{i}: {m.tensor.element}" for i, m in enumerate(inputs)]
        *lines, last = body
        value, _, expression = last.partition(" = ")
        plain = expression.startswith("%")
        with self.region(opening, f"}} -> {result.type}"):
            self._block([*arguments, f"%out: {result.element}"])
            for text in lines if plain else [*lines, last]:
                self.line(text)
            self.line(f"linalg.yield {expression if plain else value} : {result.element}")
        return result
