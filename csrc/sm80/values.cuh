// The formats of the product P V: how P is packed into operands and how R = P V is added to the output (paper
// section 3.4).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/e4m3.cuh"
#include "sm80/layout.cuh"
#include "sm80/mma.cuh"

namespace sm80 {

__device__ __forceinline__ unsigned pack_half(float x0, float x1) {
  const __half2 pair = __floats2half2_rn(x0, x1);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The sum of four packed E4M3 numbers: first and third, second and fourth.
__device__ __forceinline__ __half2 sum_e4m3(unsigned packed) {
  unsigned low, high;
  asm("{\n.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(packed));
  return __hadd2(*reinterpret_cast<const __half2*>(&low), *reinterpret_cast<const __half2*>(&high));
}

// P as four 32-bit operands for each mma; a lane reads kWords 16-byte words of V for 8 channels. The row sum adds P as
// it was rounded, so that numerator and denominator of the output err alike. It is added up in halves, which the issue
// slots bear more easily than the tensor cores, the bottleneck, would bear a product with ones.
struct ProbabilitiesE4m3 {
  static constexpr bool kOfKeyBlock = false;    // P relative to the running maximum of its row
  static constexpr bool kHasQuickStep = false;  // P above 448 would become 448
  static constexpr int kMaximumSlack = 0;       // likewise
  static constexpr int kSteps = 2;
  static constexpr int kWords = 1;
  static constexpr int kVBytes = 1;
  static constexpr int kKeyStages = 1;

  // p[j]: 16 x 8 probabilities in the accumulator layout of S.
  static __device__ __forceinline__ void pack(unsigned (&packed)[kSteps][4], const float (&p)[8][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        const float (&even)[4] = p[4 * step + slot / 2 * 2];
        const float (&odd)[4] = p[4 * step + slot / 2 * 2 + 1];
        const int row = slot % 2 * 2;
        packed[step][slot] = pack_e4m3(even[row], even[row + 1], odd[row], odd[row + 1]);
      }
    }
  }
  // This thread's part of the two row sums.
  static __device__ __forceinline__ void row_sums(float (&sum)[2], const float (&)[8][4],
                                                  const unsigned (&packed)[kSteps][4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      __half2 halves = __float2half2_rn(0.f);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int slot = row; slot < 4; slot += 2) halves = __hadd2(halves, sum_e4m3(packed[step][slot]));
      }
      sum[row] = __low2float(halves) + __high2float(halves);
    }
  }
  // A lane's 16 bytes of V for one channel: `value(key)` of the keys at the positions 4t .. 4t + 3 of each 16.
  template <class Value>
  static __device__ __forceinline__ uint4 operand(const Value& value, int, int t) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = 16 * i + 4 * t;
      words[i] = pack_e4m3(value(key_at_position(position)), value(key_at_position(position + 1)),
                           value(key_at_position(position + 2)), value(key_at_position(position + 3)));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  static __device__ __forceinline__ unsigned word(const uint4 (&v)[kWords], int step, int slot) {
    return step == 0 ? (slot == 0 ? v[0].x : v[0].y) : (slot == 0 ? v[0].z : v[0].w);
  }
  template <class R>
  static __device__ __forceinline__ void mma(R& r, const unsigned (&p)[4], unsigned b0, unsigned b1) {
    mma_e4m3(r, p, b0, b1);
  }
};

// P in unsigned 8 bits, each row relative to its largest of the key block: 255 at most. V in whole numbers with a scale
// a channel times one a key block, which multiplies the factor that P's row has anyway. Where tokens of a key block are
// unlike, each has a scale that P takes as a factor before it is rounded (E149): neither do loud ones coarsen others,
// nor does P of a quiet one, such as a sink, push theirs below 1. The row sum then adds P without it, unrounded. A
// lane's words of V lie as those of E4M3.
struct ProbabilitiesU8 {
  static constexpr bool kOfKeyBlock = true;
  static constexpr float kLog2OfLargest = 7.994353436858858f;  // log2(255)
  // P is relative to its own key block, so the maximum that the sums are relative to may lie behind: most steps rescale
  // nothing (E157).
  static constexpr int kMaximumSlack = 16;
  // Of the sums over all keys. A whole number that is summed stands for 2^-149 times as much, and the factor that
  // corrects this has to stay a float where a key block is ahead by the slack.
  static constexpr float kLog2OfUnit = -40.f;
  static_assert(149 + kLog2OfUnit + kMaximumSlack + common::kLog2OfPScale - kLog2OfLargest < 127);
  static constexpr float kVOffset = 128.f;
  static constexpr bool kHasQuickStep = false;  // needs the maximum of every key block
  static constexpr int kSteps = 2;
  static constexpr int kWords = 1;
  static constexpr int kVBytes = 1;
  static constexpr int kKeyStages = 2;

