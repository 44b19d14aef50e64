// Every op and layout prints and reads back, as text and as bytecode.
// RUN: yolomlir-opt %s --verify-roundtrip | FileCheck %s
// RUN: yolomlir-opt %s --emit-bytecode | yolomlir-opt | FileCheck %s
// RUN: yolomlir-opt %s --mlir-print-op-generic | yolomlir-opt | FileCheck %s

!image = tensor<1x4x8x8xui8, #yolo.layout<"nhwc">>
!x = tensor<1x4x8x8xf32, #yolo.layout<"nhwc">>
!n = tensor<1x4x8x8xf32>
!h = tensor<1x4x4x4xf32>
!c = tensor<1x8x8x8xf32>
!v = tensor<4xf32>

// CHECK-LABEL: func.func @every_op
func.func @every_op(%image: !image) -> tensor<1x5x6xf32> {
  // CHECK: "yolo.normalize"(%arg0) {scale = 5.000000e-01 : f64}
  %0 = "yolo.normalize"(%image) {scale = 0.5} : (!image) -> !x
  // CHECK: "yolo.convert_layout"(%{{.*}}) : (tensor<1x4x8x8xf32, #yolo.layout<"nhwc">>) -> tensor<1x4x8x8xf32>
  %1 = "yolo.convert_layout"(%0) : (!x) -> !n
  // CHECK: "yolo.weight"() {name = "w"} : () -> tensor<4x4x1x1xf32, #yolo.layout<"ohwi">>
  %w = "yolo.weight"() {name = "w"} : () -> tensor<4x4x1x1xf32, #yolo.layout<"ohwi">>
  // CHECK: "yolo.weight"() {name = "u"} : () -> tensor<4x4x1x1xf32, #yolo.layout<"hwio">>
  %u = "yolo.weight"() {name = "u"} : () -> tensor<4x4x1x1xf32, #yolo.layout<"hwio">>
  %b = "yolo.weight"() {name = "b"} : () -> !v
  // CHECK: "yolo.conv2d"(%{{.*}}, %{{.*}}) {groups = 1 : i64, padding = array<i64: 0, 0, 0, 0>, strides = array<i64: 1, 1>}
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!n, tensor<4x4x1x1xf32, #yolo.layout<"ohwi">>) -> !n
  %3 = "yolo.conv2d"(%2, %u, %b) {strides = array<i64: 2, 2>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!n, tensor<4x4x1x1xf32, #yolo.layout<"hwio">>, !v) -> !h
  // CHECK: "yolo.batch_norm"(%{{.*}}) {epsilon = 1.000000e-03 : f64}
  %4 = "yolo.batch_norm"(%3, %b, %b, %b, %b) {epsilon = 1.0e-3} : (!h, !v, !v, !v, !v) -> !h
  // CHECK: "yolo.silu"
  %5 = "yolo.silu"(%4) : (!h) -> !h
  // CHECK: "yolo.add"
  %6 = "yolo.add"(%4, %5) : (!h, !h) -> !h
  // CHECK: "yolo.upsample"(%{{.*}}) {factor = 2 : i64}
  %7 = "yolo.upsample"(%6) {factor = 2 : i64} : (!h) -> !n
  // CHECK: "yolo.concat"
  %8 = "yolo.concat"(%7, %2) : (!n, !n) -> !c
  // CHECK: "yolo.slice"(%{{.*}}) {offset = 2 : i64, size = 4 : i64}
  %9 = "yolo.slice"(%8) {offset = 2 : i64, size = 4 : i64} : (!c) -> !n
  // CHECK: "yolo.max_pool2d"
  %10 = "yolo.max_pool2d"(%9) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 2, 2, 2, 2>} : (!n) -> !n
  // CHECK: "yolo.attention"(%{{.*}}) {head_dim = 4 : i64, heads = 1 : i64, key_dim = 2 : i64, scale = 5.000000e-01 : f64}
  %11 = "yolo.attention"(%8) {heads = 1 : i64, key_dim = 2 : i64, head_dim = 4 : i64, scale = 0.5} : (!c) -> !n
  // CHECK: "yolo.detect"(%{{.*}}) {max_det = 5 : i64, strides = array<i64: 8, 16, 32>}
  %12 = "yolo.detect"(%9, %10, %11, %1, %1, %1) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!n, !n, !n, !n, !n, !n) -> tensor<1x5x6xf32>
  // CHECK: %[[C:.*]] = "yolo.candidates"(%{{.*}}) {max_det = 5 : i64, strides = array<i64: 8, 16>}
  %13 = "yolo.candidates"(%9, %10, %1, %1) {strides = array<i64: 8, 16>, max_det = 5 : i64} : (!n, !n, !n, !n) -> tensor<1x5x8xf32>
  // CHECK: "yolo.merge_detections"(%[[C]], %{{.*}}) {stride = 32 : i64}
  %14 = "yolo.merge_detections"(%13, %11, %1) {stride = 32 : i64} : (tensor<1x5x8xf32>, !n, !n) -> tensor<1x5x6xf32>
  return %12 : tensor<1x5x6xf32>
}

// What float16 weights multiply, and what their convolution gives.
// CHECK-LABEL: func.func @half
func.func @half(%h: tensor<1x4x8x8xf16>, %x: tensor<1x4x8x8xf32>, %i: tensor<1x4x8x8xui8>) {
  %w = "yolo.weight"() {name = "h"} : () -> tensor<4x4x1x1xf16>
  %b = "yolo.weight"() {name = "b"} : () -> tensor<4xf32>
  // CHECK: (tensor<1x4x8x8xf16>, tensor<4x4x1x1xf16>, tensor<4xf32>) -> tensor<1x4x8x8xf16>
  %0 = "yolo.conv2d"(%h, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<1x4x8x8xf16>, tensor<4x4x1x1xf16>, tensor<4xf32>) -> tensor<1x4x8x8xf16>
  // CHECK: (tensor<1x4x8x8xf16>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf32>
  %1 = "yolo.conv2d"(%h, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<1x4x8x8xf16>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf32>
  // CHECK: (tensor<1x4x8x8xf32>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf16>
  %2 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<1x4x8x8xf32>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf16>
  // CHECK: (tensor<1x4x8x8xui8>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf32>
  %3 = "yolo.conv2d"(%i, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<1x4x8x8xui8>, tensor<4x4x1x1xf16>) -> tensor<1x4x8x8xf32>
  // CHECK: tensor<1x8x8x8xf16>
  %4 = "yolo.concat"(%h, %h) : (tensor<1x4x8x8xf16>, tensor<1x4x8x8xf16>) -> tensor<1x8x8x8xf16>
  return
}
