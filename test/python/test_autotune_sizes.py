"""Which measured size stands for another, and what a function is called at another size."""

from __future__ import annotations

import pytest
from yolomlir.dialects import yolo

from yolomlir.autotune.signature import Form, signature, size_in
from yolomlir.autotune.sizes import Size, standing_for
from yolomlir.bindings import ir

ONE, LARGE, EIGHT = Size(1, 640, 640), Size(1, 1280, 1280), Size(8, 640, 640)

MODULE = """
!a = tensor<2x32x10x20xf32, #yolo.layout<"nhwc">>
!b = tensor<2x16x20x40xf32, #yolo.layout<"nhwc">>
!w = tensor<8x48x1x1xf32, #yolo.layout<"ohwi">>
!r = tensor<2x8x20x40xf32, #yolo.layout<"nhwc">>
func.func private @conv(%x: !a, %y: !b, %w: !w) -> !r attributes {yolo.family = "conv2d"} {
  %0 = "yolo.upsample"(%x) {factor = 2 : i64} : (!a) -> tensor<2x32x20x40xf32, #yolo.layout<"nhwc">>
  %1 = "yolo.concat"(%0, %y) : (tensor<2x32x20x40xf32, #yolo.layout<"nhwc">>, !b)
      -> tensor<2x48x20x40xf32, #yolo.layout<"nhwc">>
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (tensor<2x48x20x40xf32, #yolo.layout<"nhwc">>, !w) -> !r
  return %2 : !r
}
"""


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (ONE, [ONE]),
        (Size(1, 480, 640), [ONE]),
        (Size(2, 640, 640), [LARGE, ONE]),
        (Size(1, 672, 640), [ONE]),
        (Size(4, 640, 640), [LARGE, EIGHT]),
        (Size(5, 640, 640), [EIGHT, LARGE]),  # with tiles for 4 it might take two waves
        (Size(64, 640, 640), [EIGHT]),
        (Size(1, 32, 32), [ONE]),
    ],
)
def test_the_nearest_with_at_least_as_many_pixels(size: Size, found: list[Size]) -> None:
    assert standing_for(size, {ONE, LARGE, EIGHT}) == found


def test_only_one_image_stands_for_the_smallest_and_only_many_for_the_largest() -> None:
    assert standing_for(Size(1, 640, 640), [EIGHT]) == []
    assert standing_for(Size(64, 640, 640), [LARGE]) == []
    assert standing_for(Size(1, 32, 32), []) == []


def test_of_two_as_large_that_with_as_many_images() -> None:
    both = [Size(4, 320, 320), Size(1, 640, 640)]
    assert standing_for(Size(1, 320, 640), both) == [both[1], both[0]]
    assert standing_for(Size(4, 320, 640), both) == both


def test_a_form_at_another_size() -> None:
    """Image tensors follow the first one, at the ratio they have; weights stay."""
    with yolo.new_context(), ir.Location.unknown():
        module = ir.Module.parse(MODULE)
        function = module.body.operations[0].operation
        form, text = Form.of(function), signature(function)
    ops = "upsample[factor=2] concat conv2d"
    assert form.size == Size(2, 10, 20) == size_in(text)
    assert text == f"conv2d 2x32x10x20,2x16x20x40,8x48x1x1 > {ops} > 2x8x20x40"
    other = form.at(Size(1, 20, 10))
    assert other == f"conv2d 1x32x20x10,1x16x40x20,8x48x1x1 > {ops} > 1x8x40x20"
