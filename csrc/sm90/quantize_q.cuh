// Q. 8 bits: per token. 4 bits: minus the mean of its 128 tokens (smooth Q), then rotated and per token, or in the
// paper's per-thread groups: tokens i, i + 8, i + 16 and i + 24 of every 32. Softmax scale and log2(e) are folded into
// the stored scale.
#pragma once

#include "sm90/quantize.cuh"

namespace sm90 {

// q . mean(K) * scale, which smooth K takes from the scores: softmax does not need it, the log-sum-exp does.
template <int kLanes>
__device__ __forceinline__ void store_lse_shift(const QuantizeParams& params, i64 token_index, bool valid,
                                                const float (&q)[8], const float (&k_mean)[8]) {
  float dot = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) dot += q[i] * k_mean[i];
  dot = sum_of_token<kLanes>(dot);
  if (valid && threadIdx.x % kLanes == 0) params.lse_shift[token_index] = dot * params.scale;
}

// The mean of the block's tokens, which is also stored for the correction (paper equation 3). Threads past head_dim get
// zeros.
template <class T, int kLanes>
__device__ __forceinline__ void block_mean(const QuantizeParams& params, const BatchHead& bh, int block,
                                           float (&mean)[8]) {
  using Tile = Lanes<kLanes>;
  __shared__ float sums[kQuantizeThreads / 32][256];
  const Tile lanes(params.head_dim);
  const int first = block * kBlockM, count = min(kBlockM, params.q_length - first);
  const T* q = bh.of<T>(params.q) + lanes.channel;
#pragma unroll
  for (float& x : mean) x = 0.f;
  for (int local = lanes.token; local < count; local += Tile::kTokensAtOnce) {
    float values[8];
    load_or_zero(q + (first + local) * params.q.token_stride, lanes.active, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] += values[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int distance = kLanes; distance < 32; distance *= 2) mean[i] += __shfl_xor_sync(0xffffffff, mean[i], distance);
    if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][lanes.channel + i] = mean[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    mean[i] = 0.f;
    for (int warp = 0; warp < kQuantizeThreads / 32; ++warp) mean[i] += sums[warp][lanes.channel + i];
    mean[i] /= count;
  }
  if (lanes.token == 0 && lanes.active) {
    float* q_mean = params.q_mean + (i64(bh.index) * params.q_blocks + block) * params.head_dim + lanes.channel;
#pragma unroll
    for (int i = 0; i < 8; ++i) q_mean[i] = mean[i];
  }
}

