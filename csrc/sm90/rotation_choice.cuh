// The choice of a head's rotation by the cluster of blocks that shares it.
#pragma once

#include "common/rotation_choice.cuh"
#include "sm90/quantize.cuh"
#include "sm90/statistics.cuh"

namespace sm90 {

struct ChoiceScratch {
  GroupSample samples[kSampledGroups];  // each in one block of the cluster, that all read until its next barrier
  bool rotated;
};

// For all threads of the cluster, the same to all; between two barriers of the cluster. `means`: of K, in shared
// memory, with zeros past head_dim.
template <class T, int kLanes, class Hidden>
__device__ __forceinline__ bool choose_rotation(const ChoosingStatisticsParams& params, const BatchHead& bh,
                                                const float* means, const Hidden& hidden, ChoiceScratch& scratch) {
  const int blocks = params.cluster_blocks, block = blockIdx.x % blocks;
  const int q_heads = params.q_heads / params.kv_heads;
  const SampledHeads<T> heads{static_cast<const T*>(params.q.pointer) + bh.batch * params.q.batch_stride +
                                  i64(bh.head) * q_heads * params.q.head_stride,
                              bh.of<T>(params.k),
                              params.q.head_stride,
                              params.q.token_stride,
                              params.k.token_stride,
                              q_heads,
                              params.q_length,
                              params.kv_length,
                              params.head_dim,
                              params.score_bits};
  const RotationSampler<T, kLanes, false> sampler(heads);
  const int lane = threadIdx.x % 32;
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = means[threadIdx.x % kLanes * 8 + i];
#pragma unroll 1
  for (int number = block + threadIdx.x / 32 * blocks; number < kSampledGroups; number += kStatisticsWarps * blocks) {
    const GroupSample sample = sampler.take(number, mean, hidden);
    if (lane == 0) scratch.samples[number] = sample;
  }
  cluster_sync();
  if (threadIdx.x < 32) {
    GroupSample sample{};
    if (lane < kSampledGroups) {
      const float* from = &scratch.samples[lane].energy;
      float* to = &sample.energy;
#pragma unroll
      for (int i = 0; i < GroupSample::kNumbers; ++i) to[i] = load_from_block(from + i, lane % blocks);
    }
    const bool gains = rotation_gains(sample, params.score_bits);
    if (lane == 0) scratch.rotated = gains;
  }
  __syncthreads();
  return scratch.rotated;
}

// Tells kernels that run beside this one. For one thread.
__device__ __forceinline__ void tell_choices(HeadChoices& choices, int shown, bool rotated) {
  const HeadChoices told{shown, rotated ? kRotated : kNotRotated};
  st_release_u64(&choices, __builtin_bit_cast(u64, told));
}
// Of a head whose statistics are made.
__device__ __forceinline__ bool is_rotated(const ChoosingQuantizeParams& params, int kv_index) {
  return params.choices[kv_index].rotation == kRotated;
}
// The same of a head whose statistics may be made by a kernel that runs beside this one: waits for them, where they
// choose. For all threads of a block.
__device__ __forceinline__ bool wait_for_rotation(const ChoosingQuantizeParams& params, int kv_index) {
  if (params.rotates != Rotates::by_head) return params.rotates == Rotates::always;
  int rotation = kUndecided;
  if (threadIdx.x == 0) {
    while (rotation == kUndecided)
      rotation = __builtin_bit_cast(HeadChoices, ld_acquire_u64(&params.choices[kv_index])).rotation;
  }
  return __syncthreads_or(rotation == kRotated);
}

}  // namespace sm90
