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

template <class T>
__device__ __forceinline__ SampledHeads<T> sampled_heads(const ChoosingStatisticsParams& params, const BatchHead& bh) {
  const int q_heads = params.q_heads / params.kv_heads;
  return {static_cast<const T*>(params.q.pointer) + bh.batch * params.q.batch_stride +
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
}
// The first group of a warp, and the groups from one of them to the next.
__device__ __forceinline__ int first_group(int block, int blocks) { return block + threadIdx.x / 32 * blocks; }
__device__ __forceinline__ constexpr int group_step(int blocks) { return kStatisticsWarps * blocks; }

// Brings to L2 what choose_rotation reads. For all threads of the cluster.
template <class T, int kLanes>
__device__ __forceinline__ void prefetch_sample(const ChoosingStatisticsParams& params, const BatchHead& bh) {
  const int blocks = params.cluster_blocks, block = blockIdx.x % blocks;
  const SampledHeads<T> heads = sampled_heads<T>(params, bh);
  const RotationSampler<T, kLanes, false> sampler(heads);
#pragma unroll 1
  for (int number = first_group(block, blocks); number < kSampledGroups; number += group_step(blocks))
    sampler.prefetch(number);
}

// For all threads of the cluster, the same to all; between two barriers of the cluster. `means`: of K, in shared
// memory, with zeros past head_dim.
template <class T, int kLanes, class Hidden>
__device__ __forceinline__ bool choose_rotation(const ChoosingStatisticsParams& params, const BatchHead& bh,
                                                const float* means, const Hidden& hidden, ChoiceScratch& scratch) {
  const int blocks = params.cluster_blocks, block = blockIdx.x % blocks;
  const SampledHeads<T> heads = sampled_heads<T>(params, bh);
  const RotationSampler<T, kLanes, false> sampler(heads);
  const int lane = threadIdx.x % 32;
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = means[threadIdx.x % kLanes * 8 + i];
#pragma unroll 1
  for (int number = first_group(block, blocks); number < kSampledGroups; number += group_step(blocks)) {
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

// Tells kernels that run beside this one, and the caller. For one thread.
__device__ __forceinline__ void tell_choices(const ChoosingStatisticsParams& params, int kv_index, int shown,
                                             bool rotated) {
  const HeadChoices told{shown, rotated ? kRotated : kNotRotated};
  st_release_u64(&params.choices[kv_index], __builtin_bit_cast(u64, told));
  if (params.rotated_heads) params.rotated_heads[kv_index] = rotated;
}
// Whether a head is rotated of which no statistics have to tell it.
__device__ __forceinline__ bool is_rotated_without_choice(const ChoosingQuantizeParams& params, int kv_index) {
  return params.rotates == Rotates::as_given ? params.rotated_heads[kv_index] != 0 : params.rotates == Rotates::always;
}
// Of a head whose statistics are made.
__device__ __forceinline__ bool is_rotated(const ChoosingQuantizeParams& params, int kv_index) {
  if (params.rotates != Rotates::by_head) return is_rotated_without_choice(params, kv_index);
  return params.choices[kv_index].rotation == kRotated;
}
// Of kernels whose mask may hide keys, behind the statistics.
__device__ __forceinline__ HiddenKeys hidden_keys(const ChoosingQuantizeParams& params, const BatchHead& bh) {
  HiddenKeys hidden(params.mask, bh.batch);
  if (hidden.any()) hidden.all_but(params.choices[bh.index].shown);
  return hidden;
}
// The same of a head whose statistics may be made by a kernel that runs beside this one: waits for them, where they
// choose. For all threads of a block.
__device__ __forceinline__ bool wait_for_rotation(const ChoosingQuantizeParams& params, int kv_index) {
  if (params.rotates != Rotates::by_head) return is_rotated_without_choice(params, kv_index);
  int rotation = kUndecided;
  if (threadIdx.x == 0) {
    while (rotation == kUndecided)
      rotation = __builtin_bit_cast(HeadChoices, ld_acquire_u64(&params.choices[kv_index])).rotation;
  }
  return __syncthreads_or(rotation == kRotated);
}

}  // namespace sm90
