// Quantization of Q, K and V in one launch: the first blocks take Q, then K, then V.
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_q.cuh"
#include "sm90/quantize_v.cuh"

namespace sm90 {

template <class T, int kLanes, int kIntegerMax>
__device__ __forceinline__ void quantize_kernel(const QuantizeParams& params) {
  griddepcontrol_launch_dependents();
  int block = blockIdx.x;
  if (block < params.q_blocks * params.q_slices) {
    quantize_q<T, kLanes, kIntegerMax>(params, Slice(block / params.q_blocks, params.q_heads), block % params.q_blocks);
    return;
  }
  griddepcontrol_wait();
  block -= params.q_blocks * params.q_slices;
  if (block < params.k_blocks * params.kv_slices) {
    quantize_k<T, kLanes, kIntegerMax>(params, Slice(block / params.k_blocks, params.kv_heads),
                                       block % params.k_blocks);
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  quantize_v<T, kLanes>(params, Slice(block / params.v_blocks, params.kv_heads), block % params.v_blocks);
}

}  // namespace sm90

// kIntegerMax is the largest integer of the range: 127 for 8 bits, 7 for 4.
#define QUANTIZE_KERNEL(name, T, lanes, integer_max)                   \
  extern "C" __global__ void __launch_bounds__(sm90::kQuantizeThreads) \
      name(const __grid_constant__ sm90::QuantizeParams params) {      \
    sm90::quantize_kernel<T, lanes, integer_max>(params);              \
  }
#define QUANTIZE_KERNELS(name, T)                      \
  QUANTIZE_KERNEL(quantize8_##name##_d64, T, 8, 127)   \
  QUANTIZE_KERNEL(quantize8_##name##_d128, T, 16, 127) \
  QUANTIZE_KERNEL(quantize8_##name##_d256, T, 32, 127) \
  QUANTIZE_KERNEL(quantize4_##name##_d64, T, 8, 7)     \
  QUANTIZE_KERNEL(quantize4_##name##_d128, T, 16, 7)   \
  QUANTIZE_KERNEL(quantize4_##name##_d256, T, 32, 7)
QUANTIZE_KERNELS(fp16, __half)
QUANTIZE_KERNELS(bf16, __nv_bfloat16)
QUANTIZE_KERNELS(fp32, float)
#undef QUANTIZE_KERNELS
#undef QUANTIZE_KERNEL
