// RUN: yolomlir-opt %s --target=sm_90 --yolo-round-activations | FileCheck %s

// CHECK: func.func private @a
// CHECK-SAME: yolo.round_result
// CHECK: func.func private @b
// CHECK-NOT: yolo.round_result
// CHECK-SAME: yolo.tf32_rounded = array<i64: 0>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
module attributes {yolo.precision = "tf32"} {
  func.func @main(%x: !t) -> !t {
    %w = "yolo.weight"() {name = "w"} : () -> !w
    %0 = func.call @a(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
    %1 = func.call @b(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
    return %1 : !t
  }
  func.func private @a(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
    %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
        padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
    return %0 : !t
  }
  func.func private @b(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
    %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
        padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
    %1 = "yolo.silu"(%0) : (!t) -> !t
    return %1 : !t
  }
}
