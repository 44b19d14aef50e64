// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics

func.func @sound(%x: tensor<1x4x2x2xf32>) -> tensor<1x4x2x2xf32> {
  %0 = "yolo.silu"(%x) : (tensor<1x4x2x2xf32>) -> tensor<1x4x2x2xf32>
  return %0 : tensor<1x4x2x2xf32>
}

// -----

func.func @below(%x: tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32> {
  // expected-error @below {{result type is tensor<1x4x2x3xf32>; expected tensor<1x4x2x2xf32>}}
  %0 = "yolo.silu"(%x) : (tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32>
  return %0 : tensor<1x4x2x3xf32>
}

// -----

func.func @layer(%x: tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32> {
  // expected-error @+1 {{model.0.act: 'yolo.silu' result type}}
  %0 = "yolo.silu"(%x) : (tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32> loc("model.0.act")
  return %0 : tensor<1x4x2x3xf32>
}

// -----

func.func @regular_expression(%x: tensor<1x4x2x2xf32>) {
  %0 = "yolo.silu"(%x) : (tensor<1x4x2x2xf32>) -> tensor<1x4x2x3xf32>
  // expected-error-re @above {{result type is {{.*}}; expected tensor<{{[0-9]+}}x4x2x2xf32>}}
  return
}

// -----

func.func @parser() {
  // expected-error @+1 {{custom op 'nothing' is unknown}}
  nothing
}
