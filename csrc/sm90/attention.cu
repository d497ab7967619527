// The attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given by the
// definition HEAD_DIM.
#include "sm90/attention.cuh"

#define CONCATENATED(x, y) x##y
#define KERNEL_NAME(x, y) CONCATENATED(x, y)  // its arguments are expanded
#define ATTENTION_KERNEL(suffix, causal, biased)                                                                      \
  extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)                                                     \
      KERNEL_NAME(attention_d, KERNEL_NAME(HEAD_DIM, suffix))(const __grid_constant__ sm90::AttentionParams params) { \
    sm90::attention_kernel<HEAD_DIM, causal, biased>(params);                                                         \
  }
ATTENTION_KERNEL(, false, false)
ATTENTION_KERNEL(_causal, true, false)
ATTENTION_KERNEL(_biased, false, true)
ATTENTION_KERNEL(_causal_biased, true, true)
#undef ATTENTION_KERNEL
#undef KERNEL_NAME
#undef CONCATENATED
