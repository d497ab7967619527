// The softmax of the key tile in which a padding mask ends the keys.
#pragma once

#include "sm90/softmax.cuh"

namespace sm90 {

// The keys end in block kLast, `left` behind this thread's first of it. Blocks before are whole; those behind have no
// keys: their probabilities are zeros, and no exponentials are computed.
template <int kBlockN, int kLast>
__device__ __forceinline__ void softmax_padded_blocks(int (&scores)[kBlockN / 2], RowState& state,
                                                      const float (&q_scale)[2],
                                                      const float (&k_scale)[kBlockN / kScaleBlock], int left) {
  constexpr int kPerBlock = kScaleBlock / 2, kWhole = kLast * kPerBlock;
  float maximum[2] = {kNegativeInfinity, kNegativeInfinity};
#pragma unroll
  for (int i = 0; i < kPerBlock / 2; ++i) {
    const float term = key_distance(i) < left ? 0.f : kNegativeInfinity;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int& score = scores[kWhole + i / 2 * 4 + row * 2 + i % 2];
      const float x = fmaf(float(score), q_scale[row] * k_scale[kLast], term);
      maximum[row] = fmaxf(maximum[row], x);
      score = __float_as_int(x);
    }
  }
  float offset[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int block = 0; block < kLast; ++block) {
      const int first = block * kPerBlock + row * 2;
      int largest = max(scores[first], scores[first + 1]);
#pragma unroll
      for (int i = 4; i < kPerBlock; i += 4) largest = max(max(largest, scores[first + i]), scores[first + i + 1]);
      maximum[row] = fmaxf(maximum[row], float(largest) * (q_scale[row] * k_scale[block]));
    }
    offset[row] = state.update<false>(row, maximum[row]);
  }
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    const int row = i / 2 % 2;
    float x = kNegativeInfinity;
    if (i < kWhole)
      x = fmaf(float(scores[i]), q_scale[row] * k_scale[i / kPerBlock], offset[row]);
    else if (i < kWhole + kPerBlock)
      x = __int_as_float(scores[i]) + offset[row];
    scores[i] = i < kWhole + kPerBlock ? __float_as_int(exp2_approx(x)) : 0;
  }
}

// `keys`: how many the mask leaves of the tile, at least one. `lane`: the thread's place in its quad.
template <int kBlockN>
__device__ __forceinline__ void softmax_padded_tile(int (&scores)[kBlockN / 2], RowState& state,
                                                    const float (&q_scale)[2],
                                                    const float (&k_scale)[kBlockN / kScaleBlock], int keys, int lane) {
  static_assert(kBlockN == 2 * kScaleBlock);
  if (keys <= kScaleBlock)
    softmax_padded_blocks<kBlockN, 0>(scores, state, q_scale, k_scale, keys - 2 * lane);
  else
    softmax_padded_blocks<kBlockN, 1>(scores, state, q_scale, k_scale, keys - kScaleBlock - 2 * lane);
}

}  // namespace sm90
