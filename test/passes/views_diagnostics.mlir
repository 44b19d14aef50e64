// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-concat-views --yolo-plan-memory
// RUN: not yolomlir-opt %s --split-input-file --pass-pipeline='builtin.module(yolo-plan-memory{reuse=never})' 2>&1 | FileCheck %s --check-prefix=REUSE
// RUN: not yolomlir-opt %s --split-input-file --pass-pipeline='builtin.module(yolo-plan-memory{alignment=24})' 2>&1 | FileCheck %s --check-prefix=ALIGNMENT

// REUSE: reuse is 'never'; expected sequential, concurrent, none
// ALIGNMENT: alignment is 24; expected a power of 2

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !t {
  // expected-error @+1 {{model.0.act: 'yolo.silu' is in no dispatch}}
  %0 = "yolo.silu"(%x) : (!t) -> !t loc("model.0.act")
  return %0 : !t
}

// -----

// expected-error @unknown {{a tensor of @main is not in NHWC}}
func.func @main(%x: tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32> {
  %0 = func.call @f(%x) {yolo.dispatch} : (tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32>
  return %0 : tensor<1x8x4x4xf32>
}
func.func private @f(%x: tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32>
    attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (tensor<1x8x4x4xf32>) -> tensor<1x8x4x4xf32>
  return %0 : tensor<1x8x4x4xf32>
}

// -----

!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
!c = tensor<1x16x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> !c {
  // expected-remark @+1 {{concat is no view: an argument of @main keeps its own buffer}}
  %c = "yolo.concat"(%x, %x) : (!t, !t) -> !c
  return %c : !c
}
