// The rotation of Q and K (comfy_sage2/quantize/rotation.py) in registers: bit by bit the same sums.
#pragma once

#include "common/elements.cuh"

namespace common {

// The first 256 bits behind the point of pi; bit i, from the left, set: channel i changes its sign.
__constant__ unsigned kRotationSigns[8] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u,
                                           0xa4093822u, 0x299f31d0u, 0x082efa98u, 0xec4e6c89u};

// Rotates tokens of 8 * kLanes channels, which kLanes neighboring threads hold, eight neighboring channels each: first
// `change_signs`, which is D and may come before sums and differences with others whose signs were changed, too, then
// `transform`, which is H and for which all threads of a warp are needed. Thread l gets the rotated channels 4l to
// 4l + 3 of the first half and then those of the second, times output_signs(). Q and K have one order, so their
// products do not depend on it.
template <int kLanes>
class Rotation {
  static constexpr int kStages = kLanes == 8 ? 3 : kLanes == 16 ? 4 : 5;

 public:
  static constexpr float kInverseSize = 1.f / (8 * kLanes);  // products of rotated tokens are so many times too large

  // With false `change_signs` changes none: for tokens that are not transformed.
  __device__ __forceinline__ explicit Rotation(bool rotated = true) {
    const unsigned lane = threadIdx.x % kLanes;
    signs_ = rotated ? kRotationSigns[lane / 4] << (lane % 4 * 8) : 0u;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) swap_signs_[stage] = sign(lane >> stage);
    swap_signs_[kStages] = 1.f;
  }

  __device__ __forceinline__ void change_signs(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(__float_as_uint(x[i]) ^ ((signs_ << i) & kSignBit));
  }
  template <class T>
  __device__ __forceinline__ void change_signs(Vec8<T>& x) const {
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < Vec8<T>::kWords; ++i) {
      unsigned mask = (signs_ << (kPerWord * i + kPerWord - 1)) & kSignBit;  // of the upper or only element
      if constexpr (kPerWord == 2) mask |= ((signs_ << (2 * i)) & kSignBit) >> 16;
      x.words[i] ^= mask;
    }
  }

  __device__ __forceinline__ void transform(float (&x)[8]) const {
    add_and_subtract<1>(x, 1.f);
    add_and_subtract<2>(x, 1.f);
    add_and_subtract<4>(x, swap_signs_[0]);
    // Two threads exchange halves of their channels, so that each computes sums and differences of one half. A thread
    // keeps the lower four registers and sends the upper four: the sign before has put there what its partner needs.
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float received = __shfl_xor_sync(0xffffffffu, x[i + 4], 1 << stage);
        const float kept = x[i];
        x[i] = fmaf(swap_signs_[stage + 1], received, kept);
        x[i + 4] = fmaf(-swap_signs_[stage + 1], received, kept);
      }
    }
  }

  // Of the lower and of the upper four. A thread that received the first operand of a difference has its negative, and
  // the sign goes with the differences to the threads of the next stage.
  static __device__ __forceinline__ float2 output_signs() {
    const unsigned lane = threadIdx.x % kLanes;
    const float low = sign(__popc(lane & lane >> 1));
    return make_float2(low, low * sign(lane >> (kStages - 1)));
  }

 private:
  // -1 for an odd number.
  static __device__ __forceinline__ float sign(unsigned number) { return number & 1u ? -1.f : 1.f; }

  // With the sign -1 sums and differences change places.
  template <int kDistance>
  static __device__ __forceinline__ void add_and_subtract(float (&x)[8], float sign) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & kDistance) continue;
      const float first = x[i], second = x[i + kDistance];
      x[i] = fmaf(sign, second, first);
      x[i + kDistance] = fmaf(-sign, second, first);
    }
  }

  static constexpr unsigned kSignBit = 0x80000000u;
  unsigned signs_;  // the first channel's is the highest bit
  float swap_signs_[kStages + 1];
};

}  // namespace common
