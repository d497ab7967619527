// Block score margins: of each block of 128 queries and 128 keys the largest score relative to the running maximum of
// its row, in log2, at most 0.
#pragma once

#include "common/scores.cuh"
#include "common/tile_lists.h"

namespace common {

// The margins of a block of queries, one for each block of keys. `head` counts over batch * q_heads.
__device__ __forceinline__ float* margins_of_queries(float* margins, int head, int query, int q_length, int kv_length) {
  const auto blocks = [](int length) { return (length + kListTile - 1) / kListTile; };
  return margins + (i64(head) * blocks(q_length) + query / kListTile) * blocks(kv_length);
}

// A row's share of a margin: 0 where it is NaN, and minus infinity for a row past the last query.
__device__ __forceinline__ float margin_of_row(float largest, float maximum, bool exists) {
  return fminf(largest - maximum, exists ? 0.f : kNegativeInfinity);
}

// Raises a block's margin to the largest of the warp's threads. The bits of floats that are not positive are ordered as
// unsigned numbers, the largest float first.
__device__ __forceinline__ void raise_margin(float* margin, float of_thread) {
  const unsigned bits = __reduce_min_sync(0xffffffffu, __float_as_uint(of_thread));
  if (threadIdx.x % 32 == 0) atomicMin(reinterpret_cast<unsigned*>(margin), bits);
}

}  // namespace common