  static __device__ __forceinline__ void pack(unsigned (&packed)[kSteps][4], const float (&p)[8][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        const float (&even)[4] = p[4 * step + slot / 2 * 2];
        const float (&odd)[4] = p[4 * step + slot / 2 * 2 + 1];
        const int row = slot % 2 * 2;
        packed[step][slot] =
            __byte_perm(low_bytes(even[row], even[row + 1]), low_bytes(odd[row], odd[row + 1]), 0x6420);
      }
    }
  }
  static __device__ __forceinline__ void row_sums(float (&sum)[2], const float (&)[8][4],
                                                  const unsigned (&packed)[kSteps][4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      unsigned whole = 0u;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int slot = row; slot < 4; slot += 2) whole = __dp4a(packed[step][slot], 0x01010101u, whole);
      }
      sum[row] = __uint_as_float(whole);
    }
  }
  template <class Value>
  static __device__ __forceinline__ uint4 operand(const Value& value, int, int t) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0u;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte)
        words[i] |= (__float2uint_rn(value(key_at_position(16 * i + 4 * t + byte)) + kVOffset) & 0xff) << 8 * byte;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  static __device__ __forceinline__ unsigned word(const uint4 (&v)[kWords], int step, int slot) {
    return step == 0 ? (slot == 0 ? v[0].x : v[0].y) : (slot == 0 ? v[0].z : v[0].w);
  }

 private:
  // Two numbers from 0 to 255, rounded, in bytes 0 and 2: halves from 1024 to 2047 are whole.
  static __device__ __forceinline__ unsigned low_bytes(float x0, float x1) {
    const __half2 pair = __hadd2(__floats2half2_rn(x0, x1), __float2half2_rn(1024.f));
    return *reinterpret_cast<const unsigned*>(&pair);
  }
};

template <class T>
struct Pair16;
template <>
struct Pair16<__half> {
  static __device__ __forceinline__ unsigned packed(float x0, float x1) { return pack_half(x0, x1); }
  template <class R>
  static __device__ __forceinline__ void mma(R& r, const unsigned (&p)[4], unsigned b0, unsigned b1) {
    mma_half(r, p, b0, b1);
  }
};
template <>
struct Pair16<__nv_bfloat16> {
  static __device__ __forceinline__ unsigned packed(float x0, float x1) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x0, x1);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
  static __device__ __forceinline__ void mma(float (&r)[4], const unsigned (&p)[4], unsigned b0, unsigned b1) {
    mma_bf16(r, p, b0, b1);
  }
};

// The same in 16 bits. The row sum adds P before it is rounded, in FP32: on data-centre cards sums of halves share a
// pipe with the tensor cores.
template <class T>
struct Probabilities16 : Pair16<T> {
  static constexpr bool kOfKeyBlock = false;
  // P may exceed 448, what the largest score so far gives, as long as a thread's part of a row sum shows that none is
  // too large.
  static constexpr bool kHasQuickStep = true;
  static constexpr float kLargestRowSum = 32768.f;
  static constexpr int kMaximumSlack = 0;  // the quick step has its own
  static constexpr int kSteps = 4;
  static constexpr int kWords = 2;
  static constexpr int kVBytes = 2;
  static constexpr int kKeyStages = 2;

