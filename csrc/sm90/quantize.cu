// Quantization of Q, K and V in one launch: the first blocks take Q, then K, then V.
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_q.cuh"
#include "sm90/quantize_v.cuh"

namespace sm90 {

template <class T, int kLanes, class Format>
__device__ __forceinline__ void quantize_kernel(const QuantizeParams& params) {
  griddepcontrol_launch_dependents();
  int block = blockIdx.x;
  if (block < params.q_blocks * params.q_slices) {
    quantize_q<T, kLanes, Format>(params, BatchHead(block / params.q_blocks, params.q_heads), block % params.q_blocks);
    return;
  }
  griddepcontrol_wait();
  block -= params.q_blocks * params.q_slices;
  if (block < params.k_blocks * params.kv_slices) {
    quantize_k<T, kLanes, Format>(params, BatchHead(block / params.k_blocks, params.kv_heads), block % params.k_blocks);
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  quantize_v<T, kLanes>(params, BatchHead(block / params.v_blocks, params.kv_heads), block % params.v_blocks);
}

}  // namespace sm90

#define QUANTIZE_KERNEL(name, bounds, T, lanes, bits, rotated)                                                    \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::QuantizeParams params) { \
    sm90::quantize_kernel<T, lanes, sm90::IntegerFormat<bits, rotated>>(params);                                  \
  }
#define BOUNDS (sm90::kQuantizeThreads)
// Four blocks an SM hide the exchange between threads at head_dim 128, where the registers allow it without spills.
#define FOUR_BLOCKS (sm90::kQuantizeThreads, 4)
#define QUANTIZE_KERNELS(prefix, suffix, bounds_of_d128, T, bits, rotated)        \
  QUANTIZE_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, bits, rotated)           \
  QUANTIZE_KERNEL(prefix##_##suffix##_d128, bounds_of_d128, T, 16, bits, rotated) \
  QUANTIZE_KERNEL(prefix##_##suffix##_d256, BOUNDS, T, 32, bits, rotated)
#define QUANTIZE_KERNELS_OF(suffix, bounds_rotated, T)                    \
  QUANTIZE_KERNELS(quantize8, suffix, BOUNDS, T, 8, false)                \
  QUANTIZE_KERNELS(quantize4, suffix, BOUNDS, T, 4, false)                \
  QUANTIZE_KERNELS(quantize8_rotated, suffix, bounds_rotated, T, 8, true) \
  QUANTIZE_KERNELS(quantize4_rotated, suffix, BOUNDS, T, 4, true)
QUANTIZE_KERNELS_OF(fp16, FOUR_BLOCKS, __half)
QUANTIZE_KERNELS_OF(bf16, FOUR_BLOCKS, __nv_bfloat16)
QUANTIZE_KERNELS_OF(fp32, BOUNDS, float)
#undef QUANTIZE_KERNELS_OF
#undef QUANTIZE_KERNELS
#undef FOUR_BLOCKS
#undef BOUNDS
#undef QUANTIZE_KERNEL
