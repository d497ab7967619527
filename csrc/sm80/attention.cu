// The attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given by the
// definition HEAD_DIM. INT4_SCORES adds the 4-bit kernels, HALF_VALUES replaces the E4M3 product P V by one in fp16.
#include "sm80/attention.cuh"

using namespace sm80;

// Blocks that one SM should hold: as many as the registers of the output allow.
template <class Pv>
constexpr int kMinBlocksPerSm = HEAD_DIM == 256                       ? 1
                                : HEAD_DIM == 128 || Pv::kVBytes == 2 ? 2
                                                                      : 3;

#define ATTENTION_KERNEL(name, bits, product, has_bias, has_mask)                                     \
  extern "C" __global__ void __launch_bounds__(attention_threads(HEAD_DIM), kMinBlocksPerSm<product>) \
      name(const __grid_constant__ AttentionParams params) {                                          \
    Attention<HEAD_DIM, bits, product, has_bias, has_mask>::run(params);                              \
  }
#define KERNELS_8B(suffix, product)                                       \
  ATTENTION_KERNEL(attention_8b_plain_##suffix, 8, product, false, false) \
  ATTENTION_KERNEL(attention_8b_bias_##suffix, 8, product, true, false)   \
  ATTENTION_KERNEL(attention_8b_mask_##suffix, 8, product, false, true)
#define KERNELS_PRECISE(suffix, T)                                                \
  ATTENTION_KERNEL(attention_precise_plain_##suffix, 8, Precise<T>, false, false) \
  ATTENTION_KERNEL(attention_precise_bias_##suffix, 8, Precise<T>, true, false)   \
  ATTENTION_KERNEL(attention_precise_mask_##suffix, 8, Precise<T>, false, true)
// Smoothed Q always brings a key bias.
#define KERNELS_4B(suffix, product)                                     \
  ATTENTION_KERNEL(attention_4b_bias_##suffix, 4, product, true, false) \
  ATTENTION_KERNEL(attention_4b_mask_##suffix, 4, product, true, true)

#if HALF_VALUES
using FloatProduct = HalfFloat;
using HalfProduct = HalfHalf;
#else
using FloatProduct = E4m3Float;
using HalfProduct = E4m3Half;
#endif

KERNELS_8B(fp32, FloatProduct)
KERNELS_8B(fp16, HalfProduct)
KERNELS_PRECISE(fp16, __half)
KERNELS_PRECISE(bf16, __nv_bfloat16)
#if INT4_SCORES
KERNELS_4B(fp32, FloatProduct)
KERNELS_4B(fp16, HalfProduct)
#endif
