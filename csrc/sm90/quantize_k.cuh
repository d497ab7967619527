// K: minus its mean over tokens, rotated if wanted, in the paper's per-thread groups: of 64 keys, thread t's are 8j +
// 2t and 8j + 2t + 1.
#pragma once

#include "common/hidden_keys.cuh"
#include "sm90/quantize.cuh"

namespace sm90 {

__device__ __forceinline__ float term_of_key(const Mask& mask, i64 index) {
  return visit_mask(mask, [&](const auto* elements) { return mask_term(elements[index]); });
}

// Whether the mask may change the score of a key of a block with any query. A padding mask, which is the same for all
// queries and heads, leaves most blocks as they are, and the attention kernel takes those for unmasked. `key_end` is
// raised to the place behind the last key of the block that such a mask leaves. For all threads of a block of the
// grid together.
__device__ __forceinline__ bool block_is_masked(const Mask& mask, int batch, int first_key, int kv_length,
                                                int* key_end) {
  if (mask.element == kNone) return false;
  if (mask.head_stride != 0 || mask.query_stride != 0) return true;
  bool changed = false;
  if (threadIdx.x < kScaleBlock) {
    const int key = first_key + threadIdx.x;
    const float term =
        key < kv_length ? term_of_key(mask, batch * mask.batch_stride + key * mask.key_stride) : kLowestTerm;
    changed = key < kv_length && term != 0.f;
    const unsigned attended = __ballot_sync(0xffffffffu, !(term <= kLowestTerm));  // or NaN
    if (attended != 0 && threadIdx.x % 32 == 0) atomicMax(key_end, key + 32 - __clz(attended));
  }
  return __syncthreads_or(changed);
}

// Of a group whose largest magnitude is `amax`. The sign says whether its block is masked.
template <class Format>
__device__ __forceinline__ void store_key_scale(const QuantizeParams& params, const BatchHead& bh, int block, int group,
                                                float amax, bool masked) {
  params.k_scale[(i64(bh.index) * params.k_scale_blocks + block) * kScalesPerBlock + group] =
      amax * (masked ? -1.f / Format::kMaximum : 1.f / Format::kMaximum);
}

// Of kernels whose mask may hide keys, behind the statistics.
__device__ __forceinline__ HiddenKeys hidden_keys(const ChoosingQuantizeParams& params, const BatchHead& bh) {
  HiddenKeys hidden(params.mask, bh.batch);
  if (hidden.any()) hidden.all_but(params.choices[bh.index].shown);
  return hidden;
}

template <int kLanes>
constexpr int kKeyPasses = kScaleBlock / Lanes<kLanes>::kTokensAtOnce;  // in which a block's threads take kScaleBlock

// Of kScaleBlock tokens as they are, those that do not exist zeros; `mean` with its signs changed. Hidden tokens become
// zeros. `token_amax`, in shared memory, may be written again when all threads have gone through another barrier.
template <class T, int kLanes, class Format, class Hidden>
__device__ __forceinline__ void quantize_keys(const QuantizeParams& params, const BatchHead& bh, int block,
                                              const Lanes<kLanes>& lanes, const Rotation<kLanes>& rotation,
                                              Vec8<T> (&raw)[kKeyPasses<kLanes>], const float (&mean)[8],
                                              const Hidden& hidden, float (&token_amax)[kScaleBlock]) {
  using Tile = Lanes<kLanes>;
  constexpr int kPasses = kKeyPasses<kLanes>;
  const int first = block * kScaleBlock;
  float values[kPasses][8];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int token = first + pass * Tile::kTokensAtOnce + lanes.token;
    if constexpr (Format::kRotated) rotation.change_signs(raw[pass]);
    raw[pass].get(values[pass]);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[pass][i] -= mean[i];
    if (hidden.any() && token < params.kv_length && hidden.has(token)) {
#pragma unroll
      for (float& x : values[pass]) x = 0.f;
    }
    if constexpr (Format::kRotated) rotation.transform(values[pass]);
    const float amax = amax_of_token<kLanes>(amax_of_vec8(values[pass]));
    if (lanes.channel == 0)
      token_amax[pass * Tile::kTokensAtOnce + lanes.token] = token < params.kv_length ? amax : 0.f;
  }
  __syncthreads();
  const bool masked =
      block_is_masked(params.mask, bh.batch, first, params.kv_length, &params.prepared[bh.index].keys.end);
  const int group = lanes.token % 8 / 2;  // the same in every pass: kTokensAtOnce is a multiple of 8
  float scale = 0.f;
#pragma unroll
  for (int i = 0; i < kScaleBlock / 8; ++i)
    scale = max_nan(scale, max_nan(token_amax[8 * i + 2 * group], token_amax[8 * i + 2 * group + 1]));
  if (lanes.channel == 0 && lanes.token < 8 && lanes.token % 2 == 0)
    store_key_scale<Format>(params, bh, block, group, scale, masked);
  const float2 inverses = inverses_of<Format, kLanes>(inverse_or_zero<Format>(scale));
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int token = first + pass * Tile::kTokensAtOnce + lanes.token;
    if (has_channels<Format>(params, lanes) && token < params.kv_length)
      store_int8<Format>(params.k_int8 + (i64(bh.index) * params.kv_length + token) * params.row_bytes + lanes.channel,
                         values[pass], inverses);
  }
}

template <class T, int kLanes, class Format, class Hidden>
__device__ __forceinline__ void quantize_k(const QuantizeParams& params, const BatchHead& bh, int block,
                                           const Hidden& hidden) {
  using Tile = Lanes<kLanes>;
  constexpr int kPasses = kKeyPasses<kLanes>;
  __shared__ float token_amax[kScaleBlock];
  const Tile lanes(params.head_dim);
  const int first = block * kScaleBlock;
  const T* k = bh.of<T>(params.k) + lanes.channel;
  float mean[8];
  Vec8<T> raw[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int token = first + pass * Tile::kTokensAtOnce + lanes.token;
    raw[pass].clear();
    if (lanes.active && token < params.kv_length) raw[pass].load(k + token * params.k.token_stride);
  }
  load_or_zero(params.k_mean + i64(bh.index) * params.head_dim + lanes.channel, lanes.active, mean);
  const Rotation<kLanes> rotation;
  if constexpr (Format::kRotated) rotation.change_signs(mean);
  quantize_keys<T, kLanes, Format>(params, bh, block, lanes, rotation, raw, mean, hidden, token_amax);
}

}  // namespace sm90
