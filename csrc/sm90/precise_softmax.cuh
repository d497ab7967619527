// Online softmax of the precise mode, with P in 16 bits: a row's exponent base need not be its maximum.
//
// The first key tile of a row gives the base: its largest score. Later tiles keep it, and no maximum is taken, as long
// as their exponentials stay below what the element type holds. That is tested on their sum, which is needed anyway.
// Where a warp finds a larger one it computes the tile's scores once more, moves the base up to the largest and goes
// on. So no score is out of range, whatever the inputs, and the base moves only with a growth of kHeadroom octaves or
// more.
#pragma once

#include "common/elements.cuh"
#include "common/scores.cuh"
#include "sm90/params.h"
#include "sm90/precise_mask.cuh"
#include "sm90/tiles.h"

namespace sm90 {

template <class T>
struct ProbabilityRange;
template <>
struct ProbabilityRange<__half> {
  static constexpr float kShift = 6.f;        // log2 of P at the base: small P keep their precision
  static constexpr float kLargest = 65504.f;  // of a thread's sum in a tile, so of each P
};
template <>
struct ProbabilityRange<__nv_bfloat16> {
  static constexpr float kShift = 0.f;
  static constexpr float kLargest = 0x1p64f;  // leaves P V in FP32 as much again
};

// Two rows of a thread. Scores are in units of log2; P = 2^(score + offset).
template <class T>
struct PreciseRowState {
  using Range = ProbabilityRange<T>;
  static constexpr float kLag = 8.f;  // octaves that a masked tile's maximum may exceed the base

  float offset[2];  // kShift minus the base; infinite before the first key
  float sum[2];     // of this thread's P

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      offset[row] = -kNegativeInfinity;
      sum[row] = 0.f;
    }
  }

  // Moves the bases up to `maximum`, a thread's own, where the warp has a row that exceeds its base by more than `lag`.
  // Returns whether it did: then sums were multiplied by `factor`, and so must be what else was summed up.
  __device__ __forceinline__ bool raise(const float (&maximum)[2], float lag, float (&factor)[2]) {
    const float limit = Range::kShift + lag;
    if (!__any_sync(0xffffffffu, maximum[0] + offset[0] > limit || maximum[1] + offset[1] > limit)) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float next = fminf(offset[row], Range::kShift - quad_max(maximum[row]));
      // A row without a key keeps an infinite offset.
      factor[row] = next == offset[row] ? 1.f : exp2_approx(next - offset[row]);
      sum[row] *= factor[row];
      offset[row] = next;
    }
    return true;
  }
};

// Integer scores to floats in units of log2, the mask's terms added; with kLimited, keys from limit[row] on are masked.
// Returns the largest of each row.
template <int kBlockN, bool kLimited, class Terms>
__device__ __forceinline__ void scale_scores(int (&scores)[kBlockN / 2], const float (&q_scale)[2],
                                             const float (&k_scale)[kBlockN / kScaleBlock], int first_key,
                                             const int (&limit)[2], const Terms& mask, float (&maximum)[2]) {
  constexpr int kPerBlock = kScaleBlock / 2;
  maximum[0] = maximum[1] = kNegativeInfinity;
#pragma unroll
  for (int first = 0; first < kBlockN / 4; first += kTermsAtOnce) {
    float terms[2][kTermsAtOnce] = {};
    mask.template load<kLimited>(first, terms);
    bool exists[2][kTermsAtOnce];
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) exists[row][i] = !kLimited || first_key + key_distance(first + i) < limit[row];
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int& score = scores[2 * first + i / 2 * 4 + row * 2 + i % 2];
        float x = fmaf(float(score), q_scale[row] * k_scale[2 * first / kPerBlock], terms[row][i]);
        if (!exists[row][i]) x = kNegativeInfinity;
        maximum[row] = fmaxf(maximum[row], x);
        score = __float_as_int(x);
      }
    }
  }
}

