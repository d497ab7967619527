// Attention for head_dim 65 to 128.
#include "sm90_attention.cuh"

using Shape = sm90::TileShape<128, 128, 4>;

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d128(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, false, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d128_causal(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d128_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, false, true>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d128_causal_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, true>(params);
}
