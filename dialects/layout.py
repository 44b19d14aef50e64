"""Physical layouts: the order in memory of a tensor whose logical shape never changes."""

from __future__ import annotations

from enum import Enum

from yolomlir.bindings import ir


class Layout(Enum):
    """The physical order of a 4-D tensor; `permutation[i]` is the logical dim at place i."""

    LOGICAL = ("", (0, 1, 2, 3))
    """Activations N, C, H, W and weights O, I, KH, KW, as a checkpoint has them; no encoding."""
    NHWC = ("nhwc", (0, 2, 3, 1))
    OHWI = ("ohwi", (0, 2, 3, 1))
    """Weights for the GPU: an output channel's K = KH*KW*I values lie together."""
    HWIO = ("hwio", (2, 3, 1, 0))
    """Weights for the CPU: the output channels of one tap lie together."""

    def __init__(self, keyword: str, permutation: tuple[int, int, int, int]) -> None:
        self.keyword = keyword
        self.permutation = permutation

    @property
    def attribute(self) -> ir.Attribute | None:
        """`#yolo.layout<"…">` in the current context; None for the logical order."""
        return ir.Attribute.parse(f'#yolo.layout<"{self.keyword}">') if self.keyword else None

    @staticmethod
    def of(type_: ir.Type) -> Layout:
        """The layout of a ranked tensor type."""
        encoding = ir.RankedTensorType(type_).encoding
        if encoding is None:
            return Layout.LOGICAL
        text = str(encoding)
        for layout in Layout:
            if layout.keyword and text == f'#yolo.layout<"{layout.keyword}">':
                return layout
        raise ValueError(f"not a yolo layout: {text}")


def with_layout(type_: ir.Type, layout: Layout) -> ir.RankedTensorType:
    """The same logical tensor type in another physical order."""
    tensor_type = ir.RankedTensorType(type_)
    return ir.RankedTensorType.get(tensor_type.shape, tensor_type.element_type, layout.attribute)


def physical_shape(type_: ir.Type) -> list[int]:
    """The shape in memory order of a 4-D tensor; other ranks lie as they are."""
    shape = list(ir.RankedTensorType(type_).shape)
    if len(shape) != 4:
        return shape
    return [shape[dim] for dim in Layout.of(type_).permutation]