  static __device__ __forceinline__ void pack(unsigned (&packed)[kSteps][4], const float (&p)[8][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_pair(packed[step], p[2 * step], p[2 * step + 1]);
  }
  // The operand of one mma: 16 x 8 probabilities each of two neighboring groups of keys.
  static __device__ __forceinline__ void pack_pair(unsigned (&packed)[4], const float (&even)[4],
                                                   const float (&odd)[4]) {
    packed[0] = Pair16<T>::packed(even[0], even[1]);
    packed[1] = Pair16<T>::packed(even[2], even[3]);
    packed[2] = Pair16<T>::packed(odd[0], odd[1]);
    packed[3] = Pair16<T>::packed(odd[2], odd[3]);
  }
  static __device__ __forceinline__ void row_sums(float (&sum)[2], const float (&p)[8][4],
                                                  const unsigned (&)[kSteps][4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[row] += p[j][2 * row] + p[j][2 * row + 1];
    }
  }
  // Keys 8i + 2t and 8i + 2t + 1 need no permutation.
  template <class Value>
  static __device__ __forceinline__ uint4 operand(const Value& value, int word, int t) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 32 * word + 8 * i + 2 * t;
      words[i] = Pair16<T>::packed(value(key), value(key + 1));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  static __device__ __forceinline__ unsigned word(const uint4 (&v)[kWords], int step, int slot) {
    const uint4& four = v[step / 2];
    return step % 2 == 0 ? (slot == 0 ? four.x : four.y) : (slot == 0 ? four.z : four.w);
  }
};

// What R = P V of one key block is summed in. Two levels: R is a sum of its own, which is then added to the float32
// output. In floats, since E4M3 products sum to FP22 on Ada.
struct FloatAccumulators {
  static constexpr bool kTwoLevels = true;
  using R = float[4];
  static __device__ __forceinline__ void clear(R& r) { r[0] = r[1] = r[2] = r[3] = 0.f; }
  static __device__ __forceinline__ float value(const R& r, int i) { return r[i]; }
};

// In halves, two a register: twice the rate on GeForce cards. 448 * v_maximum * 64 must stay below 65504, and so
// the part of each of the four threads of a row below 448 * 16.
struct HalfAccumulators {
  static constexpr bool kTwoLevels = true;
  using R = unsigned[2];
  static __device__ __forceinline__ void clear(R& r) { r[0] = r[1] = 0u; }
  static __device__ __forceinline__ float value(const R& r, int i) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&r[i / 2]);
    return i % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }
};

// In whole numbers, from 0 to 64 * 255 * 255. No conversion: the bits of a whole number below 2^24 are those of the
// float that is 2^-149 times as large.
struct IntegerAccumulators {
  static constexpr bool kTwoLevels = true;
  using R = unsigned[4];
  static __device__ __forceinline__ void clear(R& r) { r[0] = r[1] = r[2] = r[3] = 0u; }
  static __device__ __forceinline__ float value(const R& r, int i) { return __uint_as_float(r[i]); }
  static __device__ __forceinline__ void mma(R& r, const unsigned (&p)[4], unsigned b0, unsigned b1) {
    mma_u8(r, p, b0, b1);
  }
};

// 16-bit products sum in FP32, so the output itself is their accumulator: no additions, and fewer registers.
struct OutputAccumulators {
  static constexpr bool kTwoLevels = false;
};

// V scaled, and centered if it is smoothed.
struct ScaledValues {
  static constexpr bool kScaled = true;
  static constexpr bool kMayExceed = false;  // rounding carries no output past the type of V: storable_amax
};
struct E4m3Float : ScaledValues, ProbabilitiesE4m3, FloatAccumulators {};
// By block-scaled products, whose sums in FP32 take no longer than those in FP16 on GeForce cards of Blackwell, and
// need no second level. Both scales are 1.
struct E4m3BlockScaled : ScaledValues, ProbabilitiesE4m3, OutputAccumulators {
  static __device__ __forceinline__ void mma(float (&r)[4], const unsigned (&p)[4], unsigned b0, unsigned b1) {
    mma_e4m3_block_scaled(r, p, b0, b1);
  }
};
struct E4m3Half : ScaledValues, ProbabilitiesE4m3, HalfAccumulators {};
struct IntegerProduct : ScaledValues, ProbabilitiesU8, IntegerAccumulators {};
// For cards without FP8.
struct HalfFloat : ScaledValues, Probabilities16<__half>, OutputAccumulators {};
struct HalfHalf : ScaledValues, Probabilities16<__half>, HalfAccumulators {
  static constexpr bool kMayExceed = true;  // precise has V as it is
  static constexpr float kLargestRowSum = 448.f * 16.f;
};
// The precise mode: V as it is.
template <class T>
struct Precise : Probabilities16<T>, OutputAccumulators {
  static constexpr bool kScaled = false;
  static constexpr bool kMayExceed = true;
  using Element = T;
};

