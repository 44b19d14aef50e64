// RUN: yolomlir-opt %s --split-input-file --yolo-form-dispatches | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK: %[[P:.*]] = call @max_pool_5x5s1_8x8x8_chain2(%arg0) {yolo.dispatch}
// CHECK: "yolo.concat"(%arg0, %[[P]])
// CHECK: func.func private @max_pool_5x5s1_8x8x8_chain2
// CHECK-SAME: yolo.family = "max_pool"
// CHECK-COUNT-2: yolo.max_pool2d
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!c2 = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!c3 = tensor<1x24x8x8xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !c3 {
  %p1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %p2 = "yolo.max_pool2d"(%p1) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %0 = "yolo.concat"(%x, %p1) : (!t, !t) -> !c2
  %1 = "yolo.concat"(%0, %p2) : (!c2, !t) -> !c3
  return %1 : !c3
}

// -----

// SPPF: four maps joined, three of them pools, become two joined.
// CHECK-LABEL: func.func @main
// CHECK: %[[P:.*]] = call @max_pool_5x5s1_8x8x8_chain3(%arg0)
// CHECK-NEXT: %[[C:.*]] = "yolo.concat"(%arg0, %[[P]])
// CHECK-NEXT: return %[[C]]
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!c2 = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!c3 = tensor<1x24x8x8xf32, #yolo.layout<"nhwc">>
!c4 = tensor<1x32x8x8xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !c4 {
  %p1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %p2 = "yolo.max_pool2d"(%p1) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %p3 = "yolo.max_pool2d"(%p2) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %0 = "yolo.concat"(%x, %p1) : (!t, !t) -> !c2
  %1 = "yolo.concat"(%0, %p2) : (!c2, !t) -> !c3
  %2 = "yolo.concat"(%1, %p3) : (!c3, !t) -> !c4
  return %2 : !c4
}

// -----

// Not: a pool that something else wants too; pools joined in another order than they are chained.
// CHECK-LABEL: func.func @main
// CHECK-NOT: chain
// CHECK: call @max_pool_5x5s1_8x8x8(
// CHECK: call @max_pool_5x5s1_8x8x8(
// CHECK: call @max_pool_5x5s1_8x8x8(
// CHECK: call @max_pool_5x5s1_8x8x8(
// CHECK-NOT: chain
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!c2 = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> (!c2, !t, !c2) {
  %p1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %p2 = "yolo.max_pool2d"(%p1) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %0 = "yolo.concat"(%p1, %p2) : (!t, !t) -> !c2
  %q1 = "yolo.max_pool2d"(%p2) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %q2 = "yolo.max_pool2d"(%q1) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>,
      padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %1 = "yolo.concat"(%q2, %q1) : (!t, !t) -> !c2
  return %0, %p1, %1 : !c2, !t, !c2
}

// -----

// Attention takes its positional encoding, whose v is slices of qkv, head after head.
// CHECK-LABEL: func.func @main
// CHECK: %[[A:.*]] = call @attention_2x2x4_16x4x4_pe(%arg0, %{{.*}}, %{{.*}}) {yolo.dispatch}
// CHECK: return %[[A]]
// CHECK: func.func private @attention_2x2x4_16x4x4_pe
// CHECK-SAME: yolo.family = "attention"
// CHECK-COUNT-2: yolo.slice
// CHECK: yolo.concat
// CHECK: yolo.attention
// CHECK: yolo.conv2d
// CHECK: yolo.add
!q = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!v = tensor<1x4x4x4xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!d = tensor<8x1x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%qkv: !q) -> !t {
  %w = "yolo.weight"() {name = "pe.weight"} : () -> !d
  %b = "yolo.weight"() {name = "pe.bias"} : () -> tensor<8xf32>
  %v0 = "yolo.slice"(%qkv) {offset = 4 : i64, size = 4 : i64} : (!q) -> !v
  %v1 = "yolo.slice"(%qkv) {offset = 12 : i64, size = 4 : i64} : (!q) -> !v
  %v = "yolo.concat"(%v0, %v1) : (!v, !v) -> !t
  %pe = "yolo.conv2d"(%v, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 8 : i64} : (!t, !d, tensor<8xf32>) -> !t
  %a = "yolo.attention"(%qkv) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64,
      scale = 0.7 : f64} : (!q) -> !t loc("attn")
  %y = "yolo.add"(%a, %pe) : (!t, !t) -> !t
  return %y : !t
}

