// Attention for head_dim up to 64.
#include "sm90_attention.cuh"

using WideShape = sm90::TileShape<64, 192, 4>;
using Shape = sm90::TileShape<64, 128, 4>;  // causal and masked: key tiles as long as query tiles

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d64(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<WideShape, false, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d64_causal(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, false>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d64_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, false, true>(params);
}
extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1)
attention_d64_causal_biased(const __grid_constant__ sm90::AttentionParams params) {
    sm90::attention_kernel<Shape, true, true>(params);
}
