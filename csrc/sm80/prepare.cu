// The kernels that run before the attention kernel, for one head_dim (definition HEAD_DIM).
#include "sm80/key_bias.cuh"
#include "sm80/quantize.cuh"
#include "sm80/rotation_choice.cuh"
#include "sm80/statistics.cuh"

using namespace sm80;

#define FOR_EACH_ELEMENT_OF_16_BITS(kernel) kernel(fp16, __half) kernel(bf16, __nv_bfloat16)
#define FOR_EACH_ELEMENT(kernel) FOR_EACH_ELEMENT_OF_16_BITS(kernel) kernel(fp32, float)

#define PARTIAL_STATISTICS(name, type)                                        \
  extern "C" __global__ void __launch_bounds__(kStatisticsThreads)            \
      partial_statistics_##name(const __grid_constant__ StatisticsParams p) { \
    partial_statistics<HEAD_DIM, type>(p);                                    \
  }
FOR_EACH_ELEMENT(PARTIAL_STATISTICS)

extern "C" __global__ void __launch_bounds__(HEAD_DIM) finish_statistics(const __grid_constant__ StatisticsParams p) {
  finish_statistics<HEAD_DIM>(p);
}

#define CHOOSE_ROTATION(name, type)                                      \
  extern "C" __global__ void __launch_bounds__(kStatisticsThreads)       \
      choose_rotation_##name(const __grid_constant__ RotationParams p) { \
    choose_rotation<HEAD_DIM, type>(p);                                  \
  }
FOR_EACH_ELEMENT(CHOOSE_ROTATION)

// Three blocks an SM limit a thread to 80 registers. At head_dim 256 that would spill.
constexpr int kQuantizeBlocks = HEAD_DIM <= 128 ? 3 : 1;

#define QUANTIZE(name, type, product, other, bits)                                \
  extern "C" __global__ void __launch_bounds__(kQuantizeThreads, kQuantizeBlocks) \
      name(const __grid_constant__ QuantizeParams p) {                            \
    quantize<HEAD_DIM, bits, type, product, other>(p);                            \
  }
#define QUANTIZE_8B(name, type) QUANTIZE(quantize_8b_##name, type, FloatProduct, IntegerProduct, 8)
FOR_EACH_ELEMENT(QUANTIZE_8B)
#define QUANTIZE_PRECISE(name, type) QUANTIZE(quantize_precise_##name, type, Precise<type>, HalfHalf, 8)
FOR_EACH_ELEMENT_OF_16_BITS(QUANTIZE_PRECISE)

extern "C" __global__ void mask_bias(const __grid_constant__ KeyBiasParams p) { sm80::mask_bias(p); }

#if INT4_SCORES
#define QUANTIZE_4B(name, type) QUANTIZE(quantize_4b_##name, type, FloatProduct, IntegerProduct, 4)
FOR_EACH_ELEMENT(QUANTIZE_4B)

#define DELTA_BIAS(name, type)                                   \
  extern "C" __global__ void __launch_bounds__(kDeltaThreads)    \
      delta_bias_##name(const __grid_constant__ DeltaParams p) { \
    delta_bias<HEAD_DIM, type>(p);                               \
  }
FOR_EACH_ELEMENT(DELTA_BIAS)
#endif
