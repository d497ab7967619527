// Q of a work tile, quantized by the consumers: per token, with the bits of the quantization pass (quantize_q.cuh).
#pragma once

#include "common/rotation.cuh"
#include "sm90/quantize.cuh"
#include "sm90/shared_storage.cuh"

namespace sm90 {

// The larger magnitude of two numbers in each half, NaN if one of them is NaN; with any sign.
__device__ __forceinline__ unsigned larger_magnitudes(unsigned x, unsigned y, __half) {
  unsigned larger;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}
__device__ __forceinline__ unsigned larger_magnitudes(unsigned x, unsigned y, __nv_bfloat16) {
  unsigned larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}

// A quad takes the two rows that it multiplies, each of its threads 16 neighboring channels of every 64.
template <class Traits>
class QueryQuantizer {
  static constexpr int kBoxes = Traits::kElementBoxes;

 public:
  // `from`, `to`: shared-memory addresses of Q as it is and of the int8 tile. `row`: of the thread in them, and `lane`
  // its place in the quad.
  __device__ __forceinline__ QueryQuantizer(unsigned from, unsigned to, int row, int lane)
      : from_(from + row * kElementBoxBytes), to_(to + row * Traits::kRowBytes), row_(row), lane_(lane) {}

  // Rows `row` and `row` + 8. `scale`: theirs, with the softmax scale folded in. Calls `loaded` when the thread has
  // what it needs of Q as it is.
  template <class T, class Loaded>
  __device__ __forceinline__ void run(float softmax_scale, float (&scale)[2], const Loaded& loaded) const {
    Vec8<T> x[2][kBoxes][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load(x[i][box][half], i, box, half);
      }
    }
    loaded();
    constexpr FixedFormat<8, false> kFormat;
    const float amax[2] = {amax_of_row(x[0]), amax_of_row(x[1])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float inverse = inverse_or_zero(kFormat, amax[i]);
      scale[i] = folded_scale<8>(kFormat, softmax_scale, amax[i]);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        uint2 words[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[8];
          x[i][box][half].get(values);
          words[half] = int8_of(kFormat, values, make_float2(inverse, inverse));
        }
        st_shared_v4_u32(target(i, box), make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
      }
    }
  }

  // The same, rotated, with the sums of the quantization pass (common/rotation.cuh).
  template <class T, class Loaded>
  __device__ __forceinline__ void run_rotated(float softmax_scale, float (&scale)[2], const Loaded& loaded) const {
    constexpr FixedFormat<8, true> kFormat;
    Vec8<T> raw[2][kBoxes][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load(raw[i][box][half], i, box, half);
      }
    }
    loaded();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[kBoxes][2][8];
      float amax = 0.f;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) rotate_box(raw[i][box], x[box], box);
      if constexpr (kBoxes == 2) add_and_subtract(x[0], x[1]);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        amax = max_nan(amax, max_nan(amax_of_vec8(x[box][0]), amax_of_vec8(x[box][1])));
      amax = amax_of_token<4>(amax);
      const float inverse = inverse_or_zero(kFormat, amax);
      scale[i] = folded_scale<Traits::kHeadDim / 8>(kFormat, softmax_scale, amax);
      const float2 signs = output_signs();
#pragma unroll
      for (int place = 0; place < kBoxes; ++place) {
        // The pass stores four channels of the first half of all, then those at the same place of the second half.
        const auto& first = x[0][kBoxes == 2 ? place : 0];
        const auto& second = kBoxes == 2 ? x[kBoxes - 1][place] : x[0][1];
        const float sign = place == 0 ? signs.x : signs.y;
        const float2 inverses = kBoxes == 2 ? make_float2(inverse * sign, inverse * sign)
                                            : make_float2(inverse * signs.x, inverse * signs.y);
        uint2 words[2];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float values[8];
#pragma unroll
          for (int j = 0; j < 4; ++j) values[j] = first[4 * part + j], values[4 + j] = second[4 * part + j];
          words[part] = int8_of(kFormat, values, inverses);
        }
        st_shared_v4_u32(target(i, place), make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
      }
    }
  }

 private:
  // Sums in place of the first operands, differences in place of the second.
  template <int kCount>
  static __device__ __forceinline__ void add_and_subtract(float (&x)[2][kCount], float (&y)[2][kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float first = x[half][j], second = y[half][j];
        x[half][j] = first + second;
        y[half][j] = first - second;
      }
    }
  }

  // Rotates 64 channels, of which the quad's thread l has those from 16l on and gets those from 8l and from 32 + 8l on,
  // times output_signs(). As in Rotation, two threads exchange halves of what they have, and a sign of -1 puts
  // differences into the registers that a thread keeps.
  template <class T>
  __device__ __forceinline__ void rotate_box(const Vec8<T> (&raw)[2], float (&x)[2][8], int box) const {
    const unsigned signs = kRotationSigns[2 * box + lane_ / 2]
                           << (lane_ % 2 * 16);  // the first channel's is the highest
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raw[half].get(x[half]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[half][j] = __uint_as_float(__float_as_uint(x[half][j]) ^ ((signs << (8 * half + j)) & 0x80000000u));
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j & distance) continue;
          const float first = x[half][j], second = x[half][j + distance];
          x[half][j] = first + second;
          x[half][j + distance] = first - second;
        }
      }
    }
    const float keeps[3] = {lane_ & 1 ? -1.f : 1.f, lane_ & 2 ? -1.f : 1.f, 1.f};
#pragma unroll
    for (int stage = 0; stage < 3; ++stage) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float kept = x[0][j], other = stage == 0 ? x[1][j] : __shfl_xor_sync(0xffffffffu, x[1][j], stage);
        x[0][j] = fmaf(keeps[stage], other, kept);
        x[1][j] = fmaf(-keeps[stage], other, kept);
      }
    }
  }
  // Of the first and of the second eight that rotate_box leaves.
  __device__ __forceinline__ float2 output_signs() const {
    const float sign = lane_ == 3 ? -1.f : 1.f;
    return make_float2(sign, lane_ & 2 ? -sign : sign);
  }

  template <class T>
  __device__ __forceinline__ void load(Vec8<T>& x, int i, int box, int half) const {
    const int place = (2 * lane_ + half) ^ (row_ % 8);  // of 16 bytes, swizzled
    const uint4 raw = ld_shared_v4_u32(from_ + (box * Traits::kBlockM + 8 * i) * kElementBoxBytes + 16 * place);
    x.words[0] = raw.x, x.words[1] = raw.y, x.words[2] = raw.z, x.words[3] = raw.w;
  }

  // Where the channels of a box go: 16 bytes, swizzled.
  __device__ __forceinline__ unsigned target(int i, int box) const {
    constexpr int kPlaces = Traits::kRowBytes / 16, kAlike = 128 / Traits::kRowBytes;  // rows of one pattern
    return to_ + 8 * i * Traits::kRowBytes + 16 * ((4 * box + lane_) ^ (row_ / kAlike % kPlaces));
  }

  template <class T>
  __device__ __forceinline__ float amax_of_row(const Vec8<T> (&x)[kBoxes][2]) const {
    unsigned largest = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (unsigned word : x[box][half].words) largest = larger_magnitudes(largest, word, T());
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      largest = larger_magnitudes(largest, __shfl_xor_sync(0xffffffff, largest, distance), T());
    Vec8<T> pair;
    pair.clear();
    pair.words[0] = largest;
    float values[8];
    pair.get(values);
    return max_nan(fabsf(values[0]), fabsf(values[1]));
  }

  const unsigned from_, to_;
  const int row_, lane_;
};

}  // namespace sm90
