// Arithmetic on attention scores, which are in units of log2.
#pragma once

#include "common/constants.h"
#include "common/elements.cuh"
#include "common/views.h"

namespace common {

constexpr float kLowest = -3.402823466e+38f;
constexpr float kNegativeInfinity = -__builtin_bit_cast(float, 0x7f800000u);
constexpr float kLowestTerm = 0.5f * kLowest;  // of a mask, in units of log2, but for minus infinity

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four threads that share a row of a matrix product's result.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// What a mask element adds to a score. Finite values stay finite, so that a row of the lowest number of its type is a
// uniform row, as in plain attention, and not an empty one.
__device__ __forceinline__ float mask_term(bool attend) { return attend ? 0.f : kNegativeInfinity; }
template <class T>
__device__ __forceinline__ float mask_term(T additive) {
  const float x = to_float(additive);
  return x < 0.f && x > kNegativeInfinity ? fmaxf(x * kLog2E, kLowestTerm) : x * kLog2E;
}

// Calls visitor(elements) with the mask's pointer in its own type.
template <class Visitor>
__device__ __forceinline__ auto visit_mask(const Mask& mask, const Visitor& visitor) {
  switch (mask.element) {
    case kBool:
      return visitor(static_cast<const bool*>(mask.pointer));
    case kHalf:
      return visitor(static_cast<const __half*>(mask.pointer));
    case kBfloat16:
      return visitor(static_cast<const __nv_bfloat16*>(mask.pointer));
    default:
      return visitor(static_cast<const float*>(mask.pointer));
  }
}

}  // namespace common
