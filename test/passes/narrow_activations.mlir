// RUN: yolomlir-opt %s --split-input-file --yolo-narrow-activations | FileCheck %s

// CHECK: yolo.precision = "fp16"
// CHECK-LABEL: func.func @main
// CHECK-SAME: (%[[X:.*]]: tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32>
// CHECK: %[[W:.*]] = "yolo.weight"() {name = "w:f16"} : () -> tensor<8x8x1x1xf16>
// CHECK: %[[A:.*]] = "yolo.conv2d"(%[[X]], %[[W]])
// CHECK-SAME: (tensor<1x8x4x4xf32>, tensor<8x8x1x1xf16>) -> tensor<1x8x4x4xf16>
// CHECK: %[[B:.*]] = "yolo.silu"(%[[A]]) : (tensor<1x8x4x4xf16>) -> tensor<1x8x4x4xf16>
// CHECK: "yolo.conv2d"(%[[B]], %[[W]])
// CHECK-SAME: (tensor<1x8x4x4xf16>, tensor<8x8x1x1xf16>) -> tensor<1x8x4x4xf32>
!t = tensor<1x8x4x4xf32>
!w = tensor<8x8x1x1xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %2 : !t
}

// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-narrow-activations
// RUN: yolomlir-opt %s --split-input-file --yolo-narrow-activations --yolo-narrow-activations | FileCheck %s

// -----

// The image, the tensor that normalize makes and the operands of detect keep their types; all that
// lies between is float16, whatever the op. Biases and the parameters of a batch norm stay.

// CHECK-LABEL: func.func @main(
// CHECK-SAME: tensor<1x3x8x8xui8>
// CHECK-NOT: name = "w0"
// CHECK: %[[X:.*]] = "yolo.normalize"(%arg0) {{.*}} -> tensor<1x3x8x8xf32>
// CHECK: "yolo.conv2d"(%[[X]], {{.*}} : (tensor<1x3x8x8xf32>, tensor<16x3x1x1xf16>, tensor<16xf32>) -> tensor<1x16x8x8xf16>
// CHECK: "yolo.batch_norm"({{.*}} : (tensor<1x16x8x8xf16>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>) -> tensor<1x16x8x8xf16>
// CHECK: "yolo.silu"({{.*}} -> tensor<1x16x8x8xf16>
// CHECK: "yolo.max_pool2d"({{.*}} -> tensor<1x16x4x4xf16>
// CHECK: "yolo.upsample"({{.*}} -> tensor<1x16x8x8xf16>
// CHECK: "yolo.add"({{.*}} -> tensor<1x16x8x8xf16>
// CHECK: "yolo.attention"({{.*}} -> tensor<1x8x8x8xf16>
// CHECK: "yolo.slice"({{.*}} -> tensor<1x4x8x8xf16>
// CHECK: "yolo.concat"({{.*}} -> tensor<1x12x8x8xf16>
// CHECK: %[[N:.*]] = "yolo.convert_layout"({{.*}} -> tensor<1x12x8x8xf16, #yolo.layout<"nhwc">>
// CHECK: %[[BOX:.*]] = "yolo.conv2d"(%[[N]], {{.*}} : (tensor<1x12x8x8xf16, #yolo.layout<"nhwc">>, tensor<4x12x1x1xf16>, tensor<4xf32>) -> tensor<1x4x8x8xf32, #yolo.layout<"nhwc">>
// CHECK: %[[CLASS:.*]] = "yolo.conv2d"(%[[N]], {{.*}} -> tensor<1x2x8x8xf32, #yolo.layout<"nhwc">>
// CHECK: "yolo.detect"(%[[BOX]], %[[BOX]], %[[BOX]], %[[CLASS]], %[[CLASS]], %[[CLASS]])
!image = tensor<1x3x8x8xui8>
!x = tensor<1x3x8x8xf32>
!t = tensor<1x16x8x8xf32>
!half = tensor<1x16x4x4xf32>
!v = tensor<16xf32>
!cat = tensor<1x12x8x8xf32>
!nhwc = tensor<1x12x8x8xf32, #yolo.layout<"nhwc">>
!box = tensor<1x4x8x8xf32, #yolo.layout<"nhwc">>
!class = tensor<1x2x8x8xf32, #yolo.layout<"nhwc">>
func.func @main(%image: !image) -> tensor<1x5x6xf32> {
  %w0 = "yolo.weight"() {name = "w0"} : () -> tensor<16x3x1x1xf32>
  %b0 = "yolo.weight"() {name = "b0"} : () -> !v
  %w1 = "yolo.weight"() {name = "w1"} : () -> tensor<4x12x1x1xf32>
  %b1 = "yolo.weight"() {name = "b1"} : () -> tensor<4xf32>
  %w2 = "yolo.weight"() {name = "w2"} : () -> tensor<2x12x1x1xf32>
  %0 = "yolo.normalize"(%image) {scale = 1.0} : (!image) -> !x
  %1 = "yolo.conv2d"(%0, %w0, %b0) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, tensor<16x3x1x1xf32>, !v) -> !t
  %2 = "yolo.batch_norm"(%1, %b0, %b0, %b0, %b0) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %3 = "yolo.silu"(%2) : (!t) -> !t
  %4 = "yolo.max_pool2d"(%3) {kernel = array<i64: 2, 2>, strides = array<i64: 2, 2>, padding = array<i64: 0, 0, 0, 0>} : (!t) -> !half
  %5 = "yolo.upsample"(%4) {factor = 2 : i64} : (!half) -> !t
  %6 = "yolo.add"(%5, %3) : (!t, !t) -> !t
  %7 = "yolo.attention"(%6) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64, scale = 5.0e-01 : f64} : (!t) -> tensor<1x8x8x8xf32>
  %8 = "yolo.slice"(%6) {offset = 4 : i64, size = 4 : i64} : (!t) -> tensor<1x4x8x8xf32>
  %9 = "yolo.concat"(%7, %8) : (tensor<1x8x8x8xf32>, tensor<1x4x8x8xf32>) -> !cat
  %10 = "yolo.convert_layout"(%9) : (!cat) -> !nhwc
  %11 = "yolo.conv2d"(%10, %w1, %b1) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!nhwc, tensor<4x12x1x1xf32>, tensor<4xf32>) -> !box
  %12 = "yolo.conv2d"(%10, %w2) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!nhwc, tensor<2x12x1x1xf32>) -> !class
  %13 = "yolo.detect"(%11, %11, %11, %12, %12, %12) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!box, !box, !box, !class, !class, !class) -> tensor<1x5x6xf32>
  return %13 : tensor<1x5x6xf32>
}

