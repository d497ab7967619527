// Quantization of Q, K and V in one launch: the first blocks take Q, then K, then V.
#include "common/type_traits.cuh"
#include "sm90/quantize_k.cuh"
#include "sm90/quantize_q.cuh"
#include "sm90/quantize_v.cuh"
#include "sm90/rotation_choice.cuh"

namespace sm90 {

// What the kernel knows of the heads of a call.
template <int kBits>
struct PlainHeads {
  using Params = QuantizeParams;
  using Format = FixedFormat<kBits, false>;
  static __device__ __forceinline__ Format wait_for_format(const Params&, const BatchHead&) { return {}; }
  static __device__ __forceinline__ Format format(const Params&, const BatchHead&) { return {}; }
  static __device__ __forceinline__ NoHiddenKeys hidden(const Params&, const BatchHead&) { return {}; }
};
// They may be rotated, all or as the statistics say, and the mask may hide keys.
template <int kBits>
struct ChosenHeads {
  using Params = ChoosingQuantizeParams;
  using Format = FormatOfHead<kBits>;
  static __device__ __forceinline__ Format wait_for_format(const Params& params, const BatchHead& q_head) {
    return {wait_for_rotation(params, kv_index_of(params, q_head))};
  }
  static __device__ __forceinline__ Format format(const Params& params, const BatchHead& head) {
    return {is_rotated(params, head.index)};
  }
  static __device__ __forceinline__ HiddenKeys hidden(const Params& params, const BatchHead& head) {
    return hidden_keys(params, head);
  }
};

template <class T, int kLanes, class Heads>
__device__ __forceinline__ void quantize_kernel(const typename Heads::Params& params) {
  griddepcontrol_launch_dependents();
  int block = blockIdx.x;
  if (block < params.q_blocks * params.q_slices) {
    const BatchHead bh(block / params.q_blocks, params.q_heads);
    quantize_q<T, kLanes, typename Heads::Format, false>(params, bh,
                                                         params.first_token / kBlockM + block % params.q_blocks,
                                                         [&] { return Heads::wait_for_format(params, bh); });
    return;
  }
  griddepcontrol_wait();
  block -= params.q_blocks * params.q_slices;
  if (block < params.k_blocks * params.kv_slices) {
    const BatchHead bh(block / params.k_blocks, params.kv_heads);
    quantize_k<T, kLanes>(params, bh, params.first_token / kScaleBlock + block % params.k_blocks,
                          Heads::format(params, bh), Heads::hidden(params, bh));
    return;
  }
  block -= params.k_blocks * params.kv_slices;
  const BatchHead bh(block / params.v_blocks, params.kv_heads);
  quantize_v<T, kLanes>(params, bh, params.first_token / kVTokens + block % params.v_blocks, Heads::hidden(params, bh));
}

}  // namespace sm90

#define QUANTIZE_KERNEL(name, bounds, T, lanes, bits, Heads)                                                           \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ sm90::Heads<bits>::Params params) { \
    sm90::quantize_kernel<T, lanes, sm90::Heads<bits>>(params);                                                        \
  }
#define BOUNDS (sm90::kQuantizeThreads)
// Four blocks an SM hide the exchange between threads at head_dim 128, where the registers allow it without spills.
#define FOUR_BLOCKS (sm90::kQuantizeThreads, 4)
#define QUANTIZE_KERNELS(prefix, suffix, bounds_of_d128, T, bits, Heads)        \
  QUANTIZE_KERNEL(prefix##_##suffix##_d64, BOUNDS, T, 8, bits, Heads)           \
  QUANTIZE_KERNEL(prefix##_##suffix##_d128, bounds_of_d128, T, 16, bits, Heads) \
  QUANTIZE_KERNEL(prefix##_##suffix##_d256, BOUNDS, T, 32, bits, Heads)
#define QUANTIZE_KERNELS_OF(suffix, bounds_choosing, T)                            \
  QUANTIZE_KERNELS(quantize8, suffix, BOUNDS, T, 8, PlainHeads)                    \
  QUANTIZE_KERNELS(quantize4, suffix, BOUNDS, T, 4, PlainHeads)                    \
  QUANTIZE_KERNELS(quantize8_choosing, suffix, bounds_choosing, T, 8, ChosenHeads) \
  QUANTIZE_KERNELS(quantize4_choosing, suffix, BOUNDS, T, 4, ChosenHeads)
QUANTIZE_KERNELS_OF(fp16, FOUR_BLOCKS, __half)
QUANTIZE_KERNELS_OF(bf16, FOUR_BLOCKS, __nv_bfloat16)
QUANTIZE_KERNELS_OF(fp32, BOUNDS, float)
#undef QUANTIZE_KERNELS_OF
#undef QUANTIZE_KERNELS
#undef FOUR_BLOCKS
#undef BOUNDS
#undef QUANTIZE_KERNEL
