// RUN: yolomlir-opt %s --split-input-file --yolo-cse | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NEXT: %[[Y:.*]] = "yolo.silu"(%arg0)
// CHECK-NEXT: %[[Z:.*]] = "yolo.add"(%[[Y]], %[[Y]])
// CHECK-NEXT: return %[[Z]]
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  %1 = "yolo.silu"(%x) : (!t) -> !t
  %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
  return %2 : !t
}

// -----

// Weights of one name merge; ops that differ in an attribute, a type or an operand's place do not.
// CHECK-LABEL: func.func @alike
// CHECK-NEXT: %[[W:.*]] = "yolo.weight"() {name = "w"}
// CHECK-NEXT: %[[V:.*]] = "yolo.weight"() {name = "v"}
// CHECK-COUNT-2: "yolo.batch_norm"(%arg0, %[[W]], %[[V]], %[[W]], %[[W]])
// CHECK-NEXT: "yolo.batch_norm"(%arg0, %[[V]], %[[W]], %[[W]], %[[W]])
// CHECK-NEXT: return
!t = tensor<1x8x6x6xf32>
!v = tensor<8xf32>
func.func @alike(%x: !t) -> (!t, !t, !t) {
  %w = "yolo.weight"() {name = "w"} : () -> !v
  %v = "yolo.weight"() {name = "v"} : () -> !v
  %u = "yolo.weight"() {name = "w"} : () -> !v
  %0 = "yolo.batch_norm"(%x, %w, %v, %w, %u) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %1 = "yolo.batch_norm"(%x, %w, %v, %u, %u) {epsilon = 2.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %2 = "yolo.batch_norm"(%x, %v, %w, %w, %u) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  return %0, %1, %2 : !t, !t, !t
}

// -----

// Dispatches merge, as long as the memory plan has not placed them.
// CHECK-LABEL: func.func @main
// CHECK-NEXT: %[[Y:.*]] = call @f(%arg0) {yolo.dispatch}
// CHECK-NEXT: %[[A:.*]] = call @f(%arg0) {yolo.dispatch, yolo.views
// CHECK-NEXT: %[[B:.*]] = call @f(%arg0) {yolo.dispatch, yolo.views
// CHECK-NEXT: return %[[Y]], %[[Y]], %[[A]], %[[B]]
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> (!t, !t, !t, !t) {
  %0 = call @f(%x) {yolo.dispatch} : (!t) -> !t
  %1 = call @f(%x) {yolo.dispatch} : (!t) -> !t
  %2 = call @f(%x) {yolo.dispatch, yolo.views = [array<i64: 0, 8>, array<i64: 2048, 8>]} : (!t) -> !t
  %3 = call @f(%x) {yolo.dispatch, yolo.views = [array<i64: 0, 8>, array<i64: 2048, 8>]} : (!t) -> !t
  return %0, %1, %2, %3 : !t, !t, !t, !t
}
func.func private @f(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
