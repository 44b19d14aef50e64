// RUN: yolomlir-opt %s --split-input-file --yolo-layout-propagation=weights=ohwi \
// RUN:   | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-DAG: %[[W:.*]] = "yolo.weight"() {name = "w:ohwi"} : () -> {{.*}}"ohwi">>
// CHECK-DAG: %[[X:.*]] = "yolo.convert_layout"(%arg0) : {{.*}} -> [[T:.*"nhwc">>]]
// CHECK: %[[Y:.*]] = "yolo.conv2d"(%[[X]], %[[W]]) {{.*}} -> [[T]]
// CHECK: %[[Z:.*]] = "yolo.silu"(%[[Y]]) : ([[T]]) -> [[T]]
// CHECK: %[[R:.*]] = "yolo.convert_layout"(%[[Z]]) : ([[T]]) -> tensor<1x8x6x6xf32>
// CHECK: return %[[R]]
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}

// Each direction alone, and the layout of weights for a CPU.
// RUN: yolomlir-opt %s --split-input-file --yolo-layout-propagation='direction=forward' \
// RUN:   | FileCheck %s --check-prefix=FORWARD
// RUN: yolomlir-opt %s --split-input-file --yolo-layout-propagation='direction=backward' \
// RUN:   | FileCheck %s --check-prefix=BACKWARD
// RUN: yolomlir-opt %s --target=sm_90 --split-input-file --yolo-layout-propagation \
// RUN:   | FileCheck %s --check-prefix=GPU
// RUN: not yolomlir-opt %s --split-input-file --yolo-layout-propagation=direction=up 2>&1 \
// RUN:   | FileCheck %s --check-prefix=OPTION
// OPTION: error: pass 'yolo-layout-propagation': direction is 'up' (one of: forward, backward, both)
// RUN: not yolomlir-opt %s --split-input-file --yolo-layout-propagation=weights=oihw 2>&1 \
// RUN:   | FileCheck %s --check-prefix=WEIGHTS
// WEIGHTS: weights is 'oihw' (one of: auto, ohwi, hwio, logical)

// -----

// A pool before a convolution: forward it keeps the order it gets, backward it takes the one that
// is wanted below, and both end there. A cheaper place for the conversion wins (the pool shrinks).
// FORWARD-LABEL: func.func @before
// FORWARD: %[[P:.*]] = "yolo.max_pool2d"(%arg0)
// FORWARD: %[[X:.*]] = "yolo.convert_layout"(%[[P]]) : {{.*}} -> tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
// FORWARD: "yolo.conv2d"(%[[X]]
// BACKWARD-LABEL: func.func @before
// BACKWARD: %[[X:.*]] = "yolo.convert_layout"(%arg0) : {{.*}} -> tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
// BACKWARD: %[[P:.*]] = "yolo.max_pool2d"(%[[X]])
// BACKWARD: "yolo.convert_layout"(%[[P]]) : (tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>) -> tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
// GPU-LABEL: func.func @before
// GPU: "yolo.weight"() {name = "w:ohwi"}
!t = tensor<1x8x6x6xf32>
!y = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
func.func @before(%x: !t) -> !y {
  %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
  %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 2, 2, 2, 2>} : (!t) -> !t
  %1 = "yolo.convert_layout"(%0) : (!t) -> !y
  %3 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!y, tensor<8x8x1x1xf32>) -> !y
  return %3 : !y
}

// -----

// After a convolution: forward hands the order on; backward leaves the activation as it was.
// FORWARD-LABEL: func.func @after
// FORWARD: %[[Y:.*]] = "yolo.conv2d"
// FORWARD: %[[S:.*]] = "yolo.silu"(%[[Y]]) : (tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>)
// FORWARD: "yolo.convert_layout"(%[[S]]) {{.*}} -> tensor<1x8x6x6xf32>
// BACKWARD-LABEL: func.func @after
// BACKWARD: %[[Y:.*]] = "yolo.conv2d"
// BACKWARD: %[[B:.*]] = "yolo.convert_layout"(%[[Y]]) {{.*}} -> tensor<1x8x6x6xf32>
// BACKWARD: "yolo.silu"(%[[B]]) : (tensor<1x8x6x6xf32>)
!t = tensor<1x8x6x6xf32>
func.func @after(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}

// -----

// Where two orders meet, a preferring op takes its own and a transparent one its first operand's.
// CHECK-LABEL: func.func @meet
// CHECK: %[[X:.*]] = "yolo.convert_layout"(%arg0)
// CHECK: "yolo.concat"(%[[X]], %{{.*}}) : (tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
!t = tensor<1x8x6x6xf32>
func.func @meet(%x: !t, %y: !t) -> tensor<1x16x6x6xf32> {
  %w = "yolo.weight"() {name = "w"} : () -> tensor<8x8x1x1xf32>
  %0 = "yolo.conv2d"(%y, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, tensor<8x8x1x1xf32>) -> !t
  %1 = "yolo.concat"(%x, %0) : (!t, !t) -> tensor<1x16x6x6xf32>
  return %1 : tensor<1x16x6x6xf32>
}

// -----

// Nothing that a function's signature or another dialect's op states is changed.
// CHECK-LABEL: func.func @fixed
// CHECK-NEXT: %[[S:.*]] = "yolo.silu"(%arg0) : (tensor<1x8x6x6xf32>) -> tensor<1x8x6x6xf32>
// CHECK-NEXT: %[[C:.*]] = call @callee(%[[S]]) : (tensor<1x8x6x6xf32>) -> tensor<1x8x6x6xf32>
// CHECK-NEXT: return %[[C]]
!t = tensor<1x8x6x6xf32>
func.func @fixed(%x: !t) -> !t {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  %1 = call @callee(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @callee(%x: !t) -> !t
