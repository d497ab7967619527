// Means of each 16 tokens of Q or K, in bf16. A group of threads that holds all channels of a token makes one of them.
#include "common/block_selection.h"
#include "common/elements.cuh"

namespace common {

// Where the threads of a block stand: each has 8 channels of one of several tokens.
struct PoolPlace {
  int channel, group, groups;

  __device__ __forceinline__ explicit PoolPlace(int channels)
      : channel(threadIdx.x % (channels / 8) * 8),
        group(threadIdx.x / (channels / 8)),
        groups(kPoolThreads / (channels / 8)) {}
};

template <class T>
__device__ __forceinline__ const T* tokens_of(const PoolParams& params, int bh) {
  const int batch = bh / params.heads, head = bh - batch * params.heads;
  return static_cast<const T*>(params.tokens.pointer) + batch * params.tokens.batch_stride +
         head * params.tokens.head_stride;
}

// Any vector may be taken from K: the softmax stays the same. One near K's mean keeps the means' digits for what tells
// tokens apart, and that of a few tokens is near enough.
template <class T>
__device__ __forceinline__ void pool_center_kernel(const PoolParams& params) {
  __shared__ float partial[kPoolThreads * 8];
  const PoolPlace place(params.channels);
  const T* tokens = tokens_of<T>(params, blockIdx.x);
  const int count = min(kCenterTokens, params.length);
  float sum[8]{};
  if (place.channel < params.head_dim) {
    for (int i = place.group; i < count; i += place.groups) {
      float values[8];
      load_vec8(tokens + i64(i) * params.length / count * params.tokens.token_stride + place.channel, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += values[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) partial[place.group * params.channels + place.channel + j] = sum[j];
  __syncthreads();
  const int own = threadIdx.x;
  if (own >= params.channels) return;
  float total = 0.f;
  for (int group = 0; group < place.groups; ++group) total += partial[group * params.channels + own];
  params.center[i64(blockIdx.x) * params.channels + own] = total / count;
}

template <class T>
__device__ __forceinline__ void pool_tokens_kernel(const PoolParams& params) {
  constexpr int kAtOnce = 32 / sizeof(T);  // loads under way
  const PoolPlace place(params.channels);
  const int blocks_of_head = (params.pool_rows + place.groups - 1) / place.groups;
  const int bh = blockIdx.x / blocks_of_head;
  const int pool = (blockIdx.x - bh * blocks_of_head) * place.groups + place.group;
  if (pool >= params.pool_rows) return;
  const int first = pool * kPoolTokens, count = min(kPoolTokens, params.length - first);
  float mean[8]{};
  if (count > 0 && place.channel < params.head_dim) {
    const T* token = tokens_of<T>(params, bh) + i64(first) * params.tokens.token_stride + place.channel;
    float sum[8]{};
#pragma unroll
    for (int part = 0; part < kPoolTokens; part += kAtOnce) {
      Vec8<T> raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) raw[i].load(token + min(part + i, count - 1) * params.tokens.token_stride);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float values[8];
        raw[i].get(values);
        if (part + i < count) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[j] += values[j];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float center = params.center ? params.center[i64(bh) * params.channels + place.channel + j] : 0.f;
      mean[j] = (sum[j] / count - center) * params.factor;
    }
  }
  store_vec8(
      static_cast<__nv_bfloat16*>(params.pools) + (i64(bh) * params.pool_rows + pool) * params.channels + place.channel,
      mean);
}

// From bf16 to bf16: a thread makes 8 channels of a block's mean.
__device__ __forceinline__ void block_means_kernel(const BlockMeanParams& params) {
  const PoolPlace place(params.channels);
  const int blocks_of_head = (params.mean_rows + place.groups - 1) / place.groups;
  const int bh = blockIdx.x / blocks_of_head;
  const int block = (blockIdx.x - bh * blocks_of_head) * place.groups + place.group;
  if (block >= params.mean_rows) return;
  const int count = min(kListTile, params.length - block * kListTile);
  float sum[8]{};
  for (int i = 0; i < kPoolsOfBlock; ++i) {
    const int pool = block * kPoolsOfBlock + i, tokens = min(kPoolTokens, params.length - pool * kPoolTokens);
    if (tokens <= 0) break;
    float values[8];
    load_vec8(static_cast<const __nv_bfloat16*>(params.pools) + (i64(bh) * params.pool_rows + pool) * params.channels +
                  place.channel,
              values);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += values[j] * tokens;
  }
#pragma unroll
  for (float& x : sum) x = count > 0 ? x / count : 0.f;
  __nv_bfloat16* means = static_cast<__nv_bfloat16*>(params.means) +
                         (i64(bh) * params.mean_rows + block) * params.copies * params.channels + place.channel;
  for (int i = 0; i < params.copies; ++i) store_vec8(means + i * params.channels, sum);
}

}  // namespace common

extern "C" __global__ void __launch_bounds__(common::kPoolThreads)
    block_means(const __grid_constant__ common::BlockMeanParams params) {
  common::block_means_kernel(params);
}

#define POOL_KERNELS(name, T)                                                 \
  extern "C" __global__ void __launch_bounds__(common::kPoolThreads)          \
      pool_center_##name(const __grid_constant__ common::PoolParams params) { \
    common::pool_center_kernel<T>(params);                                    \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(common::kPoolThreads)          \
      pool_tokens_##name(const __grid_constant__ common::PoolParams params) { \
    common::pool_tokens_kernel<T>(params);                                    \
  }
POOL_KERNELS(fp16, __half)
POOL_KERNELS(bf16, __nv_bfloat16)
POOL_KERNELS(fp32, float)
#undef POOL_KERNELS
