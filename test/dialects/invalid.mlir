// Every rule of the dialect, broken, with what is said about it.
// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics

func.func @kind(%x: f32) {
  // expected-error @below {{expected base type 'builtin.tensor' but got 'builtin.f32'}}
  %0 = "yolo.silu"(%x) : (f32) -> f32
  return
}

// -----

func.func @attribute_missing(%x: tensor<1x4x6x6xf32>) {
  // expected-error @below {{attribute "size" is expected but not provided}}
  %0 = "yolo.slice"(%x) {offset = 0 : i64} : (tensor<1x4x6x6xf32>) -> tensor<1x2x6x6xf32>
  return
}

// -----

func.func @operand_count(%x: tensor<1x4x6x6xf32>) {
  // expected-error @below {{op expects exactly 2 operands, but got 1}}
  %0 = "yolo.add"(%x) : (tensor<1x4x6x6xf32>) -> tensor<1x4x6x6xf32>
  return
}

// -----

// expected-error @below {{'"nchw"' does not satisfy the constraint}}
func.func @layout(%x: tensor<1x4x6x6xf32, #yolo.layout<"nchw">>) {
  return
}

// -----

!x = tensor<1x4x6x6xf32>
!w = tensor<8x3x1x1xf32>
func.func @channels(%x: !x, %w: !w) {
  // expected-error @below {{model.3.conv: 'yolo.conv2d' input has 4 channels; the weight expects 3 (was the checkpoint trained at another scale or class count?)}}
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x6xf32> loc("model.3.conv")
  return
}

// -----

!x = tensor<1x4x6x6xf32>
!w = tensor<8x4x1x1xf32>
func.func @groups(%x: !x, %w: !w) {
  // expected-error @below {{groups is 3; it must divide 4 input and 8 output channels}}
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 3 : i64} : (!x, !w) -> tensor<1x8x6x6xf32>
  // expected-error @below {{strides are [0, 1]; each must be at least 1}}
  %1 = "yolo.conv2d"(%x, %w) {strides = array<i64: 0, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x6xf32>
  // expected-error @below {{padding is [0, -1, 0, 0]; none may be negative}}
  %2 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, -1, 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x6xf32>
  // expected-error @below {{number of padding is 2; expected 4}}
  %3 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x6xf32>
  // expected-error @below {{result shape is [1, 8, 6, 5]; expected [1, 8, 6, 6]}}
  %4 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x5xf32>
  // expected-error @below {{mixes layouts logical, nhwc (insert yolo.convert_layout)}}
  %5 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
  return
}

// -----

!x = tensor<1x4x6x6xf32>
!w = tensor<8x4x9x9xf32>
func.func @kernel_and_bias(%x: !x, %w: !w, %v: tensor<8x4x1x1xf32>, %b: tensor<4xf32>) {
  // expected-error @below {{a 9x9 kernel does not fit the padded 6x6 input}}
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !x
  // expected-error @below {{bias shape is [4]; expected [8]}}
  %1 = "yolo.conv2d"(%x, %v, %b) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, tensor<8x4x1x1xf32>, tensor<4xf32>) -> tensor<1x8x6x6xf32>
  // expected-error @below {{operand 0 has rank 1; expected 4 (N, C, H, W)}}
  %2 = "yolo.conv2d"(%b, %v) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<4xf32>, tensor<8x4x1x1xf32>) -> tensor<1x8x6x6xf32>
  return
}

// -----

