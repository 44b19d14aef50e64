// RUN: yolomlir-opt %s --split-input-file --yolo-fold-batch-norm | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "conv.weight:bn"}
// CHECK-DAG: %[[B:.*]] = "yolo.weight"() {name = "conv.bias:bn"}
// CHECK: %[[Y:.*]] = "yolo.conv2d"(%arg0, %[[W]], %[[B]])
// CHECK-NOT: yolo.batch_norm
// CHECK: return %[[Y]]
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "conv.weight"} : () -> tensor<8x8x1x1xf32>
  %g = "yolo.weight"() {name = "bn.weight"} : () -> tensor<8xf32>
  %b = "yolo.weight"() {name = "bn.bias"} : () -> tensor<8xf32>
  %m = "yolo.weight"() {name = "bn.running_mean"} : () -> tensor<8xf32>
  %v = "yolo.weight"() {name = "bn.running_var"} : () -> tensor<8xf32>
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
  %1 = "yolo.batch_norm"(%0, %g, %b, %m, %v) {epsilon = 1.0e-3} : (!t, tensor<8xf32>,
      tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> !t
  return %1 : !t
}

// A convolution's own bias goes into the new one; the weight keeps its physical order.
// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-fold-batch-norm

// -----

// CHECK-LABEL: func.func @bias_and_layout
// CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "w:bn"} : () -> tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
// CHECK-DAG: %[[B:.*]] = "yolo.weight"() {name = "c:bn"} : () -> tensor<8xf32>
// CHECK: "yolo.conv2d"(%arg0, %[[W]], %[[B]])
// CHECK-NEXT: return
!t = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!v = tensor<8xf32>
func.func @bias_and_layout(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %c = "yolo.weight"() {name = "c"} : () -> !v
  %p = "yolo.weight"() {name = "p"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w, %c) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w, !v) -> !t
  %1 = "yolo.batch_norm"(%0, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  return %1 : !t
}

// -----

// A chain folds whole, and two convolutions of one weight get a weight each.
// CHECK-LABEL: func.func @chain_and_shared_weight
// CHECK-DAG: %[[TWICE:.*]] = "yolo.weight"() {name = "w:bn:bn"}
// CHECK-DAG: %[[OTHER:.*]] = "yolo.weight"() {name = "w:bn.2"}
// CHECK-DAG: %[[Y:.*]] = "yolo.conv2d"(%arg0, %[[TWICE]], %{{.*}})
// CHECK-DAG: %[[Z:.*]] = "yolo.conv2d"(%arg0, %[[OTHER]], %{{.*}})
// CHECK: "yolo.add"(%[[Y]], %[[Z]])
!t = tensor<1x8x6x6xf32>
!w = tensor<8x8x1x1xf32>
!v = tensor<8xf32>
func.func @chain_and_shared_weight(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %p = "yolo.weight"() {name = "p"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.batch_norm"(%0, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %2 = "yolo.batch_norm"(%1, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %3 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %4 = "yolo.batch_norm"(%3, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %5 = "yolo.add"(%2, %4) : (!t, !t) -> !t
  return %5 : !t
}

// -----

// CHECK-LABEL: func.func @result_used_twice
// CHECK: %[[Y:.*]] = "yolo.conv2d"(%arg0, %{{.*}}) {
// CHECK: "yolo.batch_norm"(%[[Y]]
!t = tensor<1x8x6x6xf32>
!w = tensor<8x8x1x1xf32>
!v = tensor<8xf32>
func.func @result_used_twice(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %p = "yolo.weight"() {name = "p"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  // expected-remark @below {{batch norm is not folded: its convolution's result has 1 more use}}
  %1 = "yolo.batch_norm"(%0, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
  return %2 : !t
}

// -----

// CHECK-LABEL: func.func @not_after_a_convolution
// CHECK: "yolo.batch_norm"(%arg0
!t = tensor<1x8x6x6xf32>
!v = tensor<8xf32>
func.func @not_after_a_convolution(%x: !t) -> !t {
  %p = "yolo.weight"() {name = "p"} : () -> !v
  // expected-remark @below {{model.0.bn: batch norm is not folded: its input is not a convolution's result}}
  %1 = "yolo.batch_norm"(%x, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t loc("model.0.bn")
  return %1 : !t
}

// -----

// CHECK-LABEL: func.func @parameter_from_outside
// CHECK: "yolo.batch_norm"
!t = tensor<1x8x6x6xf32>
!w = tensor<8x8x1x1xf32>
!v = tensor<8xf32>
func.func @parameter_from_outside(%x: !t, %w: !w) -> !t {
  %p = "yolo.weight"() {name = "p"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  // expected-remark @below {{a weight or parameter is not a yolo.weight}}
  %1 = "yolo.batch_norm"(%0, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  return %1 : !t
}

// -----

// A float16 convolution that gives float32 still does.
// CHECK-LABEL: func.func @half
// CHECK: %[[Y:.*]] = "yolo.conv2d"({{.*}} -> tensor<1x8x6x6xf32>
// CHECK-NOT: yolo.batch_norm
// CHECK: return %[[Y]]
!t = tensor<1x8x6x6xf16>
!y = tensor<1x8x6x6xf32>
!w = tensor<8x8x1x1xf16>
!v = tensor<8xf32>
func.func @half(%x: !t) -> !y {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %p = "yolo.weight"() {name = "p"} : () -> !v
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !y
  %1 = "yolo.batch_norm"(%0, %p, %p, %p, %p) {epsilon = 1.0e-3} : (!y, !v, !v, !v, !v) -> !y
  return %1 : !y
}
