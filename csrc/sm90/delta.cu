// Smooth Q's correction (paper equation 3): delta_s = mean(Q of a tile) . (K - mean(K)), in units of log2, for the
// tiles of a chunk. In FP32 throughout.
#include "common/elements.cuh"
#include "common/hidden_keys.cuh"
#include "common/type_traits.cuh"
#include "sm90/ptx.cuh"

namespace sm90 {

// Of HidingDeltaParams: a hidden key reads as the mean.
template <class T, class Params>
__device__ __forceinline__ void delta_kernel(const Params& params) {
  __shared__ __align__(16) float q_mean[kDeltaTiles][256];
  const int local_head = blockIdx.z, first_tile = blockIdx.y * kDeltaTiles;
  const int head_index = params.chunk.first_head + local_head;
  const int batch = head_index / params.q_heads;
  const int kv_head = (head_index - batch * params.q_heads) / (params.q_heads / params.kv_heads);
  const i64 kv_index = i64(batch) * params.kv_heads + kv_head;
  const int tiles = min(kDeltaTiles, params.chunk.tiles - first_tile);
  const float* means =
      params.q_mean + (i64(head_index) * params.query_tiles + params.chunk.first_tile + first_tile) * params.head_dim;
  for (int i = threadIdx.x; i < kDeltaTiles * params.head_dim; i += kDeltaThreads) {
    const int tile = i / params.head_dim;
    q_mean[tile][i - tile * params.head_dim] = tile < tiles ? means[i] * params.scale : 0.f;
  }
  __syncthreads();
  const int key = blockIdx.x * kDeltaThreads + threadIdx.x;
  if (key >= params.kv_length) return;
  const T* k = static_cast<const T*>(params.k.pointer) + batch * params.k.batch_stride +
               kv_head * params.k.head_stride + key * params.k.token_stride;
  float delta[kDeltaTiles] = {};
  int channels = params.head_dim;
  if constexpr (is_same_v<Params, HidingDeltaParams>) {
    HiddenKeys hidden(params.mask, batch);
    hidden.all_but(params.choices[kv_index].shown);
    if (hidden.has(key)) channels = 0;
  }
  for (int channel = 0; channel < channels; channel += 8) {
    float values[8], mean[8];
    load_vec8(k + channel, values);
    load_vec8(params.k_mean + kv_index * params.head_dim + channel, mean);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] -= mean[i];
#pragma unroll
    for (int tile = 0; tile < kDeltaTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) delta[tile] = fmaf(q_mean[tile][channel + i], values[i], delta[tile]);
    }
  }
  float* row = params.delta_s + (i64(local_head) * params.chunk.tiles + first_tile) * params.kv_length + key;
#pragma unroll
  for (int tile = 0; tile < kDeltaTiles; ++tile)
    if (tile < tiles) row[i64(tile) * params.kv_length] = delta[tile];
}

}  // namespace sm90

#define DELTA_KERNEL(name, T, Params)                               \
  extern "C" __global__ void __launch_bounds__(sm90::kDeltaThreads) \
      name(const __grid_constant__ sm90::Params params) {           \
    sm90::delta_kernel<T>(params);                                  \
  }
DELTA_KERNEL(delta_fp16, __half, DeltaParams)
DELTA_KERNEL(delta_bf16, __nv_bfloat16, DeltaParams)
DELTA_KERNEL(delta_fp32, float, DeltaParams)
DELTA_KERNEL(delta_hiding_fp16, __half, HidingDeltaParams)
DELTA_KERNEL(delta_hiding_bf16, __nv_bfloat16, HidingDeltaParams)
DELTA_KERNEL(delta_hiding_fp32, float, HidingDeltaParams)
#undef DELTA_KERNEL
