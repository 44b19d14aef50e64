// RUN: yolomlir-opt %s --split-input-file --yolo-lower-to-linalg | FileCheck %s

// CHECK: func.func private @silu(%[[X:.*]]: tensor<1x4x4x8xf32>) -> tensor<1x4x4x8xf32>
// CHECK: linalg.generic
// CHECK: math.exp
!silu = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func private @silu(%x: !silu) -> !silu attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!silu) -> !silu
  return %0 : !silu
}

// -----

// Pad, contraction into a fill of 0, one generic for bias, SiLU and residual; @main keeps its
// weights, calls and attributes, its views become tensor ops.

// CHECK-LABEL: func.func @main(
// CHECK-SAME: %[[X:.*]]: tensor<1x5x7x8xf32>, %{{.*}}: tensor<1x3x4x6xf32>) -> tensor<1x3x4x6xf32> attributes {yolo.arena_bytes = 64 : i64}
// CHECK: %[[W:.*]] = "yolo.weight"() {name = "w"} : () -> tensor<3x3x8x6xf32>
// CHECK: call @conv(%[[X]], %[[W]], %{{.*}}, %{{.*}}) {yolo.dispatch, yolo.views = [array<i64: 0, 8>]}
// CHECK: tensor.extract_slice %{{.*}}[0, 0, 0, 2] [1, 3, 4, 4] [1, 1, 1, 1]
// CHECK: tensor.concat dim(3)
// CHECK: func.func private @conv(
// CHECK-SAME: attributes {yolo.family = "conv2d", yolo.tile = 4 : i64}
// CHECK: tensor.pad %{{.*}} low[0, 1, 1, 0] high[0, 1, 1, 0]
// CHECK: linalg.fill
// CHECK: linalg.conv_2d_nhwc_hwcf {dilations = dense<1> : tensor<2xi64>, strides = dense<2> : tensor<2xi64>}
// CHECK-SAME: tensor<1x7x9x8xf32>, tensor<3x3x8x6xf32>
// CHECK: linalg.generic
// CHECK: ^bb0(%[[ACC:.*]]: f32, %[[BIAS:.*]]: f32, %[[RESIDUAL:.*]]: f32, %{{.*}}: f32):
// CHECK-NEXT: %[[S:.*]] = arith.addf %[[ACC]], %[[BIAS]]
// CHECK-NEXT: %[[N:.*]] = arith.negf %[[S]]
// CHECK-NEXT: %[[E:.*]] = math.exp %[[N]]
// CHECK-NEXT: %[[D:.*]] = arith.addf %[[E]]
// CHECK-NEXT: %[[Q:.*]] = arith.divf %[[S]], %[[D]]
// CHECK-NEXT: arith.addf %[[Q]], %[[RESIDUAL]]
// CHECK-NOT: linalg.generic
// CHECK: return
!x = tensor<1x8x5x7xf32, #yolo.layout<"nhwc">>
!y = tensor<1x6x3x4xf32, #yolo.layout<"nhwc">>
!w = tensor<6x8x3x3xf32, #yolo.layout<"hwio">>
!two = tensor<1x2x3x4xf32, #yolo.layout<"nhwc">>
!four = tensor<1x4x3x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !x, %r: !y) -> !y attributes {yolo.arena_bytes = 64 : i64} {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %b = "yolo.weight"() {name = "b"} : () -> tensor<6xf32>
  %y = call @conv(%x, %w, %b, %r) {yolo.dispatch, yolo.views = [array<i64: 0, 8>]} : (!x, !w, tensor<6xf32>, !y) -> !y
  %s = "yolo.slice"(%y) {offset = 2 : i64, size = 4 : i64} : (!y) -> !four
  %t = "yolo.slice"(%y) {offset = 0 : i64, size = 2 : i64} : (!y) -> !two
  %u = "yolo.concat"(%s, %t) : (!four, !two) -> !y
  return %u : !y
}
func.func private @conv(%x: !x, %w: !w, %b: tensor<6xf32>, %r: !y) -> !y attributes {yolo.family = "conv2d", yolo.tile = 4 : i64} {
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 2, 2>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!x, !w, tensor<6xf32>) -> !y
  %1 = "yolo.silu"(%0) : (!y) -> !y
  %2 = "yolo.add"(%r, %1) : (!y, !y) -> !y
  return %2 : !y
}

