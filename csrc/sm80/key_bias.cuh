// What is added to the scores of each key: the correction of smoothed Q and masks that broadcast over queries.
#pragma once

#include "sm80/counted_keys.cuh"
#include "sm80/rows.cuh"
#include "sm80/softmax.cuh"
#include "sm80/values.cuh"

namespace sm80 {

__device__ __forceinline__ float key_mask_term(const Mask& mask, i64 mask_offset, int key, int kv_length) {
  if (key >= kv_length) return kNegativeInfinity;
  if (mask.element == kNone) return 0.f;
  return visit_mask(mask,
                    [&](const auto* elements) { return mask_term(elements[mask_offset + key * mask.key_stride]); });
}

// Without smoothed Q: one row of the bias for each batch and head of the mask. Grid: (rows, blocks of keys).
__device__ __forceinline__ void mask_bias(const KeyBiasParams& p) {
  const int position = blockIdx.y * blockDim.x + threadIdx.x;
  if (position >= p.padded_keys) return;
  const int batch = blockIdx.x / p.heads, head = blockIdx.x - batch * p.heads;
  const i64 mask_offset = batch * p.mask.batch_stride + head * p.mask.head_stride;
  p.bias[i64(blockIdx.x) * p.padded_keys + position] =
      key_mask_term(p.mask, mask_offset, key_at_position(position), p.kv_length);
}

// The power of two that brings numbers of this largest magnitude (the bits of a float) to 2^12, where fp16 is exact
// enough for those below it, too; 1 where they are in fp16's range anyway.
__device__ __forceinline__ float half_range_factor(unsigned amax_bits) {
  const float amax = __uint_as_float(amax_bits);
  if (amax == 0.f || (amax >= 0x1p-10f && amax <= 65504.f)) return 1.f;
  constexpr int kBias = 127, kWanted = 12, kLargestExponent = 254;
  const int exponent = static_cast<int>(amax_bits >> 23) - kBias;
  return __uint_as_float(static_cast<unsigned>(min(kWanted - exponent + kBias, kLargestExponent)) << 23);
}

// The bits of |x|; 0 where x is NaN or infinite, so that one broken query block does not take the range of its
// neighbors.
__device__ __forceinline__ unsigned finite_magnitude(float x) {
  const unsigned bits = __float_as_uint(fabsf(x));
  return bits < 0x7f800000u ? bits : 0u;
}

// Delta S of the paper's equation 3 for 64 query blocks and 64 keys: mean(Q_i) . (K_j - mean(K)). Smoothed K is rounded
// to fp16; the means are split into two fp16 numbers, because an error of theirs would be common to a whole row of
// scores. Numbers beyond fp16's range are scaled and read again. Grid: (q heads of this launch x key blocks, groups of
// 64 query blocks).
template <int kHeadDim, class T>
__device__ __forceinline__ void delta_bias(const DeltaParams& p) {
  using Pieces = RowPieces<kHeadDim, kDeltaThreads>;
  const Sizes& sizes = p.sizes;
  const int bh_of_launch = blockIdx.x / sizes.key_blocks;
  const int bh = p.first_slice + bh_of_launch;
  const int first_key = (blockIdx.x - bh_of_launch * sizes.key_blocks) * kKeyBlock;
  const int first_row = blockIdx.y * kDeltaBlock;
  const i64 first_work_of_bh = i64(bh) * sizes.query_blocks;  // of its first query block
  const i64 end_of_group = first_work_of_bh + min(first_row + kDeltaBlock, sizes.query_blocks);
  if (first_work_of_bh + first_row >= p.first_work + p.works || end_of_group <= p.first_work) return;
  const int batch = bh / sizes.q_heads, head = bh - batch * sizes.q_heads;
  const int kv_bh = batch * sizes.kv_heads + head / (sizes.q_heads / sizes.kv_heads);

  __shared__ __align__(16) __half keys[kKeyBlock][kHeadDim + 8];
  const T* start = head_start<T>(p.k, kv_bh, sizes.kv_heads);
  const float* k_mean = p.k_mean + i64(kv_bh) * kHeadDim + Pieces::channel();
  __shared__ unsigned key_amax;  // bits of non-negative floats, a NaN above all numbers
  if (threadIdx.x == 0) key_amax = 0u;
  const KeyBits shown_keys = counted_keys(p.mask, p.shown, kv_bh, first_key, sizes);  // a hidden key reads as the mean
  float key_factor = 1.f;
#pragma unroll 1
  for (bool again = true; again;) {
    unsigned amax = 0u;
    for (int row = Pieces::row(); row < kKeyBlock; row += Pieces::kRowsAtOnce) {
      float x[8] = {};
      if (has_key(shown_keys, row)) {
        load_piece(x, start + (first_key + row) * p.k.token_stride, Pieces::channel(), sizes);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = (x[i] - k_mean[i]) * key_factor;
      }
#pragma unroll
      for (float value : x) amax = max(amax, __float_as_uint(fabsf(value)));
      *reinterpret_cast<uint4*>(&keys[row][Pieces::channel()]) =
          make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
    }
    __syncthreads();
    if (key_factor != 1.f) break;
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) atomicMax(&key_amax, amax);
    __syncthreads();
    key_factor = half_range_factor(key_amax);
    again = key_factor != 1.f;
  }

