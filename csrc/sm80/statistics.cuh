// Means of K over a sample of its tokens and of V over all, and the scales of V's channels (paper sections 3.1, 3.3,
// 3.4), in two passes: partial results of kStatisticsTokens tokens each, then their sum in a fixed order, so that
// repeated calls agree bit by bit.
#pragma once

#include "common/hidden_keys.cuh"
#include "common/sampled_keys.cuh"
#include "sm80/layout.cuh"
#include "sm80/rows.cuh"

namespace sm80 {

__device__ __forceinline__ float merge(int statistic, float x, float y) {
  return statistic == 0 ? x + y : max_nan(x, y);
}

// Whether the mean is that of a sample, which the first chunk has: of K, where a mask cannot hide keys.
__device__ __forceinline__ bool is_of_sample(const StatisticsParams& p, bool is_key) { return is_key && !p.shown; }

// Grid: (kv heads, chunks, K or V). Where V is stored as it is there is none of V. A chunk all of whose keys are hidden
// has the results of all its keys, for masks that hide all.
template <int kHeadDim, class T>
__device__ __forceinline__ void partial_statistics(const StatisticsParams& p) {
  using Pieces = RowPieces<kHeadDim, kStatisticsThreads>;
  const T* start = head_start<T>(blockIdx.z == 0 ? p.k : p.v, blockIdx.x, p.sizes.kv_heads);
  const i64 stride = blockIdx.z == 0 ? p.k.token_stride : p.v.token_stride;
  const int first = blockIdx.y * kStatisticsTokens;
  const int last = min(first + kStatisticsTokens, p.sizes.kv_length);
  const bool samples = is_of_sample(p, blockIdx.z == 0);
  if (samples && blockIdx.y != 0) return;
  __shared__ unsigned shown_keys[kStatisticsTokens / 32];  // bits of 32 keys each
  int shown = 0;
  if (p.shown) {
    const HiddenKeys hidden(p.mask, blockIdx.x / p.sizes.kv_heads);
#pragma unroll 1
    for (int base = 0; base < kStatisticsTokens; base += kStatisticsThreads) {
      const int place = base + threadIdx.x;
      const bool shows = first + place < last && !hidden.has(first + place);
      const unsigned bits = __ballot_sync(0xffffffffu, shows);
      if (threadIdx.x % 32 == 0) shown_keys[place / 32] = bits;
      shown += __syncthreads_count(shows);
    }
    if (blockIdx.z == 0 && threadIdx.x == 0) p.shown_of_chunks[i64(blockIdx.x) * p.chunks + blockIdx.y] = shown;
  }
  float found[kStatistics][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    found[0][i] = 0.f;
    found[1][i] = found[2][i] = -__builtin_bit_cast(float, 0x7f800000u);
  }
  const auto add = [&](int token) {
    float x[8];
    load_piece(x, start + token * stride, Pieces::channel(), p.sizes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      found[0][i] += x[i];
      found[1][i] = max_nan(found[1][i], x[i]);
      found[2][i] = max_nan(found[2][i], -x[i]);
    }
  };
  // Several loops: a test at each token would keep the loads of several tokens from being under way at a time.
  if (samples) {
#pragma unroll 4
    for (int n = Pieces::row(); n < sampled_key_count(p.sizes.kv_length); n += Pieces::kRowsAtOnce)
      add(sampled_key(n, p.sizes.kv_length));
  } else if (shown == 0) {
    for (int token = first + Pieces::row(); token < last; token += Pieces::kRowsAtOnce) add(token);
  } else {
#pragma unroll 2
    for (int token = first + Pieces::row(); token < last; token += Pieces::kRowsAtOnce) {
      const int place = token - first;
      if (shown_keys[place / 32] >> place % 32 & 1) add(token);
    }
  }
  __shared__ float shared[Pieces::kRowsAtOnce][kHeadDim];
  float* out =
      p.partials + ((i64(blockIdx.z) * p.slices + blockIdx.x) * p.chunks + blockIdx.y) * kStatistics * kHeadDim;
#pragma unroll
  for (int statistic = 0; statistic < kStatistics; ++statistic) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[Pieces::row()][Pieces::channel() + i] = found[statistic][i];
    __syncthreads();
    for (int channel = threadIdx.x; channel < kHeadDim; channel += kStatisticsThreads) {
      float merged = shared[0][channel];
      for (int row = 1; row < Pieces::kRowsAtOnce; ++row) merged = merge(statistic, merged, shared[row][channel]);
      out[statistic * kHeadDim + channel] = merged;
    }
  }
}

// The smallest power of two that is not below a normal positive number; infinity and NaN stay what they are.
__device__ __forceinline__ float next_power_of_two(float x) {
  return x < 0x1p127f ? __int_as_float((__float_as_int(x) + 0x7fffff) & 0x7f800000) : x;
}

// Grid: (kv heads, K or V), a thread for each channel.
template <int kHeadDim>
__device__ __forceinline__ void finish_statistics(const StatisticsParams& p) {
  const float* in =
      p.partials + (i64(blockIdx.y) * p.slices + blockIdx.x) * p.chunks * kStatistics * kHeadDim + threadIdx.x;
  float found[kStatistics];
#pragma unroll
  for (int statistic = 0; statistic < kStatistics; ++statistic) found[statistic] = in[statistic * kHeadDim];
  const bool samples = is_of_sample(p, blockIdx.y == 0);
  int tokens = samples ? sampled_key_count(p.sizes.kv_length) : p.sizes.kv_length;
  const int* shown_of_chunks = p.shown_of_chunks + i64(blockIdx.x) * p.chunks;
  int shown = 0;
  if (p.shown) {
    for (int chunk = 0; chunk < p.chunks; ++chunk) shown += shown_of_chunks[chunk];
    if (blockIdx.y == 0 && threadIdx.x == 0) p.shown[blockIdx.x] = shown;
    if (shown != 0) tokens = shown;
    if (shown != 0 && shown_of_chunks[0] == 0) {
      found[0] = 0.f;
      found[1] = found[2] = -__builtin_bit_cast(float, 0x7f800000u);
    }
  }
  const int chunks = samples ? 1 : p.chunks;
  for (int chunk = 1; chunk < chunks; ++chunk) {
    if (shown != 0 && shown_of_chunks[chunk] == 0) continue;
#pragma unroll
    for (int statistic = 0; statistic < kStatistics; ++statistic) {
      found[statistic] = merge(statistic, found[statistic], in[(i64(chunk) * kStatistics + statistic) * kHeadDim]);
    }
  }
  const i64 at = i64(blockIdx.x) * kHeadDim + threadIdx.x;
  const float mean = found[0] / tokens;
  if (blockIdx.y == 0) {
    p.k_mean[at] = mean;
    return;
  }
  const float center = p.smooth_v ? mean : 0.f;
  float largest = max_nan(found[1] - center, found[2] + center);
  if (p.sizes.element == kHalf) largest = storable_amax<__half>(largest, center);
  p.v_mean[at] = center;
  const float scale = max_nan(largest / p.v_maximum, kSmallestScale);
  p.v_scale[at] = p.powers_of_two ? next_power_of_two(scale) : scale;
}

}  // namespace sm80
