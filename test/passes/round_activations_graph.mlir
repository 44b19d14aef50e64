// RUN: yolomlir-opt %s --target=sm_90 --yolo-round-activations --statistics 2>%t.err | FileCheck %s
// RUN: FileCheck %s --check-prefix=STATS --input-file=%t.err
// RUN: sed s/tf32/fp32/ %s | yolomlir-opt --target=sm_90 --yolo-round-activations | FileCheck %s --check-prefix=FP32
// RUN: yolomlir-opt %s --target=cpu --yolo-round-activations | FileCheck %s --check-prefix=FP32

// A maximum of rounded values is rounded, and so is a concat of them. An argument of @main is not,
// so @c, which one call gives such an argument, rounds what it reads. @last feeds no convolution.
// STATS-DAG: 1 operands
// STATS-DAG: 1 results
// FP32-NOT: yolo.round_result
// FP32-NOT: yolo.tf32_rounded

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!v = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
module attributes {yolo.precision = "tf32"} {
  func.func @main(%x: !t) -> !t {
    %w = "yolo.weight"() {name = "w"} : () -> !w
    %v = "yolo.weight"() {name = "v"} : () -> !v
    %0 = func.call @c(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
    %1 = func.call @c(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
    %2 = func.call @pool(%1) {yolo.dispatch} : (!t) -> !t
    %3 = "yolo.concat"(%1, %2) : (!t, !t) -> !c
    %4 = func.call @last(%3, %v) {yolo.dispatch} : (!c, !v) -> !t
    return %4 : !t
  }
  // CHECK: func.func private @c
  // CHECK-NOT: yolo.tf32_rounded
  // CHECK-SAME: yolo.round_result
  func.func private @c(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
    %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
        groups = 1 : i64} : (!t, !w) -> !t
    return %0 : !t
  }
  // CHECK: func.func private @pool
  // CHECK-NOT: yolo.round_result
  // CHECK: max_pool2d
  func.func private @pool(%x: !t) -> !t attributes {yolo.family = "max_pool"} {
    %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>,
        padding = array<i64: 1, 1, 1, 1>} : (!t) -> !t
    return %0 : !t
  }
  // CHECK: func.func private @last
  // CHECK-NOT: yolo.round_result
  // CHECK-SAME: yolo.tf32_rounded = array<i64: 0>
  func.func private @last(%x: !c, %w: !v) -> !t attributes {yolo.family = "conv2d"} {
    %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
        groups = 1 : i64} : (!c, !v) -> !t
    return %0 : !t
  }
}
