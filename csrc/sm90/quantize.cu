// Quantization of Q, K and V in one launch: the first blocks take Q, then K, then V.
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_q.cuh"
#include "sm90/quantize_v.cuh"
#include "sm90/rotation_choice.cuh"

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
    quantize_k<T, kLanes, Format>(params, BatchHead(block / params.k_blocks, params.kv_heads), block % params.k_blocks,
                                  NoHiddenKeys());
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  quantize_v<T, kLanes>(params, BatchHead(block / params.v_blocks, params.kv_heads), block % params.v_blocks,
                        NoHiddenKeys());
}

// Of heads that are rotated or not, as the statistics say. With kMayHide the mask may hide keys, and the call may also
// rotate all heads or none.
template <class T, int kLanes, int kBits, bool kMayHide>
__device__ __forceinline__ void quantize_kernel(const ChoosingQuantizeParams& params) {
  using Rotated = IntegerFormat<kBits, true, true>;
  using NotRotated = IntegerFormat<kBits, false, true>;
  griddepcontrol_launch_dependents();
  int block = blockIdx.x;
  if (block < params.q_blocks * params.q_slices) {
    const BatchHead bh(block / params.q_blocks, params.q_heads);
    block %= params.q_blocks;
    if (wait_for_rotation(params, kv_index_of(params, bh)))
      quantize_q<T, kLanes, Rotated>(params, bh, block);
    else
      quantize_q<T, kLanes, NotRotated>(params, bh, block);
    return;
  }
  griddepcontrol_wait();
  block -= params.q_blocks * params.q_slices;
  const auto hidden_of = [&](const BatchHead& bh) {
    if constexpr (kMayHide)
      return hidden_keys(params, bh);
    else
      return NoHiddenKeys();
  };
  if (block < params.k_blocks * params.kv_slices) {
    const BatchHead bh(block / params.k_blocks, params.kv_heads);
    block %= params.k_blocks;
    if (is_rotated(params, bh.index))
      quantize_k<T, kLanes, Rotated>(params, bh, block, hidden_of(bh));
    else
      quantize_k<T, kLanes, NotRotated>(params, bh, block, hidden_of(bh));
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  const BatchHead bh(block / params.v_blocks, params.kv_heads);
  quantize_v<T, kLanes>(params, bh, block % params.v_blocks, hidden_of(bh));
}

}  // namespace sm90

#define QUANTIZE_KERNEL(name, bounds, T, lanes, bits, rotated)                                                    \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::QuantizeParams params) { \
    sm90::quantize_kernel<T, lanes, sm90::IntegerFormat<bits, rotated>>(params);                                  \
  }
#define CHOOSING_KERNEL(name, bounds, T, lanes, bits, may_hide)                                                     \
  extern "C" __global__ void __launch_bounds__ bounds name(const                                                    \
                                                           __grid_constant__ sm90::ChoosingQuantizeParams params) { \
    sm90::quantize_kernel<T, lanes, bits, may_hide>(params);                                                        \
  }
#define BOUNDS (sm90::kQuantizeThreads)
// Four blocks an SM hide the exchange between threads at head_dim 128, where the registers allow it without spills.
#define FOUR_BLOCKS (sm90::kQuantizeThreads, 4)
#define QUANTIZE_KERNELS(prefix, suffix, bounds_of_d128, T, bits, rotated)        \
  QUANTIZE_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, bits, rotated)           \
  QUANTIZE_KERNEL(prefix##_##suffix##_d128, bounds_of_d128, T, 16, bits, rotated) \
  QUANTIZE_KERNEL(prefix##_##suffix##_d256, BOUNDS, T, 32, bits, rotated)
#define CHOOSING_KERNELS(prefix, suffix, bounds_of_d128, T, bits, may_hide)        \
  CHOOSING_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, bits, may_hide)           \
  CHOOSING_KERNEL(prefix##_##suffix##_d128, bounds_of_d128, T, 16, bits, may_hide) \
  CHOOSING_KERNEL(prefix##_##suffix##_d256, BOUNDS, T, 32, bits, may_hide)
#define QUANTIZE_KERNELS_OF(suffix, bounds_rotated, T)                    \
  QUANTIZE_KERNELS(quantize8, suffix, BOUNDS, T, 8, false)                \
  QUANTIZE_KERNELS(quantize4, suffix, BOUNDS, T, 4, false)                \
  QUANTIZE_KERNELS(quantize8_rotated, suffix, bounds_rotated, T, 8, true) \
  QUANTIZE_KERNELS(quantize4_rotated, suffix, BOUNDS, T, 4, true)         \
  CHOOSING_KERNELS(quantize8_auto, suffix, bounds_rotated, T, 8, false)   \
  CHOOSING_KERNELS(quantize4_auto, suffix, BOUNDS, T, 4, false)           \
  CHOOSING_KERNELS(quantize8_hiding, suffix, BOUNDS, T, 8, true)          \
  CHOOSING_KERNELS(quantize4_hiding, suffix, BOUNDS, T, 4, true)
QUANTIZE_KERNELS_OF(fp16, FOUR_BLOCKS, __half)
QUANTIZE_KERNELS_OF(bf16, FOUR_BLOCKS, __nv_bfloat16)
QUANTIZE_KERNELS_OF(fp32, BOUNDS, float)
#undef QUANTIZE_KERNELS_OF
#undef CHOOSING_KERNELS
#undef QUANTIZE_KERNELS
#undef FOUR_BLOCKS
#undef BOUNDS
#undef CHOOSING_KERNEL
#undef QUANTIZE_KERNEL
