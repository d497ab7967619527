// The element types of tensors and masks, read as and written from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Eight neighbouring elements from a 16-byte aligned address.
__device__ __forceinline__ void load_eight(const __half* from, float (&to)[8]) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void load_eight(const __nv_bfloat16* from, float (&to)[8]) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void load_eight(const float* from, float (&to)[8]) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Two neighbouring elements to an address aligned to their pair.
__device__ __forceinline__ void store_pair(__half* to, float x, float y) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// The larger of two numbers, NaN if one of them is NaN: a NaN in a tensor has to reach the output.
__device__ __forceinline__ float max_or_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}
