// RUN: yolomlir-opt %s --target=sm_90 --split-input-file --yolo-fuse-bottlenecks \
// RUN:   | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NOT: @conv2d
// CHECK: call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add(%arg0, {{.*}}, %arg0)
// CHECK-NOT: @conv2d
// CHECK: func.func private @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add
// CHECK-SAME: yolo.family = "chain"
// CHECK: yolo.conv2d
// CHECK-NEXT: yolo.silu
// CHECK-NEXT: yolo.conv2d
// CHECK-NEXT: yolo.add
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = func.call @conv2d_3x3s1_8x8x8_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8_add(%0, %w, %x) {yolo.dispatch}
      : (!t, !w, !t) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8_silu(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8_add(%x: !t, %w: !w, %r: !t) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
  return %1 : !t
}

// -----

// RUN: yolomlir-opt %s --target=sm_120 --split-input-file --yolo-fuse-bottlenecks \
// RUN:   | FileCheck %s

// The second one begins a chain, which stores two results; operands come convolution by convolution.
// CHECK-LABEL: func.func @main
// CHECK: %[[V:.*]] = "yolo.weight"() {name = "b.weight"}
// CHECK: %[[W:.*]] = "yolo.weight"() {name = "a.weight"}
// CHECK: %[[P:.*]] = "yolo.weight"() {name = "c.weight"}
// CHECK-NOT: @conv2d
// CHECK: %[[C:.*]]:2 = call @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add_then_16(%arg0, %[[W]], %[[V]], %arg0, %[[P]]) {yolo.dispatch}
// CHECK-NEXT: return %[[C]]#0, %[[C]]#1
// CHECK-NOT: @conv2d
// CHECK: func.func private @chain_3x3s1_8x8x8_8_silu_then_3x3s1_8_add_then_16
// CHECK-SAME: %[[A:.*]]: tensor<1x8x8x8xf32{{.*}}>, %[[B:.*]]: tensor<8x8x3x3xf32{{.*}}>, %[[D:.*]]: tensor<8x8x3x3xf32{{.*}}>, %[[E:.*]]: tensor<1x8x8x8xf32{{.*}}>, %[[F:.*]]: tensor<16x8x1x1xf32
// CHECK-SAME: yolo.family = "chain"
// CHECK: %[[X:.*]] = "yolo.conv2d"(%[[A]], %[[B]])
// CHECK-NEXT: %[[S:.*]] = "yolo.silu"(%[[X]])
// CHECK-NEXT: %[[Y:.*]] = "yolo.conv2d"(%[[S]], %[[D]])
// CHECK-NEXT: %[[R:.*]] = "yolo.add"(%[[Y]], %[[E]])
// CHECK-NEXT: %[[Z:.*]] = "yolo.conv2d"(%[[R]], %[[F]])
// CHECK-NEXT: return %[[R]], %[[Z]]
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!u = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<16x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!t, !u) {
  %v = "yolo.weight"() {name = "b.weight"} : () -> !w
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %p = "yolo.weight"() {name = "c.weight"} : () -> !v
  %0 = func.call @conv2d_3x3s1_8x8x8_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1:2 = func.call @chain_3x3s1_8x8x8_8_add_then_16(%0, %v, %x, %p) {yolo.dispatch}
      : (!t, !w, !t, !v) -> (!t, !u)
  return %1#0, %1#1 : !t, !u
}
func.func private @conv2d_3x3s1_8x8x8_8_silu(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @chain_3x3s1_8x8x8_8_add_then_16(%x: !t, %w: !w, %r: !t, %p: !v) -> (!t, !u)
    attributes {yolo.family = "chain"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
  %2 = "yolo.conv2d"(%1, %p) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !v) -> !u
  return %1, %2 : !t, !u
}

// -----

// Of three in a row, the first two; not all of them.
// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]] = call @chain_3x3s1_8x8x8_8_then_3x3s1_8(%arg0
// CHECK-NEXT: %[[D:.*]] = call @conv2d_3x3s1_8x8x8_8(%[[C]]
// CHECK-NEXT: return %[[D]]
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = func.call @conv2d_3x3s1_8x8x8_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  %2 = func.call @conv2d_3x3s1_8x8x8_8(%1, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %2 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

// A first one of stride 2.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_3x3s2_8x16x16_8
// CHECK: call @conv2d_3x3s1_8x8x8_8
!i = tensor<1x8x16x16xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !i) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = func.call @conv2d_3x3s2_8x16x16_8(%x, %w) {yolo.dispatch} : (!i, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s2_8x16x16_8(%x: !i, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 2, 2>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!i, !w) -> !t
  return %0 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

// A second one of stride 2.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_3x3s1_8x16x16_8
// CHECK: call @conv2d_3x3s2_8x16x16_8
!i = tensor<1x8x16x16xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !i) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = func.call @conv2d_3x3s1_8x16x16_8(%x, %w) {yolo.dispatch} : (!i, !w) -> !i
  %1 = func.call @conv2d_3x3s2_8x16x16_8(%0, %w) {yolo.dispatch} : (!i, !w) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x16x16_8(%x: !i, %w: !w) -> !i
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!i, !w) -> !i
  return %0 : !i
}
func.func private @conv2d_3x3s2_8x16x16_8(%x: !i, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 2, 2>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!i, !w) -> !t
  return %0 : !t
}

// -----

// Groups, before and after.
// CHECK-LABEL: func.func @main
// CHECK: call @depthwise_3x3s1_8x8x8_8
// CHECK: call @conv2d_3x3s1_8x8x8_8
// CHECK: call @depthwise_3x3s1_8x8x8_8
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x1x3x3xf32, #yolo.layout<"hwio">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @depthwise_3x3s1_8x8x8_8(%x, %v) {yolo.dispatch} : (!t, !v) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  %2 = func.call @depthwise_3x3s1_8x8x8_8(%1, %v) {yolo.dispatch} : (!t, !v) -> !t
  return %2 : !t
}
func.func private @depthwise_3x3s1_8x8x8_8(%x: !t, %w: !v) -> !t
    attributes {yolo.family = "depthwise"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 8 : i64} : (!t, !v) -> !t
  return %0 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

// The first convolution's result is one part of what the second one reads.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_3x3s1_8x8x8_8
// CHECK: "yolo.concat"
// CHECK: call @conv2d_3x3s1_16x8x8_8
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!u = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x16x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t, %y: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_3x3s1_8x8x8_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = "yolo.concat"(%0, %y) : (!t, !t) -> !u
  %2 = func.call @conv2d_3x3s1_16x8x8_8(%1, %v) {yolo.dispatch} : (!u, !v) -> !t
  return %2 : !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @conv2d_3x3s1_16x8x8_8(%x: !u, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!u, !v) -> !t
  return %0 : !t
}
