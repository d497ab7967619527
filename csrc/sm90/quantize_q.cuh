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

// The largest of a warp's tokens for all of them.
template <int kLanes, int kPasses>
__device__ __forceinline__ void share_scale(float (&amax)[kPasses]) {
  float largest = amax[0];
#pragma unroll
  for (int i = 1; i < kPasses; ++i) largest = max_nan(largest, amax[i]);
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2)
    largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#pragma unroll
  for (float& x : amax) x = largest;
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

// Which tokens of a block's kBlockM a thread has a part of. 4 bits: the tokens that may share a scale are one warp's,
// in kPassesOfScale passes.
template <int kLanes, int kBits>
struct QueryTokens {
  static constexpr int kPasses = kBlockM / Lanes<kLanes>::kTokensAtOnce;
  static constexpr int kPassesOfScale = kBits == 4 ? kLanes / 8 : 1;
  static __device__ __forceinline__ int local(int pass) {
    if constexpr (kBits == 8) return pass * Lanes<kLanes>::kTokensAtOnce + threadIdx.x / kLanes;
    constexpr int kOfWarp = 32 / kLanes;
    const int place = pass % kPassesOfScale * kOfWarp + threadIdx.x % 32 / kLanes;
    return pass / kPassesOfScale * 32 + threadIdx.x / 32 + 8 * place;
  }
};

// Q minus `mean`, with smooth Q.
template <class T, int kLanes, class Format, bool kShort>
__device__ __forceinline__ void quantize_queries(const QuantizeParams& params, const BatchHead& bh, int block,
                                                 const Format& format, float (&k_mean)[8], float (&mean)[8]) {
  using Tokens = QueryTokens<kLanes, Format::kBits>;
  constexpr bool kSmooth = Format::kBits == 4;
  const Lanes<kLanes> lanes(params.head_dim);
  const Rotation<kLanes> rotation(format.rotated);
  if constexpr (Format::kMayRotate) {
    rotation.change_signs(k_mean);
    if constexpr (kSmooth) rotation.change_signs(mean);
  }
  const T* q = bh.of<T>(params.q) + lanes.channel;
  constexpr int kPasses = Tokens::kPasses, kOfScale = Tokens::kPassesOfScale;
  // Loads under way: fewer where four rotating blocks share the registers of an SM (sm90/quantize.cu).
  constexpr int kAtOnce = Format::kMayRotate && kLanes == 16 ? 2 : kPasses < 4 ? kPasses : 4;
  static_assert(kAtOnce % kOfScale == 0);
  const bool shifted = params.lse_shift;
  for (int base = 0; base < kPasses; base += kAtOnce) {
    Vec8<T> raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = block * kBlockM + Tokens::local(base + i);
      if constexpr (kShort) {
        load_last_or_zero(raw[i], q + token * params.q.token_stride, token < params.q_length && lanes.active);
      } else {
        raw[i].clear();
        if (token < params.q_length && lanes.active) raw[i].load(q + token * params.q.token_stride);
      }
    }
#pragma unroll
    for (int start = 0; start < kAtOnce; start += kOfScale) {
      float values[kOfScale][8], amax[kOfScale];
#pragma unroll
      for (int i = 0; i < kOfScale; ++i) {
        const int token = block * kBlockM + Tokens::local(base + start + i);
        const bool valid = token < params.q_length;
        if constexpr (Format::kMayRotate) rotation.change_signs(raw[start + i]);
        raw[start + i].get(values[i]);
        if (shifted) store_lse_shift<kLanes>(params, i64(bh.index) * params.q_length + token, valid, values[i], k_mean);
        if constexpr (kSmooth) {
#pragma unroll
          for (int j = 0; j < 8; ++j) values[i][j] = valid ? values[i][j] - mean[j] : 0.f;
        }
      }
      if (format.rotated) {
#pragma unroll
        for (int i = 0; i < kOfScale; ++i) rotation.transform(values[i]);
      }
#pragma unroll
      for (int i = 0; i < kOfScale; ++i) amax[i] = amax_of_token<kLanes>(amax_of_vec8(values[i]));
      if constexpr (kSmooth) {
        if (!format.rotated) share_scale<kLanes>(amax);
      }
#pragma unroll
      for (int i = 0; i < kOfScale; ++i) {
        const int token = block * kBlockM + Tokens::local(base + start + i);
        if (token >= params.q_length) continue;
        if (lanes.channel == 0)
          params.q_scale[i64(bh.index) * params.q_scale_rows + token] =
              folded_scale<kLanes>(format, params.scale, amax[i]);
        if (has_channels<Format>(params, lanes))
          store_int8(format,
                     params.q_int8 + (i64(bh.index) * params.q_length + token) * params.row_bytes + lanes.channel,
                     values[i], inverses_of<kLanes>(format, inverse_or_zero(format, amax[i])));
      }
    }
  }
}

__device__ __forceinline__ int kv_index_of(const QuantizeParams& params, const BatchHead& bh) {
  return bh.batch * params.kv_heads + bh.head / (params.q_heads / params.kv_heads);
}

// `format_of()`: called when what does not depend on it is under way. `kShort`: beside the fused prologue of a short
// KV.
template <class T, int kLanes, class Format, bool kShort, class FormatOf>
__device__ __forceinline__ void quantize_q(const QuantizeParams& params, const BatchHead& bh, int block,
                                           const FormatOf& format_of) {
  const Lanes<kLanes> lanes(params.head_dim);
  float k_mean[8] = {}, mean[8];
  if constexpr (Format::kBits == 4) block_mean<T, kLanes>(params, bh, block, mean);
  const Format format = format_of();
  if (params.lse_shift) {
    griddepcontrol_wait();
    load_or_zero(params.k_mean + i64(kv_index_of(params, bh)) * params.head_dim + lanes.channel, lanes.active, k_mean);
  }
  quantize_queries<T, kLanes, Format, kShort>(params, bh, block, format, k_mean, mean);
}

}  // namespace sm90
