// The precise mode's attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given
// by the definition HEAD_DIM: for each type of P and V one for each kind of call, and for calls with tile lists one
// that is told whether it is causal.
#include "sm90/precise.cuh"

#define CONCATENATED(x, y) x##y
#define KERNEL_NAME(x, y) CONCATENATED(x, y)  // its arguments are expanded
#define PRECISE_KERNEL(suffix, Shape, T, causal, biased)                                                            \
  extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)                                                  \
      KERNEL_NAME(precise_d, KERNEL_NAME(HEAD_DIM, suffix))(const __grid_constant__ sm90::AttentionParams params) { \
    sm90::precise_kernel<Shape, T, causal, biased>(params);                                                         \
  }
#define PRECISE_KERNELS(element, T)                                       \
  PRECISE_KERNEL(_##element, Shape, T, false, false)                      \
  PRECISE_KERNEL(_##element##_causal, Shape, T, true, false)              \
  PRECISE_KERNEL(_##element##_biased, EndingShape, T, false, true)        \
  PRECISE_KERNEL(_##element##_causal_biased, Shape, T, true, true)        \
  PRECISE_KERNEL(_##element##_listed, ListedShape, T, false, false)       \
  PRECISE_KERNEL(_##element##_listed_biased, ListedShape, T, false, true) \
  PRECISE_KERNEL(_##element##_recording, RecordingShape, T, false, false)
using BesideListedShape = sm90::BesideListedShape<sm90::PreciseShape<HEAD_DIM>>;
using Shape = sm90::PreciseShape<HEAD_DIM>;
using EndingShape = sm90::EndingShape<Shape>;
using ListedShape = sm90::ListedShape<sm90::PreciseShape<HEAD_DIM, true>>;
using RecordingShape = sm90::RecordingShape<sm90::PreciseShape<HEAD_DIM, true>>;
PRECISE_KERNELS(fp16, __half)
PRECISE_KERNELS(bf16, __nv_bfloat16)
#if HEAD_DIM == 256
PRECISE_KERNEL(_fp16_beside_listed, BesideListedShape, __half, false, false)
PRECISE_KERNEL(_fp16_causal_beside_listed, BesideListedShape, __half, true, false)
PRECISE_KERNEL(_bf16_beside_listed, BesideListedShape, __nv_bfloat16, false, false)
PRECISE_KERNEL(_bf16_causal_beside_listed, BesideListedShape, __nv_bfloat16, true, false)
#endif
#undef PRECISE_KERNELS
#undef PRECISE_KERNEL
#undef KERNEL_NAME
#undef CONCATENATED
