// The attention kernels of the precise mode for one head_dim, given by the definition HEAD_DIM.
#include "sm90/kernels.h"
#include "sm90/precise.cuh"

namespace sm90 {

#define KERNEL(family, head_dim, suffix, pv, mask, variant)                                        \
  extern "C" __global__ void __launch_bounds__(                                                    \
      KernelTraits<PvElement::pv, head_dim, mask, Variant::variant>::kThreads, 1)                  \
      SM90_KERNEL_NAME(family, head_dim, suffix)(const __grid_constant__ AttentionParams params) { \
    precise_kernel<KernelTraits<PvElement::pv, head_dim, mask, Variant::variant>>(params);         \
  }
SM90_ROWS(precise, HEAD_DIM, KERNEL)
#undef KERNEL

}  // namespace sm90
