// RUN: yolomlir-opt %s --target=sm_90 --verify-diagnostics --pass-pipeline='builtin.module(yolo-fuse-pointwise{max-first-k=9})'
// RUN: yolomlir-opt %s --target=cpu --yolo-fuse-pointwise | FileCheck %s --check-prefix=CPU
// RUN: not yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-pointwise{max-stages=0})' 2>&1 | FileCheck %s --check-prefix=STAGES
// RUN: not yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-pointwise{pixels=4})' 2>&1 | FileCheck %s --check-prefix=OPTION

// CPU: call @conv2d_3x3s1_8x4x4_8
// CPU: call @conv2d_1x1s1_8x4x4_8
// STAGES: max-stages is 0; it must be at least 1
// OPTION: has no option 'pixels'
// OPTION-SAME: max-stages, max-first-k, max-pixels, max-weight-kib, depthwise

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_3x3s1_8x4x4_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  // expected-remark @+1 {{not fused with what it reads: its sums are 72 long; at most 9}}
  %1 = func.call @conv2d_1x1s1_8x4x4_8(%0, %v) {yolo.dispatch} : (!t, !v) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x4x4_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @conv2d_1x1s1_8x4x4_8(%x: !t, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !v) -> !t
  return %0 : !t
}
