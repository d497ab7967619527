// Quantization of Q alone, beside the fused KV prologue, which is launched before it.
#include "sm90/quantize_q.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

template <class T, int kLanes, bool kRotated>
__device__ __forceinline__ void quantize_q_kernel(const QuantizeParams& params) {
  griddepcontrol_launch_dependents();
  const BatchHead bh(blockIdx.x / params.q_blocks, params.q_heads);
  quantize_q<T, kLanes, IntegerFormat<8, kRotated>, true>(params, bh, blockIdx.x % params.q_blocks);
  // Attention waits for this grid alone, which must not end before the prologue.
  if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
}

// Of heads that are rotated or not, as the prologue says of each.
template <class T, int kLanes>
__device__ __forceinline__ void quantize_q_kernel(const ChoosingQuantizeParams& params) {
  griddepcontrol_launch_dependents();
  const BatchHead bh(blockIdx.x / params.q_blocks, params.q_heads);
  const int block = blockIdx.x % params.q_blocks;
  if (wait_for_rotation(params, kv_index_of(params, bh)))
    quantize_q<T, kLanes, IntegerFormat<8, true, true>, true>(params, bh, block);
  else
    quantize_q<T, kLanes, IntegerFormat<8, false, true>, true>(params, bh, block);
  if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();  // as above
}

}  // namespace sm90

#define QUANTIZE_Q_KERNEL(name, bounds, T, lanes, rotated)                                                        \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::QuantizeParams params) { \
    sm90::quantize_q_kernel<T, lanes, rotated>(params);                                                           \
  }
#define QUANTIZE_Q_AUTO_KERNEL(name, bounds, T, lanes)                                                              \
  extern "C" __global__ void __launch_bounds__ bounds name(const                                                    \
                                                           __grid_constant__ sm90::ChoosingQuantizeParams params) { \
    sm90::quantize_q_kernel<T, lanes>(params);                                                                      \
  }
#define BOUNDS (sm90::kQuantizeThreads)
#define BOUNDS_OF_D256 (sm90::kQuantizeThreads, 3)  // else the rotation spills
#define QUANTIZE_Q_KERNELS(prefix, suffix, T, rotated)                \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, rotated)   \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d128, BOUNDS, T, 16, rotated) \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d256, BOUNDS_OF_D256, T, 32, rotated)
#define QUANTIZE_Q_AUTO_KERNELS(prefix, suffix, T)                \
  QUANTIZE_Q_AUTO_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8)   \
  QUANTIZE_Q_AUTO_KERNEL(prefix##_##suffix##_d128, BOUNDS, T, 16) \
  QUANTIZE_Q_AUTO_KERNEL(prefix##_##suffix##_d256, BOUNDS_OF_D256, T, 32)
QUANTIZE_Q_KERNELS(quantize_q, fp16, __half, false)
QUANTIZE_Q_KERNELS(quantize_q, bf16, __nv_bfloat16, false)
QUANTIZE_Q_KERNELS(quantize_q_rotated, fp16, __half, true)
QUANTIZE_Q_KERNELS(quantize_q_rotated, bf16, __nv_bfloat16, true)
QUANTIZE_Q_AUTO_KERNELS(quantize_q_auto, fp16, __half)
QUANTIZE_Q_AUTO_KERNELS(quantize_q_auto, bf16, __nv_bfloat16)
#undef QUANTIZE_Q_AUTO_KERNELS
#undef QUANTIZE_Q_KERNELS
#undef BOUNDS_OF_D256
#undef BOUNDS
#undef QUANTIZE_Q_AUTO_KERNEL
#undef QUANTIZE_Q_KERNEL
