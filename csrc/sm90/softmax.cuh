// Online softmax on the int32 scores of one warpgroup: 64 query rows x kBlockN keys in the accumulator layout of wgmma.
// Thread t of a quad holds columns 8j + 2t and 8j + 2t + 1 of rows r and r + 8: register 4j + 2 * row + column. So a
// thread needs one K scale per block of 64 keys (per-thread quantization, paper section 3.2 and equation 5).
#pragma once

#include "common/e4m3.cuh"
#include "common/scores.cuh"
#include "sm90/key_terms.cuh"
#include "sm90/params.h"
#include "sm90/tiles.h"

namespace sm90 {

struct RowState {
  float maximum[2];  // of the scores so far, in units of log2
  float rescale[2];  // what the accumulator must be multiplied with after the last step

  // A row whose keys are all masked so far keeps the base 0, so that no infinities are subtracted.
  template <bool kMasked>
  __device__ __forceinline__ float update(int row, float new_maximum) {
    new_maximum = quad_max(fmaxf(maximum[row], new_maximum));
    const float base = kMasked && new_maximum == kNegativeInfinity ? 0.f : new_maximum;
    rescale[row] = exp2_approx(maximum[row] - base);
    maximum[row] = new_maximum;
    return kLog2OfPScale - base;
  }
};

// The softmax of one key tile without masked keys: scores are replaced by the bits of 448 * exp2(score - maximum). The
// scale is positive and common to a thread's scores of a block, so the maximum is taken on the integers. The other
// parameters are those of StepOrder.
template <int kBlockN, bool kFromLast, bool kByRow, bool kTested>
__device__ __forceinline__ void softmax_full_tile(int (&scores)[kBlockN / 2], RowState& state,
                                                  const float (&q_scale)[2],
                                                  const float (&k_scale)[kBlockN / kScaleBlock]) {
  constexpr int kBlocks = kBlockN / kScaleBlock;
  constexpr int kPerBlock = kScaleBlock / 2;  // registers of a thread
  float scale[2][kBlocks], offset[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float maximum;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int first = block * kPerBlock + row * 2;
      const auto pair = [first](int i) { return first + (kFromLast ? kPerBlock - 4 - i : i); };
      int largest = max(scores[pair(0)], scores[pair(0) + 1]);
#pragma unroll
      for (int i = 4; i < kPerBlock; i += 4) largest = max(max(largest, scores[pair(i)]), scores[pair(i) + 1]);
      scale[row][block] = q_scale[row] * k_scale[block];
      const float of_block = float(largest) * scale[row][block];
      maximum = block == 0 ? of_block : fmaxf(maximum, of_block);
    }
    offset[row] = state.update<kTested>(row, maximum);
  }
#pragma unroll
  for (int n = 0; n < kBlockN / 2; ++n) {
    constexpr int kOfRow = kBlockN / 4;
    const int i = !kByRow ? n : n < kOfRow ? n / 2 * 4 + n % 2 : (n - kOfRow) / 2 * 4 + n % 2 + 2;
    const int row = i / 2 % 2;
    scores[i] = __float_as_int(exp2_approx(fmaf(float(scores[i]), scale[row][i / kPerBlock], offset[row])));
  }
}

// The last key tile, which may be ragged and, in causal attention, ends at the diagonal: keys from limit[row] on are
// masked. `bias(row, key)` gives the additive term of a key below the limit in units of log2.
template <int kBlockN, class Bias>
__device__ __forceinline__ void softmax_last_tile(int (&scores)[kBlockN / 2], RowState& state,
                                                  const float (&q_scale)[2],
                                                  const float (&k_scale)[kBlockN / kScaleBlock], int first_key,
                                                  const int (&limit)[2], const Bias& bias) {
  constexpr int kPerBlock = kScaleBlock / 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float maximum = kNegativeInfinity;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int key = first_key + 2 * i + column;
        int& score = scores[i + row * 2 + column];
        float x = float(score) * (q_scale[row] * k_scale[i / kPerBlock]);
        x = key < limit[row] ? x + bias(row, key) : kNegativeInfinity;
        maximum = fmaxf(maximum, x);
        score = __float_as_int(x);
      }
    }
    const float offset = state.update<true>(row, maximum);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        int& score = scores[i + row * 2 + column];
        score = __float_as_int(exp2_approx(__int_as_float(score) + offset));
      }
    }
  }
}

// The bits of 448 * exp2(score - maximum) of floats, given the largest of this thread's in each of its rows.
template <int kBlockN>
__device__ __forceinline__ void exponentials(int (&scores)[kBlockN / 2], RowState& state, const float (&maximum)[2]) {
  const float offset[2] = {state.update<true>(0, maximum[0]), state.update<true>(1, maximum[1])};
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i)
    scores[i] = __float_as_int(exp2_approx(__int_as_float(scores[i]) + offset[i / 2 % 2]));
}

