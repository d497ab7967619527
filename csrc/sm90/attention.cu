// The attention kernels of modes 8b and 4b for one head_dim, given by the definition HEAD_DIM.
#include "sm90/attention.cuh"
#include "sm90/kernels.h"

namespace sm90 {

#define KERNEL(family, head_dim, suffix, pv, mask, variant)                                        \
  extern "C" __global__ void __launch_bounds__(                                                    \
      KernelTraits<PvElement::pv, head_dim, mask, Variant::variant>::kThreads, 1)                  \
      SM90_KERNEL_NAME(family, head_dim, suffix)(const __grid_constant__ AttentionParams params) { \
    attention_kernel<KernelTraits<PvElement::pv, head_dim, mask, Variant::variant>>(params);       \
  }
SM90_ROWS(attention, HEAD_DIM, KERNEL)
#undef KERNEL

}  // namespace sm90
