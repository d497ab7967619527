// Which heads gain by rotation (comfy_sage2/quantize/rotation_choice.py, which says why): a sample of Q and K of a key
// head, taken group by group, and the choice that it leads to.
#pragma once

#include "common/hidden_keys.cuh"
#include "common/integer_format.cuh"
#include "common/rotation.cuh"

namespace common {

constexpr int kSampledKeyGroups = 16, kSampledQueryGroups = 8, kSampledGroups = kSampledKeyGroups + kSampledQueryGroups;
constexpr int kSampledRows = 16;  // of a group
constexpr float kRotationMargin = 0.85f, kRotationMarginOfClipped = 1.27f;

// Of a sampled group: sums over its tokens, and over the groups that share a scale. Index 0 is for Q and K as they are,
// 1 for rotated ones.
struct GroupSample {
  static constexpr int kNumbers = 6;
  float energy, tokens;
  float squares[2], groups[2];
};

// The heads of a key head, from their first token and channel on.
template <class T>
struct SampledHeads {
  const T *q, *k;
  i64 q_head_stride, q_token_stride, k_token_stride;
  int q_heads;  // that share the key head
  int q_length, kv_length, head_dim;
  int score_bits;
};

// For a warp: kLanes neighboring threads read a token, eight channels each. `kQueryGroups`: 8-bit Q shares a scale
// among four tokens, as 4-bit Q does that is not rotated.
template <class T, int kLanes, bool kQueryGroups>
class RotationSampler {
  static constexpr int kAtOnce = 32 / kLanes, kPasses = kSampledRows / kAtOnce;
  static constexpr int kTokensOfScale = 4;

 public:
  __device__ __forceinline__ RotationSampler(const SampledHeads<T>& heads)
      : heads_(heads), channel_(threadIdx.x % kLanes * 8), row_(threadIdx.x % 32 / kLanes) {}

  // Brings the tokens of the group at this place of the sample to L2, before K's mean is known.
  __device__ __forceinline__ void prefetch(int number) const {
    const Group group(heads_, number);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int token = group.token(pass * kAtOnce + row_);
      if (token < group.length && channel_ < heads_.head_dim)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(group.start + token * group.stride + channel_));
    }
  }

  // Of the group at this place of the sample. `k_mean`: this thread's channels. Hidden: HiddenKeys, NoHiddenKeys. One
  // rolled loop for K and Q: a warp runs it once a call, and fetching the code takes longer than running it.
  template <class Hidden>
  __device__ __forceinline__ GroupSample take(int number, const float (&k_mean)[8], const Hidden& hidden) const {
    const Rotation<kLanes> rotation;
    const bool is_key = number < kSampledKeyGroups, smooth = heads_.score_bits == 4;
    Group group(heads_, number);
    group.hide(hidden);
    float mean[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] = is_key ? k_mean[i] : 0.f;
    if (!is_key && smooth) mean_of(group, mean);
    const bool shares[2] = {kQueryGroups || smooth, kQueryGroups && !smooth};
    GroupSample found{};
    float amax_of_scale[2] = {};
    Rows rows(*this, group);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const Row row = rows.take(*this, group, pass);
      const bool exists = row.exists;
      float x[8], amax[2];
      row.raw.get(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = exists ? x[i] - mean[i] : 0.f;
        found.energy += x[i] * x[i];
      }
      if (exists && channel_ == 0) found.tokens += 1.f;
      amax[0] = max_of_lanes<1, kLanes>(largest(x));
      rotation.change_signs(x);
      rotation.transform(x);
      amax[1] = max_of_lanes<1, kLanes>(largest(x));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        amax_of_scale[i] = max_nan(amax_of_scale[i], amax[i]);
        const int tokens_of_scale = is_key ? kSampledRows : shares[i] ? kTokensOfScale : 1;
        if ((pass + 1) * kAtOnce % tokens_of_scale != 0) continue;
        const float of_scale = tokens_of_scale == 1 ? amax[i] : max_of_lanes<kLanes, 32>(amax_of_scale[i]);
        if (tokens_of_scale == 1 ? channel_ == 0 : threadIdx.x % 32 == 0)
          found.squares[i] += squared_scale(of_scale, i != 0);
        amax_of_scale[i] = 0.f;
      }
    }
    found.energy = sum_of_warp(found.energy);
    found.tokens = sum_of_warp(found.tokens);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found.squares[i] = sum_of_warp(found.squares[i]);
      const int tokens = static_cast<int>(found.tokens);
      found.groups[i] = is_key ? min(tokens, 1) : shares[i] ? (tokens + kTokensOfScale - 1) / kTokensOfScale : tokens;
    }
    return found;
  }

 private:
  static constexpr int kKeyBlock = 64, kKeyPlaces = 4, kQueryBlock = 128, kQueryPlaces = 8;

  // Where the tokens of a sampled group are.
  struct Group {
    __device__ __forceinline__ Group(const SampledHeads<T>& heads, int number)
        : is_key(number < kSampledKeyGroups),
          length(is_key ? heads.kv_length : heads.q_length),
          stride(is_key ? heads.k_token_stride : heads.q_token_stride) {
      const int place = is_key ? number : number - kSampledKeyGroups;
      start = is_key ? heads.k : heads.q + place % heads.q_heads * heads.q_head_stride;
      const int block = is_key ? kKeyBlock : kQueryBlock;
      const i64 blocks_before = i64(place) * ((length + block - 1) / block);
      first =
          static_cast<int>(is_key ? blocks_before / kSampledKeyGroups : blocks_before / kSampledQueryGroups) * block;
      first += is_key ? 2 * (place % kKeyPlaces) : place % kQueryPlaces;
    }
    // The group's n-th token.
    __device__ __forceinline__ int token(int n) const {
      return first + (is_key ? n / 2 * 8 + n % 2 : n * kQueryPlaces);
    }
    // By one lane each and before the rows are read: a look at the mask takes much code. For a warp together.
    template <class Hidden>
    __device__ __forceinline__ void hide(const Hidden& keys) {
      if (!keys.any() || !is_key) return;
      const int n = threadIdx.x % 32;
      hidden = __ballot_sync(0xffffffffu, n < kSampledRows && token(n) < length && keys.has(token(n)));
    }
    __device__ __forceinline__ bool has(int n) const { return token(n) < length && !(hidden >> n & 1u); }

    const bool is_key;
    const int length;
    const i64 stride;
    const T* start;
    int first;
    unsigned hidden = 0;  // bits of the group's tokens
  };
  struct Row {
    Vec8<T> raw;  // this thread's channels, zeros past head_dim
    bool exists;
  };
  // Of a group, in their order: some are under way while one is used.
  struct Rows {
    static constexpr int kAhead = 2;  // more would not fit the registers of a kernel that holds other things
    Row next[kAhead];
    __device__ __forceinline__ Rows(const RotationSampler& sampler, const Group& group) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) next[i] = sampler.load(group, i);
    }
    __device__ __forceinline__ Row take(const RotationSampler& sampler, const Group& group, int pass) {
      const Row row = next[0];
#pragma unroll
      for (int i = 1; i < kAhead; ++i) next[i - 1] = next[i];
      if (pass + kAhead < kPasses) next[kAhead - 1] = sampler.load(group, pass + kAhead);
      return row;
    }
  };

  __device__ __forceinline__ Row load(const Group& group, int pass) const {
    const int n = pass * kAtOnce + row_;
    Row row;
    row.exists = group.has(n);
    row.raw.clear();
    if (row.exists && channel_ < heads_.head_dim) row.raw.load(group.start + group.token(n) * group.stride + channel_);
    return row;
  }
  // Over the group's tokens.
  __device__ __forceinline__ void mean_of(const Group& group, float (&mean)[8]) const {
    float tokens = 0.f;
    Rows rows(*this, group);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const Row row = rows.take(*this, group, pass);
      float x[8];
      row.raw.get(x);
      tokens += row.exists && channel_ == 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) mean[i] += x[i];
    }
    tokens = sum_of_warp(tokens);
