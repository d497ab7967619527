// The attention kernels of one head_dim (64, 128 or 256; smaller ones are filled up with zeros), given by the
// definition HEAD_DIM: one for each kind of call, and for calls with tile lists one that is told whether it is causal.
#include "sm90/attention.cuh"

#define CONCATENATED(x, y) x##y
#define KERNEL_NAME(x, y) CONCATENATED(x, y)  // its arguments are expanded
#define ATTENTION_KERNEL(suffix, Shape, causal, biased)                                                               \
  extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)                                                     \
      KERNEL_NAME(attention_d, KERNEL_NAME(HEAD_DIM, suffix))(const __grid_constant__ sm90::AttentionParams params) { \
    sm90::attention_kernel<Shape, causal, biased>(params);                                                            \
  }
using WideShape = sm90::TileShape<HEAD_DIM, true>;
using Shape = sm90::TileShape<HEAD_DIM, false>;
ATTENTION_KERNEL(, WideShape, false, false)
ATTENTION_KERNEL(_biased, sm90::EndingShape<WideShape>, false, true)
#if HEAD_DIM == 64
ATTENTION_KERNEL(_narrow, Shape, false, false)
ATTENTION_KERNEL(_narrow_biased, sm90::EndingShape<Shape>, false, true)
#endif
#if HEAD_DIM <= 128
ATTENTION_KERNEL(_quantizing, sm90::QuantizingShape<Shape>, false, false)
ATTENTION_KERNEL(_quantizing_biased, sm90::PaddingShape<Shape>, false, true)
#endif
ATTENTION_KERNEL(_causal, Shape, true, false)
ATTENTION_KERNEL(_causal_biased, Shape, true, true)
ATTENTION_KERNEL(_listed, sm90::ListedShape<Shape>, false, false)
ATTENTION_KERNEL(_listed_biased, sm90::ListedShape<Shape>, false, true)
ATTENTION_KERNEL(_recording, sm90::RecordingShape<Shape>, false, false)
ATTENTION_KERNEL(_recording_biased, sm90::RecordingShape<Shape>, false, true)
#undef ATTENTION_KERNEL
#undef KERNEL_NAME
#undef CONCATENATED
