// Own and upstream passes in one pipeline, by name, nested, with options, and by short form.
// RUN: yolomlir-opt %s --pass-pipeline='builtin.module(func.func(cse,canonicalize{max-iterations=3}),yolo-cse,yolo-dce,symbol-dce)' \
// RUN:   | FileCheck %s
// RUN: yolomlir-opt %s --cse -canonicalize='max-iterations=3' --yolo-cse --yolo-dce --symbol-dce \
// RUN:   | FileCheck %s
// RUN: yolomlir-opt %s --yolo-cse --yolo-dce --emit-bytecode \
// RUN:   | yolomlir-opt --canonicalize --verify-roundtrip | FileCheck %s

// Every dump is named after its pass.
// RUN: yolomlir-opt %s --yolo-cse --canonicalize --mlir-print-ir-before=canonicalize \
// RUN:   --mlir-print-ir-after-all -o /dev/null 2>&1 | FileCheck %s --check-prefix=DUMP
// DUMP: // -----// IR Dump After yolo-cse //----- //
// DUMP: // -----// IR Dump Before canonicalize //----- //
// DUMP: // -----// IR Dump After canonicalize //----- //

// A reproducer's first line says how to run it.
// RUN: echo "// configuration: --yolo-cse --yolo-dce" > %t.mlir
// RUN: cat %s >> %t.mlir
// RUN: yolomlir-opt %t.mlir --run-reproducer --canonicalize | FileCheck %s

// CHECK-LABEL: func.func @main
// CHECK-NEXT: %[[Y:.*]] = "yolo.silu"(%arg0)
// CHECK-NEXT: "yolo.add"(%[[Y]], %[[Y]])
// CHECK-NEXT: return
// CHECK-NOT: @unused
!t = tensor<1x8x6x6xf32>
func.func @main(%x: !t) -> !t {
  %c = arith.constant 1 : i32
  %0 = "yolo.silu"(%x) : (!t) -> !t
  %1 = "yolo.silu"(%x) : (!t) -> !t
  %2 = "yolo.add"(%0, %1) : (!t, !t) -> !t
  return %2 : !t
}
func.func private @unused(!t) -> !t