// -----

// No pad where there is no padding; OHWI weights; several sources, one upsampled, in one concat.

// CHECK-LABEL: func.func private @sources(
// CHECK-NOT: tensor.pad
// CHECK: linalg.generic {indexing_maps
// CHECK-SAME: outs(%{{.*}} : tensor<1x4x4x2xf32>)
// CHECK: tensor.concat dim(3) %{{.*}}, %{{.*}}, %{{.*}} : (tensor<1x4x4x2xf32>, tensor<1x4x4x3xf32>, tensor<1x4x4x3xf32>)
// CHECK: linalg.conv_2d_nhwc_fhwc
!a = tensor<1x2x2x2xf32, #yolo.layout<"nhwc">>
!up = tensor<1x2x4x4xf32, #yolo.layout<"nhwc">>
!b = tensor<1x3x4x4xf32, #yolo.layout<"nhwc">>
!ab = tensor<1x5x4x4xf32, #yolo.layout<"nhwc">>
!abb = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
func.func private @sources(%a: !a, %b: !b, %w: !w) -> !abb attributes {yolo.family = "conv2d"} {
  %0 = "yolo.upsample"(%a) {factor = 2 : i64} : (!a) -> !up
  %1 = "yolo.concat"(%0, %b) : (!up, !b) -> !ab
  %2 = "yolo.concat"(%1, %b) : (!ab, !b) -> !abb
  %3 = "yolo.conv2d"(%2, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!abb, !w) -> !abb
  return %3 : !abb
}

// -----

// CHECK-LABEL: func.func private @first(
// CHECK-SAME: tensor<1x4x4x3xi8>
// CHECK: arith.uitofp %{{.*}} : i8 to f32
// CHECK-NEXT: arith.mulf
// CHECK: linalg.conv_2d_nhwc_hwcf
!image = tensor<1x3x4x4xui8, #yolo.layout<"nhwc">>
!f = tensor<1x3x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<4x3x1x1xf32, #yolo.layout<"hwio">>
!y = tensor<1x4x4x4xf32, #yolo.layout<"nhwc">>
func.func private @first(%x: !image, %w: !w) -> !y attributes {yolo.family = "conv2d"} {
  %0 = "yolo.normalize"(%x) {scale = 3.9215686274509803e-03 : f64} : (!image) -> !f
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!f, !w) -> !y
  return %1 : !y
}

// -----

// CHECK-LABEL: func.func private @depthwise(
// CHECK: tensor.collapse_shape %{{.*}} {{\[\[}}0], [1], [2, 3]] : tensor<3x3x1x8xf32> into tensor<3x3x8xf32>
// CHECK: linalg.depthwise_conv_2d_nhwc_hwc
!x = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<8x1x3x3xf32, #yolo.layout<"hwio">>
func.func private @depthwise(%x: !x, %w: !w, %b: tensor<8xf32>) -> !x attributes {yolo.family = "depthwise"} {
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 8 : i64} : (!x, !w, tensor<8xf32>) -> !x
  return %0 : !x
}

// -----

// Padding of a pool is minus infinity.

// CHECK-LABEL: func.func private @pool(
// CHECK: %[[LOWEST:.*]] = arith.constant 0xFF800000 : f32
// CHECK: tensor.yield %[[LOWEST]]
// CHECK: linalg.pooling_nhwc_max
!x = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func private @pool(%x: !x) -> !x attributes {yolo.family = "max_pool"} {
  %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 2, 2, 2, 2>} : (!x) -> !x
  return %0 : !x
}

// -----

// CHECK-LABEL: func.func private @attention(
// CHECK-SAME: attributes {yolo.family = "attention", yolo.head_dim = 4 : i64, yolo.heads = 2 : i64, yolo.key_dim = 2 : i64, yolo.scale = 5.000000e-01 : f64}
// CHECK: math.exp
// CHECK: arith.divf
!x = tensor<1x16x3x3xf32, #yolo.layout<"nhwc">>
!y = tensor<1x8x3x3xf32, #yolo.layout<"nhwc">>
func.func private @attention(%x: !x) -> !y attributes {yolo.family = "attention"} {
  %0 = "yolo.attention"(%x) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64, scale = 5.0e-01 : f64} : (!x) -> !y
  return %0 : !y
}

// -----

