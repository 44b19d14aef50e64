// RUN: yolomlir-opt %s --split-input-file --yolo-merge-siblings | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK: yolo.weight{{.*}}name = "a.weight+b.weight"{{.*}}tensor<16x8x1x1xf32
// CHECK: %[[C:.*]] = "yolo.conv2d"
// CHECK-NOT: yolo.conv2d
// CHECK: "yolo.slice"(%[[C]]) {offset = 0 : i64, size = 8 : i64}
// CHECK: "yolo.slice"(%[[C]]) {offset = 8 : i64, size = 8 : i64}
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!t, !t) {
  %w0 = "yolo.weight"() {name = "a.weight"} : () -> !w
  %w1 = "yolo.weight"() {name = "b.weight"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w0) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%x, %w1) {strides = array<i64: 1, 1>,
      padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  return %0, %1 : !t, !t
}

// -----

// Activations and biases merge too, weights of the CPU's layout as well; each result is a slice.
// CHECK-LABEL: func.func @main
// CHECK: %[[W:.*]] = "yolo.weight"() {name = "a.weight+b.weight"} : () -> tensor<12x8x1x1xf32, #yolo.layout<"hwio">>
// CHECK: %[[B:.*]] = "yolo.weight"() {name = "a.bias+b.bias"} : () -> tensor<12xf32>
// CHECK: %[[C:.*]] = "yolo.conv2d"(%arg0, %[[W]], %[[B]])
// CHECK-NEXT: %[[S:.*]] = "yolo.silu"(%[[C]])
// CHECK-NEXT: %[[P:.*]] = "yolo.slice"(%[[S]]) {offset = 0 : i64, size = 4 : i64}
// CHECK-NEXT: %[[Q:.*]] = "yolo.slice"(%[[S]]) {offset = 4 : i64, size = 8 : i64}
// CHECK-NOT: yolo.weight
// CHECK: return %[[P]], %[[Q]]
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!u = tensor<1x4x4x4xf32, #yolo.layout<"nhwc">>
!wa = tensor<4x8x1x1xf32, #yolo.layout<"hwio">>
!wb = tensor<8x8x1x1xf32, #yolo.layout<"hwio">>
func.func @main(%x: !t) -> (!u, !t) {
  %wa = "yolo.weight"() {name = "a.weight"} : () -> !wa
  %ba = "yolo.weight"() {name = "a.bias"} : () -> tensor<4xf32>
  %wb = "yolo.weight"() {name = "b.weight"} : () -> !wb
  %bb = "yolo.weight"() {name = "b.bias"} : () -> tensor<8xf32>
  %0 = "yolo.conv2d"(%x, %wa, %ba) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !wa, tensor<4xf32>) -> !u
  %1 = "yolo.silu"(%0) : (!u) -> !u
  %2 = "yolo.conv2d"(%x, %wb, %bb) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !wb, tensor<8xf32>) -> !t
  %3 = "yolo.silu"(%2) : (!t) -> !t
  return %1, %3 : !u, !t
}

// -----

// Not: another input, another stride, an activation on one alone, a 3x3 kernel, a result that is
// only added to something, a channel count that is no multiple of 4.
// CHECK-LABEL: func.func @main
// CHECK-COUNT-7: "yolo.conv2d"
// CHECK-NOT: yolo.slice
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!h = tensor<1x8x2x2xf32, #yolo.layout<"nhwc">>
!o = tensor<1x6x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!w3 = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
!w6 = tensor<6x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t, %y: !t) -> (!t, !t, !h, !t, !t, !t, !o) {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %w3 = "yolo.weight"() {name = "w3"} : () -> !w3
  %w6 = "yolo.weight"() {name = "w6"} : () -> !w6
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%y, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %2 = "yolo.conv2d"(%x, %w) {strides = array<i64: 2, 2>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !h
  %3 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %4 = "yolo.silu"(%3) : (!t) -> !t
  %5 = "yolo.conv2d"(%x, %w3) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 1 : i64} : (!t, !w3) -> !t
  %6 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %7 = "yolo.add"(%6, %x) : (!t, !t) -> !t
  %8 = "yolo.conv2d"(%x, %w6) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w6) -> !o
  return %0, %1, %2, %4, %5, %7, %8 : !t, !t, !h, !t, !t, !t, !o
}

// -----

// The joined weight's name is new, also where the module has one of that name already.
// CHECK-LABEL: func.func @main
// CHECK-DAG: %[[OWN:.*]] = "yolo.weight"() {name = "a+b"} : () -> tensor<8x8x1x1xf32
// CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "a+b.2"} : () -> tensor<16x8x1x1xf32
// CHECK-DAG: "yolo.conv2d"(%arg0, %[[W]])
// CHECK-DAG: "yolo.conv2d"(%{{.*}}, %[[OWN]])
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!t, !t) {
  %a = "yolo.weight"() {name = "a"} : () -> !w
  %b = "yolo.weight"() {name = "b"} : () -> !w
  %own = "yolo.weight"() {name = "a+b"} : () -> !w
  %0 = "yolo.conv2d"(%x, %a) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%x, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %2 = "yolo.conv2d"(%1, %own) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %0, %2 : !t, !t
}

// -----

// Float16 products whose results are float32 merge to such; one that gives float16 stays apart.
// CHECK-LABEL: func.func @main
// CHECK: "yolo.conv2d"{{.*}} -> tensor<1x16x4x4xf32
// CHECK-COUNT-2: "yolo.slice"{{.*}} -> tensor<1x8x4x4xf32
// CHECK: "yolo.conv2d"{{.*}} -> tensor<1x8x4x4xf16
!t = tensor<1x8x4x4xf16, #yolo.layout<"nhwc">>
!y = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf16, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!y, !t, !y) {
  %a = "yolo.weight"() {name = "a"} : () -> !w
  %b = "yolo.weight"() {name = "b"} : () -> !w
  %0 = "yolo.conv2d"(%x, %a) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !y
  %1 = "yolo.conv2d"(%x, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %2 = "yolo.conv2d"(%x, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !y
  return %0, %1, %2 : !y, !t, !y
}
