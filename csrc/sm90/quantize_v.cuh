// V: optionally minus its mean over tokens, per channel to E4M3, transposed. Keys within 16 are stored in the order in
// which the softmax leaves its probabilities in registers: [0, 1, 8, 9, 2, 3, 10, 11, ...].
#pragma once

#include "common/e4m3.cuh"
#include "sm90/quantize.cuh"

namespace sm90 {

// Row of V^T that holds a channel: so a thread's accumulators of four groups of eight columns, 8j + 2t and 8j + 2t + 1,
// are the eight neighboring channels from 8t on.
__device__ __forceinline__ constexpr int row_of_channel(int channel) {
  return channel / kVChannels * kVChannels + channel % 8 / 2 * 8 + channel / 8 % 4 * 2 + channel % 2;
}

// A channel of four keys.
__device__ __forceinline__ unsigned quantized_word(const float (&values)[4][8], float inverse, int channel) {
  return pack_e4m3(values[0][channel] * inverse, values[1][channel] * inverse, values[2][channel] * inverse,
                   values[3][channel] * inverse);
}

// Whether E4M3 cuts one of them off. A channel that was zero where its scale comes from has an inverse of zero.
__device__ __forceinline__ bool exceeds(const float (&values)[4][8], const float (&inverse)[8]) {
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float factor = inverse[j] == 0.f ? 0x1p127f : inverse[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(values[i][j] * factor));
  }
  return largest > kMaxE4m3;
}

template <class T, int kLanes, class Hidden>
__device__ __forceinline__ void quantize_v(const QuantizeParams& params, const BatchHead& bh, int block,
                                           const Hidden& hidden) {
  constexpr int kWords = kVTokens / 4;  // a word holds four keys of one channel
  __shared__ unsigned tile[kLanes * 8][kWords + 1];
  __shared__ unsigned hidden_bits[kVTokens / 32];
  if (hidden.any()) {
    if (threadIdx.x < kVTokens) {
      const unsigned bits = hidden.bits(block * kVTokens + threadIdx.x / 32 * 32, params.kv_length);
      if (threadIdx.x % 32 == 0) hidden_bits[threadIdx.x / 32] = bits;
    }
    __syncthreads();
  }
  const T* v = bh.of<T>(params.v);
  const i64 channels = i64(bh.index) * params.head_dim;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A warp takes 4 groups of 8 channels x 8 words: reads of 64 bytes, and no two of its writes meet in a bank.
#pragma unroll
  for (int pass = 0; pass < kLanes / 8; ++pass) {
    const int part = pass * 8 + warp;
    const int channel = (part / 4 * 4 + lane % 4) * 8, word = part % 4 * 8 + lane / 4;
    const int first = block * kVTokens + word / 4 * 16 + word % 4 * 2;
    const bool active = channel < params.head_dim;
    float inverse[8], mean[8], values[4][8];
    load_or_zero(params.v_inverse + channels + channel, active, inverse);
    load_or_zero(params.v_mean + channels + channel, active && params.smooth_v, mean);
    unsigned hidden_here = 0;  // from `first` on
    if (hidden.any()) hidden_here = hidden_bits[first / 32 % (kVTokens / 32)] >> first % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + i / 2 * 8 + i % 2;
      const bool valid = active && token < params.kv_length && !(hidden_here >> (token - first) & 1u);
      load_or_zero(v + token * params.v.token_stride + channel, valid, values[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[i][j] = valid ? values[i][j] - mean[j] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) tile[channel + j][word] = quantized_word(values, inverse[j], j);
    if (params.too_large && exceeds(values, inverse)) *params.too_large = 1;
  }
  __syncthreads();
  const int position = block * kVTokens + 4 * lane;
  if (position >= params.key_row_bytes) return;
  const i64 first_row = i64(bh.index) * params.v_rows;
  for (int channel = warp; channel < params.v_rows; channel += kQuantizeThreads / 32)
    *reinterpret_cast<unsigned*>(params.v_fp8 + (first_row + row_of_channel(channel)) * params.key_row_bytes +
                                 position) = tile[channel][lane];
}

}  // namespace sm90
