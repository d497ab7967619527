// What the means and scales of K and V are made of, and their sums over a cluster of blocks that shares a head. Sums
// have always the same order, so that repeated runs are equal bit by bit.
#pragma once

#include "common/e4m3.cuh"
#include "common/elements.cuh"
#include "sm90/cluster.cuh"

namespace sm90 {

constexpr int kStatisticsWarps = kStatisticsThreads / 32;

enum Statistic { kSumK, kSumV, kMaxV, kMaxNegatedV, kStatistics };

__device__ __forceinline__ float initial(int statistic) {
  return statistic == kSumK || statistic == kSumV ? 0.f : -__builtin_bit_cast(float, 0x7f800000u);
}
__device__ __forceinline__ float combine(int statistic, float x, float y) {
  return statistic == kSumK || statistic == kSumV ? x + y : max_nan(x, y);
}
template <int kChannels>
__device__ __forceinline__ float combine_warps(int statistic, const float (&partial)[kStatisticsWarps][kChannels],
                                               int channel) {
  float x = partial[0][channel];
  for (int warp = 1; warp < kStatisticsWarps; ++warp) x = combine(statistic, x, partial[warp][channel]);
  return x;
}

// Of a channel of V.
struct ValueFactors {
  float mean, scale, inverse;
};
// Over so many `tokens`, an int or a float.
template <class T, class Count>
__device__ __forceinline__ ValueFactors value_factors(float sum, float max, float max_negated, Count tokens,
                                                      bool smooth, float head_room = 1.f) {
  const float mean = smooth ? sum / tokens : 0.f;
  const float amax = head_room * storable_amax<T>(max_nan(max - mean, max_negated + mean), mean);
  // The quotient of a smaller magnitude is infinite: such a channel is quantized to zeros.
  return {mean, amax / kMaxE4m3, amax < 1.32e-36f ? 0.f : kMaxE4m3 / amax};
}
__device__ __forceinline__ void store_value_factors(const StatisticsParams& params, i64 index,
                                                    const ValueFactors& factors) {
  params.v_mean[index] = factors.mean;
  params.v_scale[index] = factors.scale;
  params.v_inverse[index] = factors.inverse;
}

}  // namespace sm90
