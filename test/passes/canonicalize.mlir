// RUN: yolomlir-opt %s --split-input-file --yolo-canonicalize | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.concat
// CHECK: %[[Y:.*]] = "yolo.silu"(%arg0)
// CHECK-NEXT: return %[[Y]]
!half = tensor<1x4x6x6xf32>
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 4 : i64} : (!t) -> !half
  %1 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!t) -> !half
  %2 = "yolo.concat"(%0, %1) : (!half, !half) -> !t
  %3 = "yolo.silu"(%2) : (!t) -> !t
  return %3 : !t
}

// -----

// CHECK-LABEL: func.func @slices
// CHECK-NEXT: %[[A:.*]] = "yolo.slice"(%arg0) {offset = 5 : i64, size = 2 : i64}
// CHECK-NEXT: %[[S:.*]] = "yolo.concat"(%arg0, %arg1)
// CHECK-NEXT: %[[B:.*]] = "yolo.slice"(%arg1) {offset = 1 : i64, size = 2 : i64}
// CHECK-NEXT: %[[C:.*]] = "yolo.slice"(%[[S]]) {offset = 7 : i64, size = 2 : i64}
// CHECK-NEXT: return %[[A]], %[[B]], %[[C]]
!t = tensor<1x8x6x6xf32>
!two = tensor<1x2x6x6xf32>
!four = tensor<1x4x6x6xf32>
func.func @slices(%x: !t, %y: !t) -> (!two, !two, !two) {
  %0 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!t) -> !four
  %1 = "yolo.slice"(%0) {offset = 1 : i64, size = 2 : i64} : (!four) -> !two
  %2 = "yolo.concat"(%x, %y) : (!t, !t) -> tensor<1x16x6x6xf32>
  %3 = "yolo.slice"(%2) {offset = 9 : i64, size = 2 : i64} : (tensor<1x16x6x6xf32>) -> !two
  // One that straddles both operands stays.
  %4 = "yolo.slice"(%2) {offset = 7 : i64, size = 2 : i64} : (tensor<1x16x6x6xf32>) -> !two
  return %1, %3, %4 : !two, !two, !two
}

// -----

// The neighbours are found at the end of a nested concat too; others stay.
// CHECK-LABEL: func.func @nested_concat
// CHECK-NEXT: %[[Y:.*]] = "yolo.concat"(%arg1, %arg0)
// CHECK-NEXT: %[[L:.*]] = "yolo.slice"(%arg0) {offset = 0
// CHECK-NEXT: %[[R:.*]] = "yolo.slice"(%arg0) {offset = 4
// CHECK-NEXT: %[[Z:.*]] = "yolo.concat"(%[[R]], %[[L]])
// CHECK-NEXT: return %[[Y]], %[[Z]]
!t = tensor<1x8x6x6xf32>
!four = tensor<1x4x6x6xf32>
func.func @nested_concat(%x: !t, %y: !four) -> (tensor<1x12x6x6xf32>, !t) {
  %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 4 : i64} : (!t) -> !four
  %1 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!t) -> !four
  %2 = "yolo.concat"(%y, %0) : (!four, !four) -> !t
  %3 = "yolo.concat"(%2, %1) : (!t, !four) -> tensor<1x12x6x6xf32>
  %4 = "yolo.slice"(%x) {offset = 0 : i64, size = 4 : i64} : (!t) -> !four
  %5 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!t) -> !four
  %6 = "yolo.concat"(%5, %4) : (!four, !four) -> !t
  return %3, %6 : tensor<1x12x6x6xf32>, !t
}

// -----

// CHECK-LABEL: func.func @windows
// CHECK-NEXT: %[[U:.*]] = "yolo.upsample"(%arg0) {factor = 4 : i64}
// CHECK-NEXT: return %arg0, %[[U]]
!t = tensor<1x8x6x6xf32>
func.func @windows(%x: !t) -> (!t, tensor<1x8x24x24xf32>) {
  %0 = "yolo.upsample"(%x) {factor = 1 : i64} : (!t) -> !t
  %1 = "yolo.max_pool2d"(%0) {kernel = array<i64: 1, 1>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>} : (!t) -> !t
  %2 = "yolo.upsample"(%x) {factor = 2 : i64} : (!t) -> tensor<1x8x12x12xf32>
  %3 = "yolo.upsample"(%2) {factor = 2 : i64} : (tensor<1x8x12x12xf32>) -> tensor<1x8x24x24xf32>
  return %1, %3 : !t, tensor<1x8x24x24xf32>
}

// -----

// CHECK-LABEL: func.func @conversions
// CHECK-NEXT: %[[X:.*]] = "yolo.convert_layout"(%arg0)
// CHECK-NEXT: return %arg0, %[[X]]
!nchw = tensor<1x8x6x6xf32>
!nhwc = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
func.func @conversions(%x: !nchw) -> (!nchw, !nhwc) {
  %0 = "yolo.convert_layout"(%x) : (!nchw) -> !nhwc
  %1 = "yolo.convert_layout"(%0) : (!nhwc) -> !nchw
  %2 = "yolo.convert_layout"(%1) : (!nchw) -> !nhwc
  return %1, %2 : !nchw, !nhwc
}