// -----

// Not: an encoding of other channels than v is a convolution of its own, and the addition too.
// CHECK-LABEL: func.func @main
// CHECK: call @depthwise_3x3s1_8x4x4(
// CHECK: call @attention_2x2x4_16x4x4(%arg0) {yolo.dispatch}
// CHECK: call @add_8x4x4(
!q = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!d = tensor<8x1x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%qkv: !q) -> !t {
  %w = "yolo.weight"() {name = "pe.weight"} : () -> !d
  %v = "yolo.slice"(%qkv) {offset = 4 : i64, size = 8 : i64} : (!q) -> !t
  %pe = "yolo.conv2d"(%v, %w) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 8 : i64} : (!t, !d) -> !t
  %a = "yolo.attention"(%qkv) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64,
      scale = 0.7 : f64} : (!q) -> !t
  %y = "yolo.add"(%a, %pe) : (!t, !t) -> !t
  return %y : !t
}

// -----

// Detection is one dispatch; what no pass grouped is one alone, an addition of a tensor to itself
// with one operand.
// CHECK-LABEL: func.func @main
// CHECK: call @silu_4x2x2(%arg0)
// CHECK: call @add_4x2x2(%{{.*}}) {yolo.dispatch}
// CHECK: call @detect_12x3_5(
// CHECK: func.func private @detect_12x3_5
// CHECK-SAME: yolo.family = "detect"
// CHECK: func.func private @silu_4x2x2
// CHECK-SAME: yolo.family = "elementwise"
!b = tensor<1x4x2x2xf32, #yolo.layout<"nhwc">>
!c = tensor<1x3x2x2xf32, #yolo.layout<"nhwc">>
func.func @main(%b: !b, %b1: !b, %c: !c, %c1: !c, %c2: !c) -> tensor<1x5x6xf32> {
  %0 = "yolo.silu"(%b) : (!b) -> !b
  %1 = "yolo.add"(%0, %0) : (!b, !b) -> !b
  %2 = "yolo.detect"(%b, %b1, %1, %c, %c1, %c2) {strides = array<i64: 8, 16, 32>,
      max_det = 5 : i64} : (!b, !b, !b, !c, !c, !c) -> tensor<1x5x6xf32>
  return %2 : tensor<1x5x6xf32>
}

// -----

// In two stages, it is two.
// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]] = call @candidates_8x3_4(%arg0, %arg1, %arg3, %arg4) {yolo.dispatch}
// CHECK: call @merge_detections_4x3_4(%[[C]], %arg2, %arg5) {yolo.dispatch}
// CHECK: func.func private @candidates_8x3_4
// CHECK-SAME: yolo.family = "detect"
// CHECK: func.func private @merge_detections_4x3_4
// CHECK-SAME: yolo.family = "merge_detections"
!b = tensor<1x4x2x2xf32, #yolo.layout<"nhwc">>
!c = tensor<1x3x2x2xf32, #yolo.layout<"nhwc">>
func.func @main(%b: !b, %b1: !b, %b2: !b, %c: !c, %c1: !c, %c2: !c) -> tensor<1x4x6xf32> {
  %0 = "yolo.candidates"(%b, %b1, %c, %c1) {strides = array<i64: 8, 16>,
      max_det = 4 : i64} : (!b, !b, !c, !c) -> tensor<1x4x8xf32>
  %1 = "yolo.merge_detections"(%0, %b2, %c2) {stride = 32 : i64} : (tensor<1x4x8xf32>, !b, !c) -> tensor<1x4x6xf32>
  return %1 : tensor<1x4x6xf32>
}
