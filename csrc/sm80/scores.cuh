// Integer scores of a warp's queries with keys of one block.
#pragma once

#include "sm80/layout.cuh"
#include "sm80/mma.cuh"

namespace sm80 {

// The scores of kTiles x 16 queries with kGroups x 8 keys, each plus `start`. `q` and `k` point at this lane's 16 bytes
// of the first 16 queries and the first 8 keys; the next 16 queries are `q_stride` words on. Register 2 * row + column
// of scores[tile][j] is the score of row lane / 4 + 8 * row with key 8j + 2 * (lane % 4) + column.
template <int kHeadDim, int kBits, int kTiles, int kGroups>
__device__ __forceinline__ void integer_scores(int (&scores)[kTiles][kGroups][4], const uint4* q, int q_stride,
                                               const uint4* k, int start) {
  using Tile = QkTile<kHeadDim, kBits>;
  const int starts[4] = {start, start, start, start};
  if constexpr (Tile::kSteps == 1) {
    uint4 a[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) a[tile] = q[tile * q_stride];
#pragma unroll
    for (int pair = 0; pair < kGroups / 2; ++pair) {
      const uint4 b = k[pair * 32];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma_int<kBits>(scores[tile][2 * pair], a[tile], b.x, b.y, starts);
        mma_int<kBits>(scores[tile][2 * pair + 1], a[tile], b.z, b.w, starts);
      }
    }
  } else {
    constexpr int kPairs = Tile::kSteps / 2;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (kTiles == 1) __syncwarp();  // keeps loads from being moved far ahead, which costs registers
      uint4 a0[kTiles], a1[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        a0[tile] = q[tile * q_stride + 2 * pair * 32];
        a1[tile] = q[tile * q_stride + (2 * pair + 1) * 32];
      }
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const uint4 b = k[(j * kPairs + pair) * 32];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          int (&to)[4] = scores[tile][j];
          if (pair == 0) {
            mma_int<kBits>(to, a0[tile], b.x, b.y, starts);
          } else {
            mma_int<kBits>(to, a0[tile], b.x, b.y, to);
          }
          mma_int<kBits>(to, a1[tile], b.z, b.w, to);
        }
      }
    }
  }
}

}  // namespace sm80