// The largest of a thread's scores of a whole tile without additive terms, in units of log2.
template <int kBlockN>
__device__ __forceinline__ void row_maxima(const int (&scores)[kBlockN / 2], const float (&q_scale)[2],
                                           const float (&k_scale)[kBlockN / kScaleBlock], float (&maximum)[2]) {
  constexpr int kPerBlock = kScaleBlock / 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int first = 0; first < kBlockN / 2; first += kPerBlock) {
      int largest = scores[first + 2 * row];
#pragma unroll
      for (int i = first; i < first + kPerBlock; i += 4)
        largest = max(max(largest, scores[i + 2 * row]), scores[i + 2 * row + 1]);
      const float of_block = float(largest) * (q_scale[row] * k_scale[first / kPerBlock]);
      maximum[row] = first == 0 ? of_block : max_nan(maximum[row], of_block);
    }
  }
}

// Floats to P. Returns their sums.
template <int kBlockN, class T>
__device__ __forceinline__ void exponentials_of_floats(int (&scores)[kBlockN / 2], const PreciseRowState<T>& state,
                                                       float (&sums)[2]) {
  // A row without a key has an infinite offset, and minus infinity in all scores.
  const float offset[2] = {state.offset[0] == -kNegativeInfinity ? 0.f : state.offset[0],
                           state.offset[1] == -kNegativeInfinity ? 0.f : state.offset[1]};
  sums[0] = sums[1] = 0.f;
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    const float p = exp2_approx(__int_as_float(scores[i]) + offset[i / 2 % 2]);
    sums[i / 2 % 2] += p;
    scores[i] = __float_as_int(p);
  }
}

// Integer scores of a tile without masked keys to P. Returns their sums, which are too large, infinite or NaN when the
// base is too low. `kRowByRow`, in each half of the keys, orders the instructions alone.
template <int kBlockN, bool kRowByRow, class T>
__device__ __forceinline__ void exponentials(int (&scores)[kBlockN / 2], const PreciseRowState<T>& state,
                                             const float (&q_scale)[2], const float (&k_scale)[kBlockN / kScaleBlock],
                                             float (&sums)[2]) {
  constexpr int kPerBlock = kScaleBlock / 2;
  float scale[2][kBlockN / kScaleBlock], partial[2][2] = {};
#pragma unroll
  for (int row = 0; row < 2; ++row)
#pragma unroll
    for (int block = 0; block < kBlockN / kScaleBlock; ++block) scale[row][block] = q_scale[row] * k_scale[block];
#pragma unroll
  for (int n = 0; n < kBlockN / 2; ++n) {
    constexpr int kOfHalf = kBlockN / 4, kOfRow = kOfHalf / 2;
    const int m = n % kOfHalf, row_by_row = n / kOfHalf * kOfHalf + m / kOfRow * 2 + m % kOfRow / 2 * 4 + m % 2;
    const int i = kRowByRow ? row_by_row : n;
    const int row = i / 2 % 2;
    const float p = exp2_approx(fmaf(float(scores[i]), scale[row][i / kPerBlock], state.offset[row]));
    partial[row][i % 2] += p;
    scores[i] = __float_as_int(p);
  }
  sums[0] = partial[0][0] + partial[0][1];
  sums[1] = partial[1][0] + partial[1][1];
}

__device__ __forceinline__ unsigned pack_pair(float low, float high, __half) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}
__device__ __forceinline__ unsigned pack_pair(float low, float high, __nv_bfloat16) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

// Probabilities as the A operands of the products with 16 keys each.
template <int kBlockN, class T>
__device__ __forceinline__ void pack_probabilities(const int (&p)[kBlockN / 2], unsigned (&packed)[kBlockN / 16][4]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 4; ++i)
    packed[i / 4][i % 4] = pack_pair(__int_as_float(p[2 * i]), __int_as_float(p[2 * i + 1]), T());
}

}  // namespace sm90
