// RUN: yolomlir-opt %s --split-input-file --yolo-concat-views | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK: %[[A:.*]] = call @producer(%arg0)
// CHECK: %[[B:.*]] = call @producer(%[[A]])
// CHECK: %[[C:.*]] = "yolo.concat"(%[[A]], %[[B]])
// CHECK: return %[[C]]
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !c {
  %a = func.call @producer(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @producer(%a) {yolo.dispatch} : (!t) -> !t
  %c = "yolo.concat"(%a, %b) : (!t, !t) -> !c
  return %c : !c
}
func.func private @producer(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}

// -----

// A map enlarged and joined with another goes into the convolution that reads it.
// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.upsample
// CHECK-NOT: yolo.concat
// CHECK: call @reader_from_8up2_8(%arg0, %arg1, %{{.*}})
// CHECK: func.func private @reader_from_8up2_8(%arg0: tensor<1x8x2x2xf32{{.*}}, %arg1: tensor<1x8x4x4xf32
// CHECK-SAME: yolo.family = "conv2d"
// CHECK: %[[U:.*]] = "yolo.upsample"(%arg0)
// CHECK: %[[C:.*]] = "yolo.concat"(%[[U]], %arg1)
// CHECK: "yolo.conv2d"(%[[C]], %arg2)
// CHECK-NOT: @reader(
!s = tensor<1x8x2x2xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%y: !s, %z: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %u = "yolo.upsample"(%y) {factor = 2 : i64} : (!s) -> !t
  %c = "yolo.concat"(%u, %z) : (!t, !t) -> !c
  %r = func.call @reader(%c, %w) {yolo.dispatch} : (!c, !w) -> !t
  return %r : !t
}
func.func private @reader(%c: !c, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%c, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!c, !w) -> !t
  return %0 : !t
}

// -----

// A tensor wanted by two concats lies in the first; the second is read as two sources.
// CHECK-LABEL: func.func @main
// CHECK: %[[A:.*]] = call @producer(%arg0)
// CHECK: %[[B:.*]] = call @producer(%[[A]])
// CHECK: %[[C:.*]] = "yolo.concat"(%[[A]], %[[B]])
// CHECK: call @reader(%[[C]], %{{.*}})
// CHECK: call @reader_from_8_8(%[[B]], %[[A]], %{{.*}})
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!t, !t) {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %a = func.call @producer(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @producer(%a) {yolo.dispatch} : (!t) -> !t
  %c = "yolo.concat"(%a, %b) : (!t, !t) -> !c
  %d = "yolo.concat"(%b, %a) : (!t, !t) -> !c
  %0 = func.call @reader(%c, %w) {yolo.dispatch} : (!c, !w) -> !t
  %1 = func.call @reader(%d, %w) {yolo.dispatch} : (!c, !w) -> !t
  return %0, %1 : !t, !t
}
func.func private @producer(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @reader(%c: !c, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%c, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!c, !w) -> !t
  return %0 : !t
}

// -----

// C2PSA: the half that is transformed is replaced where it lies, as its last reader comes before.
// CHECK-LABEL: func.func @main
// CHECK: %[[X:.*]] = call @producer(%arg0)
// CHECK: "yolo.concat"
// CHECK-NOT: @reader_from
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !c) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %y = func.call @producer(%x) {yolo.dispatch} : (!c) -> !c
  %a = "yolo.slice"(%y) {offset = 0 : i64, size = 8 : i64} : (!c) -> !t
  %b = "yolo.slice"(%y) {offset = 8 : i64, size = 8 : i64} : (!c) -> !t
  %m = func.call @step(%b) {yolo.dispatch} : (!t) -> !t
  %n = func.call @step(%m) {yolo.dispatch} : (!t) -> !t
  %z = "yolo.concat"(%a, %n) : (!t, !t) -> !c
  %0 = func.call @reader(%z, %w) {yolo.dispatch} : (!c, !w) -> !t
  return %0 : !t
}
func.func private @producer(%x: !c) -> !c attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!c) -> !c
  return %0 : !c
}
func.func private @step(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @reader(%c: !c, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%c, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!c, !w) -> !t
  return %0 : !t
}

// -----

// Not: the same with one step, which would write what it reads.
// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.concat
// CHECK: call @reader_from_8_8
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x16x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !c) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %y = func.call @producer(%x) {yolo.dispatch} : (!c) -> !c
  %a = "yolo.slice"(%y) {offset = 0 : i64, size = 8 : i64} : (!c) -> !t
  %b = "yolo.slice"(%y) {offset = 8 : i64, size = 8 : i64} : (!c) -> !t
  %m = func.call @step(%b) {yolo.dispatch} : (!t) -> !t
  %z = "yolo.concat"(%a, %m) : (!t, !t) -> !c
  %0 = func.call @reader(%z, %w) {yolo.dispatch} : (!c, !w) -> !t
  return %0 : !t
}
func.func private @producer(%x: !c) -> !c attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!c) -> !c
  return %0 : !c
}
func.func private @step(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @reader(%c: !c, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%c, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!c, !w) -> !t
  return %0 : !t
}

// -----

// What no convolution reads is copied: a concat of an argument and an upsampling.
// CHECK-LABEL: func.func @main
// CHECK: call @concat_16x4x4(%arg0) {yolo.dispatch}
// CHECK: call @upsample_8x8x8(%arg0)
// CHECK: func.func private @concat_16x4x4
// CHECK-SAME: yolo.family = "elementwise"
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!u = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> (!c, !u) {
  %c = "yolo.concat"(%x, %x) : (!t, !t) -> !c
  %u = "yolo.upsample"(%x) {factor = 2 : i64} : (!t) -> !u
  return %c, %u : !c, !u
}

// -----

// A concat that would start a tensor at a multiple of 2 channels is read as sources instead.
// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.concat
// CHECK: call @reader_from_6_8
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!s = tensor<1x6x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x14x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x14x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t, %y: !s) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %a = func.call @wide(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @narrow(%y) {yolo.dispatch} : (!s) -> !s
  %c = "yolo.concat"(%b, %a) : (!s, !t) -> !c
  %0 = func.call @reader(%c, %w) {yolo.dispatch} : (!c, !w) -> !t
  return %0 : !t
}
func.func private @wide(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @narrow(%x: !s) -> !s attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!s) -> !s
  return %0 : !s
}
func.func private @reader(%c: !c, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%c, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!c, !w) -> !t
  return %0 : !t
}

// -----

// A private function that nothing calls goes; a public one is somebody else's.
// CHECK-LABEL: func.func @main
// CHECK: func.func @other
// CHECK-NOT: @unused
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  return %x : !t
}
func.func @other(%x: !t) -> !t {
  return %x : !t
}
func.func private @unused(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
