// Integer scores of 16 queries with one block of 64 keys.
#pragma once

#include "sm80/layout.cuh"
#include "sm80/mma.cuh"

namespace sm80 {

// `q` and `k` point at this lane's 16 bytes of the tiles of the 16 queries and the 64 keys. Register 2 * row + column
// of scores[j] is the score of row lane / 4 + 8 * row with key 8j + 2 * (lane % 4) + column.
template <int kHeadDim, int kBits>
__device__ __forceinline__ void integer_scores(int (&scores)[8][4], const uint4* q, const uint4* k) {
  using Tile = QkTile<kHeadDim, kBits>;
  constexpr int kZero[4] = {0, 0, 0, 0};
  if constexpr (Tile::kSteps == 1) {
    const uint4 a = q[0];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint4 b = k[pair * 32];
      mma_int<kBits>(scores[2 * pair], a, b.x, b.y, kZero);
      mma_int<kBits>(scores[2 * pair + 1], a, b.z, b.w, kZero);
    }
  } else {
    constexpr int kPairs = Tile::kSteps / 2;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      __syncwarp();  // keeps loads from being moved far ahead, which costs registers
      const uint4 a0 = q[2 * pair * 32], a1 = q[(2 * pair + 1) * 32];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint4 b = k[(j * kPairs + pair) * 32];
        if (pair == 0) {
          mma_int<kBits>(scores[j], a0, b.x, b.y, kZero);
        } else {
          mma_int<kBits>(scores[j], a0, b.x, b.y, scores[j]);
        }
        mma_int<kBits>(scores[j], a1, b.z, b.w, scores[j]);
      }
    }
  }
}

}  // namespace sm80
