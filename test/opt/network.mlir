// A small network through the whole pipeline of each target, and again from the text that it prints.
// RUN: yolomlir-opt %s --yolo-pipeline-cpu | FileCheck %s --check-prefixes=CHECK,CPU
// RUN: yolomlir-opt %s --yolo-pipeline-gpu=level=1 --target=sm_90 \
// RUN:   | FileCheck %s --check-prefixes=CHECK,GPU
// RUN: yolomlir-opt %s --yolo-pipeline-gpu='level=1 precision=fp16' --target=sm_90 \
// RUN:   --weights=random:1 --yolo-lower-to-linalg | FileCheck %s --check-prefix=HALF
// RUN: yolomlir-opt %s --yolo-pipeline-cpu=level=0 --dump-pass-pipeline -o %t.1 2> %t.text
// RUN: %python -c "import sys; print('// configuration: --pass-pipeline=' + open(sys.argv[1]).read())" %t.text > %t.mlir
// RUN: cat %s >> %t.mlir
// RUN: yolomlir-opt %t.mlir --run-reproducer -o %t.2
// RUN: diff %t.1 %t.2

// CHECK-LABEL: func.func @main(%arg0: tensor<1x3x16x16xui8, #yolo.layout<"nhwc">>
// CHECK-SAME: yolo.arena_bytes
// CHECK-NOT: yolo.batch_norm
// CHECK-NOT: yolo.convert_layout
// CPU: "yolo.weight"() {{.*}}name = "w:bn:scale:hwio"
// GPU: "yolo.weight"() {{.*}}name = "w:bn:scale:ohwi"
// CHECK: %[[Y:.*]] = call @conv2d_{{.*}}silu{{.*}}(%arg0, %{{.*}}, %{{.*}}) {yolo.dispatch
// CHECK-NEXT: return %[[Y]]
// CHECK: func.func private @conv2d_{{.*}} attributes {yolo.family = "conv2d"

// HALF: yolo.precision = "fp16"
// HALF: "yolo.weight"() {{.*}}name = "w:bn:scale:ohwi:f16"} : () -> tensor<16x3x3x3xf16>
// HALF: func.func private @conv2d_{{.*}}tensor<1x16x16x3xi8>{{.*}}tensor<16x3x3x3xf16>, %{{.*}}: tensor<16xf32>) -> tensor<1x8x8x16xf32>
!image = tensor<1x3x16x16xui8, #yolo.layout<"nhwc">>
!x = tensor<1x3x16x16xf32, #yolo.layout<"nhwc">>
!c = tensor<1x3x16x16xf32>
!w = tensor<16x3x3x3xf32>
!y = tensor<1x16x8x8xf32>
!z = tensor<1x16x8x8xf32, #yolo.layout<"nhwc">>
!v = tensor<16xf32>
func.func @main(%image: !image) -> !z {
  %0 = "yolo.normalize"(%image) {scale = 0.00392156862 : f64} : (!image) -> !x
  %1 = "yolo.convert_layout"(%0) : (!x) -> !c
  %w = "yolo.weight"() {name = "w"} : () -> !w
  %g = "yolo.weight"() {name = "g"} : () -> !v
  %b = "yolo.weight"() {name = "b"} : () -> !v
  %m = "yolo.weight"() {name = "m"} : () -> !v
  %v = "yolo.weight"() {name = "v"} : () -> !v
  %2 = "yolo.conv2d"(%1, %w) {strides = array<i64: 2, 2>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!c, !w) -> !y
  %3 = "yolo.batch_norm"(%2, %g, %b, %m, %v) {epsilon = 1.0e-3} : (!y, !v, !v, !v, !v) -> !y
  %4 = "yolo.silu"(%3) : (!y) -> !y
  %5 = "yolo.convert_layout"(%4) : (!y) -> !z
  return %5 : !z
}