// This build's products in floats; V's tiles are the same for both.
#if HALF_VALUES
using FloatProduct = HalfFloat;
using HalfProduct = HalfHalf;
#else
using FloatProduct = E4m3Float;
using HalfProduct = E4m3Half;
#endif

// The output of a warp's kTiles x 16 rows before the division by the row sum, and this thread's part of the row sum.
template <class Pv, int kHeadDim, int kTiles>
class Output {
 public:
  float value[kTiles][kHeadDim / 8][4];
  float row_sum[kTiles][2];
  // Where P is relative to its largest in the key block:
  float block_factor[kTiles][2];  // from P of the key block to P of the running maximum
  float value_factor[kTiles][2];  // the same times the scale of the key block's V
  float2 value_sum[kTiles];       // P summed by that factor, this thread's part: what V's offset added to the output

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      row_sum[tile][0] = row_sum[tile][1] = 0.f;
      if constexpr (Pv::kOfKeyBlock) value_sum[tile] = make_float2(0.f, 0.f);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        value[tile][n][0] = value[tile][n][1] = value[tile][n][2] = value[tile][n][3] = 0.f;
    }
  }

  // The row maximum grew: earlier contributions shrink.
  __device__ __forceinline__ void rescale(int tile, const float (&factor)[2]) {
    row_sum[tile][0] *= factor[0];
    row_sum[tile][1] *= factor[1];
    if constexpr (Pv::kOfKeyBlock) {
      const float2 sum = value_sum[tile];
      value_sum[tile] = make_float2(sum.x * factor[0], sum.y * factor[1]);
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[tile][n][i] *= factor[i / 2];
    }
  }

  // P of one key block, summed. `sum_of_product`: of P as the product has it, if that differs.
  __device__ __forceinline__ void add_row_sums(int tile, const float (&sum)[2]) { add_row_sums(tile, sum, sum); }
  __device__ __forceinline__ void add_row_sums(int tile, const float (&sum)[2], const float (&sum_of_product)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      row_sum[tile][row] =
          Pv::kOfKeyBlock ? fmaf(sum[row], block_factor[tile][row], row_sum[tile][row]) : row_sum[tile][row] + sum[row];
    }
    if constexpr (Pv::kOfKeyBlock) {
      const float2 before = value_sum[tile];
      value_sum[tile] = make_float2(fmaf(sum_of_product[0], value_factor[tile][0], before.x),
                                    fmaf(sum_of_product[1], value_factor[tile][1], before.y));
    }
  }

  // Adds P V of one key block. `v` points at this lane's words of the V tile. kSyncAfter: see Attention::kProductSync.
  template <int kSyncAfter>
  __device__ __forceinline__ void add_product(const unsigned (&p)[kTiles][Pv::kSteps][4], const uint4* v) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      if constexpr (kSyncAfter > 0) {
        if (n % kSyncAfter == 0) __syncwarp();
      }
      uint4 words[Pv::kWords];
#pragma unroll
      for (int word = 0; word < Pv::kWords; ++word) words[word] = v[(n * Pv::kWords + word) * 32];
      if constexpr (Pv::kTwoLevels) {
        typename Pv::R r[kTiles];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) Pv::clear(r[tile]);
        multiply(p, words, [&](int tile) -> auto& { return r[tile]; });
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) value[tile][n][i] = added(value[tile][n][i], Pv::value(r[tile], i), tile, i / 2);
        }
      } else {
        multiply(p, words, [&](int tile) -> auto& { return value[tile][n]; });
      }
    }
  }

 private:
  // An output over all keys and what a key block adds to it.
  __device__ __forceinline__ float added(float sum, float of_block, int tile, int row) const {
    return Pv::kOfKeyBlock ? fmaf(of_block, value_factor[tile][row], sum) : sum + of_block;
  }

  // Adds P times 8 channels of V to the accumulators of each tile.
  template <class Accumulators>
  static __device__ __forceinline__ void multiply(const unsigned (&p)[kTiles][Pv::kSteps][4],
                                                  const uint4 (&words)[Pv::kWords], const Accumulators& accumulators) {
#pragma unroll
    for (int step = 0; step < Pv::kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Pv::mma(accumulators(tile), p[tile][step], Pv::word(words, step, 0), Pv::word(words, step, 1));
      }
    }
  }
};

}  // namespace sm80
