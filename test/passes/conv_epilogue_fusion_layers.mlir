// RUN: yolomlir-opt %s --yolo-conv-epilogue-fusion --mlir-print-debuginfo --mlir-print-local-scope | FileCheck %s

// A dispatch has the layer of its convolution, also where two share a function.
// CHECK: call @conv2d_1x1s1_8x4x4_8_silu({{.*}} loc("model.0.conv")
// CHECK: call @conv2d_1x1s1_8x4x4_8_silu({{.*}} loc("model.1.conv")
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t loc("model.0.conv")
  %1 = "yolo.silu"(%0) : (!t) -> !t loc("model.0.act")
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t loc("model.1.conv")
  %3 = "yolo.silu"(%2) : (!t) -> !t loc("model.1.act")
  return %3 : !t
}
