"""The `conv2d` family: NHWC implicit GEMM on tensor cores, by the kind of kernel a tile names.

Steps of K through a ring of buffers (`conv2d_kernel.py`), the image as bytes (`conv2d_image.py`),
or a window of the input loaded once for all taps, which is a chain of one stage (`chain.py`).
"""

from __future__ import annotations

from yolomlir.bindings import func
from yolomlir.codegen.gpu.chain import ChainKernel
from yolomlir.codegen.gpu.chain_problem import match_chain
from yolomlir.codegen.gpu.conv2d_image import ImageKernel
from yolomlir.codegen.gpu.conv2d_kernel import ConvKernel
from yolomlir.codegen.gpu.conv2d_kinds import objection, stated_tile
from yolomlir.codegen.gpu.conv2d_tile import ConvTile
from yolomlir.codegen.gpu.conv_problem import match_conv
from yolomlir.codegen.gpu.generate import register_family
from yolomlir.codegen.gpu.kernel import Kernel
from yolomlir.diagnostics import UserError
from yolomlir.target import Target


@register_family("conv2d")
def generate_conv2d(function: func.FuncOp, target: Target, precision: str, name: str) -> Kernel:
    """The kernel of a `conv2d` dispatch, with the tile of its `yolo.tile`.

    A tile that is a window is for a chain of one stage (`conv2d_kinds.py`).

    Raises UnsupportedError for another form than section 4 of the architecture's, UserError for a
    tile that is not legal, or none.
    """
    problem = match_conv(function.operation, precision=precision)
    tile = stated_tile(function.operation)
    if tile is None:
        raise UserError(
            "a convolution without `yolo.tile`", where=name, hint="yolo-assign-tiles gives it one"
        )
    reason = objection(tile, problem.shape, target, precision)
    if reason is not None:
        raise UserError(f"illegal tile {tile}: {reason}", where=name)
    location = function.operation.location
    if isinstance(tile, ConvTile) and problem.shape.source_vector == 0:
        return ImageKernel(problem, tile, target, precision, name, location).build()
    if isinstance(tile, ConvTile):
        return ConvKernel(problem, tile, target, precision, name, location).build()
    chain = match_chain(function.operation, precision=precision)
    return ChainKernel(chain, tile, target, precision, name, location).build()
