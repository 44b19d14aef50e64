// RUN: yolomlir-opt %s --target=sm_90 --split-input-file --verify-diagnostics --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{max-pixels=100 max-channels=256})'
// RUN: not yolomlir-opt %s --target=sm_90 --split-input-file --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{max-pixels=0})' 2>&1 | FileCheck %s --check-prefix=PIXELS
// RUN: not yolomlir-opt %s --target=cpu --split-input-file --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{max-channels=-1})' 2>&1 | FileCheck %s --check-prefix=CHANNELS
// RUN: not yolomlir-opt %s --target=sm_90 --split-input-file --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x8})' 2>&1 | FileCheck %s --check-prefix=INPUTS
// RUN: not yolomlir-opt %s --target=sm_90 --split-input-file --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{inputs=8x8x8:})' 2>&1 | FileCheck %s --check-prefix=LENGTH
// RUN: not yolomlir-opt %s --target=sm_90 --split-input-file --pass-pipeline='builtin.module(yolo-fuse-bottlenecks{size=4})' 2>&1 | FileCheck %s --check-prefix=OPTION
// RUN: not yolomlir-opt %s --target=sm_90 --split-input-file --yolo-pipeline-gpu='level=3 pairs=some' 2>&1 | FileCheck %s --check-prefix=SOME

// PIXELS: max-pixels is 0; it must be at least 1
// CHANNELS: max-channels is -1; it must be at least 1
// INPUTS: inputs is '8x8'; expected CxHxW or CxHxW:N, joined by '+'
// LENGTH: inputs is '8x8x8:'; expected
// OPTION: has no option 'size'
// OPTION-SAME: max-pixels, max-channels, inputs, portable
// SOME: inputs is 'some'; expected

!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> (!t, !t) {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  // expected-remark @+1 {{not fused with what reads it: its result is read elsewhere as well}}
  %0 = func.call @conv2d_3x3s1_8x8x8_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %0, %1 : !t, !t
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

!t = tensor<1x8x16x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  // expected-remark @+1 {{not fused with what reads it: it has 128 pixels; at most 100}}
  %0 = func.call @conv2d_3x3s1_8x16x8_8(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x16x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x16x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!u = tensor<1x264x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<264x8x3x3xf32, #yolo.layout<"ohwi">>
!v = tensor<8x264x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %v = "yolo.weight"() {name = "b.weight"} : () -> !v
  // expected-remark @+1 {{not fused with what reads it: a convolution reads 264 channels; at most 256}}
  %0 = func.call @conv2d_3x3s1_8x8x8_264(%x, %w) {yolo.dispatch} : (!t, !w) -> !u
  %1 = func.call @conv2d_3x3s1_264x8x8_8(%0, %v) {yolo.dispatch} : (!u, !v) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_8x8x8_264(%x: !t, %w: !w) -> !u
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !u
  return %0 : !u
}
func.func private @conv2d_3x3s1_264x8x8_8(%x: !u, %w: !v) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!u, !v) -> !t
  return %0 : !t
}

// -----

// What does not fit a GPU with 99 KiB and no clusters.
!t = tensor<1x256x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<256x256x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  // expected-remark @+1 {{not fused with what reads it: no tile fits 101376 bytes without clusters}}
  %0 = func.call @conv2d_3x3s1_256x8x8_256(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_256x8x8_256(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %1 : !t
}
func.func private @conv2d_3x3s1_256x8x8_256(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}

// -----

// The second one's result takes the place of what the first one reads.
!t = tensor<1x8x8x8xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<8x8x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%c: !c) -> !c {
  %w = "yolo.weight"() {name = "a.weight"} : () -> !w
  %x = func.call @elementwise(%c) {yolo.dispatch} : (!c) -> !c
  %a = "yolo.slice"(%x) {offset = 0 : i64, size = 8 : i64} : (!c) -> !t
  %b = "yolo.slice"(%x) {offset = 8 : i64, size = 8 : i64} : (!c) -> !t
  // expected-remark @+1 {{not fused with what reads it: the other would write where this one reads}}
  %0 = func.call @conv2d_3x3s1_8x8x8_8(%b, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @conv2d_3x3s1_8x8x8_8(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  %2 = "yolo.concat"(%a, %1) : (!t, !t) -> !c
  return %2 : !c
}
func.func private @elementwise(%x: !c) -> !c attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!c) -> !c
  return %0 : !c
}
func.func private @conv2d_3x3s1_8x8x8_8(%x: !t, %w: !w) -> !t
    attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>,
      padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
