// Which heads gain by rotation (comfy_sage2/quantize/rotation_choice.py, which says why): a sample of Q and K of a key
// head, taken group by group, and the choice that it leads to.
#pragma once

#include "common/hidden_keys.cuh"
#include "common/integer_format.cuh"
#include "common/rotation.cuh"

namespace common {

constexpr int kSampledKeyGroups = 16, kSampledQueryGroups = 8, kSampledGroups = kSampledKeyGroups + kSampledQueryGroups;
constexpr int kSampledRows = 16;  // of a group
constexpr float kRotationMargin = 0.95f, kRotationMarginOfClipped = 1.27f;

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

  // Of the group at this place of the sample. `mean`: of K, this thread's channels. Hidden: HiddenKeys, NoHiddenKeys.
  template <class Hidden>
  __device__ __forceinline__ GroupSample take(int number, const float (&mean)[8], const Hidden& hidden) const {
    return number < kSampledKeyGroups ? keys(number, mean, hidden) : queries(number - kSampledKeyGroups);
  }

 private:
  static constexpr int kKeyBlock = 64, kKeyPlaces = 4, kQueryBlock = 128, kQueryPlaces = 8;

  static __device__ __forceinline__ int first_token(int number, int groups, int block, int length) {
    return static_cast<int>(i64(number) * ((length + block - 1) / block) / groups) * block;
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
  __device__ __forceinline__ void load(const T* token, bool exists, float (&to)[8]) const {
#pragma unroll
    for (float& x : to) x = 0.f;
    if (exists && channel_ < heads_.head_dim) load_vec8(token + channel_, to);
  }

  template <class Hidden>
  __device__ __forceinline__ GroupSample keys(int number, const float (&mean)[8], const Hidden& hidden) const {
    const Rotation<kLanes> rotation;
    const int first = first_token(number, kSampledKeyGroups, kKeyBlock, heads_.kv_length) + 2 * (number % kKeyPlaces);
    GroupSample found{};
    float amax[2] = {};
#pragma unroll(kPasses < 4 ? kPasses : 4)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int n = pass * kAtOnce + row_, token = first + n / 2 * 8 + n % 2;
      const bool exists = token < heads_.kv_length && !hidden.has(token);
      float x[8];
      load(heads_.k + token * heads_.k_token_stride, exists, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = exists ? x[i] - mean[i] : 0.f;
        found.energy += x[i] * x[i];
      }
      if (exists && channel_ == 0) found.tokens += 1.f;
      amax[0] = max_nan(amax[0], largest(x));
      rotation.change_signs(x);
      rotation.transform(x);
      amax[1] = max_nan(amax[1], largest(x));
    }
    found.energy = sum_of_warp(found.energy);
    found.tokens = sum_of_warp(found.tokens);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found.squares[i] = squared_scale(max_of_lanes<1, 32>(amax[i]), i != 0);
      found.groups[i] = found.tokens != 0.f;
    }
    return found;
  }

  __device__ __forceinline__ GroupSample queries(int number) const {
    const Rotation<kLanes> rotation;
    const int place = number % kQueryPlaces;
    const int first = first_token(number, kSampledQueryGroups, kQueryBlock, heads_.q_length) + place;
    const T* q = heads_.q + number % heads_.q_heads * heads_.q_head_stride;
    const int left = (heads_.q_length - first + kQueryPlaces - 1) / kQueryPlaces;
    const int count = max(min(left, kSampledRows), 0);
    const auto load_query = [&](int n, float (&x)[8]) {
      load(q + i64(first + n * kQueryPlaces) * heads_.q_token_stride, n < count, x);
    };
    const bool smooth = heads_.score_bits == 4;
    float mean[8] = {};
    if (smooth) {
#pragma unroll(kPasses < 4 ? kPasses : 4)
      for (int pass = 0; pass < kPasses; ++pass) {
        float x[8];
        load_query(pass * kAtOnce + row_, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) mean[i] += x[i];
      }
#pragma unroll
      for (float& x : mean) {
#pragma unroll
        for (int distance = kLanes; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
        x /= max(count, 1);
      }
    }
    const bool shares[2] = {kQueryGroups || smooth, kQueryGroups && !smooth};
    GroupSample found{};
    found.tokens = count;
    float amax_of_scale[2] = {};
#pragma unroll(kPasses < 4 ? kPasses : 4)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int n = pass * kAtOnce + row_;
      float x[8], amax[2];
      load_query(n, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = n < count ? x[i] - mean[i] : 0.f;
        found.energy += x[i] * x[i];
      }
      amax[0] = max_of_lanes<1, kLanes>(largest(x));
      rotation.change_signs(x);
      rotation.transform(x);
      amax[1] = max_of_lanes<1, kLanes>(largest(x));
      const bool ends_scale = (pass + 1) * kAtOnce % kTokensOfScale == 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        amax_of_scale[i] = max_nan(amax_of_scale[i], amax[i]);
        if (!shares[i]) {
          if (channel_ == 0) found.squares[i] += squared_scale(amax[i], i != 0);
        } else if (ends_scale) {
          const float shared = max_of_lanes<kLanes, 32>(amax_of_scale[i]);
          if (threadIdx.x % 32 == 0) found.squares[i] += squared_scale(shared, i != 0);
        }
        if (ends_scale) amax_of_scale[i] = 0.f;
      }
    }
    found.energy = sum_of_warp(found.energy);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found.squares[i] = sum_of_warp(found.squares[i]);
      found.groups[i] = shares[i] ? (count + kTokensOfScale - 1) / kTokensOfScale : count;
    }
    return found;
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
