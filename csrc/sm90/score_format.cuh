// The integers of a head's Q and K (common/integer_format.cuh), where the kernel knows whether they are rotated and
// where each head tells: one code for both, in which `rotated` is a constant or a branch that all threads of a block
// take.
#pragma once

#include "common/integer_format.cuh"
#include "common/rotation.cuh"

namespace sm90 {

using namespace common;

template <int kBits_, bool kRotated>
struct FixedFormat {
  static constexpr int kBits = kBits_;
  static constexpr bool kOfHead = false, kMayRotate = kRotated, rotated = kRotated;
};
template <int kBits_>
struct FormatOfHead {
  static constexpr int kBits = kBits_;
  static constexpr bool kOfHead = true, kMayRotate = true;
  bool rotated;
};

// What the largest magnitude of a group is scaled to, and its inverse.
template <class Format>
__device__ __forceinline__ float maximum_of(const Format& format) {
  constexpr float kPlain = IntegerFormat<Format::kBits, false>::kMaximum;
  constexpr float kRotated = IntegerFormat<Format::kBits, true>::kMaximum;
  return format.rotated ? kRotated : kPlain;
}
template <class Format>
__device__ __forceinline__ float inverse_maximum_of(const Format& format) {
  constexpr float kPlain = 1.f / IntegerFormat<Format::kBits, false>::kMaximum;
  constexpr float kRotated = 1.f / IntegerFormat<Format::kBits, true>::kMaximum;
  return format.rotated ? kRotated : kPlain;
}

// Maximum / amax, 0 for a group of zeros or one too small to be divided by. One Newton step makes a fast quotient as
// good as an IEEE one: bf16 values often lie halfway between two integers, and an inverse that is off would round them
// to the wrong one.
template <class Format>
__device__ __forceinline__ float inverse_or_zero(const Format& format, float amax) {
  const float maximum = maximum_of(format), quotient = __fdividef(maximum, amax);
  const float rest = fmaf(-quotient, amax, maximum);
  return amax < 1e-36f ? 0.f : fmaf(rest, quotient * inverse_maximum_of(format), quotient);
}

// Of a group of Q's tokens, for the largest magnitude of its values: with the softmax scale and log2(e).
template <int kLanes, class Format>
__device__ __forceinline__ float folded_scale(const Format& format, float softmax_scale, float amax) {
  constexpr float kPlain = 1.f / IntegerFormat<Format::kBits, false>::kMaximum;
  constexpr float kRotated = 1.f / IntegerFormat<Format::kBits, true>::kMaximum * Rotation<kLanes>::kInverseSize;
  return amax * (format.rotated ? kRotated : kPlain) * softmax_scale * kLog2E;
}

// For the lower and the upper four of a thread's channels.
template <int kLanes, class Format>
__device__ __forceinline__ float2 inverses_of(const Format& format, float inverse) {
  if (!format.rotated) return make_float2(inverse, inverse);
  const float2 signs = Rotation<kLanes>::output_signs();
  return make_float2(inverse * signs.x, inverse * signs.y);
}

// Rounded to the nearest integer, half to even, in the low byte of the sum. The product is rounded by itself: so a
// value that lies halfway stays there although the inverse is rounded. Rotated values do not often lie there, and are
// not rounded before the sum; where the head tells, one of the two factors is 1.
template <class Format>
__device__ __forceinline__ float rounded(const Format& format, float x, float inverse) {
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23
  using Clipped = IntegerFormat<4, true>;
  if constexpr (Format::kBits == 4 && Format::kMayRotate)  // only rotated values can lie outside
    return fminf(fmaxf(x * inverse, Clipped::kLowest), Clipped::kHighest) + kMagic;
  else if constexpr (Format::kOfHead)
    return fmaf(__fmul_rn(x, format.rotated ? 1.f : inverse), format.rotated ? inverse : 1.f, kMagic);
  else if constexpr (Format::rotated)
    return fmaf(x, inverse, kMagic);
  else
    return __fmul_rn(x, inverse) + kMagic;
}
template <class Format>
__device__ __forceinline__ uint2 int8_of(const Format& format, const float (&x)[8], float2 inverses) {
  unsigned words[2];
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    unsigned n[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      n[i] = __float_as_uint(rounded(format, x[4 * word + i], word ? inverses.y : inverses.x));
    words[word] = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
  }
  return make_uint2(words[0], words[1]);
}

}  // namespace sm90