!x = tensor<1x4x6x6xf32>
!v = tensor<4xf32>
func.func @elementwise(%x: !x, %y: tensor<1x4x6x6xf32, #yolo.layout<"nhwc">>, %v: !v, %u: tensor<3xf32>) {
  // expected-error @below {{mean shape is [3]; expected [4]}}
  %0 = "yolo.batch_norm"(%x, %v, %v, %u, %v) {epsilon = 1.0e-3} : (!x, !v, !v, tensor<3xf32>, !v) -> !x
  // expected-error @below {{second operand's type is}}
  %1 = "yolo.add"(%x, %y) : (!x, tensor<1x4x6x6xf32, #yolo.layout<"nhwc">>) -> !x
  // expected-error @below {{result shape is [1, 4, 6, 5]; expected [1, 4, 6, 6]}}
  %2 = "yolo.convert_layout"(%x) : (!x) -> tensor<1x4x6x5xf32, #yolo.layout<"nhwc">>
  // expected-error @below {{result shape is [1, 4, 6, 5]; expected [1, 4, 6, 6]}}
  %3 = "yolo.normalize"(%x) {scale = 1.0} : (!x) -> tensor<1x4x6x5xf32>
  return
}

// -----

!x = tensor<1x4x6x6xf32>
func.func @channels_and_windows(%x: !x, %y: tensor<1x4x6x5xf32>) {
  // expected-error @below {{second operand's N, H, W is [1, 6, 5]; expected [1, 6, 6]}}
  %0 = "yolo.concat"(%x, %y) : (!x, tensor<1x4x6x5xf32>) -> tensor<1x8x6x6xf32>
  // expected-error @below {{result shape is [1, 7, 6, 6]; expected [1, 8, 6, 6]}}
  %1 = "yolo.concat"(%x, %x) : (!x, !x) -> tensor<1x7x6x6xf32>
  // expected-error @below {{channels [3, 5) leave the input's 4}}
  %2 = "yolo.slice"(%x) {offset = 3 : i64, size = 2 : i64} : (!x) -> tensor<1x2x6x6xf32>
  // expected-error @below {{result shape is [1, 4, 6, 6]; expected [1, 4, 12, 12]}}
  %3 = "yolo.upsample"(%x) {factor = 2 : i64} : (!x) -> !x
  // expected-error @below {{factor is 0; it must be at least 1}}
  %4 = "yolo.upsample"(%x) {factor = 0 : i64} : (!x) -> !x
  // expected-error @below {{result shape is [1, 4, 6, 6]; expected [1, 4, 2, 2]}}
  %5 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>} : (!x) -> !x
  return
}

// -----

!b = tensor<1x4x2x2xf32>
!c = tensor<1x3x2x2xf32>
!q = tensor<1x16x2x2xf32>
func.func @attention_and_detect(%b: !b, %c: !c, %q: !q) {
  // expected-error @below {{input channels is 16; expected 12}}
  %0 = "yolo.attention"(%q) {heads = 1 : i64, key_dim = 4 : i64, head_dim = 4 : i64, scale = 0.5} : (!q) -> !b
  // expected-error @below {{number of strides is 2; expected 3}}
  %1 = "yolo.detect"(%b, %b, %b, %c, %c, %c) {strides = array<i64: 8, 16>, max_det = 5 : i64} : (!b, !b, !b, !c, !c, !c) -> tensor<1x5x6xf32>
  // expected-error @below {{max_det is 13; it must be in [1, 12], the number of anchors}}
  %2 = "yolo.detect"(%b, %b, %b, %c, %c, %c) {strides = array<i64: 8, 16, 32>, max_det = 13 : i64} : (!b, !b, !b, !c, !c, !c) -> tensor<1x13x6xf32>
  // expected-error @below {{class map shape is}}
  %3 = "yolo.detect"(%b, %b, %b, %c, %b, %c) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!b, !b, !b, !c, !b, !c) -> tensor<1x5x6xf32>
  // expected-error @below {{box channels is 3; expected 4}}
  %4 = "yolo.detect"(%c, %b, %b, %c, %c, %c) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!c, !b, !b, !c, !c, !c) -> tensor<1x5x6xf32>
  // expected-error @below {{max_det is 9; it must be in [1, 8], the number of anchors}}
  %5 = "yolo.candidates"(%b, %b, %c, %c) {strides = array<i64: 8, 16>, max_det = 9 : i64} : (!b, !b, !c, !c) -> tensor<1x9x8xf32>
  // expected-error @below {{result shape is [1, 4, 6]; expected [1, 4, 8]}}
  %6 = "yolo.candidates"(%b, %b, %c, %c) {strides = array<i64: 8, 16>, max_det = 4 : i64} : (!b, !b, !c, !c) -> tensor<1x4x6xf32>
  return
}

