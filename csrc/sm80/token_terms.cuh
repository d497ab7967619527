// Scales of V's tokens in INT8. Where the tokens of a key block are unlike, each has a scale beside that of the key
// block (E149). P V takes it as a factor of P, so its log2, the token's term, is added to the scores.
#pragma once

#include "sm80/item.cuh"
#include "sm80/softmax.cuh"

namespace sm80 {

// The terms of one key block, as one thread reads them. The item is read for each pair: of a pointer that is kept the
// compiler makes another order of instructions.
class TokenTerms {
 public:
  __device__ __forceinline__ TokenTerms(const Item& item, int key_block, int lane)
      : item(item), key_block(key_block), lane(lane) {}

  // Whether a key block has terms: the quantization negates its scale there.
  static __device__ __forceinline__ bool marked_by(float v_tile_scale) { return v_tile_scale < 0.f; }

  // Adds them to x, scores in units of log2. If kIsNumber, x holds the numbers of the integer scores before, and
  // `scale` and `zero` become those of scores.
  template <class Numbers, bool kIsNumber>
  __device__ __forceinline__ void add(float (&x)[8][4], float (&scale)[2], float& zero) const {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float4 terms = of_pair(pair);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = x[2 * pair + odd][i];
          const float term = term_of_key(terms, odd, i % 2);
          score = kIsNumber ? fmaf(score, scale[i / 2], Numbers::offset(scale[i / 2], term)) : score + term;
        }
      }
    }
    if constexpr (kIsNumber) {
      scale[0] = scale[1] = 1.f;
      zero = 0.f;
    }
  }

  // This thread's part of the row sums of P as it would be without these factors, not rounded.
  __device__ __forceinline__ void row_sums_without(float (&sum)[2], const float (&p)[8][4]) const {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float4 terms = of_pair(pair);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const float factor = exp2_approx(-term_of_key(terms, odd, column));
          sum[0] = fmaf(p[2 * pair + odd][column], factor, sum[0]);
          sum[1] = fmaf(p[2 * pair + odd][2 + column], factor, sum[1]);
        }
      }
    }
  }

 private:
  // Of this thread's keys of two groups of eight.
  __device__ __forceinline__ float4 of_pair(int pair) const {
    return __ldg(reinterpret_cast<const float4*>(item.v_token_term + key_block * kKeyBlock) + pair * 4 + lane % 4);
  }

  const Item& item;
  int key_block, lane;
};

}  // namespace sm80
