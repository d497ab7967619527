// K: minus its mean over tokens, rotated if wanted, in the paper's per-thread groups: of 64 keys, thread t's are 8j +
// 2t and 8j + 2t + 1.
#pragma once

#include "common/hidden_keys.cuh"
#include "sm90/quantize.cuh"

namespace sm90 {

// What a mask does to the scores of a block of keys with any query.
struct BlockMask {
  bool masked;  // it may change one
  u64 hidden;   // bits of keys that do not count
};

// A padding mask, which is the same for all queries and heads, leaves most blocks as they are, and the attention kernel
// takes those for unmasked. `key_end` is raised to the place behind the last key of the block that such a mask leaves.
// For all threads of a block of the grid together.
__device__ __forceinline__ BlockMask block_mask(const Mask& mask, const HiddenKeys& hidden, int first_key,
                                                int kv_length, int* key_end) {
  if (mask.element == kNone) return {false, 0};
  if (!HiddenKeys::is_for_all(mask)) return {true, 0};
  __shared__ unsigned bits[kScaleBlock / 32];
  bool changed = false;
  if (threadIdx.x < kScaleBlock) {
    const int key = first_key + threadIdx.x;
    const float value = key < kv_length ? hidden.value(key) : kNegativeInfinity, term = mask_term(value);
    changed = key < kv_length && term != 0.f;
    const unsigned attended = __ballot_sync(0xffffffffu, !(term <= kLowestTerm));  // or NaN
    const unsigned unseen = __ballot_sync(0xffffffffu, hidden.any() && hides(mask, value));
    if (threadIdx.x % 32 == 0) {
      if (attended != 0) atomicMax(key_end, key + 32 - __clz(attended));
      bits[threadIdx.x / 32] = unseen;
    }
  }
  const bool masked = __syncthreads_or(changed);
  return {masked, bits[0] | u64(bits[1]) << 32};
}
// Of kernels whose mask is not the same for all queries and heads.
__device__ __forceinline__ BlockMask block_mask(const Mask& mask, const NoHiddenKeys&, int, int, int*) {
  return {mask.element != kNone, 0};
}

// Of a group whose largest magnitude is `amax`. The sign says whether its block is masked.
template <class Format>
__device__ __forceinline__ void store_key_scale(const QuantizeParams& params, const BatchHead& bh, int block, int group,
                                                float amax, bool masked, const Format& format) {
  const float inverse = inverse_maximum_of(format);
  params.k_scale[(i64(bh.index) * params.k_scale_blocks + block) * kScalesPerBlock + group] =
      amax * (masked ? -inverse : inverse);
}

template <class T, int kLanes, class Format, class Hidden>
__device__ __forceinline__ void quantize_k(const QuantizeParams& params, const BatchHead& bh, int block,
                                           const Format& format, const Hidden& hidden) {
  using Tile = Lanes<kLanes>;
  constexpr int kPasses = kScaleBlock / Tile::kTokensAtOnce;
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
  const BlockMask mask = block_mask(params.mask, hidden, first, params.kv_length, &params.prepared[bh.index].keys.end);
  const Rotation<kLanes> rotation(format.rotated);
  if constexpr (Format::kMayRotate) rotation.change_signs(mean);
  float values[kPasses][8];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if constexpr (Format::kMayRotate) rotation.change_signs(raw[pass]);
    raw[pass].get(values[pass]);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[pass][i] -= mean[i];
    if (hidden.any() && (mask.hidden >> (pass * Tile::kTokensAtOnce + lanes.token) & 1)) {
#pragma unroll
      for (float& x : values[pass]) x = 0.f;
    }
    if (format.rotated) rotation.transform(values[pass]);
    const int local = pass * Tile::kTokensAtOnce + lanes.token;
    const float amax = amax_of_token<kLanes>(amax_of_vec8(values[pass]));
    if (lanes.channel == 0) token_amax[local] = first + local < params.kv_length ? amax : 0.f;
  }
  __syncthreads();
  const int group = lanes.token % 8 / 2;  // the same in every pass: kTokensAtOnce is a multiple of 8
  float scale = 0.f;
#pragma unroll
  for (int i = 0; i < kScaleBlock / 8; ++i)
    scale = max_nan(scale, max_nan(token_amax[8 * i + 2 * group], token_amax[8 * i + 2 * group + 1]));
  if (lanes.channel == 0 && lanes.token < 8 && lanes.token % 2 == 0)
    store_key_scale(params, bh, block, group, scale, mask.masked, format);
  const float2 inverses = inverses_of<kLanes>(format, inverse_or_zero(format, scale));
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int token = first + pass * Tile::kTokensAtOnce + lanes.token;
    if (has_channels<Format>(params, lanes) && token < params.kv_length)
      store_int8(format, params.k_int8 + (i64(bh.index) * params.kv_length + token) * params.row_bytes + lanes.channel,
                 values[pass], inverses);
  }
}

}  // namespace sm90
