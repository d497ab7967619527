// The attention kernels of the family, one row a kernel: the kernels are defined from these rows (attention.cu), and
// launch code finds them there (kernel_table.h). Plain data, no CUDA headers. INT4_SCORES=0
// leaves out the 4-bit kernels; launch code, which serves images with and without them, does not define it.
#pragma once

#include "common/mask_policy.h"

namespace sm80 {

using common::MaskPolicy;

// 8b and 4b have P and V in 8 bits (in fp16 with HALF_VALUES) and sums in fp32 or fp16; precise has P and V in fp16 or
// bf16 and sums in fp32.
enum class PvProduct { fp32_sums, fp16_sums, precise_fp16, precise_bf16 };

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
// All of an image.
#define SM80_ROWS(ROW, head_dim)                             \
  SM80_8BIT_ROWS(ROW, head_dim, 8b, fp32, fp32_sums)         \
  SM80_8BIT_ROWS(ROW, head_dim, 8b, fp16, fp16_sums)         \
  SM80_8BIT_ROWS(ROW, head_dim, precise, fp16, precise_fp16) \
  SM80_8BIT_ROWS(ROW, head_dim, precise, bf16, precise_bf16) \
  SM80_4BIT_ROWS(ROW, head_dim, fp32, fp32_sums)             \
  SM80_4BIT_ROWS(ROW, head_dim, fp16, fp16_sums)
