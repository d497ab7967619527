// The element types of tensors and masks, read as and written from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Vec8 neighboring elements from a 16-byte aligned address.
__device__ __forceinline__ void load_vec8(const __half* from, float (&to)[8]) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void load_vec8(const __nv_bfloat16* from, float (&to)[8]) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void load_vec8(const float* from, float (&to)[8]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(from));
  const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// Vec8 neighboring elements as they are, and their unpacking: loads of several rows go out before the first is used.
template <class T>
struct Vec8 {
  static constexpr int kWords = sizeof(T) * 2;
  unsigned words[kWords];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (unsigned& word : words) word = 0u;
  }
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i);
      words[4 * i] = raw.x, words[4 * i + 1] = raw.y, words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
    }
  }
  __device__ __forceinline__ void get(float (&to)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (sizeof(T) == 4)
        to[i] = __uint_as_float(words[i]);
      else
        to[i] = pick(i, T());
    }
  }

 private:
  __device__ __forceinline__ float pick(int i, __nv_bfloat16) const {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  __device__ __forceinline__ float pick(int i, __half) const {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i / 2]));
    return i % 2 ? pair.y : pair.x;
  }
  __device__ __forceinline__ float pick(int, float) const { return 0.f; }
};

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Two neighboring elements to an address aligned to their pair.
__device__ __forceinline__ void store_pair(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// Vec8 neighboring elements to a 16-byte aligned address.
__device__ __forceinline__ void store_vec8(__half* to, const float (&x)[8]) {
  uint4 raw;
  __half2* pairs = reinterpret_cast<__half2*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = raw;
}
__device__ __forceinline__ void store_vec8(__nv_bfloat16* to, const float (&x)[8]) {
  uint4 raw;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = raw;
}
__device__ __forceinline__ void store_vec8(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Whether a magnitude is NaN or rounds to infinity as an element.
template <class T>
__device__ __forceinline__ bool is_nonfinite_as(float magnitude);
template <>
__device__ __forceinline__ bool is_nonfinite_as<__half>(float magnitude) {
  return !(magnitude < 65520.f);
}
template <>
__device__ __forceinline__ bool is_nonfinite_as<__nv_bfloat16>(float magnitude) {
  return !(magnitude < 0x1.ffp127f);
}
template <>
__device__ __forceinline__ bool is_nonfinite_as<float>(float magnitude) {
  return !(magnitude <= 0x1.fffffep127f);
}

// The largest magnitude that a channel of V, of type T and minus `mean`, is scaled for. The rounding of P V must not
// carry fp16's largest numbers to infinity: the last 1/256 below them is cut.
template <class T>
__device__ __forceinline__ float storable_amax(float amax, float) {
  return amax;
}
template <>
__device__ __forceinline__ float storable_amax<__half>(float amax, float mean) {
  const float limit = fmaxf(65504.f - fabsf(mean), 0.f) * (1.f - 1.f / 256.f);
  return amax > limit && amax <= 2.f * 65504.f ? limit : amax;  // keeps infinity and NaN
}

// A mean of elements of type T, that the rounding of its weights may have carried beyond the largest of them.
template <class T>
__device__ __forceinline__ float within_range(float mean) {
  return mean;
}
template <>
__device__ __forceinline__ float within_range<__half>(float mean) {
  return fabsf(mean) <= 2.f * 65504.f ? fminf(fmaxf(mean, -65504.f), 65504.f) : mean;  // keeps infinity and NaN
}

// The larger of two numbers, NaN if one of them is NaN: a NaN in a tensor has to reach the output.
__device__ __forceinline__ float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