// Q minus `mean` in the paper's per-thread groups.
template <class T, int kLanes, class Format>
__device__ __forceinline__ void quantize_q_per_thread(const QuantizeParams& params, const BatchHead& bh, int block,
                                                      const float (&k_mean)[8], const float (&mean)[8]) {
  using Tile = Lanes<kLanes>;
  __shared__ float token_amax[kBlockM];
  const Tile lanes(params.head_dim);
  const int first = block * kBlockM, count = min(kBlockM, params.q_length - first);
  const T* q = bh.of<T>(params.q) + lanes.channel;
  const i64 first_index = i64(bh.index) * params.q_length + first;
  for (int local = lanes.token; local < kBlockM; local += Tile::kTokensAtOnce) {
    const bool valid = lanes.active && local < count;
    float values[8];
    load_or_zero(q + (first + local) * params.q.token_stride, valid, values);
    if (params.lse_shift) store_lse_shift<kLanes>(params, first_index + local, local < count, values, k_mean);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = valid ? values[i] - mean[i] : 0.f;
    const float amax = amax_of_token<kLanes>(amax_of_vec8(values));
    if (lanes.channel == 0) token_amax[local] = amax;
  }
  __syncthreads();
  for (int local = lanes.token; local < count; local += Tile::kTokensAtOnce) {
    float values[8];
    load_or_zero(q + (first + local) * params.q.token_stride, lanes.active, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = lanes.active ? values[i] - mean[i] : 0.f;
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = max_nan(amax, token_amax[local / 32 * 32 + local % 8 + 8 * i]);
    if (lanes.channel == 0)
      params.q_scale[i64(bh.index) * params.q_scale_rows + first + local] =
          folded_scale<Format, kLanes>(params.scale, amax);
    if (has_channels<Format>(params, lanes))
      store_int8<Format>(params.q_int8 + (first_index + local) * params.row_bytes + lanes.channel, values,
                         inverses_of<Format, kLanes>(inverse_or_zero<Format>(amax)));
  }
}

// Nothing reads Q again: short ones leave L2 to what they are quantized to, for the attention kernel.
template <class T>
__device__ __forceinline__ void load_last_or_zero(Vec8<T>& to, const T* from, bool exists) {
  const u64 policy = evict_first_policy();
#pragma unroll
  for (int i = 0; i < to.kWords / 4; ++i) {
    const uint4 raw = ld_global_v4_or_zero(reinterpret_cast<const uint4*>(from) + i, exists, policy);
    to.words[4 * i] = raw.x, to.words[4 * i + 1] = raw.y, to.words[4 * i + 2] = raw.z, to.words[4 * i + 3] = raw.w;
  }
}

// Q minus `mean`, with smooth Q, per token.
template <class T, int kLanes, class Format, bool kShort>
__device__ __forceinline__ void quantize_q_per_token(const QuantizeParams& params, const BatchHead& bh, int block,
                                                     float (&k_mean)[8], float (&mean)[8]) {
  using Tile = Lanes<kLanes>;
  const Tile lanes(params.head_dim);
  const Rotation<kLanes> rotation;
  if constexpr (Format::kRotated) {
    rotation.change_signs(k_mean);
    if constexpr (Format::kSmoothQuery) rotation.change_signs(mean);
  }
  const T* q = bh.of<T>(params.q) + lanes.channel;
  constexpr int kPasses = kBlockM / Tile::kTokensAtOnce;
  // Loads under way: fewer where four rotating blocks share the registers of an SM (sm90/quantize.cu).
  constexpr int kAtOnce = Format::kRotated && kLanes == 16 ? 2 : kPasses < 4 ? kPasses : 4;
  const bool shifted = params.lse_shift;
  for (int base = 0; base < kPasses; base += kAtOnce) {
    Vec8<T> raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = block * kBlockM + (base + i) * Tile::kTokensAtOnce + lanes.token;
      if constexpr (kShort) {
        load_last_or_zero(raw[i], q + token * params.q.token_stride, token < params.q_length && lanes.active);
      } else {
        raw[i].clear();
        if (token < params.q_length && lanes.active) raw[i].load(q + token * params.q.token_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = block * kBlockM + (base + i) * Tile::kTokensAtOnce + lanes.token;
      const bool valid = token < params.q_length;
      const i64 index = i64(bh.index) * params.q_length + token;
      float values[8];
      if constexpr (Format::kRotated) rotation.change_signs(raw[i]);
      raw[i].get(values);
      if (shifted) store_lse_shift<kLanes>(params, index, valid, values, k_mean);
      if constexpr (Format::kSmoothQuery) {
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] -= mean[j];
      }
      if constexpr (Format::kRotated) rotation.transform(values);
      const float amax = amax_of_token<kLanes>(amax_of_vec8(values));
      if (valid && lanes.channel == 0)
        params.q_scale[i64(bh.index) * params.q_scale_rows + token] = folded_scale<Format, kLanes>(params.scale, amax);
      if (valid && has_channels<Format>(params, lanes))
        store_int8<Format>(params.q_int8 + index * params.row_bytes + lanes.channel, values,
                           inverses_of<Format, kLanes>(inverse_or_zero<Format>(amax)));
    }
  }
}

__device__ __forceinline__ int kv_index_of(const QuantizeParams& params, const BatchHead& bh) {
  return bh.batch * params.kv_heads + bh.head / (params.q_heads / params.kv_heads);
}

// `kShort`: beside the fused prologue of a short KV.
template <class T, int kLanes, class Format, bool kShort = false>
__device__ __forceinline__ void quantize_q(const QuantizeParams& params, const BatchHead& bh, int block) {
  const Lanes<kLanes> lanes(params.head_dim);
  float k_mean[8] = {}, mean[8];
  if (params.lse_shift) {
    griddepcontrol_wait();
    load_or_zero(params.k_mean + i64(kv_index_of(params, bh)) * params.head_dim + lanes.channel, lanes.active, k_mean);
  }
  if constexpr (Format::kSmoothQuery) block_mean<T, kLanes>(params, bh, block, mean);
  if constexpr (Format::kSmoothQuery && !Format::kQueryPerToken)
    quantize_q_per_thread<T, kLanes, Format>(params, bh, block, k_mean, mean);
  else
    quantize_q_per_token<T, kLanes, Format, kShort>(params, bh, block, k_mean, mean);
}

}  // namespace sm90