// -----

!b = tensor<1x4x2x2xf32>
!c = tensor<1x3x2x2xf32>
!two = tensor<2x4x2x2xf32>
!rows = tensor<1x4x8xf32>
!y = tensor<1x4x6xf32>
func.func @merge_detections(%r: !rows, %b: !b, %c: !c, %two: !two, %y: !y, %five: tensor<1x5x8xf32>) {
  // expected-error @below {{columns of the candidates is 6; expected 8}}
  %0 = "yolo.merge_detections"(%y, %b, %c) {stride = 32 : i64} : (!y, !b, !c) -> !y
  // expected-error @below {{result shape is [1, 4, 6]; expected [1, 5, 6]}}
  %1 = "yolo.merge_detections"(%five, %b, %c) {stride = 32 : i64} : (tensor<1x5x8xf32>, !b, !c) -> !y
  // expected-error @below {{images of the candidates is 1; expected 2}}
  %2 = "yolo.merge_detections"(%r, %two, %two) {stride = 32 : i64} : (!rows, !two, !two) -> !y
  // expected-error @below {{operand 0 has rank 4; expected 3}}
  %3 = "yolo.merge_detections"(%b, %b, %c) {stride = 32 : i64} : (!b, !b, !c) -> !y
  // expected-error @below {{result shape is [1, 4, 8]; expected [1, 4, 6]}}
  %4 = "yolo.merge_detections"(%r, %b, %c) {stride = 32 : i64} : (!rows, !b, !c) -> !rows
  return
}

// -----

func.func @shapes(%y: tensor<1x?x6x6xf32>, %z: tensor<4xf32>) {
  // expected-error @below {{operand 0 is tensor<1x?x6x6xf32>; expected a tensor of static shape}}
  %1 = "yolo.silu"(%y) : (tensor<1x?x6x6xf32>) -> tensor<1x?x6x6xf32>
  // expected-error @below {{operand 0 has rank 1; expected 4 (N, C, H, W)}}
  %2 = "yolo.slice"(%z) {offset = 0 : i64, size = 2 : i64} : (tensor<4xf32>) -> tensor<2xf32>
  return
}

// -----

!x = tensor<1x4x6x6xf32>
func.func @arrays(%x: !x, %y: tensor<1x4x6x6xf32, 1 : i64>) {
  // expected-error @below {{number of padding is 2; expected 4}}
  %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0>} : (!x) -> !x
  // expected-error @below {{kernel is [5, 5] and strides are [1, 0]; each must be at least 1}}
  %1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 5, 5>, strides = array<i64: 1, 0>, padding = array<i64: 2, 2, 2, 2>} : (!x) -> !x
  // expected-error @below {{'yolo.max_pool2d' is malformed}}
  %2 = "yolo.max_pool2d"(%x) {kernel = array<i32: 5, 5>, strides = array<i64: 1, 1>, padding = array<i64: 2, 2, 2, 2>} : (!x) -> !x
  // expected-error @below {{not a yolo layout: 1 : i64}}
  %3 = "yolo.slice"(%y) {offset = 0 : i64, size = 2 : i64} : (tensor<1x4x6x6xf32, 1 : i64>) -> tensor<1x2x6x6xf32, 1 : i64>
  return
}

// -----

