// RUN: yolomlir-opt %s --target=sm_90 --split-input-file --yolo-fuse-pointwise \
// RUN:   | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NOT: @conv2d
// CHECK: call @chain_1x1s1_8x4x4_8_silu_then_8_add(%arg0, {{.*}}, %arg0) {yolo.dispatch}
// CHECK: func.func private @chain_1x1s1_8x4x4_8_silu_then_8_add
// CHECK-SAME: yolo.family = "chain"
// CHECK: yolo.conv2d
// CHECK-NEXT: yolo.silu
// CHECK-NEXT: yolo.conv2d
// CHECK-NEXT: yolo.add
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = func.call @conv2d_1x1s1_8x4x4_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_1x1s1_8x4x4_8_add(%0, %w, %x) {yolo.dispatch}
      : (!t, !w, !t) -> !t
  return %1 : !t
}
func.func private @conv2d_1x1s1_8x4x4_8_silu(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @conv2d_1x1s1_8x4x4_8_add(%x: !t, %w: !w, %r: !t) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.add"(%0, %r) : (!t, !t) -> !t
  return %1 : !t
}

// -----

// What others read is stored as well; the slice that only the chain reads goes into it.
// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]]:2 = call @chain_1x1s1_8x4x4_8_silu_then_8(%arg0, %{{.*}}, %{{.*}}) {yolo.dispatch}
// CHECK-NOT: "yolo.slice"
// CHECK: %[[K:.*]] = "yolo.concat"(%[[C]]#0, %[[C]]#1)
// CHECK: return %[[K]]
// CHECK: func.func private @chain_1x1s1_8x4x4_8_silu_then_8
// CHECK: %[[S:.*]] = "yolo.silu"
// CHECK: %[[P:.*]] = "yolo.slice"(%[[S]]) {offset = 4 : i64, size = 4 : i64}
// CHECK: %[[Y:.*]] = "yolo.conv2d"(%[[P]]
// CHECK: return %[[S]], %[[Y]]
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!h = tensor<1x4x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!v = tensor<8x4x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !c {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_1x1s1_8x4x4_8_silu(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = "yolo.slice"(%0) {offset = 4 : i64, size = 4 : i64} : (!t) -> !h
  %2 = func.call @conv2d_1x1s1_4x4x4_8(%1, %v) {yolo.dispatch} : (!h, !v) -> !t
  %3 = "yolo.concat"(%0, %2) : (!t, !t) -> !c
  return %3 : !c
}
func.func private @conv2d_1x1s1_8x4x4_8_silu(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @conv2d_1x1s1_4x4x4_8(%x: !h, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!h, !v) -> !t
  return %0 : !t
}

// -----

// A 3x3 begins a chain; the concat that its result is a part of is put together inside, and what
// lies between the two in the program but needs neither stays where it is.
// CHECK-LABEL: func.func @main
// CHECK: %[[O:.*]] = call @other(%arg0)
// CHECK: %[[C:.*]] = call @chain_3x3s1_8x4x4_8_then_8(%arg0, %{{.*}}, %[[O]], %{{.*}}) {yolo.dispatch}
// CHECK-NEXT: return %[[C]]
// CHECK: func.func private @chain_3x3s1_8x4x4_8_then_8(%[[X:.*]]: tensor<1x8x4x4{{.*}}, %{{.*}}: tensor<8x8x3x3
// CHECK: %[[Y:.*]] = "yolo.conv2d"(%[[X]]
// CHECK: "yolo.concat"(%{{.*}}, %[[Y]])
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_3x3s1_8x4x4_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @other(%x) {yolo.dispatch} : (!t) -> !t
  %2 = "yolo.concat"(%1, %0) : (!t, !t) -> !c
  %3 = func.call @conv2d_1x1s1_16x4x4_8(%2, %v) {yolo.dispatch} : (!c, !v) -> !t
  return %3 : !t
}
func.func private @conv2d_3x3s1_8x4x4_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @other(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @conv2d_1x1s1_16x4x4_8(%x: !c, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!c, !v) -> !t
  return %0 : !t
}

// -----

// Not: a 3x3 after a 1x1, for it needs its neighbours' results.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_1x1s1_8x4x4_8(
// CHECK: call @conv2d_3x3s1_8x4x4_8(
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_1x1s1_8x4x4_8(%x, %v) {yolo.dispatch} : (!t, !v) -> !t
  %1 = func.call @conv2d_3x3s1_8x4x4_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %1 : !t
}
func.func private @conv2d_1x1s1_8x4x4_8(%x: !t, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !v) -> !t
  return %0 : !t
}
func.func private @conv2d_3x3s1_8x4x4_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

// Not: what another dispatch has to run in between, which reads the first and is read by the second.
// CHECK-LABEL: func.func @main
// CHECK: call @conv2d_1x1s1_8x4x4_8(
// CHECK: call @other(
// CHECK: call @conv2d_1x1s1_16x4x4_8(
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!v = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  %0 = func.call @conv2d_1x1s1_8x4x4_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @other(%0) {yolo.dispatch} : (!t) -> !t
  %2 = "yolo.concat"(%0, %1) : (!t, !t) -> !c
  %3 = func.call @conv2d_1x1s1_16x4x4_8(%2, %v) {yolo.dispatch} : (!c, !v) -> !t
  return %3 : !t
}
func.func private @conv2d_1x1s1_8x4x4_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @other(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @conv2d_1x1s1_16x4x4_8(%x: !c, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!c, !v) -> !t
  return %0 : !t
}

// -----

// Before yolo-concat-views an upsampling may lie between two dispatches: they stay apart.
// CHECK-LABEL: func.func @main
// CHECK: %[[A:.*]] = call @first
// CHECK: %[[U:.*]] = "yolo.upsample"(%[[A]])
// CHECK: call @second(%[[U]]
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!u = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !u {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = func.call @first(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = "yolo.upsample"(%0) {factor = 2 : i64} : (!t) -> !u
  %2 = func.call @second(%1, %w) {yolo.dispatch} : (!u, !w) -> !u
  return %2 : !u
}
func.func private @first(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @second(%x: !u, %w: !w) -> !u attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!u, !w) -> !u
  return %0 : !u
}
