// RUN: yolomlir-opt %s --split-input-file --yolo-transpose-elision | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NOT: yolo.convert_layout
// CHECK: %[[Y:.*]] = "yolo.silu"(%arg0)
// CHECK-NEXT: return %[[Y]]
!nhwc = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
!nchw = tensor<1x8x6x6xf32>
func.func @main(%x: !nhwc) -> !nhwc {
  %0 = "yolo.convert_layout"(%x) : (!nhwc) -> !nchw
  %1 = "yolo.convert_layout"(%0) : (!nchw) -> !nhwc
  %2 = "yolo.silu"(%1) : (!nhwc) -> !nhwc
  return %2 : !nhwc
}

// -----

// Two equal conversions are one; one that nothing reads goes; one that is needed stays.
// CHECK-LABEL: func.func @repeated
// CHECK-NEXT: %[[X:.*]] = "yolo.convert_layout"(%arg0)
// CHECK-NEXT: %[[Y:.*]] = "yolo.add"(%[[X]], %[[X]])
// CHECK-NEXT: return %[[Y]]
!nhwc = tensor<1x8x6x6xf32, #yolo.layout<"nhwc">>
!nchw = tensor<1x8x6x6xf32>
func.func @repeated(%x: !nhwc) -> !nchw {
  %0 = "yolo.convert_layout"(%x) : (!nhwc) -> !nchw
  %1 = "yolo.convert_layout"(%x) : (!nhwc) -> !nchw
  %2 = "yolo.add"(%0, %1) : (!nchw, !nchw) -> !nchw
  %3 = "yolo.convert_layout"(%2) : (!nchw) -> !nhwc
  return %2 : !nchw
}

// -----

// A longer chain is read from its start; the middle stays while something else reads it.
// CHECK-LABEL: func.func @chain
// CHECK-NEXT: %[[MIDDLE:.*]] = "yolo.convert_layout"(%arg0) : (tensor<8x8x1x1xf32>) -> {{.*}}"ohwi"
// CHECK-NEXT: %[[END:.*]] = "yolo.convert_layout"(%arg0) : (tensor<8x8x1x1xf32>) -> {{.*}}"hwio"
// CHECK-NEXT: return %[[MIDDLE]], %[[END]]
!oihw = tensor<8x8x1x1xf32>
!ohwi = tensor<8x8x1x1xf32, #yolo.layout<"ohwi">>
!hwio = tensor<8x8x1x1xf32, #yolo.layout<"hwio">>
func.func @chain(%w: !oihw) -> (!ohwi, !hwio) {
  %0 = "yolo.convert_layout"(%w) : (!oihw) -> !ohwi
  %1 = "yolo.convert_layout"(%0) : (!ohwi) -> !hwio
  return %0, %1 : !ohwi, !hwio
}
