// RUN: yolomlir-opt %s --target sm_90 --yolo-assign-tiles | FileCheck %s
// RUN: echo '{"ruled": {"block_m": 16, "block_n": 8, "block_k": 8, "unroll": true}}' > %t.json
// RUN: yolomlir-opt %s --target sm_90 --pass-pipeline='builtin.module(yolo-assign-tiles{override=true table=%t.json})' --statistics 2>%t.err | FileCheck %s --check-prefix=TABLE
// RUN: FileCheck %s --check-prefix=STATS --input-file=%t.err
// RUN: echo '{"windowed": {"block_m": 128, "cluster_n": 1, "warps": 8, "step_kib": 8, "slots": 2, "rows": 8, "carveout": 50, "release_early": true}}' > %t.window
// RUN: yolomlir-opt %s --target sm_80 --pass-pipeline='builtin.module(yolo-assign-tiles{table=%t.window})' | FileCheck %s --check-prefix=WINDOW
// RUN: echo '[]' > %t.bad
// RUN: not yolomlir-opt %s --pass-pipeline='builtin.module(yolo-assign-tiles{table=%t.bad})' 2>&1 | FileCheck %s --check-prefix=BAD
// RUN: not yolomlir-opt %s --pass-pipeline='builtin.module(yolo-assign-tiles{table=%t.none})' 2>&1 | FileCheck %s --check-prefix=NONE

// The rule of the family chooses; a tile that is there stays, unless a table replaces it.
// CHECK: func.func private @kept
// CHECK-SAME: yolo.tile = {block_k = 8 : i64, block_m = 32 : i64, block_n = 8 : i64}
// CHECK: func.func private @ruled
// CHECK-SAME: yolo.tile = {block_k = {{[0-9]+}} : i64, block_m = {{[0-9]+}} : i64

// TABLE: func.func private @kept
// TABLE-SAME: yolo.tile = {block_k = {{[0-9]+}} : i64
// TABLE: func.func private @ruled
// TABLE-SAME: yolo.tile = {block_k = 8 : i64, block_m = 16 : i64, block_n = 8 : i64, unroll = true}

// STATS-DAG: 2 from_rule
// STATS-DAG: 1 from_table

// A 3x3 convolution of few channels gets a window, by the rule or by a table.
// CHECK: func.func private @windowed
// CHECK-SAME: yolo.tile = {block_m = {{[0-9]+}} : i64, cluster_n = 1 : i64, rows = {{[1-9][0-9]*}} : i64, slots = {{[0-9]+}} : i64, step_kib = {{[0-9]+}} : i64, warps = {{[0-9]+}} : i64}
// WINDOW: func.func private @windowed
// WINDOW-SAME: yolo.tile = {block_m = 128 : i64, carveout = 50 : i64, cluster_n = 1 : i64, release_early = true, rows = 8 : i64, slots = 2 : i64, step_kib = 8 : i64, warps = 8 : i64}

// BAD: the tile table is not {function: {key: integer or boolean}}
// NONE: cannot read the tile table
!t = tensor<1x64x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<64x64x1x1xf32, #yolo.layout<"ohwi">>
!few = tensor<1x16x160x160xf32, #yolo.layout<"nhwc">>
!out = tensor<1x8x160x160xf32, #yolo.layout<"nhwc">>
!taps = tensor<8x16x3x3xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t, %y: !few) -> (!t, !out) {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = func.call @kept(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @ruled(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  %taps = "yolo.weight"() {name = "taps"} : () -> !taps
  %2 = func.call @windowed(%y, %taps) {yolo.dispatch} : (!few, !taps) -> !out
  return %1, %2 : !t, !out
}
func.func private @kept(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d",
    yolo.tile = {block_m = 32 : i64, block_n = 8 : i64, block_k = 8 : i64}} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  return %0 : !t
}
func.func private @ruled(%x: !t, %w: !w) -> !t attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>,
      groups = 1 : i64} : (!t, !w) -> !t
  %1 = "yolo.silu"(%0) : (!t) -> !t
  return %1 : !t
}
func.func private @windowed(%x: !few, %w: !taps) -> !out attributes {yolo.family = "conv2d"} {
  %0 = "yolo.conv2d"(%x, %w) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>,
      groups = 1 : i64} : (!few, !taps) -> !out
  return %0 : !out
}
