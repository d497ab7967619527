// Which keys of a key block count in means, scales and tiles.
#pragma once

#include "common/hidden_keys.cuh"
#include "sm80/params.h"

namespace sm80 {

using KeyBits = unsigned long long;  // of a key block, the first key in the lowest bit
static_assert(kKeyBlock == 64, "a bit for each key");

// For a warp together: which of the 64 keys from `first` on exist and are not hidden by the mask. `slice` of K;
// `shown`: how many keys of each slice the mask leaves, null where it cannot hide any. One that leaves none hides none.
// A mask is read once here and not at each use of a key, so that kernels of calls without one lose nothing by it.
__device__ __forceinline__ KeyBits counted_keys(const Mask& mask, const int* shown, int slice, int first,
                                                const Sizes& sizes) {
  const int tokens = min(kKeyBlock, sizes.kv_length - first);
  const KeyBits existing = tokens > 0 ? ~KeyBits(0) >> (kKeyBlock - tokens) : 0;
  if (shown == nullptr || shown[slice] == 0) return existing;
  const HiddenKeys hidden(mask, slice / sizes.kv_heads);
  const int lane = threadIdx.x % 32;
  KeyBits counted = 0;
#pragma unroll 1
  for (int half = 0; half < kKeyBlock; half += 32) {
    const int key = half + lane;
    counted |= KeyBits(__ballot_sync(0xffffffffu, key < tokens && !hidden.has(first + key))) << half;
  }
  return counted;
}

__device__ __forceinline__ bool has_key(KeyBits keys, int key) { return keys >> key & 1; }

}  // namespace sm80
