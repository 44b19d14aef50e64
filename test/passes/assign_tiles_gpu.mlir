// RUN: yolomlir-opt %s --target sm_90 --yolo-assign-tiles | FileCheck %s
// RUN: echo '{"ruled": {"block_m": 16, "block_n": 8, "block_k": 8, "unroll": true}}' > %t.json
// RUN: yolomlir-opt %s --target sm_90 --pass-pipeline='builtin.module(yolo-assign-tiles{override=true table=%t.json})' --statistics 2>%t.err | FileCheck %s --check-prefix=TABLE
// RUN: FileCheck %s --check-prefix=STATS --input-file=%t.err
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

// STATS-DAG: 1 from_rule
// STATS-DAG: 1 from_table

// BAD: the tile table is not {function: {key: integer or boolean}}
// NONE: cannot read the tile table
!t = tensor<1x64x8x8xf32, #yolo.layout<"nhwc">>
!w = tensor<64x64x1x1xf32, #yolo.layout<"ohwi">>
func.func @main(%x: !t) -> !t {
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %0 = func.call @kept(%x, %w) {yolo.dispatch} : (!t, !w) -> !t
  %1 = func.call @ruled(%0, %w) {yolo.dispatch} : (!t, !w) -> !t
  return %1 : !t
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
