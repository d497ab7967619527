// The precise mode's attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given
// by the definition HEAD_DIM.
#include "sm90/precise.cuh"

#define CONCATENATED(x, y) x##y
#define KERNEL_NAME(x, y) CONCATENATED(x, y)  // its arguments are expanded
#define PRECISE_KERNEL(suffix, T, causal, biased)                                                                   \
  extern "C" __global__ void __launch_bounds__(sm90::PreciseShape<HEAD_DIM, biased>::kThreads, 1)                   \
      KERNEL_NAME(precise_d, KERNEL_NAME(HEAD_DIM, suffix))(const __grid_constant__ sm90::AttentionParams params) { \
    sm90::precise_kernel<HEAD_DIM, T, causal, biased>(params);                                                      \
  }
#define PRECISE_KERNELS(element, T)                   \
  PRECISE_KERNEL(_##element, T, false, false)         \
  PRECISE_KERNEL(_##element##_causal, T, true, false) \
  PRECISE_KERNEL(_##element##_biased, T, false, true) \
  PRECISE_KERNEL(_##element##_causal_biased, T, true, true)
PRECISE_KERNELS(fp16, __half)
PRECISE_KERNELS(bf16, __nv_bfloat16)
#undef PRECISE_KERNELS
#undef PRECISE_KERNEL
#undef KERNEL_NAME
#undef CONCATENATED
