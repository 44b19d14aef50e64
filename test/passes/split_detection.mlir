// RUN: yolomlir-opt %s --split-input-file --yolo-split-detection | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK: %[[C:.*]] = "yolo.candidates"(%arg0, %arg1, %arg3, %arg4)
// CHECK-SAME: max_det = 3 : i64, strides = array<i64: 8, 16>
// CHECK: %[[Y:.*]] = "yolo.merge_detections"(%[[C]], %arg2, %arg5) {stride = 32 : i64}
// CHECK: return %[[Y]]
!b3 = tensor<1x4x4x4xf32>
!b4 = tensor<1x4x3x3xf32>
!b5 = tensor<1x4x2x2xf32>
!c3 = tensor<1x2x4x4xf32>
!c4 = tensor<1x2x3x3xf32>
!c5 = tensor<1x2x2x2xf32>
func.func @main(%0: !b3, %1: !b4, %2: !b5, %3: !c3, %4: !c4, %5: !c5) -> tensor<1x3x6xf32> {
  %y = "yolo.detect"(%0, %1, %2, %3, %4, %5) {strides = array<i64: 8, 16, 32>,
      max_det = 3 : i64} : (!b3, !b4, !b5, !c3, !c4, !c5) -> tensor<1x3x6xf32>
  return %y : tensor<1x3x6xf32>
}

// -----

// The first stage stands behind the last of its operands, before what the last level needs.
// CHECK-LABEL: func.func @main
// CHECK: "yolo.silu"(%arg0)
// CHECK: "yolo.silu"(%arg1)
// CHECK-NEXT: %[[C:.*]] = "yolo.candidates"(%{{.*}}, %{{.*}}, %arg3, %arg4)
// CHECK-NEXT: "yolo.silu"(%arg2)
// CHECK-NEXT: "yolo.merge_detections"(%[[C]],
!b3 = tensor<1x4x4x4xf32>
!b4 = tensor<1x4x3x3xf32>
!b5 = tensor<1x4x2x2xf32>
!c3 = tensor<1x2x4x4xf32>
!c4 = tensor<1x2x3x3xf32>
!c5 = tensor<1x2x2x2xf32>
func.func @main(%0: !b3, %1: !b4, %2: !b5, %3: !c3, %4: !c4, %5: !c5) -> tensor<1x4x6xf32> {
  %6 = "yolo.silu"(%0) : (!b3) -> !b3
  %7 = "yolo.silu"(%1) : (!b4) -> !b4
  %8 = "yolo.silu"(%2) : (!b5) -> !b5
  %y = "yolo.detect"(%6, %7, %8, %3, %4, %5) {strides = array<i64: 8, 16, 32>,
      max_det = 4 : i64} : (!b3, !b4, !b5, !c3, !c4, !c5) -> tensor<1x4x6xf32>
  return %y : tensor<1x4x6xf32>
}

// -----

// The last level may have fewer anchors than are wanted, but not the finer ones.
// CHECK-LABEL: func.func @main
// CHECK: yolo.merge_detections
// CHECK: "yolo.detect"
!b3 = tensor<1x4x4x4xf32>
!b4 = tensor<1x4x3x3xf32>
!b5 = tensor<1x4x2x2xf32>
!c3 = tensor<1x2x4x4xf32>
!c4 = tensor<1x2x3x3xf32>
!c5 = tensor<1x2x2x2xf32>
!b0 = tensor<1x4x1x1xf32>
!c0 = tensor<1x2x1x1xf32>
func.func @main(%0: !b3, %1: !b4, %2: !b5, %3: !c3, %4: !c4, %5: !c5, %6: !b0, %7: !b0, %8: !c0, %9: !c0) -> (tensor<1x5x6xf32>, tensor<1x3x6xf32>) {
  %y = "yolo.detect"(%0, %1, %2, %3, %4, %5) {strides = array<i64: 8, 16, 32>,
      max_det = 5 : i64} : (!b3, !b4, !b5, !c3, !c4, !c5) -> tensor<1x5x6xf32>
  %z = "yolo.detect"(%6, %7, %2, %8, %9, %5) {strides = array<i64: 8, 16, 32>,
      max_det = 3 : i64} : (!b0, !b0, !b5, !c0, !c0, !c5) -> tensor<1x3x6xf32>
  return %y, %z : tensor<1x5x6xf32>, tensor<1x3x6xf32>
}
