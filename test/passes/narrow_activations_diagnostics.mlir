// RUN: yolomlir-opt %s --split-input-file --verify-diagnostics --yolo-narrow-activations

!t = tensor<1x8x4x4xf32>
func.func private @f(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
func.func @main(%x: !t) -> !t {
  // expected-error @below {{model.1: 'func.call' is no op of the dialect; element types are chosen before that (run yolo-narrow-activations before yolo-conv-epilogue-fusion)}}
  %0 = func.call @f(%x) {yolo.dispatch} : (!t) -> !t loc("model.1")
  return %0 : !t
}
