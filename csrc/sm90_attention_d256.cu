// Attention for head_dim 129 to 256.
#include "sm90_attention.cuh"

using Shape = sm90::TileShape<256, 128, 2>;

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d256(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, false, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d256_causal(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d256_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, false, true>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d256_causal_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, true>(params);
}
