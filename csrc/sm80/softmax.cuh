// Online softmax of 16 queries and one block of 64 keys, in the accumulator layout of S. Scores are in units of log2.
#pragma once

#include "common/e4m3.cuh"
#include "common/mask_policy.h"
#include "common/scores.cuh"
#include "sm80/scores.cuh"

namespace sm80 {

__device__ __forceinline__ float quad_max_nan(float x) {
  x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Rows lane / 4 and lane / 4 + 8 of a 16-row tile.
struct Rows {
  float base[2];  // running maximum - log2(448), but for the slack: 448 * P = exp2(score - base)

  // The lowest finite number at first: no infinities are subtracted.
  __device__ __forceinline__ void clear() { base[0] = base[1] = kLowest; }

  // Takes in the largest scores of this thread; true for the whole warp if a row maximum grew by more than kSlack, in
  // units of log2. Then `factor` is what earlier contributions must be multiplied with.
  template <int kSlack>
  __device__ __forceinline__ bool update(const float (&largest)[2], float (&factor)[2]) {
    const float wanted[2] = {largest[0] - kLog2OfPScale, largest[1] - kLog2OfPScale};
    float highest[2] = {base[0], base[1]};
    if constexpr (kSlack > 0) highest[0] += kSlack, highest[1] += kSlack;
    if (!__any_sync(0xffffffffu, wanted[0] > highest[0] || wanted[1] > highest[1])) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float grown = fmaxf(base[row], quad_max(wanted[row]));
      factor[row] = exp2_approx(base[row] - grown);
      base[row] = grown;
    }
    return true;
  }
};

// What the accumulators of integer scores start with, and which numbers they are afterwards: no conversion is needed
// where they start with the bits of 1.5 * 2^23, since those plus an integer are the bits of that number plus the
// integer. Rounding then errs by about one unit of the integer score: far less than the quantization to 8 bits.
template <int kHeadDim, bool kConverts>
struct ScoreNumbers {
  static_assert(kHeadDim * 127 * 127 < 1 << 22, "a score must stay within the last bits of the number");
  static constexpr int kStart = kConverts ? 0 : 0x4b400000;
  static __device__ __forceinline__ float number(int score) { return kConverts ? float(score) : __int_as_float(score); }
  static constexpr float kZero = kConverts ? 0.f : 0x1.8p23f;  // the number of the score 0
  // number * scale + this is the score times scale plus `term`.
  static __device__ __forceinline__ float offset(float scale, float term, float zero = kZero) {
    return kConverts ? term : fmaf(scale, -zero, term);
  }
  static __device__ __forceinline__ float scaled(float number, float scale, float zero = kZero) {
    return kConverts ? number * scale : fmaf(number, scale, scale * -zero);
  }
};

// Of the terms of keys 8j + 2t, 8j + 2t + 1, 8j + 8 + 2t and 8j + 9 + 2t.
__device__ __forceinline__ float term_of_key(const float4& terms, int odd, int column) {
  return odd ? (column ? terms.w : terms.z) : (column ? terms.y : terms.x);
}

// What is added to the integer scores: nothing, a bias for each key (smoothed Q, key padding), or a mask for each score
// too.
template <MaskPolicy kMask>
struct ScoreTerms {
  static constexpr bool kNone = kMask == MaskPolicy::none;

  // Scores, or without terms the numbers of the integer scores.
  template <class Numbers>
  static __device__ __forceinline__ void apply(float (&x)[8][4], const int (&scores)[8][4], const float (&scale)[2],
                                               const float4* bias) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float4 added = make_float4(0.f, 0.f, 0.f, 0.f);
      if constexpr (includes(kMask, MaskPolicy::key_bias)) added = bias[pair * 4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float score = Numbers::number(scores[2 * pair + odd][i]);
          x[2 * pair + odd][i] = kNone ? score : fmaf(score, scale[i / 2], term_of_key(added, odd, i % 2));
        }
      }
    }
  }
};

// The keys of a score tile that each row may attend to: [0, limit).
struct KeyLimits {
  int first_key;  // of this thread's first column
  int query;      // of this thread's first row
  int kv_length, causal;

  __device__ __forceinline__ int limit(int row) const {
    return causal ? min(query + 8 * row + 1, kv_length) : kv_length;
  }

  __device__ __forceinline__ void mask_tail(float (&x)[8][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first_key + 8 * j + i % 2 >= limit(i / 2)) x[j][i] = kNegativeInfinity;
      }
    }
  }

  // `mask_offset`: of the mask's batch and head. Rows past q_length are computed as copies of the last one.
  __device__ __forceinline__ void add_mask(float (&x)[8][4], const Mask& mask, i64 mask_offset, int q_length) const {
    visit_mask(mask, [&](const auto* elements) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto* at = elements + mask_offset + min(query + 8 * row, q_length - 1) * mask.query_stride +
                         first_key * mask.key_stride;
#pragma unroll
        for (int j = 0; j < 8; ++j, at += 8 * mask.key_stride) {
          const int keys = kv_length - first_key - 8 * j;  // of this pair and behind it
          if (keys > 0) x[j][2 * row] += mask_term(at[0]);
          if (keys > 1) x[j][2 * row + 1] += mask_term(at[mask.key_stride]);
        }
      }
    });
  }
};

// kKeepsNan: a NaN is larger than all numbers; else it is left out.
template <bool kKeepsNan>
__device__ __forceinline__ float larger(float x, float y) {
  return kKeepsNan ? max_nan(x, y) : fmaxf(x, y);
}
template <bool kKeepsNan>
__device__ __forceinline__ void row_maxima(float (&largest)[2], const float (&x)[8][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    largest[row] = larger<kKeepsNan>(x[0][2 * row], x[0][2 * row + 1]);
#pragma unroll
    for (int j = 1; j < 8; ++j)
      largest[row] = larger<kKeepsNan>(largest[row], larger<kKeepsNan>(x[j][2 * row], x[j][2 * row + 1]));
  }
}

}  // namespace sm80