#pragma unroll
    for (float& x : mean) {
#pragma unroll
      for (int distance = kLanes; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
      x /= fmaxf(tokens, 1.f);
    }
  }
  static __device__ __forceinline__ float largest(const float (&x)[8]) {
    float amax = 0.f;
#pragma unroll
    for (float value : x) amax = max_nan(amax, fabsf(value));
    return amax;
  }
  template <int kFrom, int kTo>
  static __device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
    for (int distance = kFrom; distance < kTo; distance *= 2) x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
  }
  static __device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }
  // Squared scale for the largest magnitude of numbers as they are, or rotated.
  __device__ __forceinline__ float squared_scale(float amax, bool rotated) const {
    const bool clipped = heads_.score_bits == 4 && rotated;
    const float maximum = heads_.score_bits == 8 ? IntegerFormat<8, false>::kMaximum
                          : clipped              ? IntegerFormat<4, true>::kMaximum
                                                 : IntegerFormat<4, false>::kMaximum;
    const float scale = amax / maximum;
    return scale * scale * (rotated ? Rotation<kLanes>::kInverseSize : 1.f);
  }

  const SampledHeads<T>& heads_;
  const int channel_, row_;
};

// For a warp whose lanes hold the samples of the groups, in their order. All lanes get the same.
__device__ __forceinline__ bool rotation_gains(GroupSample sample, int score_bits) {
  const auto sum = [](float x) {
#pragma unroll
    for (int distance = 1; distance < kSampledKeyGroups; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  };
  static_assert(kSampledKeyGroups == 16, "the lower half of the lanes has K, the upper one Q");
  const float energy = sum(sample.energy) / sum(sample.tokens);
  const float other_energy = __shfl_xor_sync(0xffffffffu, energy, kSampledKeyGroups);
  float noise[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float term = sum(sample.squares[i]) / sum(sample.groups[i]) * other_energy;
    noise[i] = term + __shfl_xor_sync(0xffffffffu, term, kSampledKeyGroups);
  }
  return noise[1] < (score_bits == 4 ? kRotationMarginOfClipped : kRotationMargin) * noise[0];
}

}  // namespace common