// CHECK-LABEL: func.func private @detect(
// CHECK-SAME: yolo.max_det = 5 : i64, yolo.strides = array<i64: 8, 16, 32>
// CHECK: scf.forall (%{{.*}}) in (2)
// CHECK: tensor.parallel_insert_slice %{{.*}} : tensor<5x6xf32> into tensor<2x5x6xf32>
!b3 = tensor<2x4x4x4xf32, #yolo.layout<"nhwc">>
!b4 = tensor<2x4x2x2xf32, #yolo.layout<"nhwc">>
!b5 = tensor<2x4x1x1xf32, #yolo.layout<"nhwc">>
!c3 = tensor<2x3x4x4xf32, #yolo.layout<"nhwc">>
!c4 = tensor<2x3x2x2xf32, #yolo.layout<"nhwc">>
!c5 = tensor<2x3x1x1xf32, #yolo.layout<"nhwc">>
func.func private @detect(%0: !b3, %1: !b4, %2: !b5, %3: !c3, %4: !c4, %5: !c5) -> tensor<2x5x6xf32> attributes {yolo.family = "detect"} {
  %y = "yolo.detect"(%0, %1, %2, %3, %4, %5) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!b3, !b4, !b5, !c3, !c4, !c5) -> tensor<2x5x6xf32>
  return %y : tensor<2x5x6xf32>
}

// -----

// CHECK-LABEL: func.func private @candidates(
// CHECK-SAME: yolo.max_det = 5 : i64, yolo.strides = array<i64: 8, 16>
// CHECK: tensor.parallel_insert_slice %{{.*}} : tensor<5x8xf32> into tensor<2x5x8xf32>
!b3 = tensor<2x4x4x4xf32, #yolo.layout<"nhwc">>
!b4 = tensor<2x4x3x2xf32, #yolo.layout<"nhwc">>
!c3 = tensor<2x3x4x4xf32, #yolo.layout<"nhwc">>
!c4 = tensor<2x3x3x2xf32, #yolo.layout<"nhwc">>
func.func private @candidates(%0: !b3, %1: !b4, %2: !c3, %3: !c4) -> tensor<2x5x8xf32> attributes {yolo.family = "detect"} {
  %y = "yolo.candidates"(%0, %1, %2, %3) {strides = array<i64: 8, 16>, max_det = 5 : i64} : (!b3, !b4, !c3, !c4) -> tensor<2x5x8xf32>
  return %y : tensor<2x5x8xf32>
}

// CHECK-LABEL: func.func private @merge_detections(
// CHECK-SAME: yolo.stride = 32 : i64
// CHECK: tensor.concat dim(0) %{{.*}} : (tensor<5x8xf32>, tensor<5x8xf32>) -> tensor<10x8xf32>
// CHECK: tensor.parallel_insert_slice %{{.*}} : tensor<5x6xf32> into tensor<2x5x6xf32>
func.func private @merge_detections(%0: tensor<2x5x8xf32>, %1: !b4, %2: !c4) -> tensor<2x5x6xf32> attributes {yolo.family = "merge_detections"} {
  %y = "yolo.merge_detections"(%0, %1, %2) {stride = 32 : i64} : (tensor<2x5x8xf32>, !b4, !c4) -> tensor<2x5x6xf32>
  return %y : tensor<2x5x6xf32>
}

// -----

// float16: the contraction and the epilogue compute in float32, what is stored is rounded once.

