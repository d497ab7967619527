// Attention of the precise mode for Hopper: int8 scores, P and V in fp16 or bf16, FP32 accumulators. One producer
// warpgroup streams tiles, the consumer warpgroups own 64 query rows each. The block stays on its multiprocessor and
// takes work tiles in turn, heads outermost so that K and V stay in L2.
#pragma once

#include "sm90/precise_consumer.cuh"
#include "sm90/warpgroups.cuh"

namespace sm90 {

template <class Traits>
__device__ __forceinline__ void precise_kernel(const AttentionParams& params) {
  extern __shared__ unsigned char shared[];
  const SharedStorage<Traits> storage{(shared_address(shared) + Traits::kAlignment - 1) & ~(Traits::kAlignment - 1u)};
  if (threadIdx.x == 0) begin_pipelines(params, storage);
  run_warpgroups<Traits, PreciseConsumer<Traits>>(params, storage);
}

}  // namespace sm90