// Element types: only a convolution of float16 weights mixes them.
!x = tensor<1x4x6x6xf32>
!h = tensor<1x4x6x6xf16>
!w = tensor<4x4x1x1xf32>
!v = tensor<4x4x1x1xf16>
!b = tensor<4xf32>
func.func @elements(%x: !x, %h: !h, %w: !w, %v: !v, %b: !b, %c: tensor<4xf16>, %i: tensor<1x4x6x6xi32>) {
  // expected-error @below {{model.3.conv: 'yolo.conv2d' input element type is f16; expected f32 (narrow the weight as well)}}
  %0 = "yolo.conv2d"(%h, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!h, !w) -> !x loc("model.3.conv")
  // expected-error @below {{result element type is f16; expected f32 (narrow the weight as well)}}
  %1 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!x, !w) -> !h
  // expected-error @below {{bias element type is f16; expected f32}}
  %2 = "yolo.conv2d"(%h, %v, %c) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!h, !v, tensor<4xf16>) -> !h
  // expected-error @below {{operand 0 has elements of i32; expected f32, f16, ui8}}
  %3 = "yolo.conv2d"(%i, %v) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (tensor<1x4x6x6xi32>, !v) -> !h
  // expected-error @below {{result element type is ui8; a float16 weight gives f16 or f32}}
  %4 = "yolo.conv2d"(%h, %v) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!h, !v) -> tensor<1x4x6x6xui8>
  // expected-error @below {{mixes element types f16, f32; only conv2d and normalize convert}}
  %5 = "yolo.concat"(%h, %x) : (!h, !x) -> tensor<1x8x6x6xf16>
  // expected-error @below {{mixes element types f16, f32}}
  %6 = "yolo.slice"(%h) {offset = 0 : i64, size = 4 : i64} : (!h) -> !x
  // expected-error @below {{mixes element types f32, f16}}
  %7 = "yolo.convert_layout"(%x) : (!x) -> !h
  // expected-error @below {{mixes element types f16, f32}}
  %8 = "yolo.upsample"(%h) {factor = 1 : i64} : (!h) -> !x
  // expected-error @below {{mixes element types f16, f32}}
  %9 = "yolo.max_pool2d"(%h) {kernel = array<i64: 1, 1>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>} : (!h) -> !x
  // expected-error @below {{mixes element types f16, f32}}
  %10 = "yolo.attention"(%h) {heads = 1 : i64, key_dim = 1 : i64, head_dim = 2 : i64, scale = 0.5} : (!h) -> tensor<1x2x6x6xf32>
  // expected-error @below {{result type is}}
  %11 = "yolo.silu"(%h) : (!h) -> !x
  // expected-error @below {{result element type is f16; expected f32}}
  %12 = "yolo.normalize"(%x) {scale = 1.0} : (!x) -> !h
  // expected-error @below {{element type of a map is f16; expected f32}}
  %13 = "yolo.detect"(%h, %x, %x, %x, %x, %x) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!h, !x, !x, !x, !x, !x) -> tensor<1x5x6xf32>
  return
}

// -----

// What no kernel can hold: empty tensors, other ranks, other elements, a layout of what has none.
!z = tensor<1x4x0x6xf32>
!five = tensor<1x2x3x4x5xf32>
!d = tensor<1x4x6x6xf64>
!rows = tensor<1x4x6xf32, #yolo.layout<"nhwc">>
func.func @tensors(%z: !z, %five: !five, %none: tensor<f32>, %d: !d, %rows: !rows) {
  // expected-error @below {{operand 0 has shape [1, 4, 0, 6]; expected 1 to 4 sizes of at least 1}}
  %0 = "yolo.silu"(%z) : (!z) -> !z
  // expected-error @below {{operand 0 has shape [1, 2, 3, 4, 5]; expected 1 to 4 sizes of at least 1}}
  %1 = "yolo.silu"(%five) : (!five) -> !five
  // expected-error @below {{operand 0 has shape []; expected 1 to 4 sizes of at least 1}}
  %2 = "yolo.silu"(%none) : (tensor<f32>) -> tensor<f32>
  // expected-error @below {{operand 0 has elements of f64; expected f32, f16, ui8}}
  %3 = "yolo.silu"(%d) : (!d) -> !d
  // expected-error @below {{operand 0 has a layout and rank 3; expected rank 4}}
  %4 = "yolo.silu"(%rows) : (!rows) -> !rows
  // expected-error @below {{result 0 is tensor<?x4x1x1xf32>; expected a tensor of static shape}}
  %5 = "yolo.weight"() {name = "w"} : () -> tensor<?x4x1x1xf32>
  return
}

