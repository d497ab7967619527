// The keys whose mean is taken for that of K (comfy_sage2/quantize/smoothing.py, which says why).
#pragma once

#include "common/views.h"

namespace common {

constexpr int kSampledKeys = 128;

__device__ __forceinline__ int sampled_key_count(int length) { return min(length, kSampledKeys); }

// The n-th of them: one in each of as many equal parts of the keys, or of fewer keys all.
__device__ __forceinline__ int sampled_key(int n, int length) {
  if (length <= kSampledKeys) return n;
  const int first = static_cast<int>(i64(n) * length / kSampledKeys);
  const int next = static_cast<int>(i64(n + 1) * length / kSampledKeys);
  unsigned mixed = n * 0x9E3779B1u;
  mixed = (mixed ^ mixed >> 16) * 0x85EBCA6Bu;
  mixed ^= mixed >> 13;
  return first + static_cast<int>(__umulhi(mixed, next - first));
}

}  // namespace common