// CHECK-LABEL: func.func private @half(
// CHECK-SAME: tensor<1x5x7x8xf16>, %{{.*}}: tensor<6x3x3x8xf16>, %{{.*}}: tensor<6xf32>, %{{.*}}: tensor<1x3x4x6xf16>) -> tensor<1x3x4x6xf16>
// CHECK: %[[ZERO:.*]] = arith.constant 0.000000e+00 : f16
// CHECK: tensor.yield %[[ZERO]] : f16
// CHECK: linalg.fill {{.*}} -> tensor<1x3x4x6xf32>
// CHECK: linalg.conv_2d_nhwc_fhwc
// CHECK-SAME: ins(%{{.*}} : tensor<1x7x9x8xf16>, tensor<6x3x3x8xf16>) outs(%{{.*}} : tensor<1x3x4x6xf32>)
// CHECK: linalg.generic
// CHECK-SAME: outs(%{{.*}} : tensor<1x3x4x6xf16>)
// CHECK: ^bb0(%[[ACC:.*]]: f32, %[[BIAS:.*]]: f32, %[[RESIDUAL:.*]]: f16, %{{.*}}: f16):
// CHECK-NEXT: %[[S:.*]] = arith.addf %[[ACC]], %[[BIAS]] : f32
// CHECK-NEXT: %[[N:.*]] = arith.negf %[[S]] : f32
// CHECK-NEXT: %[[E:.*]] = math.exp %[[N]] : f32
// CHECK-NEXT: %[[D:.*]] = arith.addf %[[E]], %{{.*}} : f32
// CHECK-NEXT: %[[Q:.*]] = arith.divf %[[S]], %[[D]] : f32
// CHECK-NEXT: %[[R:.*]] = arith.extf %[[RESIDUAL]] : f16 to f32
// CHECK-NEXT: %[[A:.*]] = arith.addf %[[Q]], %[[R]] : f32
// CHECK-NEXT: %[[T:.*]] = arith.truncf %[[A]] : f32 to f16
// CHECK-NEXT: linalg.yield %[[T]] : f16
// CHECK-NOT: linalg.generic
// CHECK: return
!x = tensor<1x8x5x7xf16, #yolo.layout<"nhwc">>
!y = tensor<1x6x3x4xf16, #yolo.layout<"nhwc">>
!w = tensor<6x8x3x3xf16, #yolo.layout<"ohwi">>
func.func private @half(%x: !x, %w: !w, %b: tensor<6xf32>, %r: !y) -> !y attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 2, 2>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!x, !w, tensor<6xf32>) -> !y
  %1 = "yolo.silu"(%0) : (!y) -> !y
  %2 = "yolo.add"(%r, %1) : (!y, !y) -> !y
  return %2 : !y
}

// -----

// No rounding where the result is float32, whether there is a bias or not; without one the
// accumulator is the result, or is rounded alone.

// CHECK-LABEL: func.func private @wide(
// CHECK: linalg.conv_2d_nhwc_fhwc
// CHECK-NOT: truncf
// CHECK: return %{{.*}} : tensor<1x3x3x4xf32>
// CHECK-LABEL: func.func private @bare_wide(
// CHECK: %[[ACC:.*]] = linalg.conv_2d_nhwc_fhwc
// CHECK-NEXT: return %[[ACC]]
// CHECK-LABEL: func.func private @bare(
// CHECK: linalg.conv_2d_nhwc_fhwc
// CHECK: ^bb0(%[[IN:.*]]: f32, %{{.*}}: f16):
// CHECK-NEXT: %[[T:.*]] = arith.truncf %[[IN]] : f32 to f16
// CHECK-NEXT: linalg.yield %[[T]] : f16
!x = tensor<1x8x3x3xf16, #yolo.layout<"nhwc">>
!y = tensor<1x4x3x3xf32, #yolo.layout<"nhwc">>
!z = tensor<1x4x3x3xf16, #yolo.layout<"nhwc">>
!w = tensor<4x8x1x1xf16, #yolo.layout<"ohwi">>
func.func private @wide(%x: !x, %w: !w, %b: tensor<4xf32>) -> !y attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w, tensor<4xf32>) -> !y
  return %0 : !y
}
func.func private @bare_wide(%x: !x, %w: !w) -> !y attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !y
  return %0 : !y
}
func.func private @bare(%x: !x, %w: !w) -> !z attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !z
  return %0 : !z
}

// -----

// A tensor that a convolution reads is stored, in a chain as well; the slice is of what is stored.

// CHECK-LABEL: func.func private @chain(
// CHECK: linalg.conv_2d_nhwc_fhwc
// CHECK: arith.truncf
// CHECK: tensor.extract_slice {{.*}} : tensor<1x3x3x8xf16> to tensor<1x3x3x4xf16>
// CHECK: linalg.conv_2d_nhwc_fhwc {{.*}} ins(%{{.*}} : tensor<1x3x3x4xf16>, tensor<4x1x1x4xf16>)
// CHECK: arith.truncf
!x = tensor<1x8x3x3xf16, #yolo.layout<"nhwc">>
!h = tensor<1x4x3x3xf16, #yolo.layout<"nhwc">>
!w = tensor<8x8x1x1xf16, #yolo.layout<"ohwi">>
!v = tensor<4x4x1x1xf16, #yolo.layout<"ohwi">>
func.func private @chain(%x: !x, %w: !w, %v: !v) -> !h attributes {yolo.family = "chain"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !x
  %1 = "yolo.silu"(%0) : (!x) -> !x
  %2 = "yolo.slice"(%1) {offset = 4 : i64, size = 4 : i64} : (!x) -> !h
  %3 = "yolo.conv2d"(%2, %v) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!h, !v) -> !h
  return %3 : !h
}

