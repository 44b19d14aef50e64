// RUN: yolomlir-opt %s --yolo-plan-memory | FileCheck %s --check-prefix=SEQUENTIAL
// RUN: yolomlir-opt %s --pass-pipeline='builtin.module(yolo-plan-memory{reuse=concurrent})' | FileCheck %s --check-prefix=CONCURRENT

// Two branches of two steps, 512 bytes a tensor. In program order the second's inner tensor can lie
// where the first's did; side by side it cannot. (Input, two results of 512, then one or two more.)
// SEQUENTIAL: yolo.arena_bytes = 2048
// CONCURRENT: yolo.arena_bytes = 2560
!t = tensor<1x8x4x4xf32, #yolo.layout<"nhwc">>
func.func @main(%x: !t) -> (!t, !t) {
  %a = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
  %b = func.call @f(%a) {yolo.dispatch} : (!t) -> !t
  %c = func.call @f(%x) {yolo.dispatch} : (!t) -> !t
  %d = func.call @f(%c) {yolo.dispatch} : (!t) -> !t
  return %b, %d : !t, !t
}
func.func private @f(%x: !t) -> !t attributes {yolo.family = "elementwise"} {
  %0 = "yolo.silu"(%x) : (!t) -> !t
  return %0 : !t
}
