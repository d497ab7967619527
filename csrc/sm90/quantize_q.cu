// Quantization of Q alone, beside the fused KV prologue, which is launched before it.
#include "sm90/quantize_q.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

template <class T, int kLanes, Rotates kRotates>
__device__ __forceinline__ void quantize_q_kernel(const QuantizeParams& params) {
  griddepcontrol_launch_dependents();
  const BatchHead bh(blockIdx.x / params.q_blocks, params.q_heads);
  const int block = blockIdx.x % params.q_blocks;
  if (kRotates == Rotates::always ||
      (kRotates == Rotates::by_head && wait_for_rotation(params.prepared[kv_index_of(params, bh)])))
    quantize_q<T, kLanes, FormatOf<8, kRotates, true>, true>(params, bh, block);
  else
    quantize_q<T, kLanes, FormatOf<8, kRotates, false>, true>(params, bh, block);
  // Attention waits for this grid alone, which must not end before the prologue.
  if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
}

}  // namespace sm90

#define QUANTIZE_Q_KERNEL(name, bounds, T, lanes, rotates)                                                        \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::QuantizeParams params) { \
    sm90::quantize_q_kernel<T, lanes, sm90::Rotates::rotates>(params);                                            \
  }
#define BOUNDS (sm90::kQuantizeThreads)
#define BOUNDS_OF_D256 (sm90::kQuantizeThreads, 3)  // else the rotation spills
#define QUANTIZE_Q_KERNELS(prefix, suffix, T, rotates)                \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, rotates)   \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d128, BOUNDS, T, 16, rotates) \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d256, BOUNDS_OF_D256, T, 32, rotates)
QUANTIZE_Q_KERNELS(quantize_q, fp16, __half, never)
QUANTIZE_Q_KERNELS(quantize_q, bf16, __nv_bfloat16, never)
QUANTIZE_Q_KERNELS(quantize_q_rotated, fp16, __half, always)
QUANTIZE_Q_KERNELS(quantize_q_rotated, bf16, __nv_bfloat16, always)
QUANTIZE_Q_KERNELS(quantize_q_auto, fp16, __half, by_head)
QUANTIZE_Q_KERNELS(quantize_q_auto, bf16, __nv_bfloat16, by_head)
#undef QUANTIZE_Q_KERNELS
#undef BOUNDS_OF_D256
#undef BOUNDS
#undef QUANTIZE_Q_KERNEL
