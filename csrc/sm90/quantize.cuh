// The quantization pass: Q and K to int8 (8 or 4 bits of range), V to transposed E4M3, read in place from strided
// tensors.
#pragma once

#include "common/constants.h"
#include "common/elements.cuh"
#include "sm90/ptx.cuh"
#include "sm90/score_format.cuh"
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

template <class Format>
__device__ __forceinline__ void store_int8(const Format& format, signed char* to, const float (&x)[8],
                                           float2 inverses) {
  *reinterpret_cast<uint2*>(to) = int8_of(format, x, inverses);
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

// Whether a row of quantized Q or K has this thread's channels. Rows of a call that may rotate heads have those past
// head_dim, too: zeros where a head is not rotated.
template <class Format, int kLanes>
__device__ __forceinline__ bool has_channels(const QuantizeParams& params, const Lanes<kLanes>& lanes) {
  return Format::kOfHead ? lanes.channel < params.row_bytes : lanes.active;
}

}  // namespace sm90
