// Quantization of Q, K and V in one launch: the first blocks take Q, then K, then V.
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_q.cuh"
#include "sm90/quantize_v.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

template <class T, int kLanes, int kBits, Rotates kRotates>
__device__ __forceinline__ void quantize_kernel(const QuantizeParams& params) {
  griddepcontrol_launch_dependents();
  int block = blockIdx.x;
  if (block < params.q_blocks * params.q_slices) {
    const BatchHead bh(block / params.q_blocks, params.q_heads);
    block %= params.q_blocks;
    if (kRotates == Rotates::always ||
        (kRotates == Rotates::by_head && wait_for_rotation(params.prepared[kv_index_of(params, bh)])))
      quantize_q<T, kLanes, FormatOf<kBits, kRotates, true>>(params, bh, block);
    else
      quantize_q<T, kLanes, FormatOf<kBits, kRotates, false>>(params, bh, block);
    return;
  }
  griddepcontrol_wait();
  block -= params.q_blocks * params.q_slices;
  if (block < params.k_blocks * params.kv_slices) {
    const BatchHead bh(block / params.k_blocks, params.kv_heads);
    block %= params.k_blocks;
    if (kRotates == Rotates::always ||
        (kRotates == Rotates::by_head && params.prepared[bh.index].choices.rotation == kRotated))
      quantize_k<T, kLanes, FormatOf<kBits, kRotates, true>>(params, bh, block);
    else
      quantize_k<T, kLanes, FormatOf<kBits, kRotates, false>>(params, bh, block);
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  quantize_v<T, kLanes>(params, BatchHead(block / params.v_blocks, params.kv_heads), block % params.v_blocks);
}

}  // namespace sm90

#define QUANTIZE_KERNEL(name, bounds, T, lanes, bits, rotates)                                                    \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::QuantizeParams params) { \
    sm90::quantize_kernel<T, lanes, bits, sm90::Rotates::rotates>(params);                                        \
  }
#define BOUNDS (sm90::kQuantizeThreads)
// Four blocks an SM hide the exchange between threads at head_dim 128, where the registers allow it without spills.
#define FOUR_BLOCKS (sm90::kQuantizeThreads, 4)
#define QUANTIZE_KERNELS(prefix, suffix, bounds_of_d128, T, bits, rotates)        \
  QUANTIZE_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, bits, rotates)           \
  QUANTIZE_KERNEL(prefix##_##suffix##_d128, bounds_of_d128, T, 16, bits, rotates) \
  QUANTIZE_KERNEL(prefix##_##suffix##_d256, BOUNDS, T, 32, bits, rotates)
#define QUANTIZE_KERNELS_OF(suffix, bounds_rotated, T)                      \
  QUANTIZE_KERNELS(quantize8, suffix, BOUNDS, T, 8, never)                  \
  QUANTIZE_KERNELS(quantize4, suffix, BOUNDS, T, 4, never)                  \
  QUANTIZE_KERNELS(quantize8_rotated, suffix, bounds_rotated, T, 8, always) \
  QUANTIZE_KERNELS(quantize4_rotated, suffix, BOUNDS, T, 4, always)         \
  QUANTIZE_KERNELS(quantize8_auto, suffix, bounds_rotated, T, 8, by_head)   \
  QUANTIZE_KERNELS(quantize4_auto, suffix, BOUNDS, T, 4, by_head)
QUANTIZE_KERNELS_OF(fp16, FOUR_BLOCKS, __half)
QUANTIZE_KERNELS_OF(bf16, FOUR_BLOCKS, __nv_bfloat16)
QUANTIZE_KERNELS_OF(fp32, BOUNDS, float)
#undef QUANTIZE_KERNELS_OF
#undef QUANTIZE_KERNELS
#undef FOUR_BLOCKS
#undef BOUNDS
#undef QUANTIZE_KERNEL