  const int lane = threadIdx.x % 32;
  const int row = first_row + threadIdx.x / 32 * 16 + lane / 4;  // this thread's first row; the second is row + 8
  float sums[8][4];
  float mean_factor = 1.f;
#pragma unroll 1
  for (bool again = true; again;) {
    unsigned amax = 0u;
#pragma unroll
    for (float (&sum)[4] : sums) sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll 2
    for (int step = 0; step < kHeadDim / 16; ++step) {
      unsigned high[4], low[4];
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        const int block = min(row + slot % 2 * 8, sizes.query_blocks - 1);
        const int channel = step * 16 + slot / 2 * 8 + lane % 4 * 2;
        float2 mean = *reinterpret_cast<const float2*>(p.q_mean + (first_work_of_bh + block) * kHeadDim + channel);
        mean.x *= mean_factor;
        mean.y *= mean_factor;
        amax = max(amax, max(finite_magnitude(mean.x), finite_magnitude(mean.y)));
        high[slot] = pack_half(mean.x, mean.y);
        const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high[slot]));
        low[slot] = pack_half(mean.x - rounded.x, mean.y - rounded.y);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const __half* key = &keys[j * 8 + lane / 4][step * 16 + lane % 4 * 2];
        const unsigned b0 = *reinterpret_cast<const unsigned*>(key), b1 = *reinterpret_cast<const unsigned*>(key + 8);
        mma_half(sums[j], low, b0, b1);
        mma_half(sums[j], high, b0, b1);
      }
    }
    if (mean_factor != 1.f) break;
    mean_factor = half_range_factor(__reduce_max_sync(0xffffffffu, amax));
    again = mean_factor != 1.f;
  }
  const float scale = p.scale / mean_factor / key_factor;

  const i64 mask_offset = batch * p.mask.batch_stride + head * p.mask.head_stride;
  const i64 padded_keys = i64(sizes.key_blocks) * kKeyBlock;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float terms[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      terms[i] = key_mask_term(p.mask, mask_offset, first_key + key_at_position(pair * 16 + lane % 4 * 4 + i),
                               sizes.kv_length);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 work = first_work_of_bh + row + 8 * half;
      if (row + 8 * half >= sizes.query_blocks || work < p.first_work || work >= p.first_work + p.works) continue;
      const float (&even)[4] = sums[2 * pair];
      const float (&odd)[4] = sums[2 * pair + 1];
      float* to = p.bias + (work - p.first_work) * padded_keys + first_key + pair * 16 + lane % 4 * 4;
      *reinterpret_cast<float4*>(to) =
          make_float4(fmaf(even[2 * half], scale, terms[0]), fmaf(even[2 * half + 1], scale, terms[1]),
                      fmaf(odd[2 * half], scale, terms[2]), fmaf(odd[2 * half + 1], scale, terms[3]));
    }
  }
}

}  // namespace sm80
