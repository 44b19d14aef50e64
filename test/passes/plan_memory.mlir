// RUN: yolomlir-opt %s --split-input-file --yolo-plan-memory | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-SAME: yolo.arena_bytes = 1536
// CHECK-SAME: yolo.views = [array<i64: [[A:[0-9]+]], 8>, array<i64: [[Z:[0-9]+]], 8>]
// CHECK: yolo.views = [array<i64: [[A]], 8>, array<i64: [[B:[0-9]+]], 8>]
// CHECK: yolo.views = [array<i64: [[B]], 8>, array<i64: [[Z]], 8>]
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  %a = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @f(%a) {yolo.dispatch} : (!t) -> !t
  return %b : !t
}
func.func private @f(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}

// -----

// Two buffers that are never wanted together share memory: %a and %c. Views have the pitch of the
// concat's buffer and start at their channel. (512 bytes a tensor, 1024 the concat.)
// CHECK-LABEL: func.func @main
// CHECK-SAME: yolo.arena_bytes = 3072
// CHECK: call @f(%arg0) {yolo.dispatch, yolo.views = [{{.*}}, array<i64: [[A:[0-9]+]], 8>]}
// CHECK: call @f(%{{.*}}) {yolo.dispatch, yolo.views = [array<i64: [[A]], 8>, array<i64: [[B:[0-9]+]], 8>]}
// CHECK: call @f(%{{.*}}) {yolo.dispatch, yolo.views = [array<i64: [[B]], 8>, array<i64: [[C:[0-9]+]], 16>]}
// CHECK: call @f(%{{.*}}) {yolo.dispatch, yolo.views = [array<i64: [[C]], 16>, array<i64: {{[0-9]+}}, 16>]}
// CHECK: call @g(%{{.*}}) {yolo.dispatch, yolo.views = [array<i64: [[C]], 16>, array<i64: {{[0-9]+}}, 16>]}
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !c {
  %a = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @f(%a) {yolo.dispatch} : (!t) -> !t
  %c = func.call @f(%b) {yolo.dispatch} : (!t) -> !t
  %d = func.call @f(%c) {yolo.dispatch} : (!t) -> !t
  %e = "yolo.concat"(%c, %d) : (!t, !t) -> !c
  %y = func.call @g(%e) {yolo.dispatch} : (!c) -> !c
  return %y : !c
}
func.func private @f(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @g(%x: !c) -> !c attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!c) -> !c
  return %0 : !c
}

// -----

// A weight has an entry without elements. A view whose rows are less aligned than 8 channels let a
// kernel expect is stated on the function.
// CHECK-LABEL: func.func @main
// CHECK: call @h(%{{.*}}, %{{.*}}) {yolo.dispatch, yolo.views = [array<i64: {{[0-9]+}}, 14>, array<i64>, array<i64: {{[0-9]+}}, 8>]}
// CHECK: func.func private @h
// CHECK-SAME: yolo.alignments = array<i64: 8, 0, 0>
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!s = tensor<1x14x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !s) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %a = func.call @f(%x) {yolo.dispatch} : (!s) -> !s
  %b = "yolo.slice"(%a) {offset = 2 : i64, size = 8 : i64} : (!s) -> !t
  %y = func.call @h(%b, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %y : !t
}
func.func private @f(%x: !s) -> !s attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!s) -> !s
  return %0 : !s
}
func.func private @h(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
