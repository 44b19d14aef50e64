// RUN: yolomlir-opt %s --split-input-file --yolo-assign-tiles | FileCheck %s

// CHECK: func.func private @f
// CHECK-SAME: yolo.tile = {m = 32 : i64}
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  %0 = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
  return %0 : !t
}
func.func private @f(%x: !t) -> !t
    attributes {yolo.family = "elementwise", yolo.tile = {m = 32 : i64}} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}

// -----

// On the CPU there is no rule.
// CHECK: func.func private @f
// CHECK-NOT: yolo.tile
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = func.call @f(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @f(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