// A key tile with the terms of a mask for all queries, as KeyTerms gives them. With kLimited, keys from limit[row] on
// are masked, too.
template <int kBlockN, bool kLimited, class Terms>
__device__ __forceinline__ void softmax_tile_with_terms(int (&scores)[kBlockN / 2], RowState& state,
                                                        const float (&q_scale)[2],
                                                        const float (&k_scale)[kBlockN / kScaleBlock], int first_key,
                                                        const int (&limit)[2], const Terms& terms) {
  constexpr int kPerBlock = kScaleBlock / 2;
  float maximum[2] = {kNegativeInfinity, kNegativeInfinity};
#pragma unroll
  for (int first = 0; first < kBlockN / 4; first += kTermsAtOnce) {
    float term[2][kTermsAtOnce];
    terms.template load<kLimited>(first, term);
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      const int key = first_key + key_distance(first + i);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int& score = scores[2 * first + i / 2 * 4 + row * 2 + i % 2];
        float x = fmaf(float(score), q_scale[row] * k_scale[2 * first / kPerBlock], term[row][i]);
        if (kLimited && key >= limit[row]) x = kNegativeInfinity;
        maximum[row] = fmaxf(maximum[row], x);
        score = __float_as_int(x);
      }
    }
  }
  exponentials<kBlockN>(scores, state, maximum);
}

// A whole key tile with an additive term: `bias(row, key)` in units of log2. The branch is always taken (`keys` is the
// number of all keys): it keeps the loads of kAtOnce keys' terms together and apart from the next, as all at once need
// too many registers.
template <int kBlockN, class Bias>
__device__ __forceinline__ void softmax_biased_tile(int (&scores)[kBlockN / 2], RowState& state,
                                                    const float (&q_scale)[2],
                                                    const float (&k_scale)[kBlockN / kScaleBlock], int first_key,
                                                    int keys, const Bias& bias) {
  constexpr int kPerBlock = kScaleBlock / 2, kAtOnce = 4;
  float maximum[2] = {kNegativeInfinity, kNegativeInfinity};
#pragma unroll
  for (int first = 0; first < kBlockN / 4; first += kAtOnce) {
    const int chunk_key = first_key + 4 * first;
    float terms[2][kAtOnce] = {};
    if (chunk_key < keys) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int row = 0; row < 2; ++row) terms[row][i] = bias(row, chunk_key + i / 2 * 8 + i % 2);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int& score = scores[2 * first + i / 2 * 4 + row * 2 + i % 2];
        const float x = fmaf(float(score), q_scale[row] * k_scale[2 * first / kPerBlock], terms[row][i]);
        maximum[row] = fmaxf(maximum[row], x);
        score = __float_as_int(x);
      }
    }
  }
  exponentials<kBlockN>(scores, state, maximum);
}

// Probabilities as the A operand of the FP8 product: keys within 16 are in the order that the V pass stores
// (key_at_position). In two parts: the upper half of every word before the wait for the values, the lower after it.
__device__ __forceinline__ unsigned short pack_pair(int x0, int x1) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(__int_as_float(x0)), "f"(__int_as_float(x1)));
  return pair;
}
template <int kBlockN>
__device__ __forceinline__ void pack_upper(const int (&p)[kBlockN / 2], unsigned short (&upper)[kBlockN / 8]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 8; ++i) {
    const int first = i / 4 * 16 + (i % 4 / 2) * 8 + (i % 2) * 2;
    upper[i] = pack_pair(p[first + 4], p[first + 5]);
  }
}
template <int kBlockN>
__device__ __forceinline__ void pack_lower(const int (&p)[kBlockN / 2], const unsigned short (&upper)[kBlockN / 8],
                                           unsigned (&packed)[kBlockN / 32][4]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 8; ++i) {
    const int first = i / 4 * 16 + (i % 4 / 2) * 8 + (i % 2) * 2;
    const unsigned short low = pack_pair(p[first], p[first + 1]);
    asm("mov.b32 %0, {%1, %2};" : "=r"(packed[i / 4][i % 4]) : "h"(low), "h"(upper[i]));
  }
}
template <int kBlockN>
__device__ __forceinline__ void pack_probabilities(const int (&p)[kBlockN / 2], unsigned (&packed)[kBlockN / 32][4]) {
  unsigned short upper[kBlockN / 8];
  pack_upper<kBlockN>(p, upper);
  pack_lower<kBlockN>(p, upper, packed);
}

}  // namespace sm90