// -----

// One name of the weight store is one tensor.
func.func @names() {
  %0 = "yolo.weight"() {name = "w"} : () -> tensor<8x4x1x1xf32>
  // expected-error @below {{type of 'w' is tensor<8x4x1x1xf32, #yolo.layout<"ohwi">>; expected tensor<8x4x1x1xf32>}}
  %1 = "yolo.weight"() {name = "w"} : () -> tensor<8x4x1x1xf32, #yolo.layout<"ohwi">>
  return
}

// -----

// An attribute that would change nothing.
!x = tensor<1x4x6x6xf32>
!w = tensor<4x4x3x3xf32>
func.func @attributes(%x: !x, %w: !w) {
  // expected-error @below {{'yolo.conv2d' has no attribute 'dilations'; it has strides, padding, groups}}
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64, dilations = array<i64: 2, 2>} : (!x, !w) -> !x
  // expected-error @below {{'yolo.silu' has no attribute 'inplace'; it has none}}
  %1 = "yolo.silu"(%x) {inplace} : (!x) -> !x
  %2 = "yolo.silu"(%x) {my.note = "anybody's"} : (!x) -> !x
  return
}

// -----

!x = tensor<1x4x6x6xf32>
!u = tensor<1x4x6x6xui8>
!v = tensor<4xf32>
!h = tensor<4xf16>
func.func @arithmetic(%x: !x, %u: !u, %v: !v, %h: !h, %m: tensor<4x4xui8>, %w: tensor<4x4x1x1xui8>) {
  // expected-error @below {{'yolo.silu' computes on ui8; expected f32 or f16}}
  %0 = "yolo.silu"(%u) : (!u) -> !u
  // expected-error @below {{'yolo.add' computes on ui8; expected f32 or f16}}
  %1 = "yolo.add"(%u, %u) : (!u, !u) -> !u
  // expected-error @below {{'yolo.max_pool2d' computes on ui8; expected f32 or f16}}
  %2 = "yolo.max_pool2d"(%u) {kernel = array<i64: 1, 1>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>} : (!u) -> !u
  // expected-error @below {{'yolo.attention' computes on ui8; expected f32 or f16}}
  %3 = "yolo.attention"(%u) {heads = 1 : i64, key_dim = 1 : i64, head_dim = 2 : i64, scale = 0.5} : (!u) -> tensor<1x2x6x6xui8>
  // expected-error @below {{'yolo.conv2d' computes on ui8; expected f32 or f16}}
  %4 = "yolo.conv2d"(%u, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, groups = 1 : i64} : (!u, tensor<4x4x1x1xui8>) -> !u
  // expected-error @below {{mean element type is f16; expected f32}}
  %5 = "yolo.batch_norm"(%x, %v, %v, %h, %v) {epsilon = 1.0e-3} : (!x, !v, !v, !h, !v) -> !x
  // expected-error @below {{operand 0 has rank 2; expected 4 (N, C, H, W)}}
  %6 = "yolo.normalize"(%m) {scale = 1.0} : (tensor<4x4xui8>) -> tensor<4x4xf32>
  return
}

// -----

