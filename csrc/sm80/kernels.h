// The attention kernels of the family, one row a kernel: the kernels are defined from these rows (attention.cu), and
// launch code finds them there (kernel_table.h). Plain data, no CUDA headers. INT4_SCORES=0
// leaves out the 4-bit kernels; launch code, which serves images with and without them, does not define it.
#pragma once

#include "common/mask_policy.h"

namespace sm80 {

using common::MaskPolicy;

// 8b and 4b have P and V in E4M3 (in fp16 with HALF_VALUES) and sums in fp32 or fp16, or both in INT8, or in E4M3 by
// block-scaled products. precise has P and V in fp16 or bf16 and sums in fp32, or both in fp16 and sums in fp16.
enum class PvProduct { fp32_sums, fp16_sums, int8, mxfp8, precise_fp16, precise_bf16, precise_fp16_sums };

// Whether V's channels have scales, and a mean where V is smoothed.
constexpr bool has_v_scale(PvProduct product) {
  return product != PvProduct::precise_fp16 && product != PvProduct::precise_bf16;
}
// Bytes of an element of V; half_values: floats of 8b and 4b are fp16.
constexpr int v_bytes(PvProduct product, bool half_values) {
  const bool is_float = product == PvProduct::fp32_sums || product == PvProduct::fp16_sums;
  return product == PvProduct::int8 || product == PvProduct::mxfp8 || (is_float && !half_values) ? 1 : 2;
}
// Key blocks whose K is in shared memory at a time: with two the next is copied while one is worked on. E4M3 has one.
constexpr int key_stages(PvProduct product, bool half_values) {
  return product == PvProduct::int8 || v_bytes(product, half_values) == 2 ? 2 : 1;
}
// Likewise of V, which then needs no barrier of its own. Where it is small: three blocks of threads fit into 100 KB.
constexpr int value_stages(bool is_int8, int head_dim) { return is_int8 && head_dim == 64 ? 2 : 1; }

}  // namespace sm80

// ROW(head_dim, name, bits of Q and K, mask policy, product of P and V). The part of a name for the mask policy:
// "plain" scores, with a key "bias", or with a "mask" of their own for each query. Smooth Q, in 4 bits, always brings a
// key bias.
#define SM80_8BIT_ROWS(ROW, head_dim, mode, element, product)                                   \
  ROW(head_dim, attention_##mode##_plain_##element, 8, MaskPolicy::none, PvProduct::product)    \
  ROW(head_dim, attention_##mode##_bias_##element, 8, MaskPolicy::key_bias, PvProduct::product) \
  ROW(head_dim, attention_##mode##_mask_##element, 8, MaskPolicy::row_bias, PvProduct::product)
#if !defined(INT4_SCORES) || INT4_SCORES
#define SM80_4BIT_ROWS(ROW, head_dim, element, product)                                   \
  ROW(head_dim, attention_4b_bias_##element, 4, MaskPolicy::key_bias, PvProduct::product) \
  ROW(head_dim, attention_4b_mask_##element, 4, MaskPolicy::key_bias | MaskPolicy::row_bias, PvProduct::product)
#else
#define SM80_4BIT_ROWS(ROW, head_dim, element, product)
#endif
// Where V of 8b is in fp16, FP16 sums of precise are those of 8b.
#if HALF_VALUES
#define SM80_PRECISE_FP16_SUMS_ROWS(ROW, head_dim)
#else
#define SM80_PRECISE_FP16_SUMS_ROWS(ROW, head_dim) SM80_8BIT_ROWS(ROW, head_dim, precise, fp16_sums, precise_fp16_sums)
#endif
// All of an image but that of block-scaled products.
#define SM80_ROWS(ROW, head_dim)                             \
  SM80_8BIT_ROWS(ROW, head_dim, 8b, fp32, fp32_sums)         \
  SM80_8BIT_ROWS(ROW, head_dim, 8b, fp16, fp16_sums)         \
  SM80_8BIT_ROWS(ROW, head_dim, 8b, int8, int8)              \
  SM80_8BIT_ROWS(ROW, head_dim, precise, fp16, precise_fp16) \
  SM80_8BIT_ROWS(ROW, head_dim, precise, bf16, precise_bf16) \
  SM80_PRECISE_FP16_SUMS_ROWS(ROW, head_dim)                 \
  SM80_4BIT_ROWS(ROW, head_dim, fp32, fp32_sums)             \
  SM80_4BIT_ROWS(ROW, head_dim, fp16, fp16_sums)             \
  SM80_4BIT_ROWS(ROW, head_dim, int8, int8)
// All of an image of block-scaled products.
#define SM80_MXFP8_ROWS(ROW, head_dim) SM80_8BIT_ROWS(ROW, head_dim, 8b, mxfp8, mxfp8)
