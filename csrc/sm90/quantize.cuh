// The quantization pass: Q and K to int8 (8 or 4 bits of range), V to transposed E4M3, read in place from strided
// tensors.
#pragma once

#include "common/constants.h"
#include "common/elements.cuh"
#include "common/integer_format.cuh"
#include "common/rotation.cuh"
#include "sm90/ptx.cuh"
#include "sm90/tiles.h"

namespace sm90 {

struct BatchHead {
  int index, batch, head;
  __device__ __forceinline__ BatchHead(int index, int heads)
      : index(index), batch(index / heads), head(index - batch * heads) {}
  template <class T>
  __device__ __forceinline__ const T* of(const Strided& tensor) const {
    return static_cast<const T*>(tensor.pointer) + batch * tensor.batch_stride + head * tensor.head_stride;
  }
};

__device__ __forceinline__ float amax_of_vec8(const float (&x)[8]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = max_nan(amax, fabsf(x[i]));
  return amax;
}

// Over the kLanes neighboring threads that hold one token.
template <int kLanes>
__device__ __forceinline__ float amax_of_token(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x = max_nan(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}
template <int kLanes>
__device__ __forceinline__ float sum_of_token(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// kMaximum / amax, 0 for a group of zeros or one too small to be divided by. One Newton step makes a fast quotient as
// good as an IEEE one: bf16 values often lie halfway between two integers, and an inverse that is off would round them
// to the wrong one.
template <class Format>
__device__ __forceinline__ float inverse_or_zero(float amax) {
  const float quotient = __fdividef(Format::kMaximum, amax);
  const float rest = fmaf(-quotient, amax, Format::kMaximum);
  return amax < 1e-36f ? 0.f : fmaf(rest, quotient * (1.f / Format::kMaximum), quotient);
}

// Of a group of Q's tokens, for the largest magnitude of its values: with the softmax scale and log2(e).
template <class Format, int kLanes>
__device__ __forceinline__ float folded_scale(float softmax_scale, float amax) {
  constexpr float kFactor = 1.f / Format::kMaximum * (Format::kRotated ? Rotation<kLanes>::kInverseSize : 1.f);
  return amax * kFactor * softmax_scale * kLog2E;
}

// For the lower and the upper four of a thread's channels.
template <class Format, int kLanes>
__device__ __forceinline__ float2 inverses_of(float inverse) {
  if constexpr (Format::kRotated) {
    const float2 signs = Rotation<kLanes>::output_signs();
    return make_float2(inverse * signs.x, inverse * signs.y);
  }
  return make_float2(inverse, inverse);
}

// Rounded to the nearest integer, half to even, in the low byte of the sum. The product is rounded by itself: so a
// value that lies halfway stays there although the inverse is rounded. Rotated values do not often lie there.
template <class Format>
__device__ __forceinline__ uint2 int8_of(const float (&x)[8], float2 inverses) {
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23
  unsigned words[2];
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    unsigned n[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float inverse = word ? inverses.y : inverses.x;
      float sum;
      if constexpr (Format::kClipped)
        sum = fminf(fmaxf(x[4 * word + i] * inverse, Format::kLowest), Format::kHighest) + kMagic;
      else if constexpr (Format::kRotated)
        sum = fmaf(x[4 * word + i], inverse, kMagic);
      else
        sum = __fmul_rn(x[4 * word + i], inverse) + kMagic;
      n[i] = __float_as_uint(sum);
    }
    words[word] = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
  }
  return make_uint2(words[0], words[1]);
}
template <class Format>
__device__ __forceinline__ void store_int8(signed char* to, const float (&x)[8], float2 inverses) {
  *reinterpret_cast<uint2*>(to) = int8_of<Format>(x, inverses);
}

// One warp-wide view of a tile: kLanes threads read a token of up to 8 * kLanes channels.
template <int kLanes>
struct Lanes {
  static constexpr int kTokensAtOnce = kQuantizeThreads / kLanes;
  int channel, token;
  bool active;  // the channels are below head_dim
  __device__ __forceinline__ explicit Lanes(int head_dim)
      : channel(threadIdx.x % kLanes * 8), token(threadIdx.x / kLanes), active(channel < head_dim) {}
};

template <class T>
__device__ __forceinline__ void load_or_zero(const T* from, bool valid, float (&to)[8]) {
  if (valid) {
    load_vec8(from, to);
  } else {
#pragma unroll
    for (float& x : to) x = 0.f;
  }
}

// Whether a row of quantized Q or K has this thread's channels. Those past head_dim are zeros unless they are rotated.
template <class Format, int kLanes>
__device__ __forceinline__ bool has_channels(const QuantizeParams& params, const Lanes<kLanes>& lanes) {
  return Format::kByHead ? lanes.channel < params.row_bytes : lanes.active || Format::kRotated;
}

}  // namespace sm90
