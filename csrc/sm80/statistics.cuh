// Means of K and V over all tokens and the scales of V's channels (paper sections 3.1, 3.3, 3.4), in two passes:
// partial results of kStatisticsTokens tokens each, then their sum in a fixed order, so that repeated calls agree bit
// by bit.
#pragma once

#include "common/hidden_keys.cuh"
#include "sm80/layout.cuh"
#include "sm80/rows.cuh"

namespace sm80 {

__device__ __forceinline__ float merge(int statistic, float x, float y) {
  return statistic == 0 ? x + y : max_nan(x, y);
}

// Grid: (kv heads, chunks, K or V). The precise mode has no V. A chunk without a shown key has the results of all its
// keys, for masks that hide all.
template <int kHeadDim, class T>
__device__ __forceinline__ void partial_statistics(const StatisticsParams& p) {
  using Pieces = RowPieces<kHeadDim, kStatisticsThreads>;
  const T* start = head_start<T>(blockIdx.z == 0 ? p.k : p.v, blockIdx.x, p.sizes.kv_heads);
  const i64 stride = blockIdx.z == 0 ? p.k.token_stride : p.v.token_stride;
  const int first = blockIdx.y * kStatisticsTokens;
  const int last = min(first + kStatisticsTokens, p.sizes.kv_length);
  HiddenKeys hidden(p.mask, blockIdx.x / p.sizes.kv_heads);
  const int shown = hidden.count_shown<kStatisticsThreads>(first, last);
  hidden.all_but(shown);
  if (blockIdx.z == 0 && threadIdx.x == 0) p.shown_of_chunks[i64(blockIdx.x) * p.chunks + blockIdx.y] = shown;
  float found[kStatistics][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    found[0][i] = 0.f;
    found[1][i] = found[2][i] = -__builtin_bit_cast(float, 0x7f800000u);
  }
  for (int token = first + Pieces::row(); token < last; token += Pieces::kRowsAtOnce) {
    if (hidden.has(token)) continue;
    float x[8];
    load_piece(x, start + token * stride, Pieces::channel(), p.sizes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      found[0][i] += x[i];
      found[1][i] = max_nan(found[1][i], x[i]);
      found[2][i] = max_nan(found[2][i], -x[i]);
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

// Grid: (kv heads, K or V), a thread for each channel.
template <int kHeadDim>
__device__ __forceinline__ void finish_statistics(const StatisticsParams& p) {
  const float* in =
      p.partials + (i64(blockIdx.y) * p.slices + blockIdx.x) * p.chunks * kStatistics * kHeadDim + threadIdx.x;
  const int* shown_of_chunks = p.shown_of_chunks + i64(blockIdx.x) * p.chunks;
  int shown = 0;
  for (int chunk = 0; chunk < p.chunks; ++chunk) shown += shown_of_chunks[chunk];
  if (blockIdx.y == 0 && threadIdx.x == 0) p.shown[blockIdx.x] = shown;
  const float infinity = __builtin_bit_cast(float, 0x7f800000u);
  float found[kStatistics] = {0.f, -infinity, -infinity};
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    if (shown != 0 && shown_of_chunks[chunk] == 0) continue;
#pragma unroll
    for (int statistic = 0; statistic < kStatistics; ++statistic) {
      found[statistic] = merge(statistic, found[statistic], in[(i64(chunk) * kStatistics + statistic) * kHeadDim]);
    }
  }
  const i64 at = i64(blockIdx.x) * kHeadDim + threadIdx.x;
  const float mean = found[0] / (shown != 0 ? shown : p.sizes.kv_length);
  if (blockIdx.y == 0) {
    p.k_mean[at] = mean;
    return;
  }
  const float center = p.smooth_v ? mean : 0.f;
  float largest = max_nan(found[1] - center, found[2] + center);
  if (p.sizes.element == kHalf) largest = storable_amax<__half>(largest, center);
  p.v_mean[at] = center;
  p.v_scale[at] = max_nan(largest / p.v_maximum, kSmallestScale);
}

}  // namespace sm80