// -----

// The image stays what it is; only the weight is float16.

// CHECK-LABEL: func.func private @first_half(
// CHECK: arith.uitofp %{{.*}} : i8 to f32
// CHECK: linalg.conv_2d_nhwc_fhwc
// CHECK-SAME: ins(%{{.*}} : tensor<1x4x4x3xf32>, tensor<4x1x1x3xf16>) outs(%{{.*}} : tensor<1x4x4x4xf32>)
// CHECK: arith.truncf
!image = tensor<1x3x4x4xui8, #yolo.layout<"nhwc">>
!f = tensor<1x3x4x4xf32, #yolo.layout<"nhwc">>
!w = tensor<4x3x1x1xf16, #yolo.layout<"ohwi">>
!y = tensor<1x4x4x4xf16, #yolo.layout<"nhwc">>
func.func private @first_half(%x: !image, %w: !w) -> !y attributes {yolo.family = "conv2d"} {
  %0 = "yolo.normalize"(%x) {scale = 1.0 : f64} : (!image) -> !f
  %1 = "yolo.conv2d"(%0, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!f, !w) -> !y
  return %1 : !y
}

// -----

// Depthwise from OHWI, where the weight is transposed; elementwise ops alone; upsampling and
// pooling, which do no arithmetic that rounds.

// CHECK-LABEL: func.func private @depthwise_half(
// CHECK: linalg.transpose ins(%{{.*}} : tensor<8x3x3xf16>) outs(%{{.*}} : tensor<3x3x8xf16>)
// CHECK: linalg.depthwise_conv_2d_nhwc_hwc
// CHECK-SAME: ins(%{{.*}} : tensor<1x6x6x8xf16>, tensor<3x3x8xf16>) outs(%{{.*}} : tensor<1x4x4x8xf32>)
// CHECK-LABEL: func.func private @sum(
// CHECK: ^bb0(%[[A:.*]]: f16, %[[B:.*]]: f16, %{{.*}}: f16):
// CHECK-NEXT: %[[C:.*]] = arith.extf %[[A]] : f16 to f32
// CHECK-NEXT: %[[D:.*]] = arith.extf %[[B]] : f16 to f32
// CHECK-NEXT: %[[S:.*]] = arith.addf %[[C]], %[[D]] : f32
// CHECK-NEXT: %[[T:.*]] = arith.truncf %[[S]] : f32 to f16
// CHECK-NEXT: linalg.yield %[[T]] : f16
// CHECK-LABEL: func.func private @moved(
// CHECK-NOT: f32
// CHECK: %[[LOWEST:.*]] = arith.constant 0xFC00 : f16
// CHECK: tensor.yield %[[LOWEST]] : f16
// CHECK: linalg.pooling_nhwc_max
// CHECK-SAME: ins(%{{.*}} : tensor<1x8x8x8xf16>, tensor<5x5xf16>) outs(%{{.*}} : tensor<1x4x4x8xf16>)
// CHECK: ^bb0(%[[IN:.*]]: f16, %{{.*}}: f16):
// CHECK-NEXT: linalg.yield %[[IN]] : f16
// CHECK: return
!x = tensor<1x8x4x4xf16, #yolo.layout<"nhwc">>
!up = tensor<1x8x8x8xf16, #yolo.layout<"nhwc">>
!w = tensor<8x1x3x3xf16, #yolo.layout<"ohwi">>
func.func private @depthwise_half(%x: !x, %w: !w, %b: tensor<8xf32>) -> !x attributes {yolo.family = "depthwise"} {
  %0 = "yolo.conv2d"(%x, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 8 : i64} : (!x, !w, tensor<8xf32>) -> !x
  return %0 : !x
}
func.func private @sum(%x: !x, %y: !x) -> !x attributes {yolo.family = "elementwise"} {
  %0 = "yolo.add"(%x, %y) : (!x, !x) -> !x
  return %0 : !x
}
func.func private @moved(%x: !x) -> !up attributes {yolo.family = "max_pool"} {
  %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 2, 2, 2, 2>} : (!x) -> !x
  %1 = "yolo.upsample"(%0) {factor = 2 : i64} : (!x) -> !up
  return %1 : !up
}

