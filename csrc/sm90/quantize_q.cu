// Quantization of Q alone, beside the fused KV prologue, which is launched before it.
#include "sm90/quantize_q.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

__device__ __forceinline__ FixedFormat<8, false> wait_for_format(const QuantizeParams&, const BatchHead&) { return {}; }
// Of heads that are rotated or not, as the call or the prologue says.
__device__ __forceinline__ FormatOfHead<8> wait_for_format(const ChoosingQuantizeParams& params, const BatchHead& bh) {
  return {wait_for_rotation(params, kv_index_of(params, bh))};
}

template <class T, int kLanes, class Format, class Params>
__device__ __forceinline__ void quantize_q_kernel(const Params& params) {
  griddepcontrol_launch_dependents();
  const BatchHead bh(blockIdx.x / params.q_blocks, params.q_heads);
  quantize_q<T, kLanes, Format, true>(params, bh, blockIdx.x % params.q_blocks,
                                      [&] { return wait_for_format(params, bh); });
  // Attention waits for this grid alone, which must not end before the prologue.
  if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
}

}  // namespace sm90

#define QUANTIZE_Q_KERNEL(name, bounds, T, lanes, Params, ...)                                            \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::Params params) { \
    sm90::quantize_q_kernel<T, lanes, sm90::__VA_ARGS__>(params);                                         \
  }
#define BOUNDS (sm90::kQuantizeThreads)
#define BOUNDS_OF_D256 (sm90::kQuantizeThreads, 3)  // else the rotation spills
#define QUANTIZE_Q_KERNELS(prefix, suffix, T, Params, ...)                        \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, Params, __VA_ARGS__)   \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d128, BOUNDS, T, 16, Params, __VA_ARGS__) \
  QUANTIZE_Q_KERNEL(prefix##_##suffix##_d256, BOUNDS_OF_D256, T, 32, Params, __VA_ARGS__)
QUANTIZE_Q_KERNELS(quantize_q, fp16, __half, QuantizeParams, FixedFormat<8, false>)
QUANTIZE_Q_KERNELS(quantize_q, bf16, __nv_bfloat16, QuantizeParams, FixedFormat<8, false>)
QUANTIZE_Q_KERNELS(quantize_q_choosing, fp16, __half, ChoosingQuantizeParams, FormatOfHead<8>)
QUANTIZE_Q_KERNELS(quantize_q_choosing, bf16, __nv_bfloat16, ChoosingQuantizeParams, FormatOfHead<8>)
#undef QUANTIZE_Q_KERNELS
#undef BOUNDS_OF_D256
#undef BOUNDS
#undef QUANTIZE_Q_KERNEL
