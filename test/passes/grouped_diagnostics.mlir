// What passes over dispatches say of a module that is not made of dispatches and tensors.
// RUN: yolomlir-opt %s --split-input-file --target=sm_90 --verify-diagnostics --yolo-fuse-pointwise
// RUN: yolomlir-opt %s --split-input-file --target=sm_90 --verify-diagnostics --yolo-fuse-bottlenecks
// RUN: yolomlir-opt %s --split-input-file --target=sm_90 --verify-diagnostics --yolo-concat-views

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  // expected-error @below {{'arith.constant' is in no dispatch (run yolo-conv-epilogue-fusion and yolo-form-dispatches first)}}
  %c = arith.constant 1.0 : f32
  return %x : !t
}

// -----

// expected-error @unknown {{argument 1 of @main is i32; expected a tensor}}
func.func @main(%x: tensor<1x8x4x4xf32>, %n: i32) -> tensor<1x8x4x4xf32> {
  return %x : tensor<1x8x4x4xf32>
}

// -----

// expected-error @unknown {{@main has control flow; a network is one block}}
func.func @main(%x: tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32> {
  cf.br ^next
^next:
  return %x : tensor<1x8x4x4xf32>
}

// -----

// expected-error @unknown {{@f is of the family 'conv2d' and has no yolo.conv2d}}
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  %c = "yolo.concat"(%x, %x) : (!t, !t) -> !c
  %0 = func.call @f(%c) {yolo.dispatch} : (!c) -> !t
  return %0 : !t
}
func.func private @f(%x: !c) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.slice"(%x) {offset = 0 : i64, size = 8 : i64} : (!c) -> !t
  return %0 : !t
}
