// The choice of a key head's rotation, by one block of threads.
#pragma once

#include "common/rotation_choice.cuh"
#include "sm80/rows.cuh"

namespace sm80 {

// Grid: (kv heads).
template <int kHeadDim, class T>
__device__ __forceinline__ void choose_rotation(const RotationParams& p) {
  constexpr int kLanes = kHeadDim / 8, kWarps = kStatisticsThreads / 32;
  __shared__ GroupSample samples[kSampledGroups];
  const int bh = blockIdx.x, batch = bh / p.sizes.kv_heads;
  const int q_heads = p.sizes.q_heads / p.sizes.kv_heads;
  const SampledHeads<T> heads{head_start<T>(p.q, bh * q_heads, p.sizes.q_heads),
                              head_start<T>(p.k, bh, p.sizes.kv_heads),
                              p.q.head_stride,
                              p.q.token_stride,
                              p.k.token_stride,
                              q_heads,
                              p.sizes.q_length,
                              p.sizes.kv_length,
                              p.sizes.head_dim,
                              p.score_bits};
  const RotationSampler<T, kLanes, true> sampler(heads);
  HiddenKeys hidden(p.mask, batch);
  if (hidden.any()) hidden.all_but(p.shown[bh]);
  const int lane = threadIdx.x % 32;
  float mean[8];
  load_vec8(p.k_mean + i64(bh) * kHeadDim + threadIdx.x % kLanes * 8, mean);
#pragma unroll 1
  for (int number = threadIdx.x / 32; number < kSampledGroups; number += kWarps) {
    const GroupSample sample = sampler.take(number, mean, hidden);
    if (lane == 0) samples[number] = sample;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  GroupSample sample{};
  if (lane < kSampledGroups) sample = samples[lane];
  const bool gains = rotation_gains(sample, p.score_bits);
  if (lane != 0) return;
  p.rotated[bh] = gains;
  if (p.rotated_heads) p.rotated_heads[bh] = gains;
}

}  // namespace sm80
