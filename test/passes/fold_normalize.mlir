// RUN: yolomlir-opt %s --split-input-file --yolo-fold-normalize | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "conv.weight:scale"}
// CHECK-DAG: %[[X:.*]] = "yolo.normalize"(%arg0) {scale = 1.000000e+00 : f64}
// CHECK: "yolo.conv2d"(%[[X]], %[[W]])
!image = tensor<1x3x6x6xui8, #yolo.layout<"nhwc">>
!x = tensor<1x3x6x6xf32, #yolo.layout<"nhwc">>
!y = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
!w = tensor<8x3x3x3xf32>
func.func @main(%image: !image) -> !y {
  %w = "yolo.weight"() {name = "conv.weight"} : () -> !w
  %0 = "yolo.normalize"(%image) {scale = 0.00392156862 : f64} : (!image) -> !x
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 1 : i64} : (!x, !w) -> !y
  return %1 : !y
}

// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-fold-normalize

// -----

// Every convolution that reads the image, through conversions too, takes the factor.
// CHECK-LABEL: func.func @through_conversions
// CHECK-NEXT: %[[X:.*]] = "yolo.normalize"(%arg0) {scale = 1.000000e+00 : f64}
// CHECK-NEXT: %[[C:.*]] = "yolo.convert_layout"(%[[X]])
// CHECK-NEXT: %[[A:.*]] = "yolo.weight"() {name = "a:scale"}
// CHECK-NEXT: "yolo.conv2d"(%[[C]], %[[A]])
// CHECK-NEXT: %[[B:.*]] = "yolo.weight"() {name = "b:scale"}
// CHECK-NEXT: "yolo.conv2d"(%[[C]], %[[B]])
!image = tensor<1x3x6x6xui8, #yolo.layout<"nhwc">>
!x = tensor<1x3x6x6xf32, #yolo.layout<"nhwc">>
!c = tensor<1x3x6x6xf32>
!w = tensor<3x3x1x1xf32>
func.func @through_conversions(%image: !image) -> !c {
  %a = "yolo.weight"() {name = "a"} : () -> !w
  %b = "yolo.weight"() {name = "b"} : () -> !w
  %0 = "yolo.normalize"(%image) {scale = 0.5} : (!image) -> !x
  %1 = "yolo.convert_layout"(%0) : (!x) -> !c
  %2 = "yolo.conv2d"(%1, %a) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!c, !w) -> !c
  %3 = "yolo.conv2d"(%1, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!c, !w) -> !c
  %4 = "yolo.add"(%2, %3) : (!c, !c) -> !c
  return %4 : !c
}

// -----

// CHECK-LABEL: func.func @another_reader
// CHECK: "yolo.normalize"(%arg0) {scale = 5.000000e-01
!image = tensor<1x3x6x6xui8>
!x = tensor<1x3x6x6xf32>
!w = tensor<3x3x1x1xf32>
func.func @another_reader(%image: !image) -> !x {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  // expected-remark @below {{the image's scale is not folded: 'yolo.add' reads it too}}
  %0 = "yolo.normalize"(%image) {scale = 0.5} : (!image) -> !x
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !x
  %2 = "yolo.add"(%0, %1) : (!x, !x) -> !x
  return %2 : !x
}

// -----

// A factor of 1 is left in silence.
// CHECK-LABEL: func.func @nothing_to_do
// CHECK: "yolo.weight"() {name = "w"}
!image = tensor<1x3x6x6xf32>
!w = tensor<3x3x1x1xf32>
func.func @nothing_to_do(%image: !image) -> !image {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = "yolo.normalize"(%image) {scale = 1.0} : (!image) -> !image
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!image, !w) -> !image
  return %1 : !image
}