// -----

// Attention: float16 into float32 sums, the softmax in float32, its weights as float16 for v; what
// attention gives is added before the one rounding.

// CHECK-LABEL: func.func private @attention_half(
// CHECK: linalg.generic
// CHECK-SAME: ins(%{{.*}} : tensor<1x9x2x2xf16>, tensor<1x9x2x2xf16>) outs(%{{.*}} : tensor<1x2x9x9xf32>)
// CHECK-COUNT-2: arith.extf
// CHECK: math.exp %{{.*}} : f32
// CHECK: arith.truncf %{{.*}} : f32 to f16
// CHECK: linalg.generic
// CHECK-SAME: ins(%{{.*}} : tensor<1x2x9x9xf16>, tensor<1x9x2x4xf16>) outs(%{{.*}} : tensor<1x2x9x4xf32>)
// CHECK-COUNT-2: arith.extf
// CHECK: arith.divf %{{.*}} : f32
// CHECK: %[[ATTENDED:.*]] = tensor.expand_shape {{.*}} into tensor<1x3x3x8xf32>
// CHECK: linalg.depthwise_conv_2d_nhwc_hwc
// CHECK-SAME: ins(%{{.*}} : tensor<1x5x5x8xf16>, tensor<3x3x8xf16>) outs(%{{.*}} : tensor<1x3x3x8xf32>)
// CHECK: linalg.generic
// CHECK-SAME: ins(%{{.*}}, %{{.*}}, %[[ATTENDED]] : tensor<1x3x3x8xf32>, tensor<8xf32>, tensor<1x3x3x8xf32>) outs(%{{.*}} : tensor<1x3x3x8xf16>)
// CHECK-COUNT-2: arith.addf
// CHECK-NEXT: arith.truncf
// CHECK-NOT: linalg.generic
// CHECK: return
// CHECK-LABEL: func.func private @attention_alone(
// CHECK: tensor.expand_shape {{.*}} into tensor<1x3x3x8xf32>
// CHECK: linalg.generic
// CHECK: arith.truncf
!x = tensor<1x16x3x3xf16, #yolo.layout<"nhwc">>
!v = tensor<1x4x3x3xf16, #yolo.layout<"nhwc">>
!y = tensor<1x8x3x3xf16, #yolo.layout<"nhwc">>
!w = tensor<8x1x3x3xf16, #yolo.layout<"hwio">>
func.func private @attention_half(%x: !x, %w: !w, %b: tensor<8xf32>) -> !y attributes {yolo.family = "attention"} {
  %0 = "yolo.slice"(%x) {offset = 4 : i64, size = 4 : i64} : (!x) -> !v
  %1 = "yolo.slice"(%x) {offset = 12 : i64, size = 4 : i64} : (!x) -> !v
  %2 = "yolo.concat"(%0, %1) : (!v, !v) -> !y
  %3 = "yolo.attention"(%x) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64, scale = 5.0e-01 : f64} : (!x) -> !y
  %4 = "yolo.conv2d"(%2, %w, %b) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 8 : i64} : (!y, !w, tensor<8xf32>) -> !y
  %5 = "yolo.add"(%3, %4) : (!y, !y) -> !y
  return %5 : !y
}
func.func private @attention_alone(%x: !x) -> !y attributes {yolo.family = "attention"} {
  %0 = "yolo.attention"(%x) {heads = 2 : i64, key_dim = 2 : i64, head_dim = 4 : i64, scale = 5.0e-01 : f64} : (!x) -> !y
  return %0 : !y
}

// -----

// Names of functions and layers are anybody's choice: they are quoted where MLIR wants it.

// CHECK: func.func private @"a kernel"(%{{.*}}: tensor<1x4x4x8xf32>) -> tensor<1x4x4x8xf32>
// CHECK: call @"a kernel"
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func private @"a kernel"(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t loc("the \"first\" layer")
  return %0 : !t
}
func.func @main(%x: !t) -> !t {
  %0 = func.call @"a kernel"(%x) {yolo.dispatch} : (!t) -> !t
  return %0 : !t
}
