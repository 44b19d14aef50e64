"""Making references: shared and local buffers, and the layout of a memref type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.bindings import ir
from yolomlir.simulator.memory import Reference

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes

DYNAMIC = ir.ShapedType.get_dynamic_size()
DYNAMIC_STRIDE = ir.ShapedType.get_dynamic_stride_or_offset()


def is_shared(type_: Any) -> bool:
    """Whether a memref type is of workgroup memory."""
    space = str(type_.memory_space)
    return space in ("#gpu.address_space<workgroup>", "3 : i64", "3 : i32", "3")


def shared_reference(
    lanes: Lanes, offset: int, size: int, element: Any, sizes: Any, strides: Any
) -> Reference:
    """A buffer at an offset of the block's shared memory."""
    base = np.int64(lanes.rank * lanes.machine.shared_stride + offset)
    return Reference("shared", base, base, base + size, element, sizes, strides)


def local_reference(
    lanes: Lanes, offset: int, size: int, element: Any, sizes: Any, strides: Any
) -> Reference:
    """A buffer in each lane's own memory."""
    each = lanes.machine.program.local_bytes
    base = np.arange(lanes.count, dtype=np.int64) * each + offset
    return Reference("local", base, base, base + size, element, sizes, strides)
