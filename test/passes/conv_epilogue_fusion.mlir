// RUN: yolomlir-opt %s --split-input-file --yolo-conv-epilogue-fusion | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.silu
// CHECK: call @conv2d_1x1s1_8x4x4_8_silu_add(%arg0, {{.*}}, %arg0) {yolo.dispatch}
// CHECK: func.func private @conv2d_1x1s1_8x4x4_8_silu_add
// CHECK-SAME: yolo.family = "conv2d"
// CHECK: yolo.conv2d
// CHECK-NEXT: yolo.silu
// CHECK-NEXT: yolo.add
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %b = "yolo.weight"() {name = "a.bias"} : () -> tensor<8xf32>
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w, tensor<8xf32>) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  %2 = "yolo.add"(%x, %1) : (!t, !t) -> !t
  return %2 : !t
}

// -----

// Equal shapes share one function, whichever side of the addition the residual is on.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_1x1s1_8x4x4_8_add(%arg0, {{.*}}, %arg1) {yolo.dispatch}
// CHECK: call @conv2d_1x1s1_8x4x4_8_add(%{{.*}}, {{.*}}, %arg1) {yolo.dispatch}
// CHECK: func.func private @conv2d_1x1s1_8x4x4_8_add
// CHECK: yolo.conv2d
// CHECK-NEXT: "yolo.add"(%{{[0-9]+}}, %arg2)
// CHECK-NOT: func.func
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t, %r: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t loc("a")
  %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t loc("b")
  %3 = "yolo.add"(%r, %2) : (!t, !t) -> !t
  return %3 : !t
}

// -----

// Not across a value that something else wants: the activation and the addition stay.
// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]] = call @conv2d_1x1s1_8x4x4_8(
// CHECK: %[[S:.*]] = "yolo.silu"(%[[C]])
// CHECK: "yolo.add"(%[[C]], %[[S]])
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
  return %2 : !t
}

// -----

// An activation after the addition stays: the epilogue activates first.
// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]] = call @conv2d_1x1s1_8x4x4_8_add(
// CHECK: "yolo.silu"(%[[C]])
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.add"(%0, %x) : (!t, !t) -> !t
  %2 = "yolo.silu"(%1) : (!t) -> !t
  return %2 : !t
}

// -----

// Of two convolutions that are added the later one takes the addition.
// CHECK-LABEL: func.func @main
// CHECK: %[[A:.*]] = call @conv2d_1x1s1_8x4x4_8(%arg0, {{.*}}) {yolo.dispatch}
// CHECK: call @depthwise_3x3s1_8x4x4_add(%arg0, {{.*}}, %[[A]]) {yolo.dispatch}
// CHECK: func.func private @depthwise_3x3s1_8x4x4_add
// CHECK-SAME: yolo.family = "depthwise"
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!d = tensor<8x1x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %d = "yolo.weight"() {name = "b.weight"} : () -> !d
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t loc("a")
  %1 = "yolo.conv2d"(%x, %d) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 8 : i64} : (!t, !d) -> !t loc("b")
  %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
  return %2 : !t
}

// -----

// The image goes in as it is: normalize is in the body of both that read it.
// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.normalize
// CHECK: call @conv2d_1x1s1_3x4x4_8(%arg0
// CHECK: call @conv2d_1x1s1_3x4x4_8_silu(%arg0
// CHECK: func.func private @conv2d_1x1s1_3x4x4_8(%arg0: tensor<1x3x4x4xui8
// CHECK-NEXT: yolo.normalize
// CHECK: func.func private @conv2d_1x1s1_3x4x4_8_silu(%arg0: tensor<1x3x4x4xui8
// CHECK-NEXT: yolo.normalize
!i = tensor<1x3x4x4xui8, #yolo.layout<"nhwc">>
!x = tensor<1x3x4x4xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x3x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%i: !i) -> (!t, !t) {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %x = "yolo.normalize"(%i) {scale = 0.00392156862 : f64} : (!i) -> !x
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!x, !w) -> !t
  %1 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!x, !w) -> !t
  %2 = "yolo.silu"(%1) : (!t) -> !t
  return %0, %2 : !t, !t
}
