// E4M3, the 8-bit float of P and V.
#pragma once

namespace common {

constexpr float kMaxE4m3 = 448.f;
// log2(448): P is scaled to E4M3's range within the exponent.
constexpr float kLog2OfPScale = 8.807354922057604f;

// Four neighboring numbers, the first in the low byte.
__device__ __forceinline__ unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
  unsigned packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

}  // namespace common
