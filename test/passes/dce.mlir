// RUN: yolomlir-opt %s --split-input-file --yolo-dce | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NEXT: return %arg0
// CHECK-NOT: @unused
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
  %0 = "yolo.silu"(%x) : (!t) -> !t
  %1 = "yolo.add"(%0, %x) : (!t, !t) -> !t
  return %x : !t
}
func.func private @unused(%x: !t) -> !t {
  return %x : !t
}

// -----

// What is used stays, through dispatches too; a dead dispatch takes its function along.
// RUN: yolomlir-opt %s --split-input-file --yolo-dce --statistics -o /dev/null 2>&1 \
// RUN:   | FileCheck %s --check-prefix=STATISTICS
// STATISTICS: yolo-dce
// STATISTICS-NEXT: 2 functions
// STATISTICS-NEXT: 3 ops
// STATISTICS-NEXT: 1 weights

// CHECK-LABEL: func.func @main
// CHECK-NEXT: %[[Y:.*]] = call @used(%arg0)
// CHECK-NEXT: return %[[Y]]
// CHECK: func.func private @used
// CHECK-NOT: @dead
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %0 = call @used(%x) {yolo.dispatch} : (!t) -> !t
  %1 = call @dead(%0) {yolo.dispatch} : (!t) -> !t
  return %0 : !t
}
func.func private @used(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func private @dead(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
