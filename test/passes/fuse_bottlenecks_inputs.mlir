// RUN: yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x9x10+8x8x8})' | FileCheck %s --check-prefix=BOTH
// RUN: yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x8x8:3})' | FileCheck %s --check-prefix=LONG
// RUN: yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x8x8:2+8x8x8:4})' | FileCheck %s --check-prefix=SHORT
// RUN: yolomlir-opt %s --target=sm_90 --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x8x80+18x8x8+8x8x8:23})' | FileCheck %s --check-prefix=NONE
// RUN: yolomlir-opt %s --target=cpu --yolo-fuse-bottlenecks | FileCheck %s --check-prefix=NONE

// Pairs of other sizes and lengths are left alone, without a remark.
// BOTH: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8(
// BOTH: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_then_16(
// LONG: call @conv2d_3x3s1_8x8x8_8_silu(
// LONG: call @conv2d_3x3s1_8x8x8_8(
// LONG: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_then_16(
// SHORT: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8(
// SHORT: call @conv2d_3x3s1_8x8x8_8_silu(
// SHORT: call @chain_3x3s1_8x8x8_8_then_16(
// NONE: call @conv2d_3x3s1_8x8x8_8_silu(
// NONE: call @conv2d_3x3s1_8x8x8_8(
// NONE: call @conv2d_3x3s1_8x8x8_8_silu(
// NONE: call @chain_3x3s1_8x8x8_8_then_16(

!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!u = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<16x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !u {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %p = "yolo.weight"() {name = "c.weight"} : () -> !v
  %0 = func.call @conv2d_3x3s1_8x8x8_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  %2 = func.call @conv2d_3x3s1_8x8x8_8_silu(%1, %w) {yolo.dispatch} : (!t, !w) -> !t
  %3 = func.call @chain_3x3s1_8x8x8_8_then_16(%2, %w, %p) {yolo.dispatch} : (!t, !w, !v) -> !u
  return %3 : !u
}
func.func private @conv2d_3x3s1_8x8x8_8_silu(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @chain_3x3s1_8x8x8_8_then_16(%x: !t, %w: !w, %p: !v) -> !u
    attributes {yolo.family = "chain"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%0, %p) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !v) -> !u
  return %1 : !u
}