// -----

// Nothing to narrow: what ops other than a convolution tie to an argument or a result stays.

// CHECK-LABEL: func.func @main(
// CHECK-NOT: f16
!t = tensor<1x8x4x4xf32>
!c = tensor<1x16x4x4xf32>
func.func @main(%x: !t) -> !c {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  %1 = "yolo.concat"(%0, %x) : (!t, !t) -> !c
  return %1 : !c
}

// -----

// A tensor that detection and a convolution read is float32: the ties go both ways.

// CHECK-LABEL: func.func @main(
// CHECK: %[[A:.*]] = "yolo.conv2d"({{.*}} -> tensor<1x8x4x4xf16>
// CHECK: %[[B:.*]] = "yolo.conv2d"(%[[A]], {{.*}} -> tensor<1x8x4x4xf32>
// CHECK: %[[C:.*]] = "yolo.silu"(%[[B]]) : {{.*}} -> tensor<1x8x4x4xf32>
// CHECK: %[[D:.*]] = "yolo.conv2d"(%[[C]], {{.*}} : (tensor<1x8x4x4xf32>, tensor<8x8x1x1xf16>) -> tensor<1x8x4x4xf32>
// CHECK: "yolo.add"(%[[C]], %[[D]])
!t = tensor<1x8x4x4xf32>
!w = tensor<8x8x1x1xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %2 = "yolo.silu"(%1) : (!t) -> !t
  %3 = "yolo.conv2d"(%2, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %4 = "yolo.add"(%2, %3) : (!t, !t) -> !t
  return %4 : !t
}

// -----

// A weight that something else wants too stays beside its narrow copy; one that lies in no store
// keeps its convolution float32, and the one before it writes float32.

// CHECK-LABEL: func.func @main(
// CHECK-DAG: name = "v:f16"} : () -> tensor<8x8x1x1xf16>
// CHECK-DAG: %[[V:.*]] = "yolo.weight"() {name = "v"} : () -> tensor<8x8x1x1xf32>
// CHECK: %[[A:.*]] = "yolo.conv2d"(%arg0, {{.*}} -> tensor<1x8x4x4xf32>
// CHECK: "yolo.conv2d"(%[[A]], %arg1) {{.*}} : (tensor<1x8x4x4xf32>, tensor<8x8x1x1xf32>) -> tensor<1x8x4x4xf32>
// CHECK: return %{{.*}}, %[[V]]
!t = tensor<1x8x4x4xf32>
!w = tensor<8x8x1x1xf32>
func.func @main(%x: !t, %w: !w) -> (!t, !w) {
  %v = "yolo.weight"() {name = "v"} : () -> !w
  %0 = "yolo.conv2d"(%x, %v) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  // expected-remark @below {{stays float32: its weight is not a yolo.weight}}
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  return %1, %v : !t, !w
}

// -----

// What is computed of the store's tensors is float32, as they are: a convolution's weight and bias,
// a batch norm's parameter, an operand of an addition.

// CHECK-LABEL: func.func @main(
// CHECK: "yolo.silu"({{.*}} -> tensor<8x8x1x1xf32>
// CHECK: "yolo.silu"({{.*}} -> tensor<8xf32>
// CHECK: "yolo.conv2d"({{.*}} -> tensor<1x8x4x4xf32>
// CHECK: "yolo.conv2d"({{.*}}tensor<8x8x1x1xf16>, tensor<8xf32>) -> tensor<1x8x4x4xf16>
// CHECK: "yolo.batch_norm"({{.*}} -> tensor<1x8x4x4xf16>
// CHECK: "yolo.conv2d"({{.*}} -> tensor<1x8x4x4xf32>
// CHECK: "yolo.add"({{.*}} -> tensor<1x8x4x4xf32>
!t = tensor<1x8x4x4xf32>
!w = tensor<8x8x1x1xf32>
!v = tensor<8xf32>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %b = "yolo.weight"() {name = "b"} : () -> !v
  %a = "yolo.weight"() {name = "addend"} : () -> !t
  %cw = "yolo.silu"(%w) : (!w) -> !w
  %cb = "yolo.silu"(%b) : (!v) -> !v
  // expected-remark @below {{stays float32: its weight is not a yolo.weight}}
  %0 = "yolo.conv2d"(%x, %cw) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.conv2d"(%0, %w, %cb) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w, !v) -> !t
  %2 = "yolo.batch_norm"(%1, %b, %cb, %b, %b) {epsilon = 1.0e-3} : (!t, !v, !v, !v, !v) -> !t
  %3 = "yolo.conv2d"(%2, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!t, !w) -> !t
  %4 = "yolo.add"(%3, %a) : (!t, !t) -> !t
  return %4 : !t
}