!x = tensor<1x4x6x6xf32>
func.func @windows_and_sizes(%x: !x) {
  // expected-error @below {{padding is [-1, 0, 0, 0]; none may be negative}}
  %0 = "yolo.max_pool2d"(%x) {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: -1, 0, 0, 0>} : (!x) -> tensor<1x4x3x4xf32>
  // expected-error @below {{a 8x8 kernel does not fit the padded 6x6 input}}
  %1 = "yolo.max_pool2d"(%x) {kernel = array<i64: 8, 8>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>} : (!x) -> !x
  // expected-error @below {{heads, key_dim, head_dim are -1, -1, -2; at least 1 each}}
  %2 = "yolo.attention"(%x) {heads = -1 : i64, key_dim = -1 : i64, head_dim = -2 : i64, scale = 0.5} : (!x) -> tensor<1x2x6x6xf32>
  // expected-error @below {{strides are [8, 0, 32]; each must be at least 1}}
  %3 = "yolo.detect"(%x, %x, %x, %x, %x, %x) {strides = array<i64: 8, 0, 32>, max_det = 5 : i64} : (!x, !x, !x, !x, !x, !x) -> tensor<1x5x6xf32>
  // expected-error @below {{result element type is f16; expected f32}}
  %4 = "yolo.detect"(%x, %x, %x, %x, %x, %x) {strides = array<i64: 8, 16, 32>, max_det = 5 : i64} : (!x, !x, !x, !x, !x, !x) -> tensor<1x5x6xf16>
  %rows = "yolo.candidates"(%x, %x, %x, %x) {strides = array<i64: 8, 16>, max_det = 5 : i64} : (!x, !x, !x, !x) -> tensor<1x5x8xf32>
  // expected-error @below {{strides are [-32]; each must be at least 1}}
  %5 = "yolo.merge_detections"(%rows, %x, %x) {stride = -32 : i64} : (tensor<1x5x8xf32>, !x, !x) -> tensor<1x5x6xf32>
  return
}

// -----

// Dispatches, and the functions that they call.
!t = tensor<1x8x4x4xf32>
// expected-error @below {{visibility of @main is private; expected public}}
func.func private @main(%x: !t) -> !t {
  // expected-error @below {{'func.call' is a dispatch of @declared, which has no body}}
  %0 = func.call @declared(%x) {yolo.dispatch} : (!t) -> !t
  return %0 : !t
}
func.func private @declared(!t) -> !t
// expected-error @below {{@empty has a family and no body}}
func.func private @empty(!t) -> !t attributes {yolo.family = "elementwise"}
// expected-error @below {{@number has yolo.family = 5 : i32; expected a string}}
func.func private @number(%x: !t) -> !t attributes {yolo.family = 5 : i32} {
  return %x : !t
}
// expected-error @below {{@nothing has a family and no result}}
func.func private @nothing(%x: !t) attributes {yolo.family = "elementwise"} {
  return
}

// -----

// expected-error @below {{has yolo.precision = 5 : i32; expected one of fp32, tf32, fp16}}
module attributes {yolo.precision = 5 : i32} {}

// -----

// expected-error @below {{has yolo.precision = "int4"; expected one of fp32, tf32, fp16}}
module attributes {yolo.precision = "int4"} {}

// -----

// Factors are numbers; an image is bytes or float32.
!x = tensor<1x4x6x6xf32>
!h = tensor<1x4x6x6xf16>
!v = tensor<4xf32>
func.func @factors(%x: !x, %h: !h, %v: !v) {
  // expected-error @below {{scale is nan; expected a number}}
  %0 = "yolo.normalize"(%x) {scale = 0x7FF8000000000000 : f64} : (!x) -> !x
  // expected-error @below {{scale is inf; expected a number}}
  %1 = "yolo.attention"(%x) {heads = 1 : i64, key_dim = 1 : i64, head_dim = 2 : i64, scale = 0x7FF0000000000000 : f64} : (!x) -> tensor<1x2x6x6xf32>
  // expected-error @below {{epsilon is nan; expected a number}}
  %2 = "yolo.batch_norm"(%x, %v, %v, %v, %v) {epsilon = 0x7FF8000000000000 : f64} : (!x, !v, !v, !v, !v) -> !x
  // expected-error @below {{image has elements of f16; expected ui8 or f32}}
  %3 = "yolo.normalize"(%h) {scale = 1.0} : (!h) -> !x
  return
}
