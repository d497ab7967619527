// The order of scores of blocks.
#pragma once

namespace common {

// In the order of the numbers, NaN above all; the zeros are one number.
__device__ __forceinline__ unsigned ordered(float score) {
  if (score != score) return 0xffffffffu;
  const unsigned bits = __float_as_uint(score + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace common
