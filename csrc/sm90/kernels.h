// The attention kernels of the family, one row a kernel: the kernels are defined from these rows (attention.cu,
// precise.cu), and launch code finds them there (kernel_table.h). Plain data, no CUDA headers.
#pragma once

#include "common/mask_policy.h"

namespace sm90 {

using common::MaskPolicy;

// The type of P and V in their product. E4M3: modes 8b and 4b, whose scores are int8 numbers alike. 16 bits: precise.
enum class PvElement { e4m3, fp16, bf16 };

// What tells kernels of the same mask policy apart.
enum class Variant {
  standard,
  narrow,          // a step takes kTileN keys, where the standard one takes kWideTileN
  fused_prologue,  // quantizes Q itself and runs beside the prologue of a short KV, which prepares K and V in one pass
  rotating_prologue,  // the same, and rotates Q of the heads that are rotated
  after_prologue,  // of few keys and a mask, in two phases: as with a fused prologue, which is over, and Q is quantized
  dense_fallback,  // a copy of the standard one that is launched beside a block-list kernel alone
};

constexpr MaskPolicy kAnyBias = MaskPolicy::key_bias | MaskPolicy::row_bias;

}  // namespace sm90

// ROW(family, head_dim, suffix, P and V, mask policy, variant). Kernels of 8b and 4b are of the family `attention`,
// those of the precise mode of `precise`. head_dim is 64, 128 or 256: others are filled up with zeros.
#define SM90_KERNEL_NAME(family, head_dim, suffix) family##_d##head_dim##suffix
#define SM90_IMAGE_NAME(family, head_dim) family##_d##head_dim

#define SM90_STANDARD_ROWS(ROW, head_dim)                      \
  ROW(attention, head_dim, , e4m3, MaskPolicy::none, standard) \
  ROW(attention, head_dim, _biased, e4m3, kAnyBias | MaskPolicy::padding, standard)
#define SM90_NARROW_ROWS(ROW, head_dim)                             \
  ROW(attention, head_dim, _narrow, e4m3, MaskPolicy::none, narrow) \
  ROW(attention, head_dim, _narrow_biased, e4m3, kAnyBias | MaskPolicy::padding, narrow)
#define SM90_FUSED_PROLOGUE_ROWS(ROW, head_dim)                                                                   \
  ROW(attention, head_dim, _quantizing, e4m3, MaskPolicy::none, fused_prologue)                                   \
  ROW(attention, head_dim, _quantizing_biased, e4m3, MaskPolicy::key_bias | MaskPolicy::padding, fused_prologue)  \
  ROW(attention, head_dim, _rotating, e4m3, MaskPolicy::none, rotating_prologue)                                  \
  ROW(attention, head_dim, _rotating_biased, e4m3, MaskPolicy::key_bias | MaskPolicy::padding, rotating_prologue) \
  ROW(attention, head_dim, _prequantized_biased, e4m3, MaskPolicy::key_bias | MaskPolicy::padding, after_prologue)
#define SM90_OTHER_ROWS(ROW, head_dim)                                                    \
  ROW(attention, head_dim, _causal, e4m3, MaskPolicy::causal, standard)                   \
  ROW(attention, head_dim, _causal_biased, e4m3, MaskPolicy::causal | kAnyBias, standard) \
  ROW(attention, head_dim, _listed, e4m3, MaskPolicy::block_list, standard)               \
  ROW(attention, head_dim, _listed_biased, e4m3, MaskPolicy::block_list | kAnyBias, standard)
#define SM90_PRECISE_ROWS(ROW, head_dim, element)                                                      \
  ROW(precise, head_dim, _##element, element, MaskPolicy::none, standard)                              \
  ROW(precise, head_dim, _##element##_causal, element, MaskPolicy::causal, standard)                   \
  ROW(precise, head_dim, _##element##_biased, element, kAnyBias | MaskPolicy::padding, standard)       \
  ROW(precise, head_dim, _##element##_causal_biased, element, MaskPolicy::causal | kAnyBias, standard) \
  ROW(precise, head_dim, _##element##_listed, element, MaskPolicy::block_list, standard)               \
  ROW(precise, head_dim, _##element##_listed_biased, element, MaskPolicy::block_list | kAnyBias, standard)
#define SM90_DENSE_FALLBACK_ROWS(ROW, head_dim, element)                                        \
  ROW(precise, head_dim, _##element##_beside_listed, element, MaskPolicy::none, dense_fallback) \
  ROW(precise, head_dim, _##element##_causal_beside_listed, element, MaskPolicy::causal, dense_fallback)

// All of an image.
#define SM90_ROWS_OF_attention_64(ROW) \
  SM90_STANDARD_ROWS(ROW, 64) SM90_NARROW_ROWS(ROW, 64) SM90_FUSED_PROLOGUE_ROWS(ROW, 64) SM90_OTHER_ROWS(ROW, 64)
#define SM90_ROWS_OF_attention_128(ROW) \
  SM90_STANDARD_ROWS(ROW, 128) SM90_FUSED_PROLOGUE_ROWS(ROW, 128) SM90_OTHER_ROWS(ROW, 128)
#define SM90_ROWS_OF_attention_256(ROW) SM90_STANDARD_ROWS(ROW, 256) SM90_OTHER_ROWS(ROW, 256)
#define SM90_ROWS_OF_precise_64(ROW) SM90_PRECISE_ROWS(ROW, 64, fp16) SM90_PRECISE_ROWS(ROW, 64, bf16)
#define SM90_ROWS_OF_precise_128(ROW) SM90_PRECISE_ROWS(ROW, 128, fp16) SM90_PRECISE_ROWS(ROW, 128, bf16)
#define SM90_ROWS_OF_precise_256(ROW) \
  SM90_PRECISE_ROWS(ROW, 256, fp16)   \
  SM90_PRECISE_ROWS(ROW, 256, bf16) SM90_DENSE_FALLBACK_ROWS(ROW, 256, fp16) SM90_DENSE_FALLBACK_ROWS(ROW, 256, bf16)
// `head_dim` may be a macro.
#define SM90_ROWS(family, head_dim, ROW) SM90_ROWS_OF(family, head_dim)(ROW)
#define SM90_ROWS_OF(family, head_dim) SM90_ROWS_OF_##family##_##head_dim
