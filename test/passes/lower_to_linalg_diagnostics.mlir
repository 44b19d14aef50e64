// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-lower-to-linalg

// What is no kernel and no view has no physical form.
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  // expected-error @below {{model.0.act: 'yolo.silu' lies in no dispatch (run yolo-form-dispatches first)}}
  %0 = "yolo.silu"(%x) : (!t) -> !t loc("model.0.act")
  return %0 : !t
}

// -----

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  // expected-error @below {{'arith.constant' lies in no dispatch}}
  %c = arith.constant true
  %0 = scf.if %c -> !t {
    scf.yield %x : !t
  } else {
    scf.yield %x : !t
  }
  return %0 : !t
}

// -----

// expected-error @unknown {{main: i32 is not a ranked tensor}}
func.func @main(%n: i32) -> i32 {
  return %n : i32
}

// -----

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func private @kernel(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  // expected-error @below {{'tensor.empty' has no lowering to linalg}}
  %0 = tensor.empty() : !t
  return %0 : !t
}
